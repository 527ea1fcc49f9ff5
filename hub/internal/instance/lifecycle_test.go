package instance

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func allStatuses() []Status {
	return []Status{Requested, Deploying, Running, Upgrading, RollingBack, Stopping, Stopped, Decommissioning, Decommissioned, Failed}
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
		Failed:          {Upgrading, RollingBack, Decommissioning},
		Decommissioning: {Decommissioned},
	}
	for _, from := range allStatuses() {
		for _, to := range allStatuses() {
			require.Equal(t, slices.Contains(edges[from], to), from.CanBecome(to), "%s -> %s", from, to)
		}
	}
	require.False(t, Status("invented").CanBecome(Running))
}

func TestObserve(t *testing.T) {
	ready := MemberState{Status: MemberReady}
	starting := MemberState{Status: MemberStarting}
	failed := MemberState{Status: MemberFailed, Reason: ReasonCrashLoop}
	lost := MemberState{Status: MemberReady, Unreachable: true}
	gone := MemberState{Status: MemberRemoved, Gone: true}
	live := func(s Status) Lifecycle { return Lifecycle{Status: s, Health: HealthUnknown} }
	cases := []struct {
		name    string
		from    Lifecycle
		members []MemberState
		want    Lifecycle
		steps   []Step
	}{
		{"nothing said yet", live(Requested), []MemberState{{}}, live(Requested), nil},
		{"node unreachable before it heard of it", live(Requested), []MemberState{{Unreachable: true}}, Lifecycle{Requested, HealthUnknown, ReasonNodeUnreachable}, nil},
		{"first word from the node", live(Requested), []MemberState{starting}, live(Deploying), []Step{{Requested, Deploying, ""}}},
		{
			"a start too fast to be seen half-way", live(Requested),
			[]MemberState{ready},
			Lifecycle{Running, HealthHealthy, ""},
			[]Step{{Requested, Deploying, ""}, {Deploying, Running, ""}},
		},
		{
			"refused at once", live(Requested),
			[]MemberState{{Status: MemberFailed, Reason: ReasonManifestNotAdmitted}},
			Lifecycle{Failed, HealthUnhealthy, ReasonManifestNotAdmitted},
			[]Step{{Requested, Deploying, ""}, {Deploying, Failed, ReasonManifestNotAdmitted}},
		},
		{"failed without a word", live(Deploying), []MemberState{{Status: MemberFailed}}, Lifecycle{Failed, HealthUnhealthy, ReasonInternal}, []Step{{Deploying, Failed, ReasonInternal}}},
		{
			"a pull that is tried again shows why it takes so long", live(Deploying),
			[]MemberState{{Status: MemberPending, Reason: ReasonImagePullFailed}},
			Lifecycle{Deploying, HealthUnknown, ReasonImagePullFailed},
			nil,
		},
		{"one serves, one still starts", live(Deploying), []MemberState{ready, starting}, live(Deploying), nil},
		{
			"one serves, one gave up", live(Deploying),
			[]MemberState{ready, failed},
			Lifecycle{Running, HealthDegraded, ReasonCrashLoop},
			[]Step{{Deploying, Running, ReasonCrashLoop}},
		},
		{"crash after running is health", Lifecycle{Running, HealthHealthy, ""}, []MemberState{failed}, Lifecycle{Running, HealthUnhealthy, ReasonCrashLoop}, nil},
		{"and heals", Lifecycle{Running, HealthUnhealthy, ReasonCrashLoop}, []MemberState{ready}, Lifecycle{Running, HealthHealthy, ""}, nil},
		{
			"lease ended",
			Lifecycle{Running, HealthHealthy, ""},
			[]MemberState{{Status: MemberStopped, Reason: ReasonLeaseEnded}},
			Lifecycle{Running, HealthUnhealthy, ReasonLeaseEnded},
			nil,
		},
		{"contact lost", Lifecycle{Running, HealthHealthy, ""}, []MemberState{lost}, Lifecycle{Running, HealthUnknown, ReasonNodeUnreachable}, nil},
		{"contact lost to one of two", Lifecycle{Running, HealthHealthy, ""}, []MemberState{ready, lost}, Lifecycle{Running, HealthDegraded, ReasonNodeUnreachable}, nil},
		{"a failed one does not recover by itself", Lifecycle{Failed, HealthUnhealthy, ReasonCrashLoop}, []MemberState{ready}, Lifecycle{Failed, HealthUnhealthy, ReasonCrashLoop}, nil},
		{"decommissioning waits for the proof", live(Decommissioning), []MemberState{{Status: MemberRemoved}}, live(Decommissioning), nil},
		{"decommissioning waits for every proof", live(Decommissioning), []MemberState{gone, starting}, live(Decommissioning), nil},
		{"decommissioning without contact says so", live(Decommissioning), []MemberState{lost}, Lifecycle{Decommissioning, HealthUnknown, ReasonNodeUnreachable}, nil},
		{"proved", live(Decommissioning), []MemberState{gone, gone}, live(Decommissioned), []Step{{Decommissioning, Decommissioned, ""}}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			got, steps := Observe(c.from, c.members)
			require.Equal(t, c.want, got)
			require.Equal(t, c.steps, steps)
		})
	}
}

func TestDecommissionIsOpenInEveryLiveStateAndInNoOther(t *testing.T) {
	for _, s := range allStatuses() {
		l, step, err := Decommission(Lifecycle{Status: s, Health: HealthHealthy, Reason: ReasonCrashLoop})
		if s == Decommissioning || s == Decommissioned {
			require.ErrorContains(t, err, "instance_"+string(s))
			continue
		}
		require.NoError(t, err)
		require.Equal(t, Lifecycle{Status: Decommissioning, Health: HealthUnknown}, l)
		require.Equal(t, "apps.instance.decommission_requested", step.EventType())
	}
}

func drawMember(t *rapid.T) MemberState {
	return MemberState{
		Status: rapid.SampledFrom([]MemberStatus{
			"", MemberPending, MemberStarting, MemberReady, MemberDegraded, MemberFailed, MemberStopping, MemberStopped, MemberRemoved,
		}).Draw(t, "status"),
		Reason:      rapid.SampledFrom(append(Reasons(), "")).Draw(t, "reason"),
		Unreachable: rapid.Bool().Draw(t, "unreachable"),
		Gone:        rapid.Bool().Draw(t, "gone"),
	}
}

// Whatever nodes say in whatever order, an instance walks only along the edges of the design, its steps are a chain, looking
// twice changes nothing, and the end is reached only with every member proved gone.
func TestLifecycleStaysOnItsEdges(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := Lifecycle{Status: Requested, Health: HealthUnknown}
		for range rapid.IntRange(1, 30).Draw(t, "length") {
			if rapid.IntRange(0, 9).Draw(t, "ask") == 0 && l.Status.CanBecome(Decommissioning) {
				next, step, err := Decommission(l)
				require.NoError(t, err)
				require.Equal(t, l.Status, step.From)
				l = next
			}
			members := rapid.SliceOfN(rapid.Custom(drawMember), 1, 3).Draw(t, "members")
			next, steps := Observe(l, members)
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
			again, more := Observe(next, members)
			require.Equal(t, next, again)
			require.Empty(t, more)
			l = next
		}
	})
}

func TestReasonsAreAClosedList(t *testing.T) {
	require.Equal(t, ReasonInternal, knownReason("something a newer node says"))
	require.Equal(t, ReasonCrashLoop, knownReason("crash_loop"))
	require.Empty(t, knownReason(""))
}
