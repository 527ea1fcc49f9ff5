package reconcile_test

import (
	"context"
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/internal/reconcile"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/protocol"
)

// unknownCounter is a recorder that counts the listings in which a container's state is unknown.
type unknownCounter struct {
	*recorder
	unknown atomic.Int64
}

func (u *unknownCounter) List(ctx context.Context) ([]runtime.Container, error) {
	all, err := u.recorder.List(ctx)
	for _, c := range all {
		if c.State == runtime.StateUnknown {
			u.unknown.Add(1)
		}
	}
	return all, err
}

// awaitUnknown waits until passes and samples have met the unknown state often.
func (u *unknownCounter) awaitUnknown(t *testing.T, f *fixture) {
	t.Helper()
	from := u.unknown.Load()
	require.Eventually(t, func() bool {
		f.re.Wake()
		return u.unknown.Load() >= from+6
	}, 2*time.Minute, 100*time.Millisecond, "the runtime says that it cannot tell")
}

func (f *fixture) countUnknown() *unknownCounter {
	f.t.Helper()
	f.stop()
	u := &unknownCounter{recorder: &recorder{}}
	f.wrapRuntime = func(rt *runtime.Runtime) reconcile.Containers {
		u.Runtime = rt
		return u
	}
	f.start()
	return u
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

// stretch is the time of a member that is in records, of one run.
type stretch struct{ from, to time.Time }

// billedBefore is the member's measured time in records that begin before a moment.
func (f *fixture) billedBefore(memberID string, moment time.Time) (s stretch) {
	f.t.Helper()
	for _, r := range f.sessionRecords(memberID) {
		if r.GetStartedAt().AsTime().After(moment) || r.GetFinal() {
			continue
		}
		if s.from.IsZero() {
			s.from = r.GetStartedAt().AsTime()
		}
		s.to = r.GetEndedAt().AsTime()
	}
	return s
}

// A shim that does not answer while its process ends: the node cannot know, so it starts no second copy and bills
// nothing after the last sample that saw the process. It learns of the exit when the shim answers again, and counts it
// once.
func TestLaw05AnExitBehindASilentShimIsBilledUpToTheLastSample(t *testing.T) {
	f := newFixture(t)
	u := f.countUnknown()
	w := f.hub.workload(`{}`)
	f.push(w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	before := f.container(w.GetId())
	proven := u.sampledAgain(f)

	goOn := f.silence()
	require.NoError(t, unix.Kill(int(before.PID), unix.SIGKILL))
	f.awaitZombie(before.PID)
	dead := time.Now()
	u.awaitUnknown(t, f)
	require.Equal(t, runtime.StateUnknown, f.container(w.GetId()).State)
	require.Len(t, u.revisions(w.GetId()), 1, "no second copy beside what may run")
	require.Zero(t, f.until(w.GetId(), func(*protocol.WorkloadStatus) bool { return true }).GetRestarts())

	goOn()
	f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool {
		return s.GetRestarts() == 1 && s.GetStatus() == protocol.WorkloadStatus_READY
	})
	require.NotEqual(t, before.ID, f.container(w.GetId()).ID)
	require.Len(t, u.revisions(w.GetId()), 2)
	f.push()
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_REMOVED)
	billed := f.billedBefore(w.GetId(), dead)
	require.False(t, billed.to.After(dead), "nothing after its end is billed: %s to %s, and it ended before %s",
		billed.from, billed.to, dead)
	require.False(t, billed.to.Before(proven), "what a sample has seen is billed")
	_, final := f.measured(w.GetId())
	require.True(t, final)
}

// sampledAgain waits for a sample of the meter to which the shim has answered in time, and returns its time as records
// have it. The first sample that ends may have begun before.
func (u *unknownCounter) sampledAgain(f *fixture) (at time.Time) {
	f.t.Helper()
	for {
		unknown := u.unknown.Load()
		for range 2 {
			at = f.store.LastStamp().At
			require.Eventually(f.t, func() bool { return f.store.LastStamp().At.After(at) }, time.Minute, time.Millisecond)
		}
		if at = f.store.LastStamp().At; u.unknown.Load() == unknown {
			return at.Truncate(time.Microsecond)
		}
	}
}

// awaitZombie waits until the process has ended, which nobody reaps.
func (f *fixture) awaitZombie(pid uint32) {
	f.t.Helper()
	require.Eventually(f.t, func() bool {
		var number int
		var name, state string
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return false
		}
		_, err = fmt.Sscan(string(stat), &number, &name, &state)
		return err == nil && state == "Z"
	}, time.Minute, time.Millisecond)
}

// An agent that starts beside a shim that does not answer cannot tell whether the container runs. It does: it is left
// alone, and counted throughout once the shim answers.
func TestLaw04AContainerOfASilentShimIsLeftAloneUntilItAnswers(t *testing.T) {
	f := newFixture(t)
	u := f.countUnknown()
	w := f.hub.workload(`{}`)
	f.push(w)
	ready := f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	before := f.container(w.GetId())
	f.stop()
	goOn := f.silence()
	f.start()
	u.awaitUnknown(t, f)
	get(t, url(ready, "/"))
	require.Equal(t, runtime.StateUnknown, f.container(w.GetId()).State)

	goOn()
	require.Eventually(t, func() bool { return f.container(w.GetId()).State == runtime.StateRunning }, time.Minute,
		10*time.Millisecond)
	after := f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	require.Zero(t, after.GetRestarts())
	require.Equal(t, before.PID, f.container(w.GetId()).PID)
	require.Len(t, u.revisions(w.GetId()), 1)
	f.push()
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_REMOVED)
	seconds, final := f.measured(w.GetId())
	require.True(t, final)
	require.InDelta(t, f.store.Members()[w.GetId()].ExitedAt.Sub(before.StartedAt).Seconds(), seconds.Seconds(), 0.1,
		"it ran all the time")
}

// A killed shim takes its container along. That exit is recorded once and billed once, also by an agent that starts
// afterwards.
func TestLaw04AKilledShimIsOneExitThatIsBilledOnce(t *testing.T) {
	f := newFixture(t)
	prepared := f.countUnknown()
	w := f.hub.workload(`{}`)
	f.push(w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	before := f.container(w.GetId())
	proven := prepared.sampledAgain(f)
	shims := f.daemon.Shims()
	require.Len(t, shims, 1)
	require.NoError(t, unix.Kill(shims[0], unix.SIGKILL))
	again := func(s *protocol.WorkloadStatus) bool {
		return s.GetRestarts() == 1 && s.GetStatus() == protocol.WorkloadStatus_READY
	}
	f.until(w.GetId(), again)
	gone := time.Now()
	require.NotEqual(t, before.ID, f.container(w.GetId()).ID)
	f.restart()
	f.until(w.GetId(), again)
	f.awaitSamples()
	require.Len(t, prepared.revisions(w.GetId()), 2, "one container more, for one exit")
	require.EqualValues(t, 1, f.store.Members()[w.GetId()].Services["main"].Restarts)

	second := f.store.Runs()[f.container(w.GetId()).ID].StartedAt
	f.push()
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_REMOVED)
	billed := f.billedBefore(w.GetId(), second.Add(-time.Microsecond))
	require.False(t, billed.to.After(gone) || billed.to.After(second), "the first run ends before the second")
	require.False(t, billed.to.Before(proven), "what a sample has seen is billed")
	_, final := f.measured(w.GetId())
	require.True(t, final, "no second is in two records, and the last one is sealed")
}
