package accelerator_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/accelerator"
	"github.com/gpuaas/gpuaas/agent/internal/cdi"
	"github.com/gpuaas/gpuaas/e2e/nvmltest"
	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

func sharing(t *testing.T, text string) accelerator.Sharing {
	t.Helper()
	s, err := accelerator.ParseSharing(text)
	require.NoError(t, err)
	return s
}

func TestWhatCannotBeSharedIsAnErrorOfTheFlag(t *testing.T) {
	for _, text := range []string{
		"all", "all=mig:2", "=mps:2", "all=mps", "all=mps:1", "all=mps:49", "all=time_slices:x", "all=mps:2,all=mps:3",
	} {
		_, err := accelerator.ParseSharing(text)
		require.ErrorContains(t, err, "--accelerator-sharing", text)
	}
}

func TestAnOwnerSharesTheGPUsThatAreNamed(t *testing.T) {
	skip.Root(t, "device nodes")
	library := nvmltest.New(t)
	library.Setenv()
	library.Set(driver, strings.Replace(first, firstID, firstUUID, 1), strings.Replace(second, secondID, secondUUID, 1))
	root := t.TempDir()
	library.Driver(root, 2)
	i := start(t, accelerator.Config{
		Root: withDriver(t), NVML: nvmltest.Program(t), DriverRoot: root,
		Sharing: sharing(t, "all=time_slices:4,"+firstUUID+"=exclusive"),
	})
	list := i.List()
	require.Len(t, list, 2)
	require.Empty(t, list[0].GetPartitions())
	require.Len(t, list[1].GetPartitions(), 4)
	slice := list[1].GetPartitions()[3]
	require.Equal(t, secondUUID+"-ts4-3", slice.GetId())
	require.Equal(t, "1/4 time slice", slice.GetProfile())
	require.Equal(t, protocol.SharingTimeSlices, slice.GetSharing())
	require.Equal(t, list[1].GetMemoryBytes()/4, slice.GetMemoryBytes())
	require.Empty(t, i.Conditions())

	edits, err := i.Edits(t.Context(), []string{slice.GetId()}, "org")
	require.NoError(t, err)
	require.Equal(t, []string{slice.GetId()}, edits.Claims)
	require.Equal(t, []cdi.Slice{{Accelerator: secondUUID, Sharing: protocol.SharingTimeSlices}}, edits.Shared)
	require.ElementsMatch(t, nvidiaNodes(1), edits.Nodes)
	for _, ids := range [][]string{
		{secondUUID}, {slice.GetId(), secondUUID + "-ts4-0"}, {slice.GetId(), firstUUID}, {secondUUID + "-ts4-4"},
	} {
		_, err := i.Edits(t.Context(), ids, "org")
		require.Equal(t, agent.CodeAcceleratorUnusable, fault.As(err).Code, ids)
	}
}

// An AMD GPU, and one in MIG mode, is given as without the wish.
func TestAGPUThatCannotBeSharedIsACondition(t *testing.T) {
	i := start(t, accelerator.Config{Root: unpack(t, "mi300x"), Sharing: sharing(t, "all=mps:2")})
	require.Equal(t, []string{protocol.ConditionNotShared}, i.Conditions())
	for _, a := range i.List() {
		for _, p := range a.GetPartitions() {
			require.Empty(t, p.GetSharing())
		}
	}
	library := nvmltest.New(t)
	library.Setenv()
	library.Set(driver, first, "mig MIG-0aa4 11008 1g.12gb")
	i = start(t, accelerator.Config{Root: withDriver(t), NVML: nvmltest.Program(t), Sharing: sharing(t, "all=mps:2")})
	require.Equal(t, []string{protocol.ConditionNotShared}, i.Conditions())
	require.Len(t, i.List()[0].GetPartitions(), 1)
}
