// Package gpu_test runs the whole platform on the GPUs of the machine itself, for `make test-gpu`: hub, agent,
// containerd, driver and CUDA are real, and a tenant pays for what a container computed.
package gpu_test

import (
	"bytes"
	"math/big"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/e2e/nvmltest"
	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/pkg/appkit"
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// gpuPrice is the price of an hour of a GPU: a second costs a tenth of a cent.
	gpuPrice = "3.60"
	// version is that of the app which needs a GPU.
	version = "2.0.0"
)

// onRealGPUs is a platform whose node has the GPUs of this machine, and an NVIDIA GPU that works.
func onRealGPUs(t *testing.T) (*harness.Testbed, client.NodeAccelerator) {
	t.Helper()
	nvmltest.RequireRealGPUs(t)
	w := harness.New(t)
	w.StartContainerd()
	w.StartHub(w.HubConfig())
	w.NewTenant("acme")
	w.Agent = w.StartAgent(w.AgentConfig("node"))
	node := harness.AsJSON[client.Node](w.AdminShell(), "nodes", "get", w.Agent.Ready.NodeID)
	at := slices.IndexFunc(node.Accelerators, func(a client.NodeAccelerator) bool {
		return a.Vendor == protocol.VendorNVIDIA && a.Health == "ok" && len(a.Partitions) == 0
	})
	if at < 0 {
		skip.Except(t, skip.NoGPU, "NOT TESTED, the node has no whole NVIDIA GPU that works")
	}
	return w, node.Accelerators[at]
}

// computerImage is the demo's app with a program that computes on a GPU, and the system's libraries that this program
// and CUDA's library need.
func computerImage(t *testing.T) v1.Image {
	t.Helper()
	var libraries []string
	for _, dir := range []string{"/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/nvidia/lib*"} {
		found, err := filepath.Glob(filepath.Join(dir, "libcuda.so.1"))
		require.NoError(t, err)
		libraries = append(libraries, found...)
	}
	files := append(nvmltest.ComputerFiles(t, libraries...),
		appkit.File{Path: "/app", Source: harness.DemoBinary(t), Mode: 0o755})
	image, err := appkit.ImageFromFiles(files, appkit.ImageConfig{Entrypoint: []string{"/app"}, User: "1000:1000"})
	require.NoError(t, err)
	return image
}

// ship publishes the app that needs a GPU, and prices GPUs.
func ship(w *harness.Testbed) {
	w.T.Helper()
	w.ShipApp()
	r := w.Release(version)
	r.Image = computerImage(w.T)
	r.Template = []byte(strings.NewReplacer("accelerator: none", "accelerator: nvidia",
		"  compatibility:\n", "  compatibility:\n    min_gpu_count: 1\n",
		"{min: 16, default: 64, max: 4096}", "{min: 16, default: 4096, max: 4096}",
		"pids_max: 64", "pids_max: 256").Replace(string(r.Template)))
	_, err := w.Tenant.Ship(w.Ctx, w.Publisher, r)
	require.NoError(w.T, err)
	_, err = client.Read[client.Price](w.Admin().CreatePrice(w.Ctx, client.PriceCreate{
		Meter: protocol.MeterAcceleratorSeconds, Currency: scenario.Currency, Price: gpuPrice, Per: client.PriceUnitHour,
	}))
	require.NoError(w.T, err)
}

// compute runs the program in the app by the command line of a user, as soon as the node is connected.
func compute(w *harness.Testbed, s *harness.Shell, gpu client.NodeAccelerator) {
	w.T.Helper()
	var out, stderr bytes.Buffer
	w.Eventually("a command runs in the app", func() error {
		cmd := exec.CommandContext(w.Ctx, filepath.Join(harness.Binaries(w.T), "gpuaas"), "exec", "--project", "main", "gpu",
			"--", "/compute", "check")
		out.Reset()
		stderr.Reset()
		cmd.Env, cmd.Stdout, cmd.Stderr = s.Env, &out, &stderr
		_ = cmd.Run()
		return harness.Pending(nil, !strings.Contains(stderr.String(), "node_unreachable"))
	})
	nvmltest.RequireComputed(w.T, out.String()+stderr.String(), gpu.ID, uint64(gpu.MemoryMib)<<20)
}

// A tenant's app is created on a GPU, computes, survives its agent, is billed for the GPU's time and leaves the GPU to
// the next one.
func TestAnAppOnRealGPUsIsMeteredAndBilled(t *testing.T) {
	w, gpu := onRealGPUs(t)
	ship(w)
	user := w.UserShell(w.AdminShell())
	for range 2 {
		allocation := w.AllocateGPUs(w.Agent.Ready.NodeID, gpu.Model, 1, 4096)
		require.Equal(t, []string{gpu.ID}, allocation.AcceleratorIds)
		i, _, err := w.Tenant.Launch(w.Ctx, w.Operator, client.AppInstanceCreate{
			AppSlug: harness.AppSlug, Version: version, DisplayName: "gpu",
			PlacementIntent: client.PlacementIntent{AllocationIds: []string{allocation.ID}},
		}, nil)
		require.NoError(t, err)
		w.RequireAnswer(i)
		compute(w, user, gpu)

		pid := w.PidOf(i)
		require.NoError(t, w.Agent.Kill9())
		w.RestartAgent(w.Agent)
		require.Equal(t, pid, w.PidOf(i))
		compute(w, user, gpu)

		w.Decommission(i)
		requireBilled(w, i)
		_, err = client.Read[client.Allocation](w.Admin().ReleaseAllocation(w.Ctx, w.Tenant.Project.ID, allocation.ID))
		require.NoError(t, err)
	}
}

// requireBilled: the GPU was metered as long as the app ran, each second of it was charged once, and the ledger
// balances.
func requireBilled(w *harness.Testbed, i client.AppInstance) {
	w.T.Helper()
	postings := w.FinalPostings(i)
	usage, err := w.Tenant.Usage(w.Ctx, i.ID)
	require.NoError(w.T, err)
	ran, seconds := harness.RequireContiguous(w.T, usage), new(big.Rat)
	for _, u := range usage {
		if u.Meter != protocol.MeterAcceleratorSeconds {
			continue
		}
		q, ok := new(big.Rat).SetString(u.Quantity)
		require.True(w.T, ok)
		seconds.Add(seconds, q)
	}
	require.Zero(w.T, ran.Cmp(seconds), "ran %s s, had its GPU %s s", ran.FloatString(3), seconds.FloatString(3))
	require.Positive(w.T, seconds.Sign())
	// Both meters cost the same.
	paid, want := harness.UsageCost(w.T, postings), new(big.Rat).Mul(seconds, big.NewRat(2, 1000))
	off := new(big.Rat).Sub(paid, want)
	require.LessOrEqual(w.T, off.Abs(off).Cmp(big.NewRat(int64(len(postings)), 1_000_000_000)), 0, "paid %s for %s s",
		paid.FloatString(9), seconds.FloatString(3))
}
