package lifecycle

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

func allStatuses() []Status {
	return []Status{
		Requested, Deploying, Running, Upgrading, RollingBack, Stopping, Stopped, Decommissioning,
		Decommissioned, Failed,
	}
}

func TestLifecycleHasExactlyTheEdgesOfTheDesign(t *testing.T) {
	edges := map[Status][]Status{
		Requested:       {Deploying, Decommissioning, Failed},
		Deploying:       {Running, Decommissioning, Failed},
		Running:         {Upgrading, RollingBack, Stopping, Decommissioning, Failed},
		Upgrading:       {Running, RollingBack, Decommissioning, Failed},
		RollingBack:     {Running, Decommissioning, Failed},
		Stopping:        {Stopped, Decommissioning, Failed},
		Stopped:         {Deploying, Decommissioning, Failed},
		Failed:          {Deploying, Upgrading, RollingBack, Decommissioning},
		Decommissioning: {Decommissioned},
	}
	for _, from := range allStatuses() {
		for _, to := range allStatuses() {
			require.Equal(t, slices.Contains(edges[from], to), from.CanBecome(to), "%s -> %s", from, to)
		}
	}
	require.False(t, Status("invented").CanBecome(Running))
}

func TestDecommissionIsOpenInEveryLiveStateAndInNoOther(t *testing.T) {
	for _, s := range allStatuses() {
		l, step, err := Decommission(Lifecycle{Status: s, Health: HealthHealthy, Reason: protocol.WorkloadStatus_CRASH_LOOP})
		if s == Decommissioning || s == Decommissioned {
			require.ErrorContains(t, err, "instance_"+string(s))
			continue
		}
		require.NoError(t, err)
		require.Equal(t, Lifecycle{Status: Decommissioning, Health: HealthUnknown}, l)
		require.Equal(t, "apps.instance.decommission_requested", step.EventType())
	}
}

func TestActionsAreOpenWhereTheContractSaysAndNowhereElse(t *testing.T) {
	worked, never := History{Worked: true}, History{}
	actions := map[string]struct {
		do    func(Lifecycle) (Lifecycle, Step, error)
		to    Status
		event string
		from  []Status
	}{
		"upgrade": {
			func(l Lifecycle) (Lifecycle, Step, error) { return Upgrade(l, worked) }, Upgrading,
			"upgrade_requested",
			[]Status{Running, Failed},
		},
		"rollback": {
			func(l Lifecycle) (Lifecycle, Step, error) { return RollBack(l, worked) }, RollingBack,
			"rollback_requested",
			[]Status{Running, Failed},
		},
		"never ran: upgrade": {
			func(l Lifecycle) (Lifecycle, Step, error) { return Upgrade(l, never) }, Upgrading,
			"upgrade_requested",
			[]Status{Running},
		},
		"never ran: rollback": {
			func(l Lifecycle) (Lifecycle, Step, error) { return RollBack(l, never) }, RollingBack,
			"rollback_requested",
			[]Status{Running},
		},
		"stop": {Stop, Stopping, "stop_requested", []Status{Running}},
		"start": {
			func(l Lifecycle) (Lifecycle, Step, error) { return Start(l, never) }, Deploying,
			"start_requested",
			[]Status{Stopped, Failed},
		},
	}
	for name, a := range actions {
		for _, s := range allStatuses() {
			l, step, err := a.do(Lifecycle{Status: s, Health: HealthHealthy, Reason: protocol.WorkloadStatus_CRASH_LOOP})
			if !slices.Contains(a.from, s) {
				require.ErrorContains(t, err, "instance_"+string(s), "%s of %s", name, s)
				require.Equal(t, s, l.Status)
				continue
			}
			require.NoError(t, err, "%s of %s", name, s)
			require.Equal(t, Lifecycle{Status: a.to, Health: HealthUnknown}, l)
			require.Equal(t, Step{From: s, To: a.to}, step)
			require.Equal(t, "apps.instance."+a.event, step.EventType())
		}
	}
}

func TestSettingsChangeUntilTheEndBegins(t *testing.T) {
	require.NoError(t, ChangeSettings(Lifecycle{Status: Failed}))
	err := ChangeSettings(Lifecycle{Status: Decommissioning})
	require.Equal(t, "The app instance is decommissioning and cannot be changed any more.", fault.As(err).Public)
}

func TestNothingButTheEndIsOpenOnceEveryNodeIsLost(t *testing.T) {
	failed := Lifecycle{Status: Failed, Health: HealthUnhealthy, Reason: protocol.WorkloadStatus_NODE_LOST}
	past := History{Worked: true, Lost: true}
	for _, do := range []func(Lifecycle, History) (Lifecycle, Step, error){Upgrade, RollBack, Start} {
		l, _, err := do(failed, past)
		require.EqualValues(t, "node_lost", fault.As(err).Code)
		require.Equal(t, failed, l)
	}
	_, _, err := Decommission(failed)
	require.NoError(t, err)
}

func TestEventsOfAnUpgradeThatFailedAndOfOneThatDidNot(t *testing.T) {
	for event, s := range map[string]Step{
		"upgraded":    {From: Upgrading, To: Running},
		"failed":      {From: Upgrading, To: RollingBack, Reason: protocol.WorkloadStatus_CRASH_LOOP},
		"rolled_back": {From: RollingBack, To: Running},
		"stopped":     {From: Stopping, To: Stopped},
		"running":     {From: Deploying, To: Running},
		"deploying":   {From: Requested, To: Deploying},
	} {
		require.Equal(t, "apps.instance."+event, s.EventType())
	}
	require.Equal(t, "apps.instance.failed", Step{From: RollingBack, To: Failed}.EventType())
}

func drawMember(t *rapid.T) MemberState {
	m := MemberState{
		Status: protocol.WorkloadStatus_Status(
			rapid.Int32Range(0, int32(protocol.WorkloadStatus_REMOVED)).Draw(t, "status")),
		Reason: protocol.WorkloadStatus_Reason(
			rapid.Int32Range(0, int32(protocol.WorkloadStatus_INTERNAL)).Draw(t, "reason")),
		Unreachable:      rapid.Bool().Draw(t, "unreachable"),
		Gone:             rapid.Bool().Draw(t, "gone"),
		RolledBackByNode: rapid.IntRange(0, 4).Draw(t, "went_back") == 0,
		GaveUp:           rapid.Bool().Draw(t, "gave_up"),
	}
	if rapid.IntRange(0, 4).Draw(t, "lost") == 0 {
		m = MemberState{
			Status: protocol.WorkloadStatus_FAILED, Reason: protocol.WorkloadStatus_NODE_LOST, Gone: true,
			Lost: true,
		}
	}
	return m
}

// Whatever nodes say in whatever order, an instance walks only along the edges of the design, its steps are a chain,
// a second Advance changes nothing, and the end is reached only with every member proved gone.
func TestLifecycleStaysOnItsEdges(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := Lifecycle{Status: Requested, Health: HealthUnknown}
		for range rapid.IntRange(1, 30).Draw(t, "length") {
			past := History{Worked: rapid.Bool().Draw(t, "worked")}
			asked := []func(Lifecycle) (Lifecycle, Step, error){
				Decommission, Stop,
				func(l Lifecycle) (Lifecycle, Step, error) { return Start(l, past) },
				func(l Lifecycle) (Lifecycle, Step, error) { return Upgrade(l, past) },
				func(l Lifecycle) (Lifecycle, Step, error) { return RollBack(l, past) },
			}
			if n := rapid.IntRange(0, 2*len(asked)).Draw(t, "ask"); n < len(asked) {
				next, step, err := asked[n](l)
				if err == nil {
					require.Equal(t, l.Status, step.From)
					require.Equal(t, next.Status, step.To)
					require.True(t, step.From.CanBecome(step.To))
				} else {
					require.Equal(t, l, next, "what is refused changes nothing")
				}
				l = next
			}
			members := rapid.SliceOfN(rapid.Custom(drawMember), 1, 3).Draw(t, "members")
			next, steps := Advance(l, members)
			at := l.Status
			for _, s := range steps {
				require.Equal(t, at, s.From)
				require.True(t, s.From.CanBecome(s.To), "%s -> %s", s.From, s.To)
				at = s.To
			}
			require.Equal(t, at, next.Status)
			if next.Status == Decommissioned && l.Status != Decommissioned {
				for _, m := range members {
					require.True(t, m.Gone)
				}
			}
			if next.Status == Failed {
				require.NotEmpty(t, next.Reason)
			}
			if len(steps) == 0 || !steps[len(steps)-1].IsRollbackByNode() {
				again, more := Advance(next, members)
				require.Equal(t, next, again)
				require.Empty(t, more)
			}
			l = next
		}
	})
}

func TestReasonsAreAClosedList(t *testing.T) {
	require.Equal(t, protocol.WorkloadStatus_INTERNAL, KnownReason(4711))
	require.Equal(t, protocol.WorkloadStatus_CRASH_LOOP, KnownReason(protocol.WorkloadStatus_CRASH_LOOP))
	require.Empty(t, KnownReason(0))
}

// A failure ends a deployment only when a later report repeats it and its reason lasts.
func TestOnlyAReasonThatLastsAndIsRepeatedEndsADeployment(t *testing.T) {
	at := time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	failing := func(r protocol.WorkloadStatus_Reason) Member {
		return Member{Status: protocol.WorkloadStatus_FAILED, Reason: r, ObservedRevision: 3}
	}
	for n := range protocol.WorkloadStatus_Reason_name {
		r := protocol.WorkloadStatus_Reason(n)
		first := failing(r)
		first.updateFailure(Member{Status: protocol.WorkloadStatus_STARTING, ObservedRevision: 3}, at)
		require.False(t, first.State(3).GaveUp, r)
		soon := failing(r)
		soon.FailingSince = first.FailingSince
		soon.updateFailure(first, at.Add(confirmedAfter(r)-1))
		require.False(t, soon.State(3).GaveUp, r)
		later := soon
		later.updateFailure(soon, at.Add(confirmedAfter(r)))
		require.Equal(t, !isTemporary(r), later.State(3).GaveUp, r)

		for name, before := range map[string]Member{
			"another reason":   {Status: protocol.WorkloadStatus_FAILED, Reason: r + 1, ObservedRevision: 3, FailingSince: at},
			"another revision": {Status: protocol.WorkloadStatus_FAILED, Reason: r, ObservedRevision: 2, FailingSince: at},
			"not failed":       {Status: protocol.WorkloadStatus_READY, ObservedRevision: 3},
		} {
			again := failing(r)
			again.updateFailure(before, at.Add(time.Hour))
			require.False(t, again.FailureConfirmed, name)
			require.Equal(t, at.Add(time.Hour), again.FailingSince, name)
		}
		ready := Member{Status: protocol.WorkloadStatus_READY, ObservedRevision: 3, FailingSince: at, FailureConfirmed: true}
		ready.updateFailure(later, at.Add(time.Hour))
		require.Zero(t, ready.FailingSince)
		require.False(t, ready.FailureConfirmed)
	}
	require.Greater(t, confirmedAfter(protocol.WorkloadStatus_DEVICE_FAULT), 5*failureConfirmedAfter,
		"a node resets and tests an accelerator first")
	require.True(t, isTemporary(protocol.WorkloadStatus_OWNER_REFUSED))
	require.True(t, isTemporary(protocol.WorkloadStatus_FEATURE_MISSING))
	require.False(t, isTemporary(protocol.WorkloadStatus_CRASH_LOOP))
}
