package reconcile_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/reconcile"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/protocol"
)

// slowList returns a list that shows a start half done only after the store has recorded that start. It polls, because
// the store announces no runs.
type slowList struct {
	*runtime.Runtime
	f *fixture
}

func (l slowList) List(ctx context.Context) ([]runtime.Container, error) {
	all, err := l.Runtime.List(ctx)
	for _, c := range all {
		for c.State == runtime.StateCreated || c.State == runtime.StateLost {
			if run, known := l.f.store.Runs()[c.ID]; !known || !run.StartedAt.IsZero() || ctx.Err() != nil {
				break
			}
			time.Sleep(time.Millisecond)
		}
	}
	return all, err
}

func TestLaw05AStartThatEndsDuringAListingIsMeasuredFromItsBeginning(t *testing.T) {
	f := newFixture(t)
	f.stop()
	f.wrapRuntime = func(rt *runtime.Runtime) reconcile.Containers { return slowList{rt, f} }
	f.start()
	var all []*protocol.Workload
	for range 8 {
		all = append(all, f.hub.workload(`{}`))
	}
	f.push(all...)
	started := map[string]time.Time{}
	for _, w := range all {
		f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
		started[w.GetId()] = f.store.Runs()[f.container(w.GetId()).ID].StartedAt
	}
	f.push()
	for _, w := range all {
		f.untilStatus(w.GetId(), protocol.WorkloadStatus_REMOVED)
		ran := f.store.Members()[w.GetId()].ExitedAt.Sub(started[w.GetId()])
		total, _ := f.measured(w.GetId())
		require.InDelta(t, ran.Seconds(), total.Seconds(), 0.001, "from its start to its exit")
	}
}
