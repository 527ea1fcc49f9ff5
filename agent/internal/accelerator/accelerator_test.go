package accelerator_test

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/txtar"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/accelerator"
	"github.com/gpuaas/gpuaas/protocol"
)

// waitLimit is never reached by a test that passes.
const waitLimit = time.Minute

// unpack writes a tree of testdata and returns its root.
func unpack(t *testing.T, tree string) string {
	t.Helper()
	archive, err := txtar.ParseFile(filepath.Join("testdata", tree+".txtar"))
	require.NoError(t, err)
	root := t.TempDir()
	require.NoError(t, txtar.Write(archive, root))
	return root
}

// start runs an inventory until the test ends and waits for its first scan.
func start(t *testing.T, cfg accelerator.Config) *accelerator.Inventory {
	t.Helper()
	i, _ := startOne(t, cfg)
	return i
}

// startOne also returns what stops the inventory, which the test's end does otherwise: two that run would write the
// same files.
func startOne(t *testing.T, cfg accelerator.Config) (i *accelerator.Inventory, stop func()) {
	t.Helper()
	i = accelerator.New(cfg)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- i.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(t, <-done)
	})
	t.Cleanup(stop)
	i.AwaitFirstScan(ctx)
	return i, stop
}

// await waits until the inventory is as it is expected.
func await(t *testing.T, i *accelerator.Inventory, expected func() bool) {
	t.Helper()
	changed, limit := i.Subscribe(), time.After(waitLimit)
	for !expected() {
		select {
		case <-changed:
		case <-limit:
			require.FailNow(t, "the inventory does not become what is expected", "%v %v", i.List(), i.Conditions())
		}
	}
}

func ids(list []*protocol.Accelerator) []string {
	out := []string{}
	for _, a := range list {
		out = append(out, a.GetId())
	}
	return out
}

func TestMachineWithoutAcceleratorsReportsNothing(t *testing.T) {
	var log bytes.Buffer
	i := start(t, accelerator.Config{
		Root: t.TempDir(), NVML: "/nonexistent", Log: slog.New(slog.NewTextHandler(&log, nil)),
	})
	require.Empty(t, i.List())
	require.Empty(t, i.Conditions())
	require.Empty(t, log.String())
}

func TestAnAMDGPUThatGoesAndComesBackIsNoticed(t *testing.T) {
	root := unpack(t, "radeon")
	i := start(t, accelerator.Config{Root: root, Interval: 10 * time.Millisecond})
	require.Len(t, i.List(), 2)
	device := filepath.Join(root, "sys/bus/pci/drivers/amdgpu/0000:03:00.0")
	require.NoError(t, os.Rename(device, device+".gone"))
	await(t, i, func() bool { return len(i.List()) == 1 })
	require.Equal(t, []string{"0000:0b:00.0"}, ids(i.List()))
	require.NoError(t, os.Rename(device+".gone", device))
	await(t, i, func() bool { return len(i.List()) == 2 })
	require.Empty(t, i.Conditions())
}
