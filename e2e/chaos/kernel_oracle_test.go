package chaos_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/e2e/harness"
)

const (
	// clockTicksPerSecond is USER_HZ, the unit of times in /proc: 100 on every Linux that Go runs on.
	clockTicksPerSecond = 100
	kernelPollInterval  = 10 * time.Millisecond
)

// containerProcess is a container's first process by the kernel: when runc created it, when it executed the image's
// program, and when it ended.
type containerProcess struct {
	createdAt, startedAt, endedAt time.Time
	pid                           int
	// hostname begins with the name of its service.
	hostname string
}

// kernelOracle observes the containers of one containerd namespace while containerd, agent and hub are down: process
// ids are in runc's bundles, starts in /proc, and a pidfd reports the end.
type kernelOracle struct {
	bundles string
	booted  time.Time

	mu          sync.Mutex
	byContainer map[string]*containerProcess
	ends        sync.WaitGroup
}

// watchKernel starts an oracle that runs until the end of the test.
func watchKernel(w *harness.Testbed, namespace string) *kernelOracle {
	w.T.Helper()
	var up unix.Timespec
	require.NoError(w.T, unix.ClockGettime(unix.CLOCK_BOOTTIME, &up))
	o := &kernelOracle{
		bundles: filepath.Join(w.Containerd.Dir, "state", "io.containerd.runtime.v2.task", namespace),
		booted:  time.Now().Add(-time.Duration(up.Nano())), byContainer: map[string]*containerProcess{},
	}
	ctx, cancel := context.WithCancel(w.Ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(kernelPollInterval)
		defer tick.Stop()
		for ctx.Err() == nil {
			o.poll(ctx)
			select {
			case <-ctx.Done():
			case <-tick.C:
			}
		}
	}()
	w.T.Cleanup(func() {
		cancel()
		<-done
		o.ends.Wait()
	})
	return o
}

func (o *kernelOracle) poll(ctx context.Context) {
	bundles, err := os.ReadDir(o.bundles)
	if err != nil {
		return
	}
	for _, b := range bundles {
		o.mu.Lock()
		l := o.byContainer[b.Name()]
		o.mu.Unlock()
		if l == nil {
			o.watchProcess(ctx, b.Name())
		} else {
			o.noteStart(l)
		}
	}
}

// notStarted begins the name of a process that runc has created and not started yet.
const notStarted = "runc:["

func (o *kernelOracle) noteStart(l *containerProcess) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !l.startedAt.IsZero() || !l.endedAt.IsZero() {
		return
	}
	if name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", l.pid)); err == nil && !bytes.HasPrefix(name,
		[]byte(notStarted)) {
		l.startedAt = time.Now()
	}
}

// watchProcess records a container that has a process, and waits for its end.
func (o *kernelOracle) watchProcess(ctx context.Context, id string) {
	text, err := os.ReadFile(filepath.Join(o.bundles, id, "init.pid"))
	if err != nil {
		return
	}
	var pid int
	if _, err := fmt.Sscanf(string(text), "%d", &pid); err != nil || pid <= 1 {
		return
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return
	}
	ticks, err := devcluster.StartTicks(pid)
	// The id may be another process's. What is read after the pidfd was opened belongs to the pidfd's process.
	cgroup, cgroupErr := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil || cgroupErr != nil || !bytes.Contains(cgroup, []byte(id)) {
		_ = unix.Close(fd)
		return
	}
	var spec struct{ Hostname string }
	text, err = os.ReadFile(filepath.Join(o.bundles, id, "config.json"))
	if err != nil || json.Unmarshal(text, &spec) != nil {
		_ = unix.Close(fd)
		return
	}
	l := &containerProcess{
		pid: pid, createdAt: o.booted.Add(time.Duration(ticks) * time.Second / clockTicksPerSecond), hostname: spec.Hostname,
	}
	o.mu.Lock()
	o.byContainer[id] = l
	o.mu.Unlock()
	o.ends.Go(func() {
		defer func() { _ = unix.Close(fd) }()
		o.awaitEnd(ctx, fd, l)
	})
}

func (o *kernelOracle) awaitEnd(ctx context.Context, fd int, l *containerProcess) {
	for ctx.Err() == nil {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 200)
		if err != nil || n == 0 {
			continue
		}
		o.mu.Lock()
		l.endedAt = time.Now()
		o.mu.Unlock()
		return
	}
}

// processes returns the processes so far, by container.
func (o *kernelOracle) processes() map[string]containerProcess {
	o.mu.Lock()
	defer o.mu.Unlock()
	out := make(map[string]containerProcess, len(o.byContainer))
	for id, l := range o.byContainer {
		out[id] = *l
	}
	return out
}

// The kernel oracle agrees with containerd for as long as containerd runs.
func TestTheKernelOracleAgreesWithContainerd(t *testing.T) {
	w := harness.NewPlatform(t)
	o := watchKernel(w, w.Agent.Config.ContainerdNamespace)
	containers := w.WatchContainerd(w.Agent.Config.ContainerdNamespace)
	w.Decommission(w.Launch("app"))
	containers.RunningTime(t)
	processes := o.processes()
	require.Len(t, processes, 1)
	for id, l := range processes {
		started, exited := containers.Lifetime(id)
		require.WithinDuration(t, started, l.createdAt, time.Second, "containerd reports the start later")
		require.False(t, started.Before(l.createdAt.Add(-time.Second/clockTicksPerSecond)))
		require.False(t, l.startedAt.Before(l.createdAt), "it starts after it is created")
		require.True(t, l.startedAt.Before(exited), "and before it exits")
		require.False(t, l.endedAt.Before(l.startedAt))
	}
}
