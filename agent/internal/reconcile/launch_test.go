package reconcile_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/network"
	"github.com/gpuaas/gpuaas/agent/internal/reconcile"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// heldNetwork is a network whose setup ends only when the test says so.
type heldNetwork struct {
	reconcile.Network
	made   chan string
	stands chan error
}

func (h heldNetwork) Setup(ctx context.Context, id string, ports []network.PortMapping,
	namespaces func(),
) (network.Attachment, error) {
	a, err := h.Network.Setup(ctx, id, ports, namespaces)
	if err != nil {
		return a, err
	}
	select {
	case h.made <- id:
		err = <-h.stands
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		return network.Attachment{}, errors.Join(err, h.Remove(context.WithoutCancel(ctx), id))
	}
	return a, nil
}

func TestLaw10ContainerIsMadeBesideItsNetworkAndRunsOnceItStands(t *testing.T) {
	f := newFixture(t)
	warm := f.hub.workload(`{}`)
	f.push(warm)
	f.untilStatus(warm.GetId(), protocol.WorkloadStatus_READY)
	f.stop()
	h := heldNetwork{made: make(chan string), stands: make(chan error)}
	f.wrapNetwork = func(n *network.Network) reconcile.Network {
		h.Network = n
		return h
	}
	f.start()
	t.Cleanup(func() { close(h.stands) })
	w := f.hub.workload(`{}`)
	f.push(warm, w)
	require.Equal(t, network.ID(w.GetId(), "main"), <-h.made)
	require.Eventually(t, func() bool {
		all, err := f.rt.List(f.ctx())
		require.NoError(t, err)
		for _, c := range all {
			if c.MemberID == w.GetId() {
				require.NotEqual(t, runtime.StateRunning, c.State, "before its isolation rules exist")
				return c.State == runtime.StateCreated
			}
		}
		return false
	}, time.Minute, 10*time.Millisecond)
	cut := f.container(w.GetId()).ID

	h.stands <- errors.New("the plugin has failed")
	require.Equal(t, network.ID(w.GetId(), "main"), <-h.made, "it is tried again")
	_, err := f.rt.Get(f.ctx(), cut)
	require.True(t, fault.Is(err, fault.NotFound), "what was made for a network that never stood is gone: %v", err)
	require.NotContains(t, f.store.Runs(), cut)

	h.stands <- nil
	ready := f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	get(t, url(ready, "/"))
	ip := f.store.Members()[w.GetId()].Services["main"].IP
	require.Contains(t, f.hosts(w.GetId()), ip, "the container knows its address")
}

// hosts is the container's /etc/hosts as the container itself sees it.
func (f *fixture) hosts(memberID string) string {
	f.t.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/root/etc/hosts", f.container(memberID).PID))
	require.NoError(f.t, err)
	return string(raw)
}

// BenchmarkLaunch is the node's part of a launch: from the signed document to ready, the image cached.
func BenchmarkLaunch(b *testing.B) {
	f := newFixture(b)
	warm := f.hub.workload(`{}`)
	f.push(warm)
	f.untilStatus(warm.GetId(), protocol.WorkloadStatus_READY)
	for b.Loop() {
		w := f.hub.workload(`{}`)
		began := time.Now()
		f.push(warm, w)
		f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
		b.ReportMetric(float64(time.Since(began).Milliseconds()), "ms/last")
		b.StopTimer()
		f.push(warm)
		f.untilStatus(w.GetId(), protocol.WorkloadStatus_REMOVED)
		b.StartTimer()
	}
}
