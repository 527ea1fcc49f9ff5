package runtime_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestContainerRunsStopsAndLeavesNothing(t *testing.T) {
	f := newFixture(t)
	spec := f.spec(f.image(), "wait", "7")
	before := time.Now()
	run := f.start(spec)
	require.Equal(t, spec.ID, run.ContainerID)
	require.WithinRange(t, run.StartedAt, before, time.Now())
	c := f.wait(spec.ID, runtime.StateRunning)
	require.Equal(t, run.PID, c.PID)
	require.True(t, c.StartedAt.Equal(run.StartedAt))
	require.Equal(t, []any{
		spec.MemberID, spec.InstanceID, "app", uint64(3), "sha256:abc",
		spec.Service.Image,
	},
		[]any{c.MemberID, c.InstanceID, c.Service, c.Revision, c.SpecDigest, c.Image})
	f.waitForLog(spec.ID, "ready")
	require.NoError(t, f.rt.Stop(t.Context(), spec.ID, time.Minute))
	c = f.wait(spec.ID, runtime.StateExited)
	require.Equal(t, uint32(7), c.ExitCode)
	require.WithinRange(t, c.ExitedAt, run.StartedAt, time.Now())
	left, err := f.rt.Leftovers(t.Context(), spec.MemberID)
	require.NoError(t, err)
	require.NotEmpty(t, left)
	require.NoError(t, f.rt.Remove(t.Context(), spec.ID))
	require.NoError(t, f.rt.Remove(t.Context(), spec.ID))
	left, err = f.rt.Leftovers(t.Context(), spec.MemberID)
	require.NoError(t, err)
	require.Empty(t, left)
}

// containerd may end a start of a killed agent after the next agent has removed the container.
func TestLaw13ATaskWithoutItsContainerIsRemoved(t *testing.T) {
	f := newFixture(t)
	image := f.image()
	running, created := f.spec(image, "wait"), f.spec(image, "wait")
	f.start(running)
	f.makeContainer(created, true)
	for _, spec := range []runtime.Spec{running, created} {
		require.NoError(t, f.daemon.Client(t).ContainerService().Delete(f.ns(), spec.ID))
		require.NoError(t, f.rt.RemoveMember(t.Context(), spec.MemberID))
		left, err := f.rt.Leftovers(t.Context(), spec.MemberID)
		require.NoError(t, err)
		require.Empty(t, left)
	}
}

func TestStopKillsAfterTheGrace(t *testing.T) {
	f := newFixture(t)
	spec := f.spec(f.image(), "stubborn")
	f.start(spec)
	f.waitForLog(spec.ID, "ready")
	require.NoError(t, f.rt.Stop(t.Context(), spec.ID, 300*time.Millisecond))
	require.Equal(t, uint32(137), f.wait(spec.ID, runtime.StateExited).ExitCode)
	require.NoError(t, f.rt.Stop(t.Context(), spec.ID, time.Hour), "a stopped container is stopped")
	require.NoError(t, f.rt.Stop(t.Context(), "none.at.all", time.Hour))
}

func TestContainerOutlivesAgentAndContainerd(t *testing.T) {
	f := newFixture(t)
	image := f.image()
	spec, other := f.spec(image, "wait", "3"), f.spec(image, "exit-when", "/tmp/go", "4")
	run, _ := f.start(spec), f.start(other)
	f.waitForLog(spec.ID, "ready")

	// The agent is gone: nothing but containerd knows.
	require.NoError(t, f.rt.Close())
	require.NoError(t, f.daemon.Kill9())
	require.NoError(t, processAlive(run.PID))
	require.NoError(t, f.daemon.Start(t.Context()))
	f.rt = f.open()
	c, err := f.rt.Get(t.Context(), spec.ID)
	require.NoError(t, err)
	require.Equal(t, runtime.StateRunning, c.State)
	require.Equal(t, run.PID, c.PID)
	require.True(t, c.StartedAt.Equal(run.StartedAt))

	// One ends while neither runs: its exit code and time are there afterwards.
	code, err := f.rt.Exec(t.Context(), other.ID, []string{"/app", "exit", "0"}, time.Minute)
	require.NoError(t, err)
	require.Zero(t, code)
	before := time.Now()
	require.NoError(t, f.rt.Close())
	require.NoError(t, f.daemon.Kill9())
	c2 := f.pidOf(other.ID)
	require.NoError(t, killProcess(c2))
	require.Eventually(t, func() bool {
		_, err := os.Stat(fmt.Sprintf("/proc/%d", c2))
		return os.IsNotExist(err)
	}, time.Minute, time.Millisecond, "the shim has taken note of its end")
	ended := time.Now()
	require.NoError(t, f.daemon.Start(t.Context()))
	f.rt = f.open()
	c, err = f.rt.Get(t.Context(), other.ID)
	require.NoError(t, err)
	require.Equal(t, runtime.StateExited, c.State)
	require.Equal(t, uint32(137), c.ExitCode)
	require.WithinRange(t, c.ExitedAt, before, ended.Add(time.Second), "the shim's time, not that of the reattach")
	require.NoError(t, f.rt.Stop(t.Context(), spec.ID, time.Minute))
	require.Equal(t, uint32(3), f.wait(spec.ID, runtime.StateExited).ExitCode)
}

func TestStopWaitsThroughARestartOfContainerd(t *testing.T) {
	f := newFixture(t)
	spec := f.spec(f.image(), "stubborn")
	f.start(spec)
	f.waitForLog(spec.ID, "ready")
	done := make(chan error, 1)
	go func() { done <- f.rt.Stop(t.Context(), spec.ID, 2*time.Second) }()
	require.NoError(t, f.daemon.Kill9())
	require.NoError(t, f.daemon.Start(t.Context()))
	if err := <-done; err != nil {
		// The very first question may have met the gap; the caller asks again.
		require.NoError(t, f.rt.Stop(t.Context(), spec.ID, 0))
	}
	require.Equal(t, uint32(137), f.wait(spec.ID, runtime.StateExited).ExitCode)
}

func TestKilledShimMakesTheRunLost(t *testing.T) {
	f := newFixture(t)
	spec := f.spec(f.image(), "wait")
	run := f.start(spec)
	for _, shim := range f.daemon.Shims() {
		require.NoError(t, killProcess(shim))
	}
	c := f.wait(spec.ID, runtime.StateLost)
	require.False(t, c.StartedAt.IsZero())
	require.NoError(t, waitGone(int(run.PID)))
	_, err := f.rt.Start(t.Context(), spec)
	require.ErrorContains(t, err, "run_ended")
	require.NoError(t, f.rt.Remove(t.Context(), spec.ID))
	left, err := f.rt.Leftovers(t.Context(), spec.MemberID)
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestStartOfARunningRunChangesNothing(t *testing.T) {
	f := newFixture(t)
	spec := f.spec(f.image(), "wait")
	one := f.start(spec)
	two := f.start(spec)
	require.Equal(t, one.PID, two.PID)
	require.True(t, one.StartedAt.Equal(two.StartedAt))
	require.NoError(t, f.rt.Stop(t.Context(), spec.ID, time.Minute))
	_, err := f.rt.Start(t.Context(), spec)
	require.ErrorContains(t, err, "run_ended")
}

// A crash between a start and the note of it: the process has waited for the start since it was created.
func TestLaw05AStartThatWasNotNotedCountsFromItsCall(t *testing.T) {
	f := newFixture(t)
	spec := f.spec(f.image(), "wait")
	pending, err := f.rt.Prepare(t.Context(), spec)
	require.NoError(t, err)
	defer pending.Close()
	require.NoError(t, f.rt.CreateTask(t.Context(), pending))
	created := time.Now()
	run, err := f.rt.StartTask(t.Context(), pending, spec.IP, spec.Peers)
	require.NoError(t, err)
	require.NoError(t, os.Remove(f.cfg.StateDir+"/"+spec.ID+"/started"))
	all, err := f.rt.List(t.Context())
	require.NoError(t, err)
	require.Len(t, all, 1)
	require.Equal(t, runtime.StateCreated, all[0].State, "the note is still to come: no time may be taken for its start")

	pending.Close()
	c, err := f.rt.Get(t.Context(), spec.ID)
	require.NoError(t, err)
	require.False(t, c.StartedAt.Before(created), "it waited since before %s", created)
	require.False(t, c.StartedAt.After(run.StartedAt))
	require.NoError(t, f.rt.Stop(t.Context(), spec.ID, time.Minute))
}

func TestHalfMadeRunIsMadeAgain(t *testing.T) {
	f := newFixture(t)
	image := f.image()
	for name, halve := range map[string]func(spec runtime.Spec){
		"only the files": func(spec runtime.Spec) {
			require.NoError(t, os.MkdirAll(f.cfg.StateDir+"/"+spec.ID+"/sys", 0o711))
		},
		"container without task": func(spec runtime.Spec) { f.makeContainer(spec, false) },
		"task not started":       func(spec runtime.Spec) { f.makeContainer(spec, true) },
		"snapshot without container": func(spec runtime.Spec) {
			f.makeContainer(spec, false)
			require.NoError(t, f.daemon.Client(t).ContainerService().Delete(f.ns(), spec.ID))
		},
	} {
		t.Run(name, func(t *testing.T) {
			spec := f.spec(image, "wait", "5")
			halve(spec)
			f.start(spec)
			f.waitForLog(spec.ID, "ready")
			require.NoError(t, f.rt.Stop(t.Context(), spec.ID, time.Minute))
			require.Equal(t, uint32(5), f.wait(spec.ID, runtime.StateExited).ExitCode)
			require.NoError(t, f.rt.RemoveMember(t.Context(), spec.MemberID))
			left, err := f.rt.Leftovers(t.Context(), spec.MemberID)
			require.NoError(t, err)
			require.Empty(t, left)
		})
	}
}

// A kill of the agent comes before containerd has a record of the container.
func TestAnInterruptedStartLeavesNoFiles(t *testing.T) {
	f := newFixture(t)
	running := f.startWaiting(f.image())
	interrupted := filepath.Join(f.cfg.StateDir, "member.interrupted")
	require.NoError(t, os.MkdirAll(filepath.Join(interrupted, "config"), 0o711))
	require.NoError(t, f.open().RemoveInterrupted(t.Context()))
	require.NoDirExists(t, interrupted)
	require.DirExists(t, filepath.Join(f.cfg.StateDir, running))
	f.wait(running, runtime.StateRunning)
}

func TestFailedStartSaysWhyAndLeavesNothing(t *testing.T) {
	f := newFixture(t)
	image := f.image()
	for name, c := range map[string]struct {
		change func(*runtime.Spec)
		want   string
	}{
		"no such command": {func(s *runtime.Spec) { s.Service.Command = []string{"/nothing"} }, "bad_command"},
		"no program":      {func(s *runtime.Spec) { s.Service.Command = []string{"/etc/hosts"} }, "bad_command"},
		"a directory":     {func(s *runtime.Spec) { s.Service.Command = []string{"/home"} }, "bad_command"},
		"no such image":   {func(s *runtime.Spec) { s.Service.Image = "org/acme/none@sha256:" + zeros }, "image_missing"},
		"no network":      {func(s *runtime.Spec) { s.NetNSPath = "/nowhere" }, "start_failed"},
		"accelerators": {
			func(s *runtime.Spec) { s.Service.Resources.AcceleratorIds = []string{"gpu-1"} },
			"bad_workload",
		},
		"foreign id": {func(s *runtime.Spec) { s.ID = "other.1" }, "bad_workload"},
		"scratch over proc": {func(s *runtime.Spec) {
			s.Service.Scratch = []*protocol.Scratch{{Path: "/proc/x", SizeBytes: 1}}
		}, "bad_workload"},
		"working in proc": {func(s *runtime.Spec) { s.Service.WorkingDir = "/proc/self/fd/7" }, "bad_workload"},
		"working its way": {func(s *runtime.Spec) { s.Service.WorkingDir = "/home/../proc/self/fd/7" }, "bad_workload"},
		"no memory limit": {func(s *runtime.Spec) { s.Service.Resources.MemoryBytes = 0 }, "bad_workload"},
	} {
		t.Run(name, func(t *testing.T) {
			spec := f.spec(image, "wait")
			c.change(&spec)
			_, err := f.rt.Start(t.Context(), spec)
			require.ErrorContains(t, err, c.want)
			left, err := f.rt.Leftovers(t.Context(), spec.MemberID)
			require.NoError(t, err)
			require.Empty(t, left)
		})
	}
}

const zeros = "0000000000000000000000000000000000000000000000000000000000000000"

func TestProbesRunInsideTheContainer(t *testing.T) {
	f := newFixture(t)
	spec := f.spec(f.image(), "wait")
	f.start(spec)
	code, err := f.rt.Exec(t.Context(), spec.ID, []string{"/app", "exit", "12"}, time.Minute)
	require.NoError(t, err)
	require.Equal(t, 12, code)
	_, err = f.rt.Exec(t.Context(), spec.ID, []string{"/app", "hang"}, 300*time.Millisecond)
	require.ErrorIs(t, err, runtime.ErrExecTimeout)
	_, err = f.rt.Exec(t.Context(), spec.ID, []string{"/nothing"}, time.Minute)
	require.Error(t, err)
	_, err = f.rt.Exec(t.Context(), "none.at.all", []string{"/app"}, time.Minute)
	require.ErrorContains(t, err, "container_missing")
	require.Equal(t, "1", f.cgroupProcesses(spec.ID), "no probe's process is left")
}

// A containerd that hangs keeps its connection: without a bound the agent would wait for ever, and tell nobody.
func TestAListingEndsWhereContainerdHangs(t *testing.T) {
	f := newFixture(t)
	id := f.startWaiting(f.image())
	f.rt.SetAnswerWithin(100 * time.Millisecond)
	goOn, err := devcluster.Pause(f.daemon.PID())
	require.NoError(t, err)
	t.Cleanup(goOn)
	_, err = f.rt.List(t.Context())
	require.ErrorContains(t, err, "deadline exceeded")
	require.NoError(t, t.Context().Err())
	goOn()
	f.rt.SetAnswerWithin(time.Minute)
	all, err := f.rt.List(t.Context())
	require.NoError(t, err)
	require.Len(t, all, 1)
	require.Equal(t, id, all[0].ID)
}

// silence stops the only shim, and returns what lets it go on.
func (f *fixture) silence() (goOn func()) {
	f.t.Helper()
	shims := f.daemon.Shims()
	require.Len(f.t, shims, 1)
	goOn, err := devcluster.Pause(shims[0])
	require.NoError(f.t, err)
	f.t.Cleanup(goOn)
	return goOn
}

// The shim of a busy machine is slow: the time until the command starts is not the command's.
func TestTheTimeoutOfAProbesCommandBeginsWithIt(t *testing.T) {
	f := newFixture(t)
	id := f.startWaiting(f.image())
	goOn := f.silence()
	const timeout = 4 * time.Second // a busy machine needs a part of it for the command
	time.AfterFunc(timeout+time.Second, goOn)
	code, err := f.rt.Exec(t.Context(), id, []string{"/app", "exit", "12"}, timeout)
	require.NoError(t, err)
	require.Equal(t, 12, code)
}

func TestUseIsMeasured(t *testing.T) {
	f := newFixture(t)
	spec := f.spec(f.image(), "spin")
	f.start(spec)
	f.waitForLog(spec.ID, "ready")
	var last runtime.Stats
	require.Eventually(t, func() bool {
		s, err := f.rt.Stats(spec.ID)
		require.NoError(t, err)
		require.GreaterOrEqual(t, s.CPUUsageMicros, last.CPUUsageMicros)
		last = s
		return s.CPUUsageMicros > 200_000 && s.MemoryBytes > 0
	}, time.Minute, 20*time.Millisecond)
	require.NoError(t, f.rt.Stop(t.Context(), spec.ID, 0))
	require.NoError(t, f.rt.Remove(t.Context(), spec.ID))
	_, err := f.rt.Stats(spec.ID)
	require.ErrorIs(t, err, fs.ErrNotExist)
}

func TestWithoutContainerdTheErrorSaysWhatToDo(t *testing.T) {
	dir := t.TempDir()
	_, err := runtime.Open(t.Context(), runtime.Config{
		Address: dir + "/none.sock", StateDir: dir + "/a", LogDir: dir + "/b", RuncRoot: dir + "/c",
	})
	require.ErrorContains(t, err, "containerd_unavailable")
	require.ErrorContains(t, err, "systemctl start containerd")
}

// What a container uses is known without its shim.
func TestLaw13ASilentShimHidesNoUse(t *testing.T) {
	f := newFixture(t)
	spec := f.spec(f.image(), "spin")
	f.start(spec)
	f.waitForLog(spec.ID, "ready")
	f.silence()
	before, err := f.rt.Stats(spec.ID)
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		now, err := f.rt.Stats(spec.ID)
		require.NoError(t, err)
		return now.CPUUsageMicros > before.CPUUsageMicros
	}, time.Minute, 10*time.Millisecond)
}

// A container has its stop signal and its grace, also where its shim passes no signal on.
func TestAStopSignalComesPastASilentShim(t *testing.T) {
	f := newFixture(t)
	spec := f.spec(f.image(), "wait", "7")
	f.start(spec)
	pid := f.wait(spec.ID, runtime.StateRunning).PID
	goOn := f.silence()
	stopped := make(chan error, 1)
	go func() { stopped <- f.rt.Stop(t.Context(), spec.ID, time.Hour) }()
	require.Eventually(t, func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		return err == nil && strings.Contains(string(stat), ") Z ")
	}, time.Minute, 10*time.Millisecond)
	goOn()
	require.NoError(t, <-stopped)
	require.EqualValues(t, 7, f.wait(spec.ID, runtime.StateExited).ExitCode, "it ended by itself")
}

// An invalid stop signal of an image counts as SIGTERM; otherwise each stop would fail before it kills the container.
func TestAContainerWithAnInvalidStopSignalIsStopped(t *testing.T) {
	f := newFixture(t)
	for _, name := range []string{"200", "-1", "SIGNONE"} {
		spec := f.spec(f.image(func(c *v1.Config) { c.StopSignal = name }), "wait", "7")
		f.start(spec)
		f.waitForLog(spec.ID, "ready")
		require.NoError(t, f.rt.Stop(t.Context(), spec.ID, time.Minute), name)
		require.EqualValues(t, 7, f.wait(spec.ID, runtime.StateExited).ExitCode, name)
	}
}

// What runs behind a shim that never answers would run on, unpaid and on a device that nobody else gets.
func TestLaw13AStopEndsBehindASilentShim(t *testing.T) {
	f := newFixture(t)
	spec := f.spec(f.image(), "stubborn")
	f.start(spec)
	pid := f.wait(spec.ID, runtime.StateRunning).PID
	silent := f.daemon.Shims()
	f.silence()
	require.NoError(t, f.rt.Stop(t.Context(), spec.ID, time.Second))
	require.Eventually(t, func() bool {
		_, err := os.Stat(fmt.Sprintf("/proc/%d", pid))
		return os.IsNotExist(err)
	}, time.Minute, 10*time.Millisecond)
	// The program that cleans up for containerd after a shim has the name of one.
	require.NotSubset(t, f.daemon.Shims(), silent, "the shim that said nothing of the end of its container has ended")
	require.NoError(t, f.rt.Remove(t.Context(), spec.ID))
	left, err := f.rt.Leftovers(t.Context(), spec.MemberID)
	require.NoError(t, err)
	require.Empty(t, left)
}
