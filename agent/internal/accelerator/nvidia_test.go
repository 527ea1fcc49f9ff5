package accelerator_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/agent/internal/accelerator"
	"github.com/gpuaas/gpuaas/e2e/nvmltest"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	driver   = "driver 550.54.15 12040"
	first    = "gpu GPU-8f6d2e1a-0001 1b 81559 16896 ok NVIDIA H100 80GB HBM3"
	second   = "gpu GPU-8f6d2e1a-0002 43 81559 16896 ok NVIDIA H100 80GB HBM3"
	firstID  = "GPU-8f6d2e1a-0001"
	secondID = "GPU-8f6d2e1a-0002"
)

// withDriver is the root of a machine on which NVIDIA's kernel module is loaded.
func withDriver(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	require.NoError(t, os.MkdirAll(filepath.Join(root, "sys/module/nvidia"), 0o755))
	slot := filepath.Join(root, "sys/bus/pci/devices/0000:1b:00.0")
	require.NoError(t, os.MkdirAll(slot, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(slot, "numa_node"), []byte("1\n"), 0o600))
	return root
}

// TestNVIDIA runs the real child, which loads a library that says what the test sets.
func TestNVIDIA(t *testing.T) {
	library := nvmltest.New(t)
	library.Setenv()
	cfg := accelerator.Config{Root: withDriver(t), NVML: nvmltest.Program(t), Interval: 10 * time.Millisecond}

	t.Run("library without a driver", func(t *testing.T) {
		i := start(t, cfg)
		require.Empty(t, i.List())
		require.Empty(t, i.Conditions())
	})
	t.Run("H100 with MIG behind switches", func(t *testing.T) {
		library.Set(driver, first, "link 0 18", "mig MIG-0aa4 11008 1g.12gb", "mig MIG-0bb5 40448 3g.40gb", second,
			"link 0 17")
		list := start(t, cfg).List()
		require.Equal(t, []string{firstID, secondID}, ids(list))
		requireEqual(t, &protocol.Accelerator{
			Id: firstID, Vendor: "nvidia", Model: "NVIDIA H100 80GB HBM3", MemoryBytes: 81559 << 20, Health: "ok",
			PciAddress: "0000:1b:00.0", NumaNode: proto.Uint32(1), Cores: 16896, DriverVersion: "550.54.15",
			RuntimeVersion: "12.4",
			Links:          []*protocol.AcceleratorLink{{Kind: "nvswitch", Count: 18}},
			Partitions: []*protocol.AcceleratorPartition{
				{Id: "MIG-0aa4", Profile: "1g.12gb", MemoryBytes: 11008 << 20},
				{Id: "MIG-0bb5", Profile: "3g.40gb", MemoryBytes: 40448 << 20},
			},
		}, list[0])
		require.Empty(t, list[1].GetPartitions())
		require.Nil(t, list[1].NumaNode)
		require.EqualValues(t, 17, list[1].GetLinks()[0].GetCount())
	})
	t.Run("NVLink between two GPUs", func(t *testing.T) {
		library.Set(driver, first, "link 43 4", "link 99 2", second, "link 1b 4")
		list := start(t, cfg).List()
		require.Len(t, list[0].GetLinks(), 1, "a GPU that the machine does not see has no id")
		require.True(t, proto.Equal(&protocol.AcceleratorLink{PeerId: secondID, Kind: "nvlink", Count: 4},
			list[0].GetLinks()[0]))
		require.Equal(t, firstID, list[1].GetLinks()[0].GetPeerId())
	})
	for state, health := range map[string]string{
		"ok": "ok", "ecc": "degraded", "pending": "degraded", "hot": "degraded", "failed": "faulty", "lost": "faulty",
		"reset": "needs_reset", "reboot": "faulty",
	} {
		t.Run("health "+state, func(t *testing.T) {
			library.Set(driver, "gpu "+firstID+" 1b 81559 16896 "+state+" NVIDIA H100 80GB HBM3")
			require.Equal(t, health, start(t, cfg).List()[0].GetHealth())
		})
	}
	t.Run("GPU that falls off the bus and comes back", func(t *testing.T) { requireChangesNoticed(t, library, cfg) })
	t.Run("driver that hangs", func(t *testing.T) { requireHangReported(t, library, cfg) })
}

func requireChangesNoticed(t *testing.T, library *nvmltest.Library, cfg accelerator.Config) {
	t.Helper()
	library.Set(driver, first, second)
	i := start(t, cfg)
	library.Set(driver, second)
	await(t, i, func() bool { return len(i.List()) == 1 })
	require.Equal(t, []string{secondID}, ids(i.List()))
	library.Set(driver, first, second)
	await(t, i, func() bool { return len(i.List()) == 2 })
	require.NoError(t, os.RemoveAll(filepath.Join(cfg.Root, "sys/module/nvidia")))
	await(t, i, func() bool { return len(i.List()) == 0 })
	require.Empty(t, i.Conditions(), "the driver was unloaded")
	require.NoError(t, os.Mkdir(filepath.Join(cfg.Root, "sys/module/nvidia"), 0o755))
}

func requireHangReported(t *testing.T, library *nvmltest.Library, cfg accelerator.Config) {
	t.Helper()
	library.Set(driver, first)
	cfg.Timeout = 3 * time.Second
	i := start(t, cfg)
	await(t, i, func() bool { return len(i.List()) == 1 && len(i.Conditions()) == 0 })
	library.Set("hang")
	await(t, i, func() bool { return len(i.Conditions()) == 1 })
	require.Equal(t, []string{protocol.ConditionNVIDIAUnresponsive}, i.Conditions())
	require.Equal(t, []string{firstID}, ids(i.List()), "a driver that hangs does not say that its GPUs are gone")
	library.Set(driver, second)
	await(t, i, func() bool { return len(i.Conditions()) == 0 })
	require.Equal(t, []string{secondID}, ids(i.List()))
}

func TestProgramThatGivesNoInventoryIsACondition(t *testing.T) {
	for name, script := range map[string]string{
		"missing": "", "fails": "echo no library >&2; exit 3", "prints no document": "echo hello",
		"prints without end": "yes",
	} {
		t.Run(name, func(t *testing.T) {
			program := filepath.Join(t.TempDir(), "gpuaas-nvml")
			if script != "" {
				require.NoError(t, os.WriteFile(program, []byte("#!/bin/sh\n"+script+"\n"), 0o700))
			}
			i := start(t, accelerator.Config{Root: withDriver(t), NVML: program})
			require.Equal(t, []string{protocol.ConditionNVIDIAUnresponsive}, i.Conditions())
			require.Empty(t, i.List())
		})
	}
}

// A package that installs another version of the driver removes the library of the one that runs, and its GPUs go on.
func TestALibraryThatIsMissingDoesNotSayThatItsGPUsAreGone(t *testing.T) {
	library, root := nvmltest.New(t), t.TempDir()
	library.Setenv()
	library.Driver(root, 1)
	library.Set(driver, first)
	i := start(t, accelerator.Config{
		Root: withDriver(t), NVML: nvmltest.Program(t), DriverRoot: root, Interval: 10 * time.Millisecond,
	})
	require.Equal(t, []string{firstID}, ids(i.List()))
	name := filepath.Join(root, "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1")
	require.NoError(t, os.Rename(name, name+".dpkg-tmp"))
	await(t, i, func() bool { return len(i.Conditions()) > 0 || len(i.List()) == 0 })
	require.Equal(t, []string{firstID}, ids(i.List()))
	require.Equal(t, []string{protocol.ConditionNVIDIAUnresponsive}, i.Conditions())
	require.NoError(t, os.Rename(name+".dpkg-tmp", name))
	await(t, i, func() bool { return len(i.Conditions()) == 0 })
}
