package runtime_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/accelerator"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/e2e/nvmltest"
	"github.com/gpuaas/gpuaas/pkg/appkit"
)

// scan runs an inventory until the test ends, and waits for its first scan.
func scan(t *testing.T, cfg accelerator.Config) *accelerator.Inventory {
	t.Helper()
	i := accelerator.New(cfg)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- i.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
	i.AwaitFirstScan(ctx)
	return i
}

// counterImage has a program that loads CUDA's library as other programs do, and prints how many GPUs it finds.
func (f *fixture) counterImage() string {
	f.t.Helper()
	program, needs := nvmltest.Counter(f.t)
	files := []appkit.File{{Path: "/count", Source: program, Mode: 0o755}}
	for _, path := range needs {
		real, err := filepath.EvalSymlinks(path)
		require.NoError(f.t, err)
		files = append(files, appkit.File{Path: path, Source: real, Mode: 0o755})
	}
	img, err := appkit.ImageFromFiles(files, appkit.ImageConfig{Entrypoint: []string{"/count"}})
	require.NoError(f.t, err)
	ref := f.registry.push("org/acme/"+f.word, img)
	require.NoError(f.t, f.ensure(ref))
	return ref
}

// counted is what the program says in a container with these accelerators.
func (f *fixture) counted(image string, i *accelerator.Inventory, ids ...string) string {
	f.t.Helper()
	spec := f.spec(image)
	spec.Service.Command = []string{"/count"}
	spec.Service.Resources.MemoryBytes, spec.Service.Resources.AcceleratorIds = 1<<30, ids
	var err error
	spec.Devices, err = i.Edits(f.t.Context(), ids, "org")
	require.NoError(f.t, err)
	f.start(spec)
	f.wait(spec.ID, runtime.StateExited)
	r, err := f.rt.Logs(f.t.Context(), spec.ID, 0, true)
	require.NoError(f.t, err)
	defer func() { require.NoError(f.t, r.Close()) }()
	out := make([]byte, 4096)
	n, err := r.Read(out)
	require.NoError(f.t, err)
	require.NoError(f.t, f.rt.Remove(f.t.Context(), spec.ID))
	return string(out[:n])
}

// Everything but the driver and the GPUs is real: the child and its dlopen, NVIDIA's toolkit, container and cgroup, and
// the search for CUDA's library in the container.
func TestLaw10AProgramFindsOnlyTheNVIDIAGPUsItWasGiven(t *testing.T) {
	f := newFixture(t) // before the first temporary directory of the test: it searches for what the test leaves
	library := nvmltest.New(t)
	library.Setenv()
	ids := make([]string, 3)
	lines := []string{"driver " + nvmltest.Version + " 12040"}
	for n := range ids {
		ids[n] = fmt.Sprintf("GPU-8f6d2e1a-73c1-4a0e-9d53-0c5b1f2a6d0%d", n)
		lines = append(lines, fmt.Sprintf("gpu %s %x 81559 16896 ok NVIDIA H100 80GB HBM3", ids[n], 0x1b+n))
	}
	library.Set(lines...)
	dir := filepath.Dir(f.cfg.StateDir)
	library.Driver(dir+"/driver", len(ids))
	require.NoError(t, os.MkdirAll(dir+"/machine/sys/module/nvidia", 0o755))
	i := scan(t, accelerator.Config{
		Root: dir + "/machine", NVML: nvmltest.Program(t), DriverRoot: dir + "/driver", Timeout: time.Minute,
	})
	require.Len(t, i.List(), len(ids))
	image := f.counterImage()
	require.Equal(t, "code 0, 1 GPUs\n", f.counted(image, i, ids[1]))
	require.Equal(t, "code 0, 2 GPUs\n", f.counted(image, i, ids[2], ids[0]))
	require.Contains(t, f.counted(image, i), "libcuda.so.1: cannot open shared object file")
}
