package reconcile_test

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/internal/reconcile"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestContainerdThatDiesAndComesBackLosesNothing(t *testing.T) {
	f := newFixture(t)
	w := f.hub.workload(`{}`)
	f.push(w)
	ready := f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	pid := f.container(w.GetId()).PID
	require.NoError(t, f.daemon.Kill9())
	f.re.Wake()
	changed := f.re.Subscribe()
	for !slices.Contains(f.re.Report().Conditions, "containerd_unavailable") {
		select {
		case <-changed:
		case <-time.After(time.Minute):
			t.Fatal("nobody notices that containerd is gone")
		}
	}
	get(t, url(ready, "/"))
	require.NoError(t, f.daemon.Start(f.ctx()))
	for slices.Contains(f.re.Report().Conditions, "containerd_unavailable") {
		select {
		case <-changed:
		case <-time.After(time.Minute):
			t.Fatal("nobody notices that containerd is back")
		}
	}
	require.Equal(t, pid, f.container(w.GetId()).PID)
	require.NoError(t, unix.Kill(int(pid), unix.SIGKILL))
	f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool {
		return s.GetRestarts() == 1 && s.GetStatus() == protocol.WorkloadStatus_READY
	})
}

// killedDaemon is a runtime whose containerd dies as the first container is started.
type killedDaemon struct {
	*runtime.Runtime
	f    *fixture
	died atomic.Bool
}

func (m *killedDaemon) Prepare(ctx context.Context, spec runtime.Spec) (*runtime.Pending, error) {
	if m.died.Swap(true) {
		return m.Runtime.Prepare(ctx, spec)
	}
	if err := m.f.daemon.Kill9(); err != nil {
		return nil, err
	}
	pending, err := m.Runtime.Prepare(ctx, spec)
	return pending, errors.Join(err, m.f.daemon.Start(m.f.ctx()))
}

func TestADamagedImageDelaysNoOtherMember(t *testing.T) {
	f := newFixture(t)
	whole := f.hub.image
	f.hub.image = f.hub.push("apps/hello/"+f.word+"x", "/other") // without the manifest's command: it is pulled and fails
	w := f.hub.workload(`{}`)
	f.push(w)
	f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool { return s.GetReason() != 0 })
	f.stop()
	f.daemon.DamageBlob(t, func(blob []byte) bool { return bytes.Contains(blob, []byte(`"Entrypoint":["/other"]`)) },
		func([]byte) []byte { return []byte("x") })
	f.start()
	f.hub.image = whole
	other := f.hub.workload(`{}`)
	f.push(w, other)
	f.untilStatus(other.GetId(), protocol.WorkloadStatus_READY)
}

func TestDeathOfContainerdIsNoFailureOfTheWorkloadThatItWasStarting(t *testing.T) {
	f := newFixture(t)
	f.stop()
	killed := &killedDaemon{f: f}
	f.wrapRuntime = func(rt *runtime.Runtime) reconcile.Containers {
		killed.Runtime = rt
		return killed
	}
	f.start()
	w := f.hub.workload(`{}`)
	f.push(w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	require.True(t, killed.died.Load())
	require.Zero(t, f.store.Members()[w.GetId()].Services["main"].Failures)
}
