package accelerator_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/accelerator"
	"github.com/gpuaas/gpuaas/e2e/nvmltest"
	"github.com/gpuaas/gpuaas/protocol"
)

// kernelWrites appends records to the machine's kernel log.
func kernelWrites(t *testing.T, root string, number int, text string) {
	t.Helper()
	path := filepath.Join(root, "dev/kmsg")
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	file, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	require.NoError(t, err)
	_, err = fmt.Fprintf(file, "3,%d,5140900,-;%s\n", number, text)
	require.NoError(t, err)
	require.NoError(t, file.Close())
}

// writeProgram makes a program in one step: the inventory may run it at any moment.
func writeProgram(t *testing.T, path, text string) {
	t.Helper()
	require.NoError(t, os.WriteFile(path+".new", []byte("#!/bin/sh\n"+text+"\n"), 0o700))
	require.NoError(t, os.Rename(path+".new", path))
}

func health(i *accelerator.Inventory, id string) string {
	for _, a := range i.List() {
		if a.GetId() == id {
			return a.GetHealth() + " " + a.GetHealthReason()
		}
	}
	return protocol.HealthMissing
}

// The GPU is reset once no container has it, tested, and given back; a restart of the agent counts no message twice.
func TestAGPUWithAFaultIsResetAndReturns(t *testing.T) {
	library := nvmltest.New(t)
	library.Setenv()
	library.Set(driver, first, second)
	root, dir := withDriver(t), t.TempDir()
	program := filepath.Join(dir, "nvidia-smi")
	cfg := accelerator.Config{
		Root: root, NVML: nvmltest.Program(t), Interval: 10 * time.Millisecond, ResetProgram: program,
		LadderFile: filepath.Join(dir, "health.json"), TestFor: 50 * time.Millisecond,
	}
	i, stop := startOne(t, cfg)
	kernelWrites(t, root, 0, "NVRM: Xid (PCI:0000:1b:00): 31, pid=1, name=python, MMU Fault")
	await(t, i, func() bool { return health(i, firstID) == "ok Xid 31 of the app" })
	require.Zero(t, i.State(firstID), "the app made it: the GPU goes on")

	kernelWrites(t, root, 1, "NVRM: Xid (PCI:0000:1b:00): 95, pid=1, Uncontained")
	await(t, i, func() bool { return health(i, firstID) == "needs_reset Xid 95" })
	require.Equal(t, agent.AcceleratorNeedsReset, i.State(firstID))
	require.Zero(t, i.State(secondID))
	i.SetUsed([]string{firstID})
	require.Never(t, func() bool { return i.State(firstID) != agent.AcceleratorNeedsReset }, 100*time.Millisecond,
		10*time.Millisecond)
	i.SetUsed(nil)
	await(t, i, func() bool {
		return health(i, firstID) == "needs_reset Xid 95; the agent cannot reset it: reset it or reboot the node"
	})
	writeProgram(t, program, "echo \"$@\" >> "+dir+"/resets")
	await(t, i, func() bool { return health(i, firstID) == "ok " })
	text, err := os.ReadFile(filepath.Join(dir, "resets"))
	require.NoError(t, err)
	require.Equal(t, "--gpu-reset --id=0000:1b:00.0\n", string(text))

	stop()
	again, stop := startOne(t, cfg)
	require.Never(t, func() bool { return again.State(firstID) != 0 }, 100*time.Millisecond, 10*time.Millisecond)
	kernelWrites(t, root, 2, "NVRM: Xid (PCI:0000:43:00): 79, GPU has fallen off the bus.")
	await(t, again, func() bool { return health(again, secondID) == "quarantined Xid 79" })
	require.Equal(t, agent.AcceleratorQuarantined, again.State(secondID))
	stop()
	third := start(t, cfg)
	require.Equal(t, agent.AcceleratorQuarantined, third.State(secondID), "also after a restart of the agent")
}

// An operator releases a GPU from quarantine once no container has it; the test program decides whether it returns.
func TestAReleasedGPUIsTestedFirst(t *testing.T) {
	root, dir := unpack(t, "radeon"), t.TempDir()
	program := filepath.Join(dir, "test")
	goOn := filepath.Join(dir, "go-on")
	writeProgram(t, program, `until [ -e `+goOn+` ]; do sleep 0.02; done
		echo "$@" > `+dir+`/args; printf 'reading\nmemory differs\n'; exit 3`)
	i := start(t, accelerator.Config{
		Root: root, Interval: 10 * time.Millisecond, TestFor: 50 * time.Millisecond, TestProgram: program,
	})
	const id = "GPU-d20b5fe3917c4468"
	require.ErrorContains(t, i.Release(t.Context(), "GPU-0"), "no accelerator GPU-0")
	require.ErrorContains(t, i.Release(t.Context(), id), "neither quarantined")
	kernelWrites(t, root, 0, "amdgpu 0000:03:00.0: amdgpu: device lost from bus!")
	await(t, i, func() bool { return i.State(id) == agent.AcceleratorQuarantined })
	i.SetUsed([]string{id})
	require.ErrorContains(t, i.Release(t.Context(), id), "still has")
	i.SetUsed(nil)
	require.NoError(t, i.Release(t.Context(), id))
	require.Equal(t, agent.AcceleratorTesting, i.State(id))
	require.NoError(t, os.WriteFile(goOn, nil, 0o600))
	await(t, i, func() bool { return i.State(id) == agent.AcceleratorQuarantined })
	require.Contains(t, health(i, id), "device lost from bus; its test failed: exit status 3: memory differs")
	args, err := os.ReadFile(filepath.Join(dir, "args"))
	require.NoError(t, err)
	require.Equal(t, "amd "+id+" 0000:03:00.0\n", string(args))

	writeProgram(t, program, "exit 0")
	require.NoError(t, i.Release(t.Context(), id))
	await(t, i, func() bool { return health(i, id) == "ok " })
}

// A driver's reset is one, however often the agent starts after it and reads of it in the kernel's log.
func TestAResetCountsOnceAcrossRestartsOfTheAgent(t *testing.T) {
	root := unpack(t, "radeon")
	cfg := accelerator.Config{
		Root: root, Interval: 10 * time.Millisecond, TestFor: time.Hour,
		LadderFile: filepath.Join(t.TempDir(), "health.json"),
	}
	const id = "GPU-d20b5fe3917c4468"
	kernelWrites(t, root, 0, "amdgpu 0000:03:00.0: amdgpu: GPU reset begin!")
	kernelWrites(t, root, 1, "amdgpu 0000:03:00.0: amdgpu: GPU reset(1) succeeded!")
	for range 6 {
		i, stop := startOne(t, cfg)
		await(t, i, func() bool { return i.State(id) != 0 })
		require.Equal(t, agent.AcceleratorTesting, i.State(id))
		require.Never(t, func() bool { return i.State(id) != agent.AcceleratorTesting }, 50*time.Millisecond,
			10*time.Millisecond)
		stop()
	}
}

func TestAnAMDGPUThatItsDriverResetsReturns(t *testing.T) {
	root := unpack(t, "radeon")
	i := start(t, accelerator.Config{Root: root, Interval: 10 * time.Millisecond, TestFor: 50 * time.Millisecond})
	const id = "GPU-d20b5fe3917c4468"
	kernelWrites(t, root, 0, "amdgpu 0000:03:00.0: amdgpu: GPU reset begin!")
	await(t, i, func() bool { return i.State(id) == agent.AcceleratorNeedsReset })
	i.SetUsed(nil)
	kernelWrites(t, root, 1, "amdgpu 0000:03:00.0: amdgpu: GPU reset(1) succeeded!")
	await(t, i, func() bool { return i.State(id) == 0 })
	kernelWrites(t, root, 2, "amdgpu 0000:03:00.0: amdgpu: GPU reset begin!")
	kernelWrites(t, root, 3, "amdgpu 0000:03:00.0: amdgpu: GPU reset end with ret = -19")
	await(t, i, func() bool { return i.State(id) == agent.AcceleratorQuarantined })
}

// The times on the ladder are the machine's, whose clock may be set back between two agents.
func TestAClockThatIsSetBackKeepsNoAcceleratorOutOfUse(t *testing.T) {
	root := unpack(t, "radeon")
	cfg := accelerator.Config{
		Root: root, Interval: 10 * time.Millisecond, TestFor: 50 * time.Millisecond,
		LadderFile: filepath.Join(t.TempDir(), "health.json"),
	}
	const id = "GPU-d20b5fe3917c4468"
	ahead := time.Now().Add(24 * time.Hour).Format(time.RFC3339)
	require.NoError(t, os.WriteFile(cfg.LadderFile, []byte(`{"rungs":{"`+id+`":{"health":"testing","since":"`+ahead+
		`"}}}`), 0o600))
	i := start(t, cfg)
	i.SetUsed(nil)
	await(t, i, func() bool { return health(i, id) == "ok " })
}

// A program that tests an accelerator goes on after a kill of the agent. The next agent waits for its end, by the lock
// of a file that the program inherits.
func TestAnAcceleratorWaitsForTheProgramOfAKilledAgent(t *testing.T) {
	root, dir := unpack(t, "radeon"), t.TempDir()
	const id = "GPU-d20b5fe3917c4468"
	cfg := accelerator.Config{
		Root: root, Interval: 10 * time.Millisecond, TestFor: time.Nanosecond, TestProgram: filepath.Join(dir, "test"),
		LadderFile: filepath.Join(dir, "health.json"),
	}
	file := cfg.LadderFile + "." + id + ".lock"
	writeProgram(t, cfg.TestProgram, `[ "$(readlink /proc/$$/fd/3)" = `+file+` ] || { echo "it is not inherited"; exit 9; }
		flock --nonblock `+file+` true && { echo "it is not locked"; exit 9; }
		exit 0`)
	require.NoError(t, os.WriteFile(cfg.LadderFile, []byte(`{"rungs":{"`+id+`":{"health":"testing"}}}`), 0o600))
	program, err := os.Create(file)
	require.NoError(t, err)
	require.NoError(t, unix.Flock(int(program.Fd()), unix.LOCK_EX))
	i := start(t, cfg)
	i.SetUsed(nil)
	require.Eventually(t, func() bool { return opened(t, file) == 2 }, time.Minute, 10*time.Millisecond)
	require.Equal(t, agent.AcceleratorTesting, i.State(id))
	require.NoError(t, program.Close())
	await(t, i, func() bool { return i.State(id) != agent.AcceleratorTesting })
	require.Equal(t, "ok ", health(i, id))
}

// opened returns how often this process has a file open.
func opened(t *testing.T, path string) (times int) {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	for _, fd := range all {
		if file, _ := os.Readlink("/proc/self/fd/" + fd.Name()); file == path {
			times++
		}
	}
	return times
}
