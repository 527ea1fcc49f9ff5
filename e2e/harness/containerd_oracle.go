package harness

import (
	"context"
	"math/big"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/v2/client"
	coreevents "github.com/containerd/containerd/v2/core/events"
	"github.com/containerd/typeurl/v2"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	api "github.com/gpuaas/gpuaas/pkg/client"
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
	tr.mu.Lock()
	defer tr.mu.Unlock()
	require.NotEmpty(t, tr.started)
	return tr.sum(t, "")
}

// RunningTimeOf is the same for the containers of one member.
func (tr *ContainerdOracle) RunningTimeOf(t *testing.T, memberID string) time.Duration {
	t.Helper()
	tr.mu.Lock()
	defer tr.mu.Unlock()
	return tr.sum(t, memberID+".")
}

func (tr *ContainerdOracle) sum(t *testing.T, prefix string) (total time.Duration) {
	t.Helper()
	for id, start := range tr.started {
		if !strings.HasPrefix(id, prefix) {
			continue
		}
		require.Contains(t, tr.exited, id, "the container has not exited")
		total += tr.exited[id].Sub(start)
	}
	require.Positive(t, total, "no container of %q ran", prefix)
	return total
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

// UsageCost is what usage took from the tenant, as a positive amount.
func UsageCost(t *testing.T, postings []api.Posting) *big.Rat {
	t.Helper()
	total := new(big.Rat)
	for _, p := range postings {
		sums, err := scenario.Sums(p)
		require.NoError(t, err)
		for currency, sum := range sums {
			require.Zero(t, sum.Sign(), "posting %s is off by %s %s", p.PostingID, sum.RatString(), currency)
		}
		if p.Kind != api.PostingKindUsage {
			continue
		}
		for _, e := range p.Entries {
			amount, ok := new(big.Rat).SetString(e.Amount)
			require.True(t, ok)
			if amount.Sign() > 0 {
				total.Add(total, amount)
			}
		}
	}
	return total
}

// RequireContiguous asserts that one meter's records neither overlap nor leave a gap within one container run.
func RequireContiguous(t *testing.T, records []api.UsageRecord, meter string) (total *big.Rat) {
	t.Helper()
	total = new(big.Rat)
	var mine []api.UsageRecord
	for _, r := range records {
		if r.Meter == meter {
			mine = append(mine, r)
		}
	}
	sortByStart(mine)
	require.NotEmpty(t, mine)
	for i, r := range mine {
		q, ok := new(big.Rat).SetString(r.Quantity)
		require.True(t, ok)
		total.Add(total, q)
		if i > 0 {
			require.True(t, mine[i-1].EndedAt.Equal(r.StartedAt), "usage from %s follows usage to %s", r.StartedAt,
				mine[i-1].EndedAt)
		}
	}
	return total
}

func sortByStart(records []api.UsageRecord) {
	for i := range records {
		for j := i; j > 0 && records[j].StartedAt.Before(records[j-1].StartedAt); j-- {
			records[j], records[j-1] = records[j-1], records[j]
		}
	}
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
