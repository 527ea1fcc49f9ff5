package lifecycle

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/protocol"
)

// The members of the cases.
var (
	ready    = MemberState{Status: protocol.WorkloadStatus_READY}
	starting = MemberState{Status: protocol.WorkloadStatus_STARTING}
	failed   = MemberState{
		Status: protocol.WorkloadStatus_FAILED, Reason: protocol.WorkloadStatus_CRASH_LOOP,
		GaveUp: true,
	}
	failedOnce = MemberState{Status: protocol.WorkloadStatus_FAILED, Reason: protocol.WorkloadStatus_CRASH_LOOP}
	lost       = MemberState{Status: protocol.WorkloadStatus_READY, Unreachable: true}
	gone       = MemberState{Status: protocol.WorkloadStatus_REMOVED, Gone: true}
	nodeLost   = MemberState{
		Status: protocol.WorkloadStatus_FAILED, Reason: protocol.WorkloadStatus_NODE_LOST, Gone: true,
		Lost: true,
	}
	failedLost = Lifecycle{Failed, HealthUnhealthy, protocol.WorkloadStatus_NODE_LOST}
)

// live is an instance with this status.
func live(s Status) Lifecycle { return Lifecycle{Status: s, Health: HealthUnknown} }

type advanceCase struct {
	name    string
	from    Lifecycle
	members []MemberState
	want    Lifecycle
	steps   []Step
}

// Nobody can take out a member that was lost with its node, and another one takes its place.
func TestALostMemberOfAnExternalWorkerHarmsNothingWhileOthersLive(t *testing.T) {
	running := Lifecycle{Running, HealthHealthy, 0}
	next, steps := AdvanceExternal(running, []MemberState{ready, nodeLost})
	require.Equal(t, running, next)
	require.Empty(t, steps)
	next, _ = AdvanceExternal(running, []MemberState{failedOnce, ready, nodeLost})
	require.Equal(t, Lifecycle{Running, HealthDegraded, protocol.WorkloadStatus_CRASH_LOOP}, next)
	next, steps = AdvanceExternal(running, []MemberState{nodeLost, nodeLost})
	require.Equal(t, failedLost, next)
	require.Equal(t, []Step{{Running, Failed, protocol.WorkloadStatus_NODE_LOST}}, steps)
}

// The others live as well while a task is about them: they come, are recovered, or are stopped.
func TestALostMemberOfAnExternalWorkerEndsNothingWhileATaskIsAboutTheOthers(t *testing.T) {
	stopped := MemberState{Status: protocol.WorkloadStatus_STOPPED}
	for _, c := range []struct {
		at    Status
		other MemberState
	}{
		{Requested, MemberState{}}, {Deploying, starting}, {Running, starting}, {Upgrading, starting}, {Stopped, stopped},
	} {
		next, steps := AdvanceExternal(live(c.at), []MemberState{c.other, nodeLost, gone})
		require.Equal(t, c.at, next.Status)
		require.Empty(t, steps)
	}
	next, _ := AdvanceExternal(live(Stopped), []MemberState{nodeLost, gone})
	require.Equal(t, failedLost, next)
}

// What its only member serves is not known while that is recovered.
func TestWhatAnExternalWorkerRecoversAsAWholeIsNotHealthy(t *testing.T) {
	next, steps := AdvanceExternal(Lifecycle{Running, HealthUnhealthy, protocol.WorkloadStatus_CRASH_LOOP},
		[]MemberState{starting, nodeLost, gone})
	require.Equal(t, live(Running), next)
	require.Empty(t, steps)
}

// Without its only controller a cluster is not healthy, whatever its workers are.
func TestTheLossOfTheLastMemberOfAComponentDegrades(t *testing.T) {
	running := Lifecycle{Running, HealthHealthy, 0}
	of := func(role string, m MemberState) MemberState {
		m.Role = role
		return m
	}
	lost, worker := of("controller", nodeLost), of("worker", ready)
	next, steps := AdvanceExternal(running, []MemberState{lost, worker, of("controller", gone)})
	require.Equal(t, Lifecycle{Running, HealthDegraded, protocol.WorkloadStatus_NODE_LOST}, next)
	require.Empty(t, steps)
	next, _ = AdvanceExternal(next, []MemberState{lost, worker, of("controller", MemberState{})})
	require.Equal(t, running, next, "another one comes")
	next, _ = AdvanceExternal(running, []MemberState{of("worker", nodeLost), worker, of("controller", ready)})
	require.Equal(t, running, next)
}

func requireAdvance(t *testing.T, cases []advanceCase) {
	t.Helper()
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			got, steps := Advance(c.from, c.members)
			require.Equal(t, c.want, got)
			require.Equal(t, c.steps, steps)
		})
	}
}

func TestAdvanceStartsAnInstance(t *testing.T) {
	requireAdvance(t, []advanceCase{
		{"before the first report", live(Requested), []MemberState{{}}, live(Requested), nil},
		{
			"node unreachable before its first report", live(Requested),
			[]MemberState{{Unreachable: true}},
			Lifecycle{Requested, HealthUnknown, protocol.WorkloadStatus_NODE_UNREACHABLE},
			nil,
		},
		{
			"first report of the node", live(Requested),
			[]MemberState{starting},
			live(Deploying),
			[]Step{{Requested, Deploying, 0}},
		},
		{
			"a start too fast to be seen half-way", live(Requested),
			[]MemberState{ready},
			Lifecycle{Running, HealthHealthy, 0},
			[]Step{{Requested, Deploying, 0}, {Deploying, Running, 0}},
		},
		{
			"refused at once", live(Requested),
			[]MemberState{{
				Status: protocol.WorkloadStatus_FAILED, Reason: protocol.WorkloadStatus_MANIFEST_NOT_ADMITTED,
				GaveUp: true,
			}},
			Lifecycle{Failed, HealthUnhealthy, protocol.WorkloadStatus_MANIFEST_NOT_ADMITTED},
			[]Step{{Requested, Deploying, 0}, {Deploying, Failed, protocol.WorkloadStatus_MANIFEST_NOT_ADMITTED}},
		},
		{"failed once so far", live(Deploying), []MemberState{failedOnce}, Lifecycle{
			Deploying, HealthUnknown,
			protocol.WorkloadStatus_CRASH_LOOP,
		}, nil},
		{
			"failed once so far while rolling back", live(RollingBack),
			[]MemberState{failedOnce},
			Lifecycle{RollingBack, HealthUnknown, protocol.WorkloadStatus_CRASH_LOOP},
			nil,
		},
		{
			"one gave up, one failed once so far", live(Deploying),
			[]MemberState{failed, failedOnce},
			Lifecycle{Deploying, HealthUnknown, protocol.WorkloadStatus_CRASH_LOOP},
			nil,
		},
		{
			"failed without a reason", live(Deploying),
			[]MemberState{{Status: protocol.WorkloadStatus_FAILED, GaveUp: true}},
			Lifecycle{Failed, HealthUnhealthy, protocol.WorkloadStatus_INTERNAL},
			[]Step{{Deploying, Failed, protocol.WorkloadStatus_INTERNAL}},
		},
		{
			"a pull that is tried again shows why it takes so long", live(Deploying),
			[]MemberState{{Status: protocol.WorkloadStatus_PENDING, Reason: protocol.WorkloadStatus_IMAGE_PULL_FAILED}},
			Lifecycle{Deploying, HealthUnknown, protocol.WorkloadStatus_IMAGE_PULL_FAILED},
			nil,
		},
		{"one serves, one still starts", live(Deploying), []MemberState{ready, starting}, live(Deploying), nil},
		{
			"one serves, one gave up", live(Deploying),
			[]MemberState{ready, failed},
			Lifecycle{Running, HealthDegraded, protocol.WorkloadStatus_CRASH_LOOP},
			[]Step{{Deploying, Running, protocol.WorkloadStatus_CRASH_LOOP}},
		},
	})
}

func TestAdvanceShowsTheHealthOfARunningInstance(t *testing.T) {
	requireAdvance(t, []advanceCase{
		{
			"crash after running is health",
			Lifecycle{Running, HealthHealthy, 0},
			[]MemberState{failed},
			Lifecycle{Running, HealthUnhealthy, protocol.WorkloadStatus_CRASH_LOOP},
			nil,
		},
		{
			"and heals",
			Lifecycle{Running, HealthUnhealthy, protocol.WorkloadStatus_CRASH_LOOP},
			[]MemberState{ready},
			Lifecycle{Running, HealthHealthy, 0},
			nil,
		},
		{
			"lease ended",
			Lifecycle{Running, HealthHealthy, 0},
			[]MemberState{{Status: protocol.WorkloadStatus_STOPPED, Reason: protocol.WorkloadStatus_LEASE_ENDED}},
			Lifecycle{Running, HealthUnhealthy, protocol.WorkloadStatus_LEASE_ENDED},
			nil,
		},
		{"contact lost", Lifecycle{Running, HealthHealthy, 0}, []MemberState{lost}, Lifecycle{
			Running, HealthUnknown,
			protocol.WorkloadStatus_NODE_UNREACHABLE,
		}, nil},
		{
			"contact lost to one of two",
			Lifecycle{Running, HealthHealthy, 0},
			[]MemberState{ready, lost},
			Lifecycle{Running, HealthDegraded, protocol.WorkloadStatus_NODE_UNREACHABLE},
			nil,
		},
		{
			"a failed one does not recover by itself",
			Lifecycle{Failed, HealthUnhealthy, protocol.WorkloadStatus_CRASH_LOOP},
			[]MemberState{ready},
			Lifecycle{Failed, HealthUnhealthy, protocol.WorkloadStatus_CRASH_LOOP},
			nil,
		},
	})
}

func TestAdvanceUpgradesAndRollsBack(t *testing.T) {
	requireAdvance(t, []advanceCase{
		{"upgrade in progress", live(Upgrading), []MemberState{starting}, live(Upgrading), nil},
		{"before a report on the new revision", live(Upgrading), []MemberState{{}}, live(Upgrading), nil},
		{
			"upgraded", live(Upgrading),
			[]MemberState{ready},
			Lifecycle{Running, HealthHealthy, 0},
			[]Step{{Upgrading, Running, 0}},
		},
		{
			"upgrade failed without a fallback", live(Upgrading),
			[]MemberState{failed},
			Lifecycle{Failed, HealthUnhealthy, protocol.WorkloadStatus_CRASH_LOOP},
			[]Step{{Upgrading, Failed, protocol.WorkloadStatus_CRASH_LOOP}},
		},
		{
			"the node rolled back", live(Upgrading),
			[]MemberState{{RolledBackByNode: true, Reason: protocol.WorkloadStatus_READINESS_TIMEOUT}},
			Lifecycle{RollingBack, HealthUnknown, protocol.WorkloadStatus_READINESS_TIMEOUT},
			[]Step{{Upgrading, RollingBack, protocol.WorkloadStatus_READINESS_TIMEOUT}},
		},
		{
			"one of two nodes rolled back", live(Upgrading),
			[]MemberState{ready, {RolledBackByNode: true}},
			Lifecycle{RollingBack, HealthUnknown, protocol.WorkloadStatus_INTERNAL},
			[]Step{{Upgrading, RollingBack, protocol.WorkloadStatus_INTERNAL}},
		},
		{
			"rolled back",
			Lifecycle{RollingBack, HealthUnknown, protocol.WorkloadStatus_CRASH_LOOP},
			[]MemberState{ready},
			Lifecycle{Running, HealthHealthy, 0},
			[]Step{{RollingBack, Running, 0}},
		},
		{"the old one will not start either", live(RollingBack), []MemberState{failed}, Lifecycle{
			Failed, HealthUnhealthy,
			protocol.WorkloadStatus_CRASH_LOOP,
		}, []Step{{RollingBack, Failed, protocol.WorkloadStatus_CRASH_LOOP}}},
	})
}

func TestAdvanceStopsAnInstance(t *testing.T) {
	requireAdvance(t, []advanceCase{
		{"stopping", live(Stopping), []MemberState{ready}, live(Stopping), nil},
		{
			"stopping waits for every member", live(Stopping),
			[]MemberState{{Status: protocol.WorkloadStatus_STOPPED}, {Status: protocol.WorkloadStatus_STOPPING}},
			live(Stopping), nil,
		},
		{"stopping without contact says so", live(Stopping), []MemberState{lost}, Lifecycle{
			Stopping, HealthUnknown,
			protocol.WorkloadStatus_NODE_UNREACHABLE,
		}, nil},
		{
			"stopped", live(Stopping),
			[]MemberState{{Status: protocol.WorkloadStatus_STOPPED}},
			live(Stopped),
			[]Step{{Stopping, Stopped, 0}},
		},
		{"stopped stays stopped", live(Stopped), []MemberState{ready}, live(Stopped), nil},
	})
}

func TestAdvanceEndsWhatALostNodeRan(t *testing.T) {
	requireAdvance(t, []advanceCase{
		{
			"node lost before its first report", live(Requested),
			[]MemberState{nodeLost},
			failedLost,
			[]Step{{Requested, Failed, protocol.WorkloadStatus_NODE_LOST}},
		},
		{
			"node lost while running",
			Lifecycle{Running, HealthUnknown, protocol.WorkloadStatus_NODE_UNREACHABLE},
			[]MemberState{nodeLost},
			failedLost,
			[]Step{{Running, Failed, protocol.WorkloadStatus_NODE_LOST}},
		},
		{
			"node lost while upgrading", live(Upgrading),
			[]MemberState{nodeLost},
			failedLost,
			[]Step{{Upgrading, Failed, protocol.WorkloadStatus_NODE_LOST}},
		},
		{
			"node lost while stopped", live(Stopped),
			[]MemberState{nodeLost},
			failedLost,
			[]Step{{Stopped, Failed, protocol.WorkloadStatus_NODE_LOST}},
		},
		{
			"one of two nodes lost",
			Lifecycle{Running, HealthHealthy, 0},
			[]MemberState{ready, nodeLost},
			Lifecycle{Running, HealthDegraded, protocol.WorkloadStatus_NODE_LOST},
			nil,
		},
		{
			"node lost while decommissioning",
			Lifecycle{Decommissioning, HealthUnknown, protocol.WorkloadStatus_NODE_UNREACHABLE},
			[]MemberState{gone, nodeLost},
			Lifecycle{Decommissioned, HealthUnknown, protocol.WorkloadStatus_NODE_LOST},
			[]Step{{Decommissioning, Decommissioned, protocol.WorkloadStatus_NODE_LOST}},
		},
	})
}

func TestAdvanceDecommissionsOnEveryProof(t *testing.T) {
	requireAdvance(t, []advanceCase{
		{
			"decommissioning waits for the proof", live(Decommissioning),
			[]MemberState{{Status: protocol.WorkloadStatus_REMOVED}},
			live(Decommissioning), nil,
		},
		{
			"decommissioning waits for every proof", live(Decommissioning),
			[]MemberState{gone, starting},
			live(Decommissioning),
			nil,
		},
		{"decommissioning without contact says so", live(Decommissioning), []MemberState{lost}, Lifecycle{
			Decommissioning,
			HealthUnknown, protocol.WorkloadStatus_NODE_UNREACHABLE,
		}, nil},
		{
			"proved", live(Decommissioning),
			[]MemberState{gone, gone},
			live(Decommissioned),
			[]Step{{Decommissioning, Decommissioned, 0}},
		},
	})
}
