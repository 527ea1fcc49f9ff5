package periodic_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/periodic"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/protocol"
)

// world adds what only the tests of passes need.
type world struct {
	*commandtest.World
}

func newWorld(t *testing.T) *world { return &world{commandtest.New(t)} }

func (w *world) passes() periodic.Passes {
	return periodic.Passes{DB: w.DB, Log: slog.New(slog.DiscardHandler)}
}

func TestLaw08AnUnpaidReleaseIsOneTransaction(t *testing.T) {
	w := newWorld(t)
	a := w.Allocation()
	w.Instance()
	w.RequireAtomic(w.InTx(func(ctx context.Context, tx db.Tx) error {
		return periodic.ReleaseUnpaid(ctx, tx, a.ID, "corr", w.Now)
	}), "app_instances", "events", "audit_rows")
}

func TestAnAllocationThatIsNotPaidEndsWithWhatRunsInIt(t *testing.T) {
	w := newWorld(t)
	a := w.Allocation()
	i := w.Instance()
	w.Report(1, w.Says(i, protocol.WorkloadStatus_READY))
	w.Enqueued = nil
	unpaid := func(ctx context.Context, tx db.Tx) error {
		return periodic.ReleaseUnpaid(ctx, tx, a.ID, "corr-unpaid", w.Now)
	}
	w.Tx(unpaid)
	require.Equal(t, []string{w.Node}, w.Enqueued)
	w.Tx(unpaid) // again changes nothing
	require.Len(t, w.Enqueued, 1)
	require.Equal(t, lifecycle.Decommissioning, w.Get(i.ID).Lifecycle.Status)
	w.Report(2, w.Removed(i))
	require.Equal(t, lifecycle.Decommissioned, w.Get(i.ID).Lifecycle.Status)
	require.Equal(t, []string{
		"capacity.allocation.active", "capacity.allocation.releasing",
		"capacity.allocation.released",
	}, w.EventTypes(a.ID))
}

// onRecord calls a function with each record that a pass logs.
type onRecord struct {
	slog.Handler
	do func()
}

func (o onRecord) Enabled(context.Context, slog.Level) bool { return true }

func (o onRecord) Handle(context.Context, slog.Record) error {
	o.do()
	return nil
}

// Credit that comes after the pass has billed an allocation, and before it ends it, is not too late.
func TestAnAllocationThatIsPaidAgainBeforeItsEndGoesOn(t *testing.T) {
	w := newWorld(t)
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, err := ledger.CreatePrice(ctx, tx, ledger.Price{
			Meter: ledger.MeterAllocationSeconds, Currency: "EUR", Nanos: 1_000_000_000, Per: "hour", From: w.Now,
		}, w.Now)
		return err
	})
	w.Allocation()
	i := w.Instance()
	w.Report(1, w.Says(i, protocol.WorkloadStatus_READY))
	w.Exec(`UPDATE wallets SET balance_nanos = 0`)
	w.Now = w.Now.Add(55 * time.Minute)
	grants := 0
	granting := periodic.Passes{DB: w.DB, Log: slog.New(onRecord{do: func() {
		grants++
		w.Tx(func(ctx context.Context, tx db.Tx) error {
			_, err := ledger.GrantCredit(ctx, tx, ledger.Grant{
				OrgID: w.Project.OrgID, Currency: "EUR", Nanos: 1_000_000_000, Key: "late",
			}, w.Now)
			return err
		})
	}})}
	require.NoError(t, granting.AccrueAllocations(t.Context(), time.Time{}, w.Now))
	require.Equal(t, 1, grants)
	require.Equal(t, lifecycle.Running, w.Get(i.ID).Lifecycle.Status)

	w.Exec(`UPDATE wallets SET balance_nanos = 0`)
	w.Now = w.Now.Add(55 * time.Minute)
	require.NoError(t, w.passes().AccrueAllocations(t.Context(), time.Time{}, w.Now))
	require.Equal(t, lifecycle.Decommissioning, w.Get(i.ID).Lifecycle.Status)
}
