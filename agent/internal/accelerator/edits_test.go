package accelerator_test

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/accelerator"
	"github.com/gpuaas/gpuaas/agent/internal/cdi"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// amdNodes are the compute device and these render nodes.
func amdNodes(minors ...uint32) []cdi.Node {
	nodes := []cdi.Node{{Path: "/dev/kfd", Major: 235}}
	for _, minor := range minors {
		nodes = append(nodes, cdi.Node{
			Path: "/dev/dri/renderD" + strconv.FormatUint(uint64(minor), 10), Major: 226, Minor: minor,
		})
	}
	return nodes
}

func TestAMDGPUsAreGivenByTheirRenderNodes(t *testing.T) {
	const first, second = "GPU-8c1f0a96f2d3b751", "GPU-0f44e2b17a90c6d3"
	for _, c := range []struct {
		tree string
		ids  []string
		want []cdi.Node
	}{
		{"radeon", []string{"GPU-d20b5fe3917c4468"}, amdNodes(128)},
		{"radeon", []string{"0000:0b:00.0"}, amdNodes(129)},
		{"mi210", []string{"GPU-b19d5c7730e4f286", "GPU-6f2e9b0d41c8a357"}, amdNodes(129, 128)},
		{"mi300x", []string{second}, amdNodes(136)},
		{"mi300x", []string{first + "-3"}, amdNodes(131)},
		{"mi300x", []string{first}, amdNodes(128, 129, 130, 131, 132, 133, 134, 135)},
		{"mi300x", nil, nil},
	} {
		i := start(t, accelerator.Config{Root: unpack(t, c.tree)})
		edits, err := i.Edits(t.Context(), c.ids, "org")
		require.NoError(t, err)
		require.Equal(t, c.want, edits.Nodes, c.ids)
		require.Empty(t, edits.Mounts)
		require.Subset(t, edits.Claims, c.ids)
	}
	i := start(t, accelerator.Config{Root: unpack(t, "mi300x")})
	whole, err := i.Edits(t.Context(), []string{first}, "org")
	require.NoError(t, err)
	require.Contains(t, whole.Claims, first+"-3", "the whole GPU excludes its parts")
	for _, ids := range [][]string{{first, first + "-3"}, {second, second}, {"GPU-unknown"}, {first + "-8"}} {
		_, err := i.Edits(t.Context(), ids, "org")
		require.Equal(t, agent.CodeAcceleratorUnusable, fault.As(err).Code, ids)
	}
}

func TestAnAMDGPUWithoutAComputeNodeIsNotGiven(t *testing.T) {
	for name, gone := range map[string]string{
		"no compute device": "sys/class/kfd/kfd/dev", "no render node": "sys/class/drm/renderD128/dev",
		"not served by KFD": "sys/class/kfd/kfd/topology/nodes/1",
	} {
		root := unpack(t, "radeon")
		i := start(t, accelerator.Config{Root: root})
		require.NoError(t, os.RemoveAll(filepath.Join(root, gone)))
		_, err := i.Edits(t.Context(), []string{"GPU-d20b5fe3917c4468"}, "org")
		require.Equal(t, agent.CodeAcceleratorUnusable, fault.As(err).Code, name)
	}
}

func TestStateSaysWhyAnAcceleratorCannotBeUsed(t *testing.T) {
	root := unpack(t, "mi210")
	cfg := accelerator.Config{Root: root, Interval: 10 * time.Millisecond}
	require.Equal(t, agent.AcceleratorAwaited, accelerator.New(cfg).State("GPU-6f2e9b0d41c8a357"))
	i := start(t, cfg)
	require.Zero(t, i.State("GPU-6f2e9b0d41c8a357"))
	require.Zero(t, i.State("GPU-b19d5c7730e4f286"), "a degraded one works")
	require.Equal(t, agent.AcceleratorMissing, i.State("GPU-unknown"))
	require.NoError(t, os.Remove(filepath.Join(root, "sys/bus/pci/drivers/amdgpu/0000:43:00.0/mem_info_vram_total")))
	await(t, i, func() bool { return i.State("GPU-6f2e9b0d41c8a357") == agent.AcceleratorFaulty })
	_, err := i.Edits(t.Context(), []string{"GPU-6f2e9b0d41c8a357"}, "org")
	require.ErrorContains(t, err, "does not work")

	hangs := start(t, accelerator.Config{Root: withDriver(t), NVML: "/nonexistent"})
	require.Equal(t, agent.AcceleratorUnanswered, hangs.State("GPU-unknown"), "a driver that fails says nothing")
	_, err = hangs.Edits(context.WithoutCancel(t.Context()), []string{"GPU-unknown"}, "org")
	require.Equal(t, agent.CodeAcceleratorUnusable, fault.As(err).Code)
}
