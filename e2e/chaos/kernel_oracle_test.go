package chaos_test

import (
	"bytes"
	"context"
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

// containerProcess is one container's first process as the kernel knows it: when it was made, when it became what the
// image says, and when it ended.
type containerProcess struct {
	born, began, ended time.Time
	pid                int
}

// kernelOracle watches the containers of one containerd namespace through the kernel alone, so that it goes on seeing
// while containerd, the agent and the hub are dead: the process ids are what runc wrote into the bundles, the start is
// the kernel's, the end is when the process's own file descriptor says so.
type kernelOracle struct {
	bundles string
	booted  time.Time

	mu          sync.Mutex
	byContainer map[string]*containerProcess
	ends        sync.WaitGroup
}

// watchKernel begins to watch; it ends with the test.
func watchKernel(w *harness.Testbed, namespace string) *kernelOracle {
	w.T.Helper()
	var up unix.Timespec
	require.NoError(w.T, unix.ClockGettime(unix.CLOCK_BOOTTIME, &up))
	wit := &kernelOracle{
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
			wit.poll(ctx)
			select {
			case <-ctx.Done():
			case <-tick.C:
			}
		}
	}()
	w.T.Cleanup(func() {
		cancel()
		<-done
		wit.ends.Wait()
	})
	return wit
}

func (wit *kernelOracle) poll(ctx context.Context) {
	bundles, err := os.ReadDir(wit.bundles)
	if err != nil {
		return
	}
	for _, b := range bundles {
		wit.mu.Lock()
		l := wit.byContainer[b.Name()]
		wit.mu.Unlock()
		if l == nil {
			wit.watchProcess(ctx, b.Name())
		} else {
			wit.awaitBegin(l)
		}
	}
}

// waitingToBegin is how runc names the process of a container that is made and not started yet.
const waitingToBegin = "runc:["

func (wit *kernelOracle) awaitBegin(l *containerProcess) {
	wit.mu.Lock()
	defer wit.mu.Unlock()
	if !l.began.IsZero() || !l.ended.IsZero() {
		return
	}
	if name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", l.pid)); err == nil && !bytes.HasPrefix(name,
		[]byte(waitingToBegin)) {
		l.began = time.Now()
	}
}

// watchProcess begins to watch a container as soon as it has a process.
func (wit *kernelOracle) watchProcess(ctx context.Context, id string) {
	text, err := os.ReadFile(filepath.Join(wit.bundles, id, "init.pid"))
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
	// Read after the descriptor was opened: only then it is this process's.
	cgroup, cgroupErr := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil || cgroupErr != nil || !bytes.Contains(cgroup, []byte(id)) {
		_ = unix.Close(fd)
		return
	}
	l := &containerProcess{pid: pid, born: wit.booted.Add(time.Duration(ticks) * time.Second / clockTicksPerSecond)}
	wit.mu.Lock()
	wit.byContainer[id] = l
	wit.mu.Unlock()
	wit.ends.Go(func() {
		defer func() { _ = unix.Close(fd) }()
		wit.awaitEnd(ctx, fd, l)
	})
}

func (wit *kernelOracle) awaitEnd(ctx context.Context, fd int, l *containerProcess) {
	for ctx.Err() == nil {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 200)
		if err != nil || n == 0 {
			continue
		}
		wit.mu.Lock()
		l.ended = time.Now()
		wit.mu.Unlock()
		return
	}
}

// processes are the lives so far.
func (wit *kernelOracle) processes() map[string]containerProcess {
	wit.mu.Lock()
	defer wit.mu.Unlock()
	out := make(map[string]containerProcess, len(wit.byContainer))
	for id, l := range wit.byContainer {
		out[id] = *l
	}
	return out
}

// The kernel oracle agrees with containerd for as long as containerd runs.
func TestTheKernelOracleAgreesWithContainerd(t *testing.T) {
	w := harness.NewPlatform(t)
	wit := watchKernel(w, w.Agent.Config.ContainerdNamespace)
	containers := w.WatchContainerd(w.Agent.Config.ContainerdNamespace)
	w.Decommission(w.Launch("app"))
	containers.RunningTime(t)
	lives := wit.processes()
	require.Len(t, lives, 1)
	for id, l := range lives {
		started, exited := containers.Lifetime(id)
		require.WithinDuration(t, started, l.born, time.Second, "containerd tells of a start after it")
		require.False(t, started.Before(l.born.Add(-time.Second/clockTicksPerSecond)))
		require.False(t, l.began.Before(l.born), "it was the app's only after it was born")
		require.True(t, l.began.Before(exited), "and before it exited")
		require.False(t, l.ended.Before(l.began))
	}
}
