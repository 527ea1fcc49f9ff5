package harness

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/v2/client"
	coreevents "github.com/containerd/containerd/v2/core/events"
	"github.com/containerd/typeurl/v2"
	"github.com/stretchr/testify/require"
)

// resubscribeDelay is the pause before a broken event stream is opened again.
const resubscribeDelay = 50 * time.Millisecond

// ContainerdOracle listens to containerd itself: when tasks started and when they exited, by container id.
type ContainerdOracle struct {
	mu      sync.Mutex
	started map[string]time.Time
	// reported is when a start became known here.
	reported map[string]time.Time
	exited   map[string]time.Time
	// Kernel watches the processes of the same containers.
	Kernel *KernelOracle
	ctx    context.Context
}

// WatchContainerd records the events of a containerd namespace until the test ends.
func (w *Testbed) WatchContainerd(namespace string) *ContainerdOracle {
	w.T.Helper()
	cl, err := client.New(w.Containerd.Address, client.WithDefaultNamespace(namespace))
	require.NoError(w.T, err)
	ctx, cancel := context.WithCancel(w.Ctx)
	tr := &ContainerdOracle{
		started: map[string]time.Time{}, reported: map[string]time.Time{}, exited: map[string]time.Time{},
		Kernel: w.WatchKernel(namespace), ctx: ctx,
	}
	done := make(chan struct{})
	messages, broken := cl.EventService().Subscribe(ctx, `namespace==`+namespace)
	go func() {
		defer close(done)
		for {
			select {
			case <-ctx.Done():
				return
			case m := <-messages:
				tr.record(m)
			case <-broken: //nolint:errcheck // it is the daemon that is gone
				// The daemon was killed. Events until its restart are lost.
				select {
				case <-ctx.Done():
					return
				case <-time.After(resubscribeDelay):
					messages, broken = cl.EventService().Subscribe(ctx, `namespace==`+namespace)
				}
			}
		}
	}()
	w.T.Cleanup(func() {
		cancel()
		<-done
		_ = cl.Close()
	})
	return tr
}

func (tr *ContainerdOracle) record(m *coreevents.Envelope) {
	if m == nil || m.Event == nil {
		return
	}
	e, err := typeurl.UnmarshalAny(m.Event)
	if err != nil {
		return
	}
	tr.mu.Lock()
	defer tr.mu.Unlock()
	switch e := e.(type) {
	case *events.TaskStart:
		tr.started[e.ContainerID], tr.reported[e.ContainerID] = m.Timestamp, time.Now()
	case *events.TaskExit:
		// After an agent that was killed while it deleted a task, containerd may clean up behind the shim that has gone, and
		// report the exit once more, as of then.
		if _, again := tr.exited[e.ContainerID]; e.ID == e.ContainerID && !again {
			tr.exited[e.ContainerID] = e.ExitedAt.AsTime()
		}
	}
}

// Starts counts the containers that have started.
func (tr *ContainerdOracle) Starts() int {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	return len(tr.started)
}

// RunningTime is how long members ran in all, by containerd's clock; every container must have exited.
func (tr *ContainerdOracle) RunningTime(t *testing.T) time.Duration {
	t.Helper()
	return tr.RunningTimeOf(t, "")
}

// RunningTimeOf is RunningTime for one member.
func (tr *ContainerdOracle) RunningTimeOf(t *testing.T, memberID string) time.Duration {
	t.Helper()
	total, _ := tr.RunsOf(t, memberID)
	return total
}

// RunsOf is how long a member ran in all, and in how many stretches: time in which several containers of it ran counts
// once. The empty id stands for all members, each by itself. Each container must have exited: RunsOf waits until
// containerd has reported it.
func (tr *ContainerdOracle) RunsOf(t *testing.T, memberID string) (total time.Duration, stretches int) {
	t.Helper()
	require.NoError(t, Await(tr.ctx, ConvergenceBound, func() error { return tr.checkExited(memberID) }))
	tr.mu.Lock()
	defer tr.mu.Unlock()
	members := map[string][]Stretch{}
	for id, start := range tr.started {
		if memberID != "" && MemberOf(id) != memberID {
			continue
		}
		members[MemberOf(id)] = append(members[MemberOf(id)], Stretch{start, tr.exited[id]})
	}
	require.NotEmpty(t, members, "no container of %q ran", memberID)
	for _, ran := range members {
		ranFor, n := Together(ran)
		total, stretches = total+ranFor, stretches+n
	}
	return total, stretches
}

// checkExited returns an error while containerd has not reported the exit of a member's container.
func (tr *ContainerdOracle) checkExited(memberID string) error {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	for id := range tr.started {
		if _, exited := tr.exited[id]; !exited && (memberID == "" || MemberOf(id) == memberID) {
			return fmt.Errorf("container %s has not exited", id)
		}
	}
	return nil
}

// LongestOf is how long a member may have run in all: by the kernel, where containerd reported a start late, as on a
// busy machine. The empty id stands for all members.
func (tr *ContainerdOracle) LongestOf(t *testing.T, memberID string) time.Duration {
	t.Helper()
	return max(tr.RunningTimeOf(t, memberID), tr.Kernel.longestOf(memberID))
}

// Stretch is a time in which a container ran.
type Stretch struct{ From, To time.Time }

// Together is how long at least one of several containers ran, and in how many stretches.
func Together(ran []Stretch) (total time.Duration, stretches int) {
	ran = slices.Clone(ran)
	slices.SortFunc(ran, func(a, b Stretch) int { return a.From.Compare(b.From) })
	var until time.Time
	for _, s := range ran {
		if !s.To.After(s.From) || !s.To.After(until) {
			continue
		}
		if s.From.After(until) {
			stretches++
			until = s.From
		}
		total, until = total+s.To.Sub(until), s.To
	}
	return total, stretches
}

// MemberOf is the member that a container run belongs to: a run is named <member>.<number>.
func MemberOf(run string) string {
	member, _, _ := strings.Cut(run, ".")
	return member
}

// Lifetime returns when the container started and exited; zero where containerd has not reported it.
func (tr *ContainerdOracle) Lifetime(id string) (started, exited time.Time) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	return tr.started[id], tr.exited[id]
}

// Reported returns when the start of a container became known outside containerd; zero where it has reported none.
func (tr *ContainerdOracle) Reported(id string) time.Time {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	return tr.reported[id]
}

// FirstStart is when the first container started, by containerd, which may have reported it late. The kernel saw none
// run before notBefore.
func (tr *ContainerdOracle) FirstStart() (first, notBefore time.Time) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	for _, start := range tr.started {
		if first.IsZero() || start.Before(first) {
			first = start
		}
	}
	notBefore = first
	for _, p := range tr.Kernel.Processes() {
		if p.NotStartedAt.Before(notBefore) {
			notBefore = p.NotStartedAt
		}
	}
	return first, notBefore
}

// RunningTimeUntil is how long a member ran before the given time, or in all when it is zero.
func (tr *ContainerdOracle) RunningTimeUntil(member string, moment time.Time) (total time.Duration) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	var ran []Stretch
	for id, start := range tr.started {
		end := tr.exited[id]
		if !moment.IsZero() && end.After(moment) {
			end = moment
		}
		if MemberOf(id) == member && end.After(start) {
			ran = append(ran, Stretch{start, end})
		}
	}
	total, _ = Together(ran)
	return total
}
