package plan_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/protocol"
)

// Of members that only together break a rule the older goes first, and nothing else is left out.
func TestOfMembersThatTogetherBreakARuleTheOlderStays(t *testing.T) {
	for rule, spoil := range map[plan.Rule]func(*plan.Snapshot){
		plan.RuleAcceleratorShared: func(s *plan.Snapshot) {
			older, younger := s.Members[1].Services[0].GetResources(), s.Members[0].Services[0].GetResources()
			younger.AcceleratorIds = older.GetAcceleratorIds()
		},
		plan.RuleHostPortShared: func(s *plan.Snapshot) {
			for _, m := range s.Members {
				m.Services[0].Ports = []*protocol.Port{{Name: "http", ContainerPort: 80, HostPort: 30001}}
			}
		},
		plan.RuleDuplicateMember: func(s *plan.Snapshot) { s.Members = append(s.Members, s.Members[0]) },
		plan.RuleAllocationFull: func(s *plan.Snapshot) {
			for _, m := range s.Members {
				m.Services[0].Resources.CpuMillis = 5000
			}
		},
	} {
		t.Run(string(rule), func(t *testing.T) {
			snap := goldenSnapshot()
			require.Less(t, snap.Members[1].ID, snap.Members[0].ID)
			spoil(&snap)
			state, left, err := plan.CompileEach(snap, nil)
			require.NoError(t, err)
			require.Len(t, left, 1)
			require.Equal(t, "member-2", left[0].MemberID)
			require.ErrorContains(t, left[0].Cause, string(rule))
			require.Len(t, state.Parts, len(snap.Members)-1)
			require.Equal(t, "member-1", state.Parts[0].ID)
		})
	}
}

// A member that goes on with its last document has no way back from a stop, also where it was stopped in an upgrade.
func TestAStopReachesAMemberWhoseUpgradeCannotGoOn(t *testing.T) {
	snap := goldenSnapshot()
	m := &snap.Members[0]
	m.Stopped = false
	back := *m
	back.Revision, m.Revision = 1, 2
	m.Fallback = &back
	good, err := plan.Compile(snap)
	require.NoError(t, err)
	last := map[string][]byte{}
	for _, p := range good.Parts {
		last[p.ID] = p.Bytes
	}
	m.Services, m.Fallback, m.Stopped = nil, nil, true
	state, left, err := plan.CompileEach(snap, last)
	require.NoError(t, err)
	require.Len(t, left, 1)
	require.True(t, left[0].Kept)
	require.Len(t, state.Parts, len(good.Parts))
	for _, p := range state.Parts {
		require.Equal(t, p.ID == m.ID, p.Workload.GetStopped())
	}
}

// A node has its state however many members its rows give it: those beyond the most are left out.
func TestMembersBeyondTheMostAreLeftOut(t *testing.T) {
	snap := goldenSnapshot()
	model := snap.Members[0]
	snap.Members = nil
	for n := range protocol.MaxParts + 2 {
		m := model
		m.ID = fmt.Sprintf("member-%05d", n)
		m.Services = []*protocol.Service{service("app", 1, 1<<20, nil)}
		snap.Members = append(snap.Members, m)
	}
	state, left, err := plan.CompileEach(snap, nil)
	require.NoError(t, err)
	require.Len(t, state.Parts, protocol.MaxParts)
	require.Len(t, left, 2)
	for n, l := range left {
		require.Equal(t, fmt.Sprintf("member-%05d", protocol.MaxParts+n), l.MemberID)
		require.ErrorContains(t, l.Cause, string(plan.RuleTooMany))
	}
}
