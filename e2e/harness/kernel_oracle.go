package harness

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
)

const (
	// ClockTicksPerSecond is USER_HZ, the unit of times in /proc: 100 on every Linux that Go runs on.
	ClockTicksPerSecond = 100
	kernelPollInterval  = 10 * time.Millisecond
)

// ContainerProcess is a container's first process by the kernel: when runc created it, when it executed the image's
// program, and when it ended.
type ContainerProcess struct {
	CreatedAt, StartedAt, EndedAt time.Time
	// Waited is how long the shim waited just after the end, for a processor and for the runc that had sent a signal. It
	// notes the end so much later, and nothing else can tell an agent when a process ended.
	Waited time.Duration
	// NotStartedAt is the last moment at which it was seen to await its start. The start ends before the image's program
	// is executed, which the process does within its own limits.
	NotStartedAt time.Time
	pid, shim    int
	// fifo is the file with which runc holds the process until it is started.
	fifo string
	// Hostname begins with the name of its service.
	Hostname string
}

// KernelOracle observes the containers of one containerd namespace while containerd, agent and hub are down: process
// ids are in runc's bundles, starts in /proc, and a pidfd reports the end.
type KernelOracle struct {
	bundles string
	booted  time.Time

	mu          sync.Mutex
	byContainer map[string]*ContainerProcess
	ends        sync.WaitGroup
}

// WatchKernel starts an oracle that runs until the end of the test.
func (w *Testbed) WatchKernel(namespace string) *KernelOracle {
	w.T.Helper()
	var up unix.Timespec
	require.NoError(w.T, unix.ClockGettime(unix.CLOCK_BOOTTIME, &up))
	o := &KernelOracle{
		bundles: filepath.Join(w.Containerd.Dir, "state", "io.containerd.runtime.v2.task", namespace),
		booted:  time.Now().Add(-time.Duration(up.Nano())), byContainer: map[string]*ContainerProcess{},
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

func (o *KernelOracle) poll(ctx context.Context) {
	bundles, err := os.ReadDir(o.bundles)
	if err != nil {
		return
	}
	for _, b := range bundles {
		if strings.HasPrefix(b.Name(), ".") {
			continue // containerd is removing it
		}
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

func (o *KernelOracle) noteStart(l *ContainerProcess) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !l.StartedAt.IsZero() || !l.EndedAt.IsZero() {
		return
	}
	asked := time.Now()
	_, held := os.Lstat(l.fifo)
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", l.pid))
	switch {
	case err != nil:
	case bytes.HasPrefix(name, []byte(notStarted)):
		if held == nil {
			l.NotStartedAt = asked
		}
	default:
		l.StartedAt = time.Now()
		l.shim = parentOf(l.pid) // runc, which was the parent, has ended
	}
}

// watchProcess records a container that has a process, and waits for its end.
func (o *KernelOracle) watchProcess(ctx context.Context, id string) {
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
		o.noteMissed(id)
		return
	}
	ticks, err := devcluster.StartTicks(pid)
	// The id may be another process's. What is read after the pidfd was opened belongs to the pidfd's process.
	cgroup, cgroupErr := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil || cgroupErr != nil || !bytes.Contains(cgroup, []byte(id)) {
		_ = unix.Close(fd)
		o.noteMissed(id)
		return
	}
	var spec struct{ Hostname string }
	var runc struct{ Root string }
	if o.readBundle(id, "config.json", &spec) != nil || o.readBundle(id, "options.json", &runc) != nil {
		_ = unix.Close(fd)
		return
	}
	created := o.booted.Add(time.Duration(ticks) * time.Second / ClockTicksPerSecond)
	l := &ContainerProcess{
		pid: pid, CreatedAt: created, NotStartedAt: created, Hostname: spec.Hostname,
		fifo: filepath.Join(runc.Root, filepath.Base(o.bundles), id, "exec.fifo"),
	}
	o.mu.Lock()
	o.byContainer[id] = l
	o.mu.Unlock()
	o.ends.Go(func() {
		defer func() { _ = unix.Close(fd) }()
		o.awaitEnd(ctx, fd, l)
	})
}

// noteMissed records a container whose process has come and gone between two polls, as that of a service that runs once
// on a busy machine: it was there from when runc wrote its id until now at most.
func (o *KernelOracle) noteMissed(id string) {
	info, err := os.Stat(filepath.Join(o.bundles, id, "init.pid"))
	var spec struct{ Hostname string }
	if err != nil || o.readBundle(id, "config.json", &spec) != nil {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.byContainer[id] = &ContainerProcess{
		CreatedAt: info.ModTime(), NotStartedAt: info.ModTime(), EndedAt: time.Now(), Hostname: spec.Hostname,
	}
}

// readBundle reads a JSON file of a container's bundle.
func (o *KernelOracle) readBundle(id, name string, into any) error {
	text, err := os.ReadFile(filepath.Join(o.bundles, id, name))
	if err != nil {
		return err
	}
	return json.Unmarshal(text, into)
}

func (o *KernelOracle) awaitEnd(ctx context.Context, fd int, l *ContainerProcess) {
	for ctx.Err() == nil {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 200)
		if err != nil || n == 0 {
			continue
		}
		o.mu.Lock()
		l.EndedAt = time.Now()
		o.mu.Unlock()
		o.awaitShim(ctx, l)
		return
	}
}

// awaitShim notes how long the shim waits until it must have noted the end. containerd's shim holds the lock of a
// container's process while runc sends it a signal. Until its waits are read first, and after they were read last, it
// may have waited all the time: this process waits for a processor, too.
func (o *KernelOracle) awaitShim(ctx context.Context, l *ContainerProcess) {
	o.mu.Lock()
	if l.shim == 0 { // no poll saw it run; it keeps its parent until the shim has noted the end
		l.shim = parentOf(l.pid)
	}
	o.mu.Unlock()
	waits, err := waitsForProcessor(l.shim)
	senders, sentAt, readAt := signalSenders(l.shim), l.EndedAt, time.Now()
	o.addWait(l, readAt.Sub(l.EndedAt))
	for tick := time.NewTicker(kernelPollInterval); err == nil && time.Since(sentAt) < noticeTime; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		var now map[string]time.Duration
		if now, err = waitsForProcessor(l.shim); err != nil {
			o.addWait(l, time.Since(readAt)) // the shim has ended as well
			return
		}
		readAt = time.Now()
		if len(senders) > 0 {
			o.addWait(l, time.Since(sentAt))
			sentAt = time.Now()
			still := signalSenders(l.shim)
			senders = slices.DeleteFunc(senders, func(pid int) bool { return !slices.Contains(still, pid) })
		}
		for thread, wait := range now {
			o.addWait(l, wait-waits[thread])
		}
		maps.Copy(waits, now)
	}
}

func (o *KernelOracle) addWait(l *ContainerProcess, d time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	l.Waited += d
}

// Processes returns the processes so far, by container.
func (o *KernelOracle) Processes() map[string]ContainerProcess {
	o.mu.Lock()
	defer o.mu.Unlock()
	out := make(map[string]ContainerProcess, len(o.byContainer))
	for id, l := range o.byContainer {
		out[id] = *l
	}
	return out
}

// RunningTimeOf is how long a member ran: for at least sure and at most possible, since a start is known to a poll and
// an end to the shim, and in how many stretches. The empty id stands for all members. Each container must have ended.
func (o *KernelOracle) RunningTimeOf(t *testing.T, memberID string) (sure, possible time.Duration, stretches int) {
	t.Helper()
	surely, possibly := map[string][]Stretch{}, map[string][]Stretch{}
	for id, l := range o.Processes() {
		m := MemberOf(id)
		if memberID != "" && m != memberID || l.StartedAt.IsZero() {
			continue
		}
		require.False(t, l.EndedAt.IsZero(), "container %s has not ended", id)
		surely[m] = append(surely[m], Stretch{l.StartedAt, l.EndedAt})
		possibly[m] = append(possibly[m], Stretch{l.NotStartedAt, l.EndedAt.Add(l.Waited)})
	}
	require.NotEmpty(t, possibly, "no container of %q ran", memberID)
	for m := range possibly {
		least, _ := Together(surely[m])
		most, n := Together(possibly[m])
		sure, possible, stretches = sure+least, possible+most, stretches+n
	}
	return sure, possible, stretches
}

// longestOf is how long a member ran at most. The empty id stands for all members.
func (o *KernelOracle) longestOf(memberID string) (total time.Duration) {
	possibly := map[string][]Stretch{}
	for id, l := range o.Processes() {
		if m := MemberOf(id); memberID == "" || m == memberID {
			possibly[m] = append(possibly[m], Stretch{l.NotStartedAt, l.EndedAt.Add(l.Waited)})
		}
	}
	for _, stretches := range possibly {
		most, _ := Together(stretches)
		total += most
	}
	return total
}
