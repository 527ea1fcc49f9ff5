package lifecycle_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/e2e/nvmltest"
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/protocol"
)

// The real agent finds NVIDIA's GPUs through gpuaas-nvml, which lies beside it, and AMD's in sysfs.
func TestGPUsThatComeAndGoAreShownWithoutARestart(t *testing.T) {
	w := harness.New(t)
	harness.NeedsNVML(t)
	library := nvmltest.New(t)
	const nvidia = "gpu GPU-8f6d2e1a-0001 1b 81559 16896 ok NVIDIA H100 80GB HBM3"
	library.Set("driver 550.54.15 12040", nvidia, "mig MIG-0aa4 11008 1g.12gb")

	w.StartContainerd()
	w.StartHub(w.HubConfig())
	c := w.AgentConfig("node")
	machine := w.Machine(&c, "radeon.txtar")
	require.NoError(t, os.MkdirAll(filepath.Join(machine, "sys/module/nvidia"), 0o755))
	c.Env = append(c.Env, library.Env...)
	id := w.StartAgent(c).Ready.NodeID
	s := w.AdminShell()
	health := func() map[string]string {
		found := map[string]string{}
		for _, a := range harness.AsJSON[client.Node](s, "nodes", "get", id).Accelerators {
			found[a.Model] = a.Health
		}
		return found
	}
	expect := func(what string, want map[string]string) {
		t.Helper()
		w.Eventually(what, func() error {
			got := health()
			for model, state := range want {
				if got[model] != state {
					return harness.ErrPending
				}
			}
			return nil
		})
	}
	const h100, radeon, old = "NVIDIA H100 80GB HBM3", "AMD Radeon RX 7900", "AMD GPU 0x731f"
	require.Equal(t, map[string]string{h100: "ok", radeon: "ok", old: "ok"}, health(), "the first session names all")
	table := s.MustRun("nodes", "get", id)
	require.Contains(t, table, "1g.12gb MIG-0aa4")
	require.Contains(t, table, "0000:0b:00.0")

	library.Set("driver 550.54.15 12040")
	device := filepath.Join(machine, "sys/bus/pci/drivers/amdgpu/0000:03:00.0")
	require.NoError(t, os.Rename(device, device+".gone"))
	expect("the GPUs are missing", map[string]string{h100: "missing", radeon: "missing", old: "ok"})
	library.Set("driver 550.54.15 12040", nvidia)
	require.NoError(t, os.Rename(device+".gone", device))
	expect("the GPUs are back", map[string]string{h100: "ok", radeon: "ok", old: "ok"})

	library.Set("fail")
	w.Eventually("the driver's failure is a condition", func() error {
		n := harness.AsJSON[client.Node](s, "nodes", "get", id)
		return harness.Pending(nil, slices.Contains(n.Conditions, protocol.ConditionNVIDIAUnresponsive))
	})
	require.Equal(t, "ok", health()[h100], "a driver that fails does not say that its GPUs are gone")
}
