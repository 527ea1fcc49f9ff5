package e2e_test

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
)

const (
	// clockTicksPerSecond is USER_HZ, the unit of times in /proc: 100 on every Linux that Go runs on.
	clockTicksPerSecond = 100
	witnessPoll         = 10 * time.Millisecond
)

// life is one container's first process as the kernel knows it: when it was made, when it became what the image says,
// and when it ended.
type life struct {
	born, began, ended time.Time
	pid                int
}

// witness watches the containers of one containerd namespace through the kernel alone, so that it goes on seeing while
// containerd, the agent and the hub are dead: the process ids are what runc wrote into the bundles, the start is the
// kernel's, the end is when the process's own file descriptor says so.
type witness struct {
	bundles string
	booted  time.Time

	mu    sync.Mutex
	lives map[string]*life
	ends  sync.WaitGroup
}

// watch begins to watch; it ends with the test.
func (w *world) watch(namespace string) *witness {
	w.t.Helper()
	var up unix.Timespec
	require.NoError(w.t, unix.ClockGettime(unix.CLOCK_BOOTTIME, &up))
	wit := &witness{
		bundles: filepath.Join(w.containerd.Dir, "state", "io.containerd.runtime.v2.task", namespace),
		booted:  time.Now().Add(-time.Duration(up.Nano())), lives: map[string]*life{},
	}
	ctx, cancel := context.WithCancel(w.ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(witnessPoll)
		defer tick.Stop()
		for ctx.Err() == nil {
			wit.look(ctx)
			select {
			case <-ctx.Done():
			case <-tick.C:
			}
		}
	}()
	w.t.Cleanup(func() {
		cancel()
		<-done
		wit.ends.Wait()
	})
	return wit
}

func (wit *witness) look(ctx context.Context) {
	bundles, err := os.ReadDir(wit.bundles)
	if err != nil {
		return
	}
	for _, b := range bundles {
		wit.mu.Lock()
		l := wit.lives[b.Name()]
		wit.mu.Unlock()
		if l == nil {
			wit.meet(ctx, b.Name())
		} else {
			wit.awaitBegin(l)
		}
	}
}

// waitingToBegin is how runc names the process of a container that is made and not started yet.
const waitingToBegin = "runc:["

func (wit *witness) awaitBegin(l *life) {
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

// meet begins to watch a container as soon as it has a process.
func (wit *witness) meet(ctx context.Context, id string) {
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
	l := &life{pid: pid, born: wit.booted.Add(time.Duration(ticks) * time.Second / clockTicksPerSecond)}
	wit.mu.Lock()
	wit.lives[id] = l
	wit.mu.Unlock()
	wit.ends.Go(func() {
		defer func() { _ = unix.Close(fd) }()
		wit.awaitEnd(ctx, fd, l)
	})
}

func (wit *witness) awaitEnd(ctx context.Context, fd int, l *life) {
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

// seen are the lives so far.
func (wit *witness) seen() map[string]life {
	wit.mu.Lock()
	defer wit.mu.Unlock()
	out := make(map[string]life, len(wit.lives))
	for id, l := range wit.lives {
		out[id] = *l
	}
	return out
}

// The witness is worth what it agrees with containerd on, while that one can be asked.
func TestTheWitnessSeesWhatContainerdSees(t *testing.T) {
	w := platform(t)
	wit := w.watch(w.agent.Config.ContainerdNamespace)
	containers := w.listen(w.agent.Config.ContainerdNamespace)
	w.decommission(w.launch("app"))
	containers.running(t)
	lives := wit.seen()
	require.Len(t, lives, 1)
	for id, l := range lives {
		started, exited := containers.lifetime(id)
		require.WithinDuration(t, started, l.born, time.Second, "containerd tells of a start after it")
		require.False(t, started.Before(l.born.Add(-time.Second/clockTicksPerSecond)))
		require.False(t, l.began.Before(l.born), "it was the app's only after it was born")
		require.True(t, l.began.Before(exited), "and before it exited")
		require.False(t, l.ended.Before(l.began))
	}
}
