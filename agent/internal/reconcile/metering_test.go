package reconcile_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/reconcile"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/protocol"
)

// slowList returns a list that shows a start half done only after the store has recorded that start. It polls, because
// the store announces no runs.
type slowList struct {
	*runtime.Runtime
	f *fixture
}

func (l slowList) List(ctx context.Context) ([]runtime.Container, error) {
	all, err := l.Runtime.List(ctx)
	for _, c := range all {
		for c.State == runtime.StateCreated || c.State == runtime.StateLost {
			if run, known := l.f.store.Runs()[c.ID]; !known || !run.StartedAt.IsZero() || ctx.Err() != nil {
				break
			}
			time.Sleep(time.Millisecond)
		}
	}
	return all, err
}

// failingList fails each listing while failing is set, and counts them.
type failingList struct {
	*runtime.Runtime
	failing atomic.Bool
	asked   atomic.Int64
}

func (d *failingList) List(ctx context.Context) ([]runtime.Container, error) {
	if d.failing.Load() {
		d.asked.Add(1)
		return nil, errors.New("containerd does not answer")
	}
	return d.Runtime.List(ctx)
}

// listsAfter notes a listing that comes before the sample of the first one is stored.
type listsAfter struct {
	*runtime.Runtime
	f      *fixture
	first  sync.Once
	before time.Time
	early  atomic.Bool
}

func (l *listsAfter) List(ctx context.Context) ([]runtime.Container, error) {
	stored := l.f.store.LastStamp().At
	first := false
	l.first.Do(func() { l.before, first = stored, true })
	if !first && !stored.After(l.before) {
		l.early.Store(true)
	}
	return l.Runtime.List(ctx)
}

// Law 5: an agent that is killed at each start, as soon as it stops something, still bills what runs meanwhile.
func TestLaw05AnAgentMeasuresBeforeItActs(t *testing.T) {
	f := newFixture(t)
	f.stop()
	l := &listsAfter{f: f}
	f.wrapRuntime = func(rt *runtime.Runtime) reconcile.Containers {
		l.Runtime = rt
		return l
	}
	f.start()
	w := f.hub.workload(`{}`)
	f.push(w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	require.False(t, l.early.Load(), "a pass came before the first sample")
}

// unknownUse is a machine that does not tell what containers use.
type unknownUse struct{ asked atomic.Int64 }

func (u *unknownUse) Stats(string) (runtime.Stats, error) {
	u.asked.Add(1)
	return runtime.Stats{}, errors.New("not known")
}

// Law 5: the time of containers is measured although their use is not known.
func TestLaw05UseThatIsNotKnownKeepsNoTimeFromBeingStored(t *testing.T) {
	f := newFixture(t)
	f.stop()
	unknown := &unknownUse{}
	f.wrapStats = func(*runtime.Runtime) reconcile.Stats { return unknown }
	f.start()
	w := f.hub.workload(`{}`)
	f.push(w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	started := f.store.Runs()[f.container(w.GetId()).ID].StartedAt
	require.Eventually(t, func() bool { return unknown.asked.Load() > 3 }, time.Minute, 10*time.Millisecond)
	f.push()
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_REMOVED)
	ran := f.store.Members()[w.GetId()].ExitedAt.Sub(started)
	total, final := f.measured(w.GetId())
	require.True(t, final)
	require.InDelta(t, ran.Seconds(), total.Seconds(), 0.001, "from its start to its exit")
}

// The step of the clock is not billed, and the time until then is measured: both need the listing before it.
func TestLaw05TheClockIsNotSetWithoutASample(t *testing.T) {
	f := newFixture(t)
	f.stop()
	d := &failingList{}
	f.wrapRuntime = func(rt *runtime.Runtime) reconcile.Containers {
		d.Runtime = rt
		return d
	}
	f.start()
	d.failing.Store(true)
	before := f.clock.Now()
	ctx, cancel := context.WithCancel(t.Context())
	synced := make(chan struct{})
	go func() {
		defer close(synced)
		f.re.SyncClock(ctx, before.Add(24*time.Hour), 0)
	}()
	require.Eventually(t, func() bool { return d.asked.Load() > 20 }, time.Minute, 10*time.Millisecond)
	cancel()
	<-synced
	require.Less(t, f.clock.Now().Sub(before), time.Hour)
	d.failing.Store(false)
	require.Eventually(t, func() bool { return f.clock.Now().Sub(before) > time.Hour }, time.Minute, 10*time.Millisecond)
}

func TestLaw05AStartThatEndsDuringAListingIsMeasuredFromItsBeginning(t *testing.T) {
	f := newFixture(t)
	f.stop()
	f.wrapRuntime = func(rt *runtime.Runtime) reconcile.Containers { return slowList{rt, f} }
	f.start()
	var all []*protocol.Workload
	for range 8 {
		all = append(all, f.hub.workload(`{}`))
	}
	f.push(all...)
	started := map[string]time.Time{}
	for _, w := range all {
		f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
		started[w.GetId()] = f.store.Runs()[f.container(w.GetId()).ID].StartedAt
	}
	f.push()
	for _, w := range all {
		f.untilStatus(w.GetId(), protocol.WorkloadStatus_REMOVED)
		ran := f.store.Members()[w.GetId()].ExitedAt.Sub(started[w.GetId()])
		total, _ := f.measured(w.GetId())
		require.InDelta(t, ran.Seconds(), total.Seconds(), 0.001, "from its start to its exit")
	}
}

// heldList keeps listings back once they have seen what runs, while hold is set.
type heldList struct {
	*runtime.Runtime
	hold    atomic.Bool
	held    chan struct{}
	release chan struct{}
}

func (l *heldList) List(ctx context.Context) ([]runtime.Container, error) {
	all, err := l.Runtime.List(ctx)
	if l.hold.Load() {
		for _, step := range []chan struct{}{l.held, l.release} {
			select {
			case <-step:
			case <-ctx.Done():
			}
		}
	}
	return all, err
}

// A sample has the time before its listing: what the listing has seen running may have ended since.
func TestAnEndDuringAListingIsBilledUpToTheEnd(t *testing.T) {
	f := newFixture(t)
	f.stop()
	l := &heldList{held: make(chan struct{}), release: make(chan struct{})}
	f.wrapRuntime = func(rt *runtime.Runtime) reconcile.Containers {
		l.Runtime = rt
		return l
	}
	f.start()
	w := f.hub.workload(`{}`)
	f.push(w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	run := f.container(w.GetId()).ID
	started := f.store.Runs()[run].StartedAt
	l.hold.Store(true)
	f.re.Wake()
	for range 2 { // one listing of a pass and one of a sample: there is never a second one of either
		l.held <- struct{}{}
	}
	l.hold.Store(false)
	require.NoError(t, f.rt.Stop(f.ctx(), run, 0))
	f.push()
	ended := f.clock.Now()
	require.Eventually(t, func() bool { return f.clock.Now().Sub(ended) > 100*time.Millisecond }, time.Minute,
		time.Millisecond)
	close(l.release)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_REMOVED)
	ran := f.store.Members()[w.GetId()].ExitedAt.Sub(started)
	total, _ := f.measured(w.GetId())
	require.InDelta(t, ran.Seconds(), total.Seconds(), 0.001, "from its start to its exit")
}
