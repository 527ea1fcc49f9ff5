package ledger_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
)

func (w *world) volume(bytes int64) ledger.Subject {
	s := w.subject(ledger.Volume)
	s.AppInstanceID, s.AppSlug, s.SKU, s.VolumeBytes = "", "", "", bytes
	return s
}

func TestAVolumeIsBilledByBytesAndTimeOnce(t *testing.T) {
	w := newWorld(t)
	w.credit("100")
	w.price(ledger.Price{Meter: ledger.MeterVolumeByteSeconds}, "3.6") // for a GiB and hour
	s, err := w.open(w.volume(2 << 30))
	require.NoError(t, err)
	again, err := w.open(s)
	require.NoError(t, err)
	require.Equal(t, s.ID, again.ID)
	_, held := w.wallet()
	require.Equal(t, "7.2", held, "an hour ahead")
	for _, seconds := range []float64{0.3, 999.7, 1000} {
		w.now = at(seconds)
		require.Empty(t, w.accrue())
		w.checkBill()
	}
	resize := func(bytes int64) {
		require.NoError(t, do(w, func(ctx context.Context, tx db.Tx) error {
			return ledger.ResizeVolume(ctx, tx, s.ID, bytes, w.now)
		}))
	}
	resize(4 << 30) // a snapshot is taken
	w.now = at(2000)
	resize(0) // the node has lost it
	w.now = at(2400)
	require.Empty(t, w.accrue())
	w.checkBill()
	resize(2 << 30)
	w.now = at(3000)
	w.close(s, at(2500))
	available, held := w.wallet()
	require.Equal(t, "0", held)
	require.Equal(t, "93.8", available, "2 GiB for 1100 s and 4 GiB for 1000 s")
	require.InDelta(t, (2*1100+4*1000)<<30,
		number(w, `SELECT sum(quantity)::int8 FROM usage_recent WHERE meter = 'volume_byte_seconds'`), 2,
		"a part of a unit is not billed")
	w.close(s, at(9000))
	w.checkBill()
	records := must(w, func(ctx context.Context, tx db.Tx) ([]ledger.UsageRecord, error) {
		list, _, err := ledger.ListUsage(ctx, tx, ledger.Filter{OrgID: w.org, UsageSource: ledger.SourceVolume})
		return list, err
	})
	require.Len(t, records, 6)
	require.Equal(t, s.ID, records[0].VolumeID)
}

// A number of bytes times the seconds of a long absence is more than a row holds.
func TestALargeVolumeIsBilledForALongAbsenceOfTheHub(t *testing.T) {
	w := newWorld(t)
	w.credit("100000")
	w.price(ledger.Price{Meter: ledger.MeterVolumeByteSeconds}, "0.001")
	s, err := w.open(w.volume(80 << 40)) // 16 TiB with four snapshots
	require.NoError(t, err)
	w.now = w.now.Add(30*24*time.Hour + 30*time.Minute)
	require.Empty(t, w.accrue())
	w.checkBill()
	w.close(s, w.now)
	available, held := w.wallet()
	require.Equal(t, "0", held)
	require.Equal(t, "40976.64", available, "80 TiB for 720.5 hours")
}

// An empty wallet takes no data: what the volume takes beyond its hold is written off.
func TestLaw07AVolumeWithoutMoneyStaysAndIsWrittenOff(t *testing.T) {
	w := newWorld(t)
	w.price(ledger.Price{Meter: ledger.MeterVolumeByteSeconds}, "3.6")
	w.credit("1")
	s := w.volume(1 << 30)
	require.Equal(t, "insufficient_funds", faultCode(do(w, func(ctx context.Context, tx db.Tx) error {
		return ledger.CheckFunds(ctx, tx, s)
	})))
	s, err := w.open(s)
	require.NoError(t, err, "it is there already")
	w.now = at(2000)
	require.Empty(t, w.accrue())
	w.close(s, w.now)
	available, held := w.wallet()
	require.Equal(t, "0", available)
	require.Equal(t, "0", held)
	require.Equal(t, "-1", w.accounts()["platform:write_off"])
	w.checkBill()
}
