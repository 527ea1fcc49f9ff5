package agent_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestBackoffDoublesUpToItsLimit(t *testing.T) {
	require.Zero(t, agent.Backoff(0))
	require.Equal(t, time.Second, agent.Backoff(1))
	require.Equal(t, 8*time.Second, agent.Backoff(4))
	require.Equal(t, agent.BackoffMax, agent.Backoff(1_000_000))
}

func TestFailuresAreForgottenAfterALongRunAndWithANewRevision(t *testing.T) {
	m := agent.Member{ID: "web"}
	for range 7 {
		m = m.Failed(1, protocol.WorkloadStatus_CRASH_LOOP, "", false, time.Second, noon)
	}
	require.EqualValues(t, 7, m.Failures)
	require.EqualValues(t, 1, m.Failed(1, protocol.WorkloadStatus_CRASH_LOOP, "", false, agent.StableAfter, noon).Failures)
	require.EqualValues(t, 1, m.Failed(2, protocol.WorkloadStatus_CRASH_LOOP, "", false, time.Second, noon).Failures)
}

// A kill of the agent right after a start: the run has no start, and the container has exited at once.
func TestAnExitCountsThoughItsStartWasNotStored(t *testing.T) {
	m := agent.Member{ID: "web"}
	crash := func(run agent.Run, up time.Duration) uint32 {
		l := agent.Listed{Status: agent.Exited, ExitCode: 1, StartedAt: noon.Add(-up), ExitedAt: noon}
		agent.RecordExit{MemberID: "web", Service: "app", Revision: 1, Unasked: true}.RecordMember(&m, run, l, noon, noon)
		return m.Services["app"].Failures
	}
	require.EqualValues(t, 1, crash(agent.Run{StartedAt: noon.Add(-time.Second)}, time.Second))
	require.EqualValues(t, 2, crash(agent.Run{}, time.Second))
	require.EqualValues(t, 1, crash(agent.Run{}, agent.StableAfter))
}

// A one-shot service that the node ends may exit with 0 halfway through its work: it runs again once it may.
func TestAServiceIsCompletedByAnExitOfItsOwnAlone(t *testing.T) {
	started := agent.Run{StartedAt: noon.Add(-time.Minute)}
	with := func(change func(*agent.Run)) agent.Run {
		run := started
		change(&run)
		return run
	}
	exited := agent.Listed{Status: agent.Exited, StartedAt: noon.Add(-time.Minute), ExitedAt: noon}
	completes := func(run agent.Run, l agent.Listed, restart protocol.Service_RestartPolicy) bool {
		m := agent.Member{ID: "web"}
		agent.RecordExit{
			MemberID: "web", Service: "migrate", Revision: 1, SpecDigest: "spec", Restart: restart, Unasked: true,
		}.RecordMember(&m, run, l, noon, noon)
		return len(m.Services["migrate"].Completed) > 0
	}
	require.True(t, completes(started, exited, protocol.Service_ON_FAILURE))
	require.True(t, completes(started, exited, protocol.Service_NEVER))
	require.False(t, completes(started, exited, protocol.Service_ALWAYS))
	for name, run := range map[string]agent.Run{
		"stopped":     with(func(r *agent.Run) { r.StopRequested = true }),
		"over disk":   with(func(r *agent.Run) { r.OverDisk = "too much" }),
		"not alive":   with(func(r *agent.Run) { r.NotAlive = "no answer" }),
		"not a build": with(func(r *agent.Run) { r.BuildFailed = "nothing installed" }),
	} {
		require.False(t, completes(run, exited, protocol.Service_ON_FAILURE), name)
	}
	for name, l := range map[string]agent.Listed{
		"failed": {Status: agent.Exited, ExitCode: 1},
		"lost":   {Status: agent.Exited, Lost: true},
		"killed": {Status: agent.Exited, OOMKilled: true},
	} {
		require.False(t, completes(started, l, protocol.Service_ON_FAILURE), name)
	}
}

// A registry that is away says nothing about the workload: it waits, says for what, and is pulled when the registry is
// back.
func TestARegistryThatIsAwayNeverFailsAMember(t *testing.T) {
	m := agent.Member{ID: "web", InstanceID: "i-web"}
	now := noon
	wanted := agent.Desired{Workloads: []agent.Workload{web(2)}}
	status := func() *protocol.WorkloadStatus {
		leases := agent.Leases{"web": {MemberID: "web", No: 1, ExpiresAt: now.Add(time.Hour)}}
		observed := agent.Observed{
			Members:  map[string]agent.Member{"web": m},
			Networks: []agent.Network{{MemberID: "web", Service: "app", Ready: true}},
		}
		require.NotEmpty(t, agent.Diff(wanted, leases, observed, m.RetryAt), "it is tried again")
		require.Empty(t, agent.Diff(wanted, leases, observed, m.RetryAt.Add(-1)), "after a pause")
		return agent.Statuses(wanted, leases, observed, now)[0]
	}
	for range 50 {
		m = m.Failed(2, protocol.WorkloadStatus_IMAGE_PULL_FAILED, "could not be pulled", false, 0, now)
		s := status()
		require.Equal(t, []any{
			protocol.WorkloadStatus_STARTING, protocol.WorkloadStatus_IMAGE_PULL_FAILED,
			"could not be pulled",
		},
			[]any{s.GetStatus(), s.GetReason(), s.GetDetail()})
		now = m.RetryAt
	}
	require.Equal(t, now, m.RetryAt)

	came := m
	for range agent.CrashLoopAfter - 1 {
		m = m.Failed(2, protocol.WorkloadStatus_CRASH_LOOP, "exit code 1", false, time.Second, now)
		require.Equal(t, protocol.WorkloadStatus_STARTING, status().GetStatus(), "what fails once the image is there is "+
			"counted from "+
			"then on")
	}
	m = m.Failed(2, protocol.WorkloadStatus_CRASH_LOOP, "exit code 1", false, time.Second, now)
	require.Equal(t, protocol.WorkloadStatus_FAILED, status().GetStatus())

	m = came.Failed(2, protocol.WorkloadStatus_IMAGE_PULL_FAILED, "is not in the registry", true, 0, now)
	require.Equal(t, protocol.WorkloadStatus_FAILED, status().GetStatus(), "what no other try can bring is a failure at "+
		"once")
}

// Each try of a revision that fills its part of the disk fills it anew: after a few it is left alone, until there is
// another revision.
func TestRevisionThatFillsTheDiskIsNotTriedForEver(t *testing.T) {
	w := web(2)
	m := agent.Member{ID: "web", InstanceID: "i-web"}
	diff := func(w agent.Workload) []agent.Action {
		later := m.RetryAt.Add(time.Hour)
		return agent.Diff(agent.Desired{Workloads: []agent.Workload{w}},
			agent.Leases{"web": {MemberID: "web", No: 1, ExpiresAt: later.Add(time.Hour)}},
			agent.Observed{Members: map[string]agent.Member{"web": m}}, later)
	}
	for range agent.CrashLoopAfter {
		require.NotEmpty(t, diff(w))
		m = m.Failed(2, protocol.WorkloadStatus_DISK_LIMIT, "", false, time.Second, noon)
	}
	require.Empty(t, diff(w))
	require.NotEmpty(t, diff(web(3)))
}

// A container that the journal does not know is found by its service and copy, as others are.
func TestARunOfALostStoreIsThatOfItsContainer(t *testing.T) {
	l := agent.Listed{ID: "m.1", MemberID: "m", InstanceID: "i", Service: "web", Copy: "abc", Revision: 3}
	run := l.UnknownRun(sameClock{})
	require.Equal(t, []string{l.ID, l.MemberID, l.InstanceID, l.Service, l.Copy},
		[]string{run.ID, run.MemberID, run.InstanceID, run.Service, run.Copy})
}

// Of a container that fails by itself, or whose end nobody saw, what no scan has confirmed is not billed: perhaps its
// accelerators failed.
func TestWhatEndsUnseenMayHaveCrashed(t *testing.T) {
	run := agent.Run{ID: "m.1", MemberID: "m", StartedAt: noon}
	stopped := run
	stopped.StopRequested = true
	for name, c := range map[string]struct {
		listed  agent.Listed
		run     agent.Run
		crashed bool
	}{
		"done":         {agent.Listed{}, run, false},
		"failed":       {agent.Listed{ExitCode: 1}, run, true},
		"stopped":      {agent.Listed{ExitCode: 143}, stopped, false},
		"lost":         {agent.Listed{Lost: true}, run, true},
		"lost at stop": {agent.Listed{Lost: true}, stopped, true},
	} {
		c.listed.ID, c.listed.MemberID, c.listed.Status = run.ID, run.MemberID, agent.Exited
		require.Equal(t, c.crashed, c.listed.MeterRun(c.run, c.run, agent.Work{}, sameClock{}).Crashed, name)
	}
}

// sameClock is a machine's clock that tells the node's time.
type sameClock struct{}

func (sameClock) FromMachineTime(t, _ time.Time) time.Time { return t }

func (sameClock) Exited(t time.Time) time.Time { return t }

// A network that was made at the second try does not hide why its containers end.
func TestFailuresOfANetworkEndWithIt(t *testing.T) {
	w := web(2)
	m := failed(2, 1, protocol.WorkloadStatus_INSUFFICIENT_CAPACITY)
	agent.SetupNetwork{MemberID: "web", Revision: 1, Workload: w, Services: []string{"app"}}.Record(&m)
	require.Equal(t, uint32(1), m.Failures, "of another revision")
	agent.SetupNetwork{MemberID: "web", Revision: 2, Workload: w, Services: []string{"app"}}.Record(&m)
	m.Services["app"] = agent.ServiceRecord{Tries: agent.Tries{
		Failures: agent.CrashLoopAfter, FailedRevision: 2, Reason: protocol.WorkloadStatus_CRASH_LOOP,
	}}
	s := agent.Statuses(desired(w), week("web"), withImage(observed(m, 2)), noon)[0]
	require.Equal(t, protocol.WorkloadStatus_FAILED, s.GetStatus())
	require.Equal(t, protocol.WorkloadStatus_CRASH_LOOP, s.GetReason())
}

// Nor do the pulls that failed before the images of an upgrade came.
func TestFailuresOfPullsEndWithTheImages(t *testing.T) {
	w := upgrade()
	m := failed(3, 2, protocol.WorkloadStatus_IMAGE_PULL_FAILED)
	m.ConfirmedRevision = 3
	m.Services = map[string]agent.ServiceRecord{"app": {Tries: agent.Tries{
		Failures: agent.CrashLoopAfter, FailedRevision: 3, Reason: protocol.WorkloadStatus_CRASH_LOOP,
	}}}
	reason := func(o agent.Observed) protocol.WorkloadStatus_Reason {
		return agent.Statuses(desired(w), week("web"), o, noon)[0].GetReason()
	}
	require.Equal(t, protocol.WorkloadStatus_CRASH_LOOP, reason(withImage(observed(m, 2))))
	require.Equal(t, protocol.WorkloadStatus_IMAGE_PULL_FAILED, reason(observed(m, 2)))
}
