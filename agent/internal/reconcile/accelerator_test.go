package reconcile_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/txtar"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/accelerator"
	"github.com/gpuaas/gpuaas/agent/internal/reconcile"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/e2e/skip"
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
	f.inventory = accelerator.Config{
		Root: filepath.Join(f.dir, "machine"), Interval: 20 * time.Millisecond, TestFor: 200 * time.Millisecond,
	}
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
	f.awaitSamples()
	billed, _ := f.measured(w.GetId())
	f.awaitSamples()
	later, _ := f.measured(w.GetId())
	require.Equal(t, billed, later, "it runs, and is not billed")
	require.NoError(t, os.Rename(memory+".gone", memory))
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	require.Eventually(t, func() bool { now, _ := f.measured(w.GetId()); return now > billed }, 30*time.Second,
		10*time.Millisecond)
}

// awaitSamples waits until a second has passed between two samples of the meter.
func (f *fixture) awaitSamples() {
	f.t.Helper()
	from := f.store.LastStamp().At
	require.Eventually(f.t, func() bool { return f.store.LastStamp().At.Sub(from) > time.Second }, 30*time.Second,
		10*time.Millisecond)
}

// The driver resets an accelerator: its container is stopped and not billed, and runs again once the test is over.
func TestAnAcceleratorWithAFaultIsNotBilledUntilItReturns(t *testing.T) {
	f, _ := newFixtureWithGPUs(t)
	f.hub.accelerators = []string{radeonID}
	w := f.hub.workload(`{}`)
	f.push(w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	before := f.container(w.GetId())
	require.Eventually(t, func() bool { now, _ := f.measured(w.GetId()); return now > 0 }, 30*time.Second,
		10*time.Millisecond)
	f.kernelWrites(0, "amdgpu 0000:03:00.0: amdgpu: GPU reset begin!")
	fault := f.untilStatus(w.GetId(), protocol.WorkloadStatus_FAILED)
	require.Equal(t, protocol.WorkloadStatus_DEVICE_FAULT, fault.GetReason())
	require.Contains(t, fault.GetDetail(), "waits for a reset")
	require.Eventually(t, func() bool { return len(f.containersOf(w.GetId())) == 0 }, 30*time.Second, 10*time.Millisecond)
	require.Eventually(t, func() bool { return !f.store.Metering(w.GetId()) }, 30*time.Second, 10*time.Millisecond,
		"what ran until then is sealed")
	billed, _ := f.measured(w.GetId())
	f.awaitSamples()
	later, _ := f.measured(w.GetId())
	require.Equal(t, billed, later, "without its accelerator it is not billed")

	f.kernelWrites(1, "amdgpu 0000:03:00.0: amdgpu: GPU reset(1) succeeded!")
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	require.NotEqual(t, before.ID, f.container(w.GetId()).ID)
	require.Eventually(t, func() bool { now, _ := f.measured(w.GetId()); return now > billed }, 30*time.Second,
		10*time.Millisecond)

	f.kernelWrites(2, "amdgpu 0000:03:00.0: amdgpu: device lost from bus!")
	f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool {
		return s.GetStatus() == protocol.WorkloadStatus_FAILED && strings.Contains(s.GetDetail(), "quarantined")
	})
}

// The driver finds no fault, and the container cannot open its device: it starts anew, with the rule.
func TestAContainerThatCannotOpenItsAcceleratorStartsAgain(t *testing.T) {
	f, _ := newFixtureWithGPUs(t)
	f.hub.accelerators = []string{radeonID}
	w := f.hub.workload(`{}`)
	f.push(w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	before := f.container(w.GetId())
	found, err := filepath.Glob("/sys/fs/cgroup/devices/*/" + w.GetId() + "/" + before.ID + "/devices.deny")
	require.NoError(t, err)
	if len(found) == 0 {
		skip.Except(t, skip.CgroupV2, "")
	}
	rules, err := os.ReadFile(filepath.Join(filepath.Dir(found[0]), "devices.list"))
	require.NoError(t, err)
	for line := range strings.Lines(string(rules)) {
		if strings.HasPrefix(line, "c 226:") {
			require.NoError(t, os.WriteFile(found[0], []byte(line), 0))
		}
	}
	s := f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool { return s.GetRestarts() > 0 })
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	require.NotEqual(t, before.ID, f.container(w.GetId()).ID)
	require.Regexp(t, `it cannot open its accelerator: /dev/dri/renderD\d+: operation not permitted`,
		f.store.Members()[w.GetId()].Services[manifest.ServiceName].Detail+s.GetDetail())
}

// doubtful lists running containers as ones whose state is unknown.
type doubtful struct{ *runtime.Runtime }

func (d doubtful) List(ctx context.Context) ([]runtime.Container, error) {
	all, err := d.Runtime.List(ctx)
	for i := range all {
		all[i].State = runtime.StateUnknown
	}
	return all, err
}

// usedNoter keeps which accelerators the first pass calls used.
type usedNoter struct {
	reconcile.Accelerators
	first chan []string
}

func (n usedNoter) SetUsed(ids []string) {
	select {
	case n.first <- ids:
	default:
	}
	n.Accelerators.SetUsed(ids)
}

func TestLaw14AnAcceleratorOfAContainerInDoubtIsNotReset(t *testing.T) {
	f, _ := newFixtureWithGPUs(t)
	f.hub.accelerators = []string{radeonID}
	w := f.hub.workload(`{}`)
	f.push(w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	f.stop()
	f.wrapRuntime = func(rt *runtime.Runtime) reconcile.Containers { return doubtful{rt} }
	first := make(chan []string, 1)
	f.wrapAccelerators = func(a reconcile.Accelerators) reconcile.Accelerators { return usedNoter{a, first} }
	f.start()
	require.Equal(t, []string{radeonID}, <-first)
}

// flickering are devices of which each second check finds one lost.
type flickering struct{ checks atomic.Int64 }

func (d *flickering) LostDevices(context.Context, string) (string, error) {
	if d.checks.Add(1)%2 == 0 {
		return "/dev/dri/renderD128: operation not permitted", nil
	}
	return "", nil
}

// A check may fail while the driver is reset; only one failure after the other ends a container.
func TestAContainerThatOpensItsAcceleratorAgainGoesOn(t *testing.T) {
	f, _ := newFixtureWithGPUs(t)
	f.stop()
	devices := &flickering{}
	f.devices = devices
	f.start()
	f.hub.accelerators = []string{radeonID}
	w := f.hub.workload(`{}`)
	f.push(w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	before := f.container(w.GetId())
	checked := devices.checks.Load()
	require.Eventually(t, func() bool { return devices.checks.Load() > checked+6 }, time.Minute, 10*time.Millisecond)
	require.Empty(t, f.store.Runs()[before.ID].NotAlive)
	require.Equal(t, before.PID, f.container(w.GetId()).PID)
}

// kernelWrites appends a record to the machine's kernel log.
func (f *fixture) kernelWrites(number int, text string) {
	f.t.Helper()
	path := filepath.Join(f.inventory.Root, "dev/kmsg")
	require.NoError(f.t, os.MkdirAll(filepath.Dir(path), 0o755))
	file, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	require.NoError(f.t, err)
	_, err = fmt.Fprintf(file, "3,%d,5140900,-;%s\n", number, text)
	require.NoError(f.t, err)
	require.NoError(f.t, file.Close())
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
