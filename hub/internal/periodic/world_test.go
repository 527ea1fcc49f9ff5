package periodic_test

import (
	"context"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
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
	unpaid := w.passes()
	require.NoError(t, unpaid.ReleaseUnpaid(t.Context(), a.ID, "corr-unpaid", w.Now))
	require.Equal(t, []string{w.Node}, w.Enqueued)
	require.NoError(t, unpaid.ReleaseUnpaid(t.Context(), a.ID, "corr-unpaid", w.Now), "again changes nothing")
	require.Len(t, w.Enqueued, 1)
	require.Equal(t, lifecycle.Decommissioning, w.Get(i.ID).Lifecycle.Status)
	w.Report(2, w.Removed(i))
	require.Equal(t, lifecycle.Decommissioned, w.Get(i.ID).Lifecycle.Status)
	require.Equal(t, []string{
		"capacity.allocation.active", "capacity.allocation.releasing",
		"capacity.allocation.released",
	}, w.EventTypes(a.ID))
}
