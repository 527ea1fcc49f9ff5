package ledger_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	wholeGPU = "GPU-0"
	third    = "GPU-1-mps3-0"
	quarter  = "GPU-2-ts4-3"
)

// with is a member with one accelerator that is not opened yet.
func (w *world) with(accelerator, sku string) ledger.Subject {
	s := w.subject(ledger.Member)
	s.SKU = sku
	s.SetAccelerators([]string{accelerator})
	return s
}

// perHour is what an hour of the member costs at most, by the estimate and by its lease.
func (w *world) perHour(s ledger.Subject) string {
	w.t.Helper()
	estimate := must(w, func(ctx context.Context, tx db.Tx) (ledger.Estimate, error) {
		return ledger.EstimateMember(ctx, tx, s, w.now)
	})
	s, err := w.open(s)
	require.NoError(w.t, err)
	w.lease(s, time.Hour)
	cost := must(w, func(ctx context.Context, tx db.Tx) (ledger.Cost, error) {
		return ledger.CostOf(ctx, tx, s.AppInstanceID)
	})
	require.Equal(w.t, estimate.PerHourNanos, cost.PerHourNanos)
	return ledger.FormatNanos(cost.PerHourNanos)
}

// Unless the price is for the SKU that the allocation names, it is that of a whole accelerator.
func TestASliceCostsItsPartOfAnAcceleratorsPrice(t *testing.T) {
	w := newWorld(t)
	w.credit("1000")
	meter := protocol.MeterAcceleratorSeconds
	w.price(ledger.Price{Meter: meter}, "1")
	require.Equal(t, "1", w.perHour(w.with(wholeGPU, "")))
	require.Equal(t, "0.25", w.perHour(w.with(quarter, "")))
	require.Equal(t, "0.333333334", w.perHour(w.with(third, "")), "a hold is rounded up")
	require.Equal(t, "0.25", w.perHour(w.with(quarter, "h200-quarter")), "its SKU has no price")
	w.price(ledger.Price{Meter: meter, SKU: "h200-quarter"}, "0.4")
	require.Equal(t, "0.4", w.perHour(w.with(quarter, "h200-quarter")))
	require.Equal(t, "0.25", w.perHour(w.with(quarter, "")))
	w.price(ledger.Price{Meter: meter, AppSlug: "demo"}, "2")
	require.Equal(t, "0.5", w.perHour(w.with(quarter, "h200-quarter")), "the app's price goes first")
	w.price(ledger.Price{Meter: meter, AppSlug: "demo", SKU: "h200-quarter"}, "3")
	require.Equal(t, "3", w.perHour(w.with(quarter, "h200-quarter")))
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds}, "1")
	require.Equal(t, "1.5", w.perHour(w.with(quarter, "")), "a session is no accelerator")
}

// An hour of each: what is posted is exact, and rounded once.
func TestTheBillOfSlicesIsTheirPartOfTheGPUs(t *testing.T) {
	w := newWorld(t)
	w.credit("1000")
	price := w.price(ledger.Price{Meter: protocol.MeterAcceleratorSeconds, HostBasisPoints: 7000}, "1")
	var members []ledger.Subject
	for _, id := range []string{third, quarter, quarter, quarter, quarter, wholeGPU} {
		s, err := w.open(w.with(id, ""))
		require.NoError(t, err)
		w.lease(s, 2*time.Hour)
		members = append(members, s)
	}
	w.now = at(3600)
	var charged []int64
	for _, s := range members {
		for part := range 3 {
			w.seq++
			from := float64(1200 * part)
			w.post(record(w.seq, s, protocol.MeterAcceleratorSeconds, from, from+1200, 1_200_000_000))
		}
		charged = append(charged, number(w, `SELECT charged_nanos FROM usage_hours WHERE subject_id = $1 AND price_id = $2
			AND quantity = 3600000000`, s.ID, price.ID))
	}
	const fourth = 250_000_000
	require.Equal(t, []int64{333_333_333, fourth, fourth, fourth, fourth, 1_000_000_000}, charged)
	require.Equal(t, "0.7", w.accounts()["platform:revenue"])
	require.Equal(t, "1.633333333", w.accounts()["host:"+w.node])
	require.EqualValues(t, -333_333_333, number(w, `SELECT e.amount_nanos FROM entries e
		JOIN postings p ON p.id = e.posting_id
		WHERE p.kind = 'usage' AND p.subject_id = $1 AND e.account LIKE 'hold:%'`, members[0].ID))
	w.checkInvariants()
}

// An hour has one price: a member keeps the part of a GPU that it had first.
func TestTheBilledPartOfAGPUStays(t *testing.T) {
	w := newWorld(t)
	w.credit("1000")
	w.price(ledger.Price{Meter: protocol.MeterAcceleratorSeconds}, "1")
	raise := func(s ledger.Subject, accelerators ...string) error {
		return do(w, func(ctx context.Context, tx db.Tx) error {
			return ledger.RaiseLimits(ctx, tx, ledger.LeaseRequest{
				SubjectID: s.ID, NodeID: s.NodeID, Now: w.now, Duration: time.Hour,
			}, 0, 0, accelerators)
		})
	}
	s, err := w.open(w.with(quarter, ""))
	require.NoError(t, err)
	for _, other := range []string{wholeGPU, third} {
		require.Equal(t, "accelerator_part_fixed", faultCode(raise(s, other)))
	}
	require.NoError(t, raise(s), "without any")
	require.NoError(t, raise(s, "GPU-7-ts4-0"), "a slice of the same size")

	none := w.member()
	require.NoError(t, raise(none, quarter))
	cost := must(w, func(ctx context.Context, tx db.Tx) (ledger.Cost, error) {
		return ledger.CostOf(ctx, tx, none.AppInstanceID)
	})
	require.EqualValues(t, 250_000_000, cost.PerHourNanos)
}
