package reconcile_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/agent/internal/cdi"
	"github.com/gpuaas/gpuaas/agent/internal/network"
	"github.com/gpuaas/gpuaas/agent/internal/reconcile"
	"github.com/gpuaas/gpuaas/agent/policy"
	"github.com/gpuaas/gpuaas/protocol"
)

// heldStarts are accelerators that hold each start back until the test lets it go on.
type heldStarts struct {
	reconcile.Accelerators
	due  chan struct{}
	goOn chan struct{}
}

func (h heldStarts) Edits(ctx context.Context, ids []string, orgID string) (cdi.Edits, error) {
	select {
	case h.due <- struct{}{}:
		<-h.goOn
	case <-ctx.Done():
		return cdi.Edits{}, ctx.Err()
	}
	return h.Accelerators.Edits(ctx, ids, orgID)
}

// A start is decided, and waits. A state that stops the workload, or no longer has it, is accepted meanwhile: the start
// goes on and makes nothing.
func TestLaw01AStartThatWaitedDoesNotRunAfterAnAcceptedStop(t *testing.T) {
	f := newFixture(t)
	f.stop()
	h := heldStarts{due: make(chan struct{}), goOn: make(chan struct{})}
	f.wrapAccelerators = func(a reconcile.Accelerators) reconcile.Accelerators {
		h.Accelerators = a
		return h
	}
	prepared := f.recording()
	stopped, removed := f.hub.workload(`{}`), f.hub.workload(`{}`)
	f.push(stopped, removed)
	<-h.due
	<-h.due
	stop := proto.CloneOf(stopped)
	stop.Stopped, stop.Revision = true, 2
	f.push(stop)
	close(h.goOn)
	f.until(stopped.GetId(), func(s *protocol.WorkloadStatus) bool {
		return s.GetStatus() == protocol.WorkloadStatus_STOPPED && s.GetRevision() == 2
	})
	f.untilStatus(removed.GetId(), protocol.WorkloadStatus_REMOVED)
	for _, w := range []*protocol.Workload{stopped, removed} {
		require.Empty(t, prepared.revisions(w.GetId()), "no container was to be made")
		require.Empty(t, f.containersOf(w.GetId()))
		seconds, _ := f.measured(w.GetId())
		require.Zero(t, seconds)
	}
	require.Empty(t, f.store.Runs())

	again := proto.CloneOf(stopped)
	again.Revision = 3
	f.push(again)
	<-h.due
	f.untilStatus(stopped.GetId(), protocol.WorkloadStatus_READY)
	require.Equal(t, []uint64{3}, prepared.revisions(stopped.GetId()))
}

// removals are networks that say which of them the agent has removed.
type removals struct {
	reconcile.Network
	ids chan string
}

func (r removals) Remove(ctx context.Context, id string) error {
	err := r.Network.Remove(ctx, id)
	r.ids <- id
	return err
}

// A start is decided, and waits. The owner refuses the workload meanwhile: the start goes on and makes nothing.
func TestLaw15AStartThatWaitedDoesNotRunAgainstTheOwnersPolicy(t *testing.T) {
	f := newFixture(t)
	f.stop()
	h := heldStarts{due: make(chan struct{}), goOn: make(chan struct{})}
	f.wrapAccelerators = func(a reconcile.Accelerators) reconcile.Accelerators {
		h.Accelerators = a
		return h
	}
	removed := make(chan string, 8)
	f.wrapNetwork = func(n *network.Network) reconcile.Network { return removals{n, removed} }
	prepared := f.recording()
	w := f.hub.workload(`{}`)
	f.push(w)
	<-h.due
	f.owner.Store(&policy.Policy{Closed: true})
	close(h.goOn)
	<-removed // which waits for the end of the start
	require.Empty(t, prepared.revisions(w.GetId()), "no container was to be made")
	require.Empty(t, f.store.Runs())
	refused := f.untilStatus(w.GetId(), protocol.WorkloadStatus_FAILED)
	require.Equal(t, protocol.WorkloadStatus_OWNER_REFUSED, refused.GetReason())
}
