package reconcile_test

import (
	"context"
	"io"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/internal/reconcile"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/policy"
	"github.com/gpuaas/gpuaas/protocol"
)

// The disk of the store is really full. A stop, a decommission, the end of a lease and the owner's word all take
// effect, also where the agent was restarted meanwhile; and a restart afterwards, on the disk that is still full,
// starts nothing of it again.
func TestFullDiskKeepsNothingRunning(t *testing.T) {
	for name, restarted := range map[string]bool{"while the agent runs": false, "after a restart of the agent": true} {
		t.Run(name, func(t *testing.T) { fullDiskKeepsNothingRunning(t, restarted) })
	}
}

func fullDiskKeepsNothingRunning(t *testing.T, restarted bool) {
	f := newFixture(t)
	f.stop()
	disk := f.dir + "/state"
	require.NoError(t, unix.Mount("tmpfs", disk, "tmpfs", 0, "size=256m"))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(disk, 0)) })
	f.disk = state.Options{MinFreeBytes: state.DefaultMinFreeBytes, CopyDir: f.dir + "/copy"}
	f.start()
	t.Cleanup(func() { f.stop() })
	asked, left, unpaid, refused := f.hub.workload(`{}`), f.hub.workload(`{}`), f.hub.workload(`{}`), f.hub.workload(`{}`)
	all := []*protocol.Workload{asked, left, unpaid, refused}
	f.push(all...)
	for _, w := range all {
		f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	}
	ends := f.hub.newLease(unpaid.GetId(), time.Hour)
	ends.CapNanos = 2_500_000 // two and a half seconds at the price of the test
	ends.Prices[0].PriceNanos = 1_000_000
	f.lease(ends)
	f.fill(disk)
	if restarted {
		f.restart()
	}

	asked.Stopped, asked.Revision = true, 2
	another := f.hub.workload(`{}`)
	v, parts := f.hub.desired(asked, unpaid, refused, another)
	require.NoError(t, f.store.AcceptState(v, parts))
	f.untilStatus(asked.GetId(), protocol.WorkloadStatus_STOPPED)
	require.NotNil(t, f.untilStatus(left.GetId(), protocol.WorkloadStatus_REMOVED).GetRemoval())
	require.Equal(t, protocol.WorkloadStatus_LEASE_ENDED, f.untilStatus(unpaid.GetId(), protocol.WorkloadStatus_STOPPED).
		GetReason())
	require.Contains(t, f.re.Report().Conditions, "disk_full")
	require.NotEmpty(t, f.container(refused.GetId()).ID, "what is paid and wanted goes on")
	f.owner.Store(&policy.Policy{Closed: true})
	f.re.Wake()
	f.until(refused.GetId(), func(s *protocol.WorkloadStatus) bool {
		return s.GetReason() == protocol.WorkloadStatus_OWNER_REFUSED
	})
	f.untilNothingRuns()

	f.restart()
	f.untilStatus(asked.GetId(), protocol.WorkloadStatus_STOPPED)
	f.untilNothingRuns()
	seconds, _ := f.measured(refused.GetId())
	require.Positive(t, seconds, "usage of the full disk is there")
	require.NoError(t, os.Remove(disk+"/ballast"))
	f.owner.Store(&policy.Policy{})
	f.lease(f.hub.newLease(another.GetId(), time.Hour))
	f.untilStatus(another.GetId(), protocol.WorkloadStatus_READY)
}

// fill takes all that is free on the directory's file system.
func (f *fixture) fill(dir string) {
	f.t.Helper()
	ballast, err := os.Create(dir + "/ballast")
	require.NoError(f.t, err)
	for piece := int64(1 << 20); piece >= 4<<10; {
		at, err := ballast.Seek(0, io.SeekEnd)
		require.NoError(f.t, err)
		if unix.Fallocate(int(ballast.Fd()), 0, at, piece) != nil {
			piece /= 2
		}
	}
	require.NoError(f.t, ballast.Close())
}

func (f *fixture) untilNothingRuns() {
	f.t.Helper()
	require.Eventually(f.t, func() bool {
		there, err := f.rt.List(f.ctx())
		return err == nil && len(there) == 0
	}, 30*time.Second, 10*time.Millisecond)
}

func TestALargeStoreIsReported(t *testing.T) {
	f := newFixture(t)
	f.stop()
	f.collectEvery = 20 * time.Millisecond
	f.disk.LargeBytes = 1
	f.start()
	untilReported := func(reported bool) {
		t.Helper()
		require.Eventually(t, func() bool {
			r := f.re.Report()
			return r.Passes > 0 && slices.Contains(r.Conditions, "agent_store_large") == reported
		}, 30*time.Second, 10*time.Millisecond)
	}
	untilReported(true)
	f.stop()
	f.disk.LargeBytes = 0
	f.start()
	for range 3 {
		before := f.re.Report().Passes
		require.Eventually(t, func() bool { return f.re.Report().Passes > before }, 30*time.Second, 10*time.Millisecond)
	}
	untilReported(false)
}

// A container that takes too much of the disk is ended, its status says why, and each try begins with an empty layer.
func TestContainerOverItsDiskLimitIsEndedWithThatReason(t *testing.T) {
	f := newFixture(t)
	f.stop()
	f.rtCfg.DiskBytes = 1 // the layer of any container that has mounts has a directory
	f.start()
	w := f.hub.workload(`{}`)
	f.push(w)
	s := f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool { return s.GetReason() != 0 && s.GetRestarts() > 1 })
	require.Equal(t, protocol.WorkloadStatus_DISK_LIMIT, s.GetReason())
	require.Contains(t, s.GetDetail(), "file system")
}

// hangingStop is a runtime in which the first container that is stopped does not end.
type hangingStop struct {
	*runtime.Runtime
	first atomic.Pointer[string]
}

func (h *hangingStop) Stop(ctx context.Context, id string, grace time.Duration) error {
	if h.first.CompareAndSwap(nil, &id) || *h.first.Load() == id {
		<-ctx.Done()
		return ctx.Err()
	}
	return h.Runtime.Stop(ctx, id, grace)
}

func TestLaw13AContainerThatDoesNotEndDelaysNoOtherAtItsDiskLimit(t *testing.T) {
	f := newFixture(t)
	f.stop()
	f.rtCfg.DiskBytes = 1
	f.wrapRuntime = func(rt *runtime.Runtime) reconcile.Containers { return &hangingStop{Runtime: rt} }
	f.start()
	f.push(f.hub.workload(`{}`), f.hub.workload(`{}`))
	require.Eventually(t, func() bool {
		return slices.ContainsFunc(f.re.Report().Workloads, func(s *protocol.WorkloadStatus) bool {
			return s.GetReason() == protocol.WorkloadStatus_DISK_LIMIT
		})
	}, time.Minute, 10*time.Millisecond)
}
