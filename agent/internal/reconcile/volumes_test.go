package reconcile_test

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/reconcile"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

const volumeOfDemo = "    volumes:\n      - {name: data, path: /data, size_mib: 32, snapshot_on_upgrade: true}\n"

// inVolume is a file of the member's volume as its container sees it.
func (f *fixture) inVolume(memberID string) string {
	f.t.Helper()
	return fmt.Sprintf("/proc/%d/root/data/file", f.container(memberID).PID)
}

func (f *fixture) requireInVolume(memberID, text string) {
	f.t.Helper()
	got, err := os.ReadFile(f.inVolume(memberID))
	require.NoError(f.t, err)
	require.Equal(f.t, text, string(got))
}

func TestAVolumeOutlivesContainersAndEndsWithItsMember(t *testing.T) {
	f := newFixture(t)
	f.hub.volumes = volumeOfDemo
	w := f.hub.workload(`{}`)
	f.push(w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	path := f.inVolume(w.GetId())
	info, err := os.Stat(filepath.Dir(path))
	require.NoError(t, err)
	_, base, _ := f.rt.UserNamespaces()
	st, is := info.Sys().(*syscall.Stat_t)
	require.True(t, is)
	require.Equal(t, base+1000, st.Uid, "a new volume is the user's")
	require.NoError(t, os.WriteFile(path, []byte("kept"), 0o600))

	require.NoError(t, unix.Kill(int(f.container(w.GetId()).PID), unix.SIGKILL))
	f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool {
		return s.GetRestarts() == 1 && s.GetStatus() == protocol.WorkloadStatus_READY
	})
	f.requireInVolume(w.GetId(), "kept")
	f.restart()
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	f.requireInVolume(w.GetId(), "kept")

	w.Stopped, w.Revision = true, 2
	f.push(w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_STOPPED)
	require.Eventually(t, func() bool { // a moment after its network is removed
		_, err := os.Stat(filepath.Join(f.volCfg.MountDir, w.GetId()+".data"))
		return os.IsNotExist(err)
	}, 30*time.Second, 10*time.Millisecond, "what is stopped is unmounted")
	w.Stopped, w.Revision = false, 3
	f.push(w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	f.requireInVolume(w.GetId(), "kept")

	f.push()
	gone := f.untilStatus(w.GetId(), protocol.WorkloadStatus_REMOVED)
	require.Contains(t, gone.GetRemoval().GetAbsent(), protocol.AbsentVolume)
	require.NoDirExists(t, filepath.Join(f.volCfg.Dir, w.GetId()+".data"))
}

func TestAFailedUpgradeFindsItsVolumeAsItWas(t *testing.T) {
	f := newFixture(t)
	f.hub.volumes = volumeOfDemo
	w := f.hub.workload(`{}`)
	f.push(w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	require.NoError(t, os.WriteFile(f.inVolume(w.GetId()), []byte("first"), 0o600))

	f.hub.readyWithin = "6" // until then the test writes
	next := f.hub.workload(`{"ready_after_millis":3600000}`)
	next.Id, next.InstanceId, next.Revision, next.Fallback = w.GetId(), w.GetInstanceId(), 2, w
	f.push(next)
	f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool {
		return s.GetRevision() == 2 && s.GetStatus() == protocol.WorkloadStatus_STARTING && s.GetStartedAt() != nil
	})
	f.requireInVolume(w.GetId(), "first")
	require.NoError(t, os.WriteFile(f.inVolume(w.GetId()), []byte("migrated"), 0o600))

	f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool {
		return s.GetFallbackFromRevision() == 2 && s.GetStatus() == protocol.WorkloadStatus_READY
	})
	f.requireInVolume(w.GetId(), "first")
}

func TestAnUpgradeWhoseVolumeHasNoRoomLeavesTheContentAlone(t *testing.T) {
	f := newFixture(t)
	f.hub.volumes = volumeOfDemo
	w := f.hub.workload(`{}`)
	f.push(w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	require.NoError(t, os.WriteFile(f.inVolume(w.GetId()), []byte("first"), 0o600))
	f.stop()
	f.volCfg.ReserveBytes = 1 << 60 // the disk has become full meanwhile
	f.start()
	next := f.hub.workload(`{"greeting":"next"}`)
	next.Id, next.InstanceId, next.Revision, next.Fallback = w.GetId(), w.GetInstanceId(), 2, w
	f.push(next)
	s := f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool {
		return s.GetFallbackFromRevision() == 2 && s.GetStatus() == protocol.WorkloadStatus_READY
	})
	require.Equal(t, protocol.WorkloadStatus_INSUFFICIENT_CAPACITY, s.GetReason())
	f.requireInVolume(w.GetId(), "first")
}

func TestAMemberWritesToAVolumeThatOneOfItsServicesWritesTo(t *testing.T) {
	mounts := func(readOnly bool, id string) agent.Service {
		return agent.Service{Spec: &protocol.Service{Volumes: []*protocol.VolumeMount{{VolumeId: id, ReadOnly: readOnly}}}}
	}
	w := agent.Workload{Services: []agent.Service{mounts(true, "v1"), mounts(false, "v1"), mounts(true, "v2")}}
	require.False(t, reconcile.OnlyReads(w, "v1"))
	require.True(t, reconcile.OnlyReads(w, "v2"))
}

// A version without a project's volume gives it up, so that another app instance may write to it.
func TestAnUpgradeToAVersionWithoutAProjectsVolumeGivesItUp(t *testing.T) {
	f := newFixture(t)
	const id = "0198a000-0000-7000-8000-000000000001"
	f.hub.nodeVolumes = []*protocol.ProjectVolume{{Id: id, ProjectId: "p1", SizeBytes: 32 << 20}}
	writer := func() *protocol.Workload {
		f.hub.volumes = "    volumes:\n      - {name: data, path: /data, size_mib: 32, scope: project}\n"
		f.hub.chosen = []manifest.VolumeChoice{{Name: "data", VolumeID: id, SizeMiB: 32}}
		w := f.hub.workload(`{}`)
		w.ProjectId = "p1"
		return w
	}
	w, other := writer(), writer()
	f.push(w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	require.NoError(t, os.WriteFile(f.inVolume(w.GetId()), []byte("kept"), 0o600))

	f.hub.volumes, f.hub.chosen = "", nil
	next := f.hub.workload(`{}`)
	next.Id, next.InstanceId, next.Revision, next.ProjectId = w.GetId(), w.GetInstanceId(), 2, "p1"
	f.push(next, other)
	f.untilStatus(other.GetId(), protocol.WorkloadStatus_READY)
	f.requireInVolume(other.GetId(), "kept")
	f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool {
		return s.GetRevision() == 2 && s.GetStatus() == protocol.WorkloadStatus_READY
	})
}
