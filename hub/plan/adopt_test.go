package plan_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/protocol"
)

func doc(id string, revision uint64, stopped bool, accelerators ...string) *protocol.Workload {
	return &protocol.Workload{
		Id: id, AllocationId: "alloc-" + id, Revision: revision, Stopped: stopped,
		Services: []*protocol.Service{{Name: "app", Resources: &protocol.Resources{AcceleratorIds: accelerators}}},
	}
}

func TestLaw16ANewerStateWinsOverTheRestoredRows(t *testing.T) {
	rows := []plan.RecordedMember{
		{ID: "changed", Revision: 1, Desired: true},
		{ID: "ended", Revision: 1, Desired: true},
		{ID: "ending", Revision: 1},
		{ID: "gone", Revision: 1, Gone: true},
		{ID: "same", Revision: 2, Desired: true},
		{ID: "stopped", Revision: 1, Desired: true},
	}
	claims := []plan.RecordedClaim{{"gpu-0", "alloc-ended", "org"}, {"gpu-1", "alloc-same", "org"}}
	got := plan.Adopt(rows, claims, nil, plan.Upload{
		Newer: true, Named: []string{"changed", "made", "missing", "same", "stopped"},
		Workloads: []*protocol.Workload{
			doc("made", 1, false, "gpu-0"), doc("changed", 3, false),
			doc("same", 2, false, "gpu-1"), doc("stopped", 1, true),
		},
	})
	require.Equal(t, []string{"made"}, ids(got.Made))
	require.Equal(t, []string{"changed", "stopped"}, ids(got.Changed))
	require.Equal(t, []string{"ended"}, got.Ended)
	require.Equal(t, []string{"ended", "ending"}, got.Left)
	require.Equal(t, []plan.RecordedClaim{{"gpu-0", "alloc-ended", "org"}}, got.Superseded)
	require.Equal(t, []string{"missing"}, got.Missing)
}

// The newer state was signed when another org had a slice of the GPU: by then the claims of the org before had ended.
func TestLaw14ANewerStateGivesAGPUToOneOrg(t *testing.T) {
	oneOrg := map[string]string{
		"gpu-0-ts4-0": "gpu-0", "gpu-0-ts4-1": "gpu-0", "gpu-0-ts4-2": "gpu-0", "gpu-1-ts4-0": "gpu-1",
	}
	claims := []plan.RecordedClaim{
		{"gpu-0-ts4-0", "alloc-before", "before"},
		{"gpu-0-ts4-2", "alloc-idle", "now"},
		{"gpu-1-ts4-0", "alloc-before", "before"},
		{"gpu-2", "alloc-whole", "before"},
	}
	w := doc("made", 1, false, "gpu-0-ts4-1")
	w.OrgId = "now"
	b := plan.Upload{Newer: true, Named: []string{"made"}, Workloads: []*protocol.Workload{w}}
	require.Equal(t, claims[:1], plan.Adopt(nil, claims, oneOrg, b).Superseded)
	b.Newer = false
	require.Empty(t, plan.Adopt(nil, claims, oneOrg, b).Superseded)
}

// What was made before the backup and is in no state yet must not be taken for ended.
func TestLaw16AStateThatIsNotNewerEndsNothing(t *testing.T) {
	got := plan.Adopt([]plan.RecordedMember{{ID: "made", Desired: true}, {ID: "ending"}}, nil, nil, plan.Upload{})
	require.Equal(t, plan.Adoption{Left: []string{"ending"}}, got)
}

// Whatever the rows say: all that the node was to run is desired afterwards, unless its end was asked for before
// the backup.
func TestLaw16NothingThatRunsIsForgotten(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var rows []plan.RecordedMember
		var b plan.Upload
		b.Newer = true
		wanted := map[string]bool{}
		for i := range rapid.IntRange(0, 12).Draw(t, "members") {
			id := fmt.Sprintf("m%02d", i)
			if rapid.Bool().Draw(t, "known") {
				m := plan.RecordedMember{
					ID: id, Revision: rapid.Uint64Range(1, 4).Draw(t, "revision"),
					Desired: rapid.Bool().Draw(t,
						"wanted"),
				}
				rows = append(rows, m)
				wanted[id] = m.Desired
			}
			if rapid.Bool().Draw(t, "named") {
				b.Named = append(b.Named, id)
				b.Workloads = append(b.Workloads, doc(id, rapid.Uint64Range(1, 4).Draw(t, "running"),
					rapid.Bool().Draw(t, "stopped")))
			}
		}
		a := plan.Adopt(rows, nil, nil, b)
		for _, w := range a.Made {
			wanted[w.GetId()] = true
		}
		for _, id := range a.Ended {
			require.True(t, wanted[id])
			wanted[id] = false
		}
		for _, w := range b.Workloads {
			asked := false
			for _, m := range rows {
				asked = asked || m.ID == w.GetId() && !m.Desired
			}
			require.Equal(t, !asked, wanted[w.GetId()], "%s", w.GetId())
		}
	})
}

func ids(list []*protocol.Workload) []string {
	var out []string
	for _, w := range list {
		out = append(out, w.GetId())
	}
	return out
}
