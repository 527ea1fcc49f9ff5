package harness

import (
	"context"
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
	exited  map[string]time.Time
}

// WatchContainerd records the events of a containerd namespace until the test ends.
func (w *Testbed) WatchContainerd(namespace string) *ContainerdOracle {
	w.T.Helper()
	cl, err := client.New(w.Containerd.Address, client.WithDefaultNamespace(namespace))
	require.NoError(w.T, err)
	ctx, cancel := context.WithCancel(w.Ctx)
	tr := &ContainerdOracle{started: map[string]time.Time{}, exited: map[string]time.Time{}}
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
		tr.started[e.ContainerID] = m.Timestamp
	case *events.TaskExit:
		if e.ID == e.ContainerID {
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

// RunningTime is how long containers ran in all, by containerd's clock; every one must have exited.
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

// RunsOf is how long a member's containers ran in all, and how many did; the empty id stands for all members. Each
// container must have exited.
func (tr *ContainerdOracle) RunsOf(t *testing.T, memberID string) (total time.Duration, runs int) {
	t.Helper()
	tr.mu.Lock()
	defer tr.mu.Unlock()
	for id, start := range tr.started {
		if memberID != "" && MemberOf(id) != memberID {
			continue
		}
		require.Contains(t, tr.exited, id, "the container has not exited")
		total += tr.exited[id].Sub(start)
		runs++
	}
	require.Positive(t, runs, "no container of %q ran", memberID)
	return total, runs
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

// FirstStart is when the first container started.
func (tr *ContainerdOracle) FirstStart() (first time.Time) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	for _, start := range tr.started {
		if first.IsZero() || start.Before(first) {
			first = start
		}
	}
	return first
}

// RunningTimeUntil is how long a member's containers ran before the given time, or in all when it is zero.
func (tr *ContainerdOracle) RunningTimeUntil(member string, moment time.Time) (total time.Duration) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	for id, start := range tr.started {
		end := tr.exited[id]
		if !moment.IsZero() && end.After(moment) {
			end = moment
		}
		if MemberOf(id) == member && end.After(start) {
			total += end.Sub(start)
		}
	}
	return total
}
