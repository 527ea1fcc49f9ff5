package plan_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/protocol"
)

// A revision and its fallback may have the same accelerators; no other member may have those of either.
func TestLaw14HoldsForTheFallbackToo(t *testing.T) {
	member := func(id string, now, before []string) plan.Member {
		m := plan.Member{
			ID: id, InstanceID: "instance", AllocationID: "allocation", OrgID: "org", OrgSlug: "acme", ProjectID: "project",
			AppSlug: "demo", AppVersion: "1.0.0", CorrelationID: "correlation", Revision: 2,
			ManifestEnvelope: signed("manifest"), DelegationEnvelope: signed("delegation"), ParametersJSON: "{}",
			Services: []*protocol.Service{service("app", 1000, 1<<30, now)},
		}
		if before != nil {
			back := m
			back.Revision, back.Services = 1, []*protocol.Service{service("app", 1000, 1<<30, before)}
			m.Fallback = &back
		}
		return m
	}
	for name, c := range map[string]struct {
		members []plan.Member
		rule    plan.Rule
	}{
		"one accelerator less": {[]plan.Member{member("a", []string{"GPU-1"}, []string{"GPU-1", "GPU-2"})}, ""},
		"another accelerator":  {[]plan.Member{member("a", []string{"GPU-1"}, []string{"GPU-2"})}, ""},
		"one of another member": {
			[]plan.Member{member("a", []string{"GPU-1"}, []string{"GPU-2"}), member("b", []string{"GPU-2"}, nil)},
			plan.RuleAcceleratorShared,
		},
		"one that another member goes back to": {
			[]plan.Member{member("a", []string{"GPU-1"}, []string{"GPU-2"}), member("b", []string{}, []string{"GPU-2"})},
			plan.RuleAcceleratorShared,
		},
		"one that is not claimed": {
			[]plan.Member{member("a", []string{"GPU-1"}, []string{"GPU-3"})}, plan.RuleAcceleratorUnclaimed,
		},
	} {
		t.Run(name, func(t *testing.T) {
			snap := plan.Snapshot{
				Node: plan.Node{ID: "node", AcceleratorIDs: []string{"GPU-1", "GPU-2", "GPU-3"}},
				Allocations: []plan.Allocation{{
					ID: "allocation", NodeID: "node", OrgID: "org", ProjectID: "project", CPUMillis: 8000, MemoryBytes: 8 << 30,
					AcceleratorIDs: []string{"GPU-1", "GPU-2"},
				}},
				Members: c.members,
			}
			state, err := plan.Compile(snap)
			require.NoError(t, err)
			err = plan.Check(snap, state)
			if c.rule == "" {
				require.NoError(t, err)
				return
			}
			var violations plan.Violations
			require.ErrorAs(t, err, &violations)
			require.Equal(t, c.rule, violations[0].Rule)
		})
	}
}
