package accelerator_test

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/accelerator"
	"github.com/gpuaas/gpuaas/e2e/nvmltest"
	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// mpsMachine has two GPUs with four slices each.
func mpsMachine(t *testing.T, program string) (*nvmltest.Library, accelerator.Config) {
	t.Helper()
	skip.Root(t, "device nodes and mounts")
	library := nvmltest.New(t)
	library.Setenv()
	library.Set(driver, strings.Replace(first, firstID, firstUUID, 1), strings.Replace(second, secondID, secondUUID, 1))
	root, dir := t.TempDir(), t.TempDir()
	library.Driver(root, 2)
	require.NoError(t, os.WriteFile(filepath.Join(root, "usr/bin/nvidia-cuda-mps-control"), []byte(program), 0o755))
	cfg := accelerator.Config{
		Root: withDriver(t), NVML: nvmltest.Program(t), DriverRoot: root, Sharing: sharing(t, "all=mps:4"), MPSDir: dir,
		Interval: 20 * time.Millisecond, MPSIdle: time.Hour,
	}
	t.Cleanup(func() { require.NoError(t, accelerator.StopMPS(context.Background(), cfg)) })
	return library, cfg
}

func TestContainersWithSlicesReachOneMPSDaemon(t *testing.T) {
	library, cfg := mpsMachine(t, nvmltest.MPSControl)
	i, stop := startOne(t, cfg)
	slice := func(n int) []string { return []string{firstUUID + "-mps4-" + strconv.Itoa(n)} }
	edits, err := i.Edits(t.Context(), slice(0), "acme")
	require.NoError(t, err)
	require.ElementsMatch(t, nvidiaNodes(0), edits.Nodes)
	mps := edits.MPS
	require.Equal(t, uint64(25), mps.ThreadPercent)
	require.Equal(t, uint64(81559/4), mps.MemoryMiB)
	require.FileExists(t, mps.PipeDir+"/control")
	require.FileExists(t, mps.ShmDir+"/gpuaas-test-mps")
	require.NoFileExists(t, "/dev/shm/gpuaas-test-mps", "the daemon does not see the host's")
	var st unix.Statfs_t
	require.NoError(t, unix.Statfs(mps.PipeDir, &st))
	require.LessOrEqual(t, st.Blocks*uint64(st.Bsize), uint64(4<<20), "containers write to it")
	var machine unix.Sysinfo_t
	require.NoError(t, unix.Sysinfo(&machine))
	require.NoError(t, unix.Statfs(mps.ShmDir, &st))
	require.LessOrEqual(t, st.Blocks*uint64(st.Bsize), machine.Totalram*uint64(machine.Unit)/8,
		"a quarter of the memory for all, of which the machine has two")
	require.LessOrEqual(t, st.Files, uint64(64<<10))
	told, err := os.ReadFile(filepath.Join(mps.PipeDir, "../log/commands"))
	require.NoError(t, err)
	require.Equal(t, "set_default_active_thread_percentage 25\nset_default_device_pinned_mem_limit 0 20389M\n",
		string(told))
	require.Equal(t, firstUUID+" 3", library.ComputeMode(), "only MPS may use the GPU")

	again, err := i.Edits(t.Context(), slice(1), "acme")
	require.NoError(t, err)
	require.Equal(t, mps, again.MPS)
	i.SetUsed(slice(0))
	_, err = i.Edits(t.Context(), slice(2), "globex")
	require.Equal(t, agent.CodeAcceleratorUnusable, fault.As(err).Code, "%v", err)
	require.Zero(t, i.State(slice(0)[0]))

	stop()
	later := start(t, cfg)
	later.SetUsed(slice(0))
	require.Zero(t, later.State(slice(0)[0]), "a new agent finds the daemon")
	_, err = later.Edits(t.Context(), slice(2), "acme")
	require.NoError(t, err)
}

// The containers of a daemon that has ended are stopped, and started again once none is left.
func TestAnMPSDaemonThatHasEndedStopsItsContainers(t *testing.T) {
	_, cfg := mpsMachine(t, nvmltest.MPSControl)
	i := start(t, cfg)
	slice := firstUUID + "-mps4-0"
	edits, err := i.Edits(t.Context(), []string{slice}, "acme")
	require.NoError(t, err)
	i.SetUsed([]string{slice})
	killSupervisor(t, edits.MPS.PipeDir)
	await(t, i, func() bool { return i.State(slice) == agent.AcceleratorWithoutMPS })
	_, err = i.Edits(t.Context(), []string{firstUUID + "-mps4-1"}, "acme")
	require.Equal(t, agent.CodeAcceleratorUnusable, fault.As(err).Code, "a container still has the daemon of before")
	i.SetUsed(nil)
	require.Zero(t, i.State(slice))
	_, err = i.Edits(t.Context(), []string{slice}, "acme")
	require.NoError(t, err)
}

func TestAnMPSDaemonWithoutContainersLeavesNothing(t *testing.T) {
	library, cfg := mpsMachine(t, nvmltest.MPSControl)
	cfg.MPSIdle = time.Millisecond
	i := start(t, cfg)
	_, err := i.Edits(t.Context(), []string{firstUUID + "-mps4-0"}, "acme")
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		i.SetUsed(nil)
		left, err := os.ReadDir(cfg.MPSDir)
		return err == nil && len(left) == 0
	}, 10*time.Second, 10*time.Millisecond)
	require.Equal(t, firstUUID+" 0", library.ComputeMode(), "every program may use the GPU again")
	mounts, err := os.ReadFile("/proc/self/mounts")
	require.NoError(t, err)
	require.NotContains(t, string(mounts), cfg.MPSDir)
}

// Its supervisor cannot release the GPU itself, as when the kernel kills it for memory.
func TestAKilledMPSDaemonLeavesTheGPUToEveryProgram(t *testing.T) {
	library, cfg := mpsMachine(t, nvmltest.MPSControl)
	cfg.MPSIdle = time.Millisecond
	i := start(t, cfg)
	edits, err := i.Edits(t.Context(), []string{firstUUID + "-mps4-0"}, "acme")
	require.NoError(t, err)
	killSupervisor(t, edits.MPS.PipeDir)
	require.Equal(t, firstUUID+" 3", library.ComputeMode())
	require.Eventually(t, func() bool {
		i.SetUsed(nil)
		left, err := os.ReadDir(cfg.MPSDir)
		return err == nil && len(left) == 0
	}, waitLimit, 10*time.Millisecond)
	require.Equal(t, firstUUID+" 0", library.ComputeMode())
}

// The agent that would have released the GPU has ended as well, and the driver does not answer at first.
func TestAnUninstalledAgentLeavesTheGPUToEveryProgram(t *testing.T) {
	library, cfg := mpsMachine(t, nvmltest.MPSControl)
	i, stop := startOne(t, cfg)
	edits, err := i.Edits(t.Context(), []string{firstUUID + "-mps4-0"}, "acme")
	require.NoError(t, err)
	stop()
	killSupervisor(t, edits.MPS.PipeDir)
	without := cfg
	without.NVML = "/no/such/program"
	require.Error(t, accelerator.StopMPS(t.Context(), without))
	require.Equal(t, firstUUID+" 3", library.ComputeMode())
	require.NoError(t, accelerator.StopMPS(t.Context(), cfg), "the GPU is still known")
	require.Equal(t, firstUUID+" 0", library.ComputeMode())
	require.NoDirExists(t, filepath.Join(cfg.MPSDir, firstUUID))
}

func killSupervisor(t *testing.T, pipeDir string) {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(pipeDir, "../lock"))
	require.NoError(t, err)
	pid, err := strconv.Atoi(string(raw))
	require.NoError(t, err)
	require.NoError(t, unix.Kill(pid, unix.SIGKILL))
}

func TestAnMPSDaemonThatDoesNotStartIsACondition(t *testing.T) {
	_, cfg := mpsMachine(t, "#!/bin/sh\necho no such GPU\nexit 1\n")
	i := start(t, cfg)
	_, err := i.Edits(t.Context(), []string{firstUUID + "-mps4-0"}, "acme")
	require.ErrorContains(t, err, "no such GPU")
	require.Equal(t, []string{protocol.ConditionNoMPS}, i.Conditions())
}

// The daemon of the first GPU has no socket until that of the second one has started and ended.
func TestAnMPSDaemonThatDoesNotAnswerDelaysNoOther(t *testing.T) {
	asked, answers := filepath.Join(t.TempDir(), "asked"), filepath.Join(t.TempDir(), "answers")
	_, cfg := mpsMachine(t, strings.Replace(nvmltest.MPSControl, "\n", "\n"+`
if [ "$1 $CUDA_VISIBLE_DEVICES" = "-f `+firstUUID+`" ]; then
	touch `+asked+`
	until [ -e `+answers+` ]; do sleep 0.02; done
fi
`, 1))
	cfg.MPSIdle = time.Millisecond
	i := start(t, cfg)
	slow := make(chan error, 1)
	go func() {
		_, err := i.Edits(t.Context(), []string{firstUUID + "-mps4-0"}, "acme")
		slow <- err
	}()
	isThere := func(path string) bool {
		_, err := os.Stat(path)
		return err == nil
	}
	require.Eventually(t, func() bool { return isThere(asked) }, waitLimit, 10*time.Millisecond)
	_, err := i.Edits(t.Context(), []string{secondUUID + "-mps4-0"}, "acme")
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		i.SetUsed(nil)
		return !isThere(filepath.Join(cfg.MPSDir, secondUUID))
	}, waitLimit, 10*time.Millisecond)
	require.NoError(t, os.WriteFile(answers, nil, 0o600))
	require.NoError(t, <-slow)
}
