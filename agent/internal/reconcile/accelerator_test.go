package reconcile_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/txtar"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/accelerator"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

const radeonID = "GPU-d20b5fe3917c4468"

// newFixtureWithGPUs is one of a machine with the accelerators of a workstation.
func newFixtureWithGPUs(t *testing.T) (f *fixture, device string) {
	t.Helper()
	f = newFixture(t)
	f.stop()
	archive, err := txtar.ParseFile("../accelerator/testdata/radeon.txtar")
	require.NoError(t, err)
	f.inventory = accelerator.Config{Root: filepath.Join(f.dir, "machine"), Interval: 20 * time.Millisecond}
	require.NoError(t, txtar.Write(archive, f.inventory.Root))
	f.start()
	return f, filepath.Join(f.inventory.Root, "sys/bus/pci/drivers/amdgpu/0000:03:00.0")
}

func TestALostAcceleratorStopsItsContainerUntilItIsBack(t *testing.T) {
	f, device := newFixtureWithGPUs(t)
	other := f.hub.workload(`{}`)
	f.hub.accelerators = []string{radeonID}
	w := f.hub.workload(`{}`)
	f.push(w, other)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	f.untilStatus(other.GetId(), protocol.WorkloadStatus_READY)
	before := f.container(w.GetId())
	require.Equal(t, []string{radeonID}, before.AcceleratorIDs)

	f.restart()
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	require.Equal(t, before.PID, f.container(w.GetId()).PID, "it goes on, also while the agent has not scanned yet")

	require.NoError(t, os.Rename(device, device+".gone"))
	lost := f.untilStatus(w.GetId(), protocol.WorkloadStatus_FAILED)
	require.Equal(t, protocol.WorkloadStatus_DEVICE_FAULT, lost.GetReason())
	require.Contains(t, lost.GetDetail(), radeonID)
	require.Eventually(t, func() bool { return len(f.containersOf(w.GetId())) == 0 }, 30*time.Second, 10*time.Millisecond)
	f.restart()
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_FAILED)

	require.NoError(t, os.Rename(device+".gone", device))
	back := f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	require.Zero(t, back.GetReason())
	require.NotEqual(t, before.ID, f.container(w.GetId()).ID)
	require.NotEmpty(t, f.container(other.GetId()).ID, "the neighbour has gone on")

	memory := filepath.Join(device, "mem_info_vram_total")
	require.NoError(t, os.Rename(memory, memory+".gone"))
	faulty := f.untilStatus(w.GetId(), protocol.WorkloadStatus_DEGRADED)
	require.Equal(t, protocol.WorkloadStatus_DEVICE_FAULT, faulty.GetReason())
	require.NoError(t, os.Rename(memory+".gone", memory))
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
}

func TestAnAcceleratorMovesToAnotherMemberOnceItIsFree(t *testing.T) {
	f, _ := newFixtureWithGPUs(t)
	f.hub.accelerators = []string{radeonID}
	first, second := f.hub.workload(`{"ignore_term":true}`), f.hub.workload(`{}`)
	f.push(first)
	f.untilStatus(first.GetId(), protocol.WorkloadStatus_READY)
	f.push(second)
	f.untilStatus(second.GetId(), protocol.WorkloadStatus_READY)
	f.untilStatus(first.GetId(), protocol.WorkloadStatus_REMOVED)
	require.Equal(t, []string{radeonID}, f.container(second.GetId()).AcceleratorIDs)
	f.push()
	f.untilStatus(second.GetId(), protocol.WorkloadStatus_REMOVED)
	entries, err := os.ReadDir("/dev/gpuaas-" + f.word)
	require.NoError(t, err)
	require.Empty(t, entries)
}

func (f *fixture) containersOf(memberID string) []runtime.Container {
	f.t.Helper()
	all, err := f.rt.List(f.ctx())
	require.NoError(f.t, err)
	return slices.DeleteFunc(all, func(c runtime.Container) bool { return c.MemberID != memberID })
}

// withAccelerators makes the manifest one of an app that needs AMD's accelerators, where the hub gives them.
func (h *hub) withAccelerators(template []byte) ([]byte, manifest.Shape) {
	if len(h.accelerators) == 0 {
		return template, manifest.Shape{}
	}
	text := strings.Replace(string(template), "accelerator: none", "accelerator: amd", 1)
	text = strings.Replace(text, "  compatibility:\n", "  compatibility:\n    min_gpu_count: 1\n", 1)
	return []byte(text), manifest.Shape{AcceleratorVendor: manifest.AcceleratorAMD, AcceleratorIDs: h.accelerators}
}
