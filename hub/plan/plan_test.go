package plan_test

import (
	"encoding/hex"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/protocol"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func TestCompileGivesEqualBytesForAnyOrderOfTheSnapshot(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		snap := validSnapshot(t)
		shuffled := snap
		shuffled.Members = rapid.Permutation(snap.Members).Draw(t, "members")
		shuffled.Allocations = rapid.Permutation(snap.Allocations).Draw(t, "allocations")

		first, err := plan.Compile(snap)
		require.NoError(t, err)
		second, err := plan.Compile(shuffled)
		require.NoError(t, err)

		require.Equal(t, first.Refs(), second.Refs())
		for i := range first.Parts {
			require.Equal(t, first.Parts[i].Bytes, second.Parts[i].Bytes)
		}
	})
}

func TestCheckPassesWhatCompileMakesOfAValidSnapshot(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		snap := validSnapshot(t)
		state, err := plan.Compile(snap)
		require.NoError(t, err)
		require.NoError(t, plan.Check(snap, state))
		require.Len(t, state.Parts, len(snap.Members))
		for i, ref := range state.Refs() {
			require.Equal(t, state.Parts[i].ID, ref.GetId())
			require.Equal(t, uint64(len(state.Parts[i].Bytes)), ref.GetSizeBytes())
		}
	})
}

func TestCompileDoesNotChangeTheSnapshot(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		snap := validSnapshot(t)
		before := make([]string, 0, len(snap.Members))
		for _, m := range snap.Members {
			before = append(before, fmt.Sprint(m.ID, m.Features))
		}
		_, err := plan.Compile(snap)
		require.NoError(t, err)
		for i, m := range snap.Members {
			require.Equal(t, before[i], fmt.Sprint(m.ID, m.Features))
		}
	})
}

func TestABannedNodeGetsAnEmptyState(t *testing.T) {
	snap := goldenSnapshot()
	snap.Node.Banned = true
	state, err := plan.Compile(snap)
	require.NoError(t, err)
	require.Empty(t, state.Parts)
	require.NoError(t, plan.Check(snap, state))
}

func TestCompileRefusesEnvelopeBytesThatAreNotOne(t *testing.T) {
	snap := goldenSnapshot()
	snap.Members[0].ManifestEnvelope = []byte{0xff, 0xff}
	_, err := plan.Compile(snap)
	require.ErrorContains(t, err, "manifest envelope")
}

// TestLaw14OneAcceleratorOneClaimOneMemberOneCopy: each way to break a valid snapshot is found, under its own name.
func TestLaw14OneAcceleratorOneClaimOneMemberOneCopy(t *testing.T) {
	cases := map[plan.Rule]func(*plan.Snapshot){
		plan.RuleAcceleratorClaims: func(s *plan.Snapshot) {
			s.Allocations[1].AcceleratorIDs = append(s.Allocations[1].AcceleratorIDs, s.Allocations[0].AcceleratorIDs[0])
		},
		plan.RuleAcceleratorShared: func(s *plan.Snapshot) {
			r := s.Members[1].Services[0].GetResources()
			r.AcceleratorIds = append(r.AcceleratorIds, s.Members[0].Services[0].GetResources().GetAcceleratorIds()[0])
		},
		plan.RuleAcceleratorOrgs: func(s *plan.Snapshot) {
			s.Allocations[1].OrgID = "another"
			s.Node.OneOrg = map[string]string{
				s.Allocations[0].AcceleratorIDs[0]: "GPU", s.Allocations[1].AcceleratorIDs[0]: "GPU",
			}
		},
		plan.RuleAcceleratorUnknown: func(s *plan.Snapshot) { s.Node.AcceleratorIDs = s.Node.AcceleratorIDs[1:] },
		plan.RuleAcceleratorUnclaimed: func(s *plan.Snapshot) {
			s.Members[0].Services[0].Resources.AcceleratorIds = []string{"GPU-03"}
		},
		plan.RuleVolumeUnknown: func(s *plan.Snapshot) {
			s.Members[0].Services[0].Volumes = []*protocol.VolumeMount{{Name: "data", Path: "/data", VolumeId: "v1"}}
		},
		plan.RuleVolumeForeign: func(s *plan.Snapshot) {
			s.Members[0].Services[0].Volumes = []*protocol.VolumeMount{{Name: "data", Path: "/data", VolumeId: "v1"}}
			s.Volumes = []*protocol.ProjectVolume{{Id: "v1", ProjectId: "another", SizeBytes: 1 << 30}}
		},
		plan.RuleAllocationFull:    func(s *plan.Snapshot) { s.Members[0].Services[0].Resources.CpuMillis = 8001 },
		plan.RuleAllocationUnknown: func(s *plan.Snapshot) { s.Members[0].AllocationID = "gone" },
		plan.RuleAllocationForeign: func(s *plan.Snapshot) { s.Members[0].ProjectID = "another" },
		plan.RuleDuplicateMember:   func(s *plan.Snapshot) { s.Members = append(s.Members, s.Members[0]) },
		plan.RuleWrongNode:         func(s *plan.Snapshot) { s.Allocations[0].NodeID = "node-2" },
		plan.RuleRevision:          func(s *plan.Snapshot) { s.Members[0].Revision = 0 },
		plan.RuleEnvelope:          func(s *plan.Snapshot) { s.Members[0].ManifestEnvelope = nil },
		plan.RuleServices:          func(s *plan.Snapshot) { s.Members[0].Services = nil },
		plan.RuleImageDigest:       func(s *plan.Snapshot) { s.Members[0].Services[0].Image = "apps/demo/runtime:latest" },
		plan.RuleSSHAccountShared: func(s *plan.Snapshot) {
			s.SSHKeys = []*protocol.SSHKey{sshKey("allocation-1", "project-1"), sshKey("allocation-2", "project-2")}
		},
		plan.RuleTooLarge: func(s *plan.Snapshot) { s.Members[0].ParametersJSON = strings.Repeat("x", 1<<20) },
	}
	for rule, spoil := range cases {
		t.Run(string(rule), func(t *testing.T) {
			snap := goldenSnapshot()
			spoil(&snap)
			state, err := plan.Compile(snap)
			require.NoError(t, err)
			var violations plan.Violations
			require.ErrorAs(t, plan.Check(snap, state), &violations)
			rules := make([]plan.Rule, 0, len(violations))
			for _, v := range violations {
				rules = append(rules, v.Rule)
			}
			require.Contains(t, rules, rule, violations.Error())
		})
	}
}

func TestAnImageThatIsMountedIsNamedByItsDigest(t *testing.T) {
	for image, fits := range map[string]bool{
		"apps/demo/weights@sha256:" + strings.Repeat("0", 64): true, "apps/demo/weights:latest": false, "": false,
	} {
		snap := goldenSnapshot()
		snap.Members[0].Services[0].ImageMounts = []*protocol.ImageMount{{Image: image, Path: "/models"}}
		state, err := plan.Compile(snap)
		require.NoError(t, err)
		if err = plan.Check(snap, state); fits {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, string(plan.RuleImageDigest), "%q", image)
		}
	}
}

// What the platform manages, and nothing else, runs in an allocation of the platform; a slice of a GPU that no hardware
// keeps apart from the others never goes to another org.
func TestOnlyWhatThePlatformManagesRunsInItsAllocations(t *testing.T) {
	for name, c := range map[string]struct {
		platform bool
		mode     string
		oneOrg   map[string]string
		broken   []plan.Rule
	}{
		"lent":              {platform: true, mode: "platform_managed"},
		"a tenant's":        {mode: "platform_managed", broken: []plan.Rule{plan.RuleAllocationForeign}},
		"operated by other": {platform: true, mode: "tenant_dedicated", broken: []plan.Rule{plan.RuleAllocationForeign}},
		"slice": {
			platform: true, mode: "platform_managed", oneOrg: map[string]string{"GPU-01": "GPU"},
			broken: []plan.Rule{plan.RuleAcceleratorOrgs},
		},
	} {
		snap := goldenSnapshot()
		snap.Node.OneOrg, snap.Allocations[0].Platform = c.oneOrg, c.platform
		m := &snap.Members[0]
		m.OrgID, m.ProjectID, m.OperatingMode = "org-3", "project-3", c.mode
		if m.Fallback != nil {
			m.Fallback.OrgID, m.Fallback.ProjectID, m.Fallback.OperatingMode = m.OrgID, m.ProjectID, m.OperatingMode
		}
		state, err := plan.Compile(snap)
		require.NoError(t, err, name)
		var violations plan.Violations
		if err := plan.Check(snap, state); err != nil {
			require.ErrorAs(t, err, &violations, name)
		}
		var rules []plan.Rule
		for _, v := range violations {
			rules = append(rules, v.Rule)
		}
		require.Equal(t, c.broken, rules, name)
	}
}

// A member that breaks a rule is left out of its node's state, or goes on with its last document; its neighbours have
// theirs.
func TestAMemberThatBreaksARuleKeepsNoNeighbourOutOfTheState(t *testing.T) {
	good, err := plan.Compile(goldenSnapshot())
	require.NoError(t, err)
	first := goldenSnapshot().Members[0].ID
	last := map[string][]byte{}
	for _, p := range good.Parts {
		last[p.ID] = p.Bytes
	}
	cases := map[plan.Rule]func(*plan.Member){
		plan.RuleTooLarge:             func(m *plan.Member) { m.ParametersJSON = strings.Repeat("x", 1<<20) },
		plan.RuleServices:             func(m *plan.Member) { m.Services = nil },
		plan.RuleAllocationFull:       func(m *plan.Member) { m.Services[0].Resources.CpuMillis = 8001 },
		plan.RuleAllocationUnknown:    func(m *plan.Member) { m.AllocationID = "gone" },
		plan.RuleAcceleratorUnclaimed: func(m *plan.Member) { m.Services[0].Resources.AcceleratorIds = []string{"GPU-03"} },
		"manifest envelope":           func(m *plan.Member) { m.ManifestEnvelope = []byte{0xff, 0xff} },
	}
	for rule, spoil := range cases {
		t.Run(string(rule), func(t *testing.T) {
			snap := goldenSnapshot()
			spoil(&snap.Members[0])
			state, left, err := plan.CompileEach(snap, nil)
			require.NoError(t, err)
			require.Len(t, left, 1)
			require.Equal(t, first, left[0].MemberID)
			require.ErrorContains(t, left[0].Cause, string(rule))
			require.False(t, left[0].Kept)
			require.Len(t, state.Parts, len(good.Parts)-1)

			state, left, err = plan.CompileEach(snap, last)
			require.NoError(t, err)
			require.True(t, left[0].Kept)
			require.Equal(t, good.Refs(), state.Refs(), "the very documents that the node has")

			snap.Members[0].Stopped = true
			state, _, err = plan.CompileEach(snap, last)
			require.NoError(t, err)
			for _, p := range state.Parts {
				require.Equal(t, p.ID == first, p.Workload.GetStopped() && !good.Parts[0].Workload.GetStopped(),
					"a stop takes effect in the last document, too")
			}
		})
	}
}

// A claim that nobody uses is no reason to refuse a node its state.
func TestADoubleClaimThatNoMemberUsesLeavesNobodyOut(t *testing.T) {
	snap := goldenSnapshot()
	snap.Allocations = append(snap.Allocations, plan.Allocation{
		ID: "z", NodeID: snap.Node.ID,
		AcceleratorIDs: snap.Allocations[0].AcceleratorIDs,
	})
	state, left, err := plan.CompileEach(snap, nil)
	require.NoError(t, err)
	require.Empty(t, left)
	require.Len(t, state.Parts, len(snap.Members))
}

func TestCheckFindsAStateThatIsNotTheSnapshots(t *testing.T) {
	cases := map[plan.Rule]func(*plan.NodeState){
		plan.RuleWrongNode:     func(s *plan.NodeState) { s.NodeID = "node-2" },
		plan.RuleMemberMissing: func(s *plan.NodeState) { s.Parts = s.Parts[1:] },
		plan.RuleMemberUnknown: func(s *plan.NodeState) { s.Parts[0].ID = "a-stranger" },
		plan.RuleOrder:         func(s *plan.NodeState) { s.Parts[0], s.Parts[1] = s.Parts[1], s.Parts[0] },
		plan.RuleBytes:         func(s *plan.NodeState) { s.Parts[0].Bytes[10] ^= 1 },
		plan.RuleTooLarge: func(s *plan.NodeState) {
			s.Parts[0].Bytes = append(s.Parts[0].Bytes, make([]byte, protocol.MaxWorkloadBytes)...)
		},
		plan.RuleFallback: func(s *plan.NodeState) {
			back := proto.CloneOf(s.Parts[0].Workload)
			back.Revision--
			back.OrgId = "another"
			s.Parts[0].Workload.Fallback = back
		},
	}
	for rule, spoil := range cases {
		t.Run(string(rule), func(t *testing.T) {
			snap := goldenSnapshot()
			state, err := plan.Compile(snap)
			require.NoError(t, err)
			spoil(&state)
			require.ErrorContains(t, plan.Check(snap, state), string(rule))
		})
	}
}

func TestMemoryThatOverflowsDoesNotFit(t *testing.T) {
	snap := goldenSnapshot()
	snap.Members[0].Services[0].Resources.MemoryBytes = 1<<64 - 1
	snap.Members[1].Services[0].Resources.MemoryBytes = 2
	state, err := plan.Compile(snap)
	require.NoError(t, err)
	require.ErrorContains(t, plan.Check(snap, state), string(plan.RuleAllocationFull))
}

// TestCompiledStateIsTheGoldenOne guards the bytes: other bytes for the same rows would make every node replace what it
// runs.
func TestCompiledStateIsTheGoldenOne(t *testing.T) {
	state, err := plan.Compile(goldenSnapshot())
	require.NoError(t, err)
	var got strings.Builder
	for _, p := range state.Parts {
		// protojson varies its white space on purpose; one space everywhere makes it comparable.
		text := strings.Join(strings.Fields(protojson.Format(p.Workload)), " ")
		fmt.Fprintf(&got, "%s\n%s\n%s\n", p.ID, hex.EncodeToString(p.SHA256[:]), text)
	}
	path := filepath.Join("testdata", "state.golden")
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(got.String()), 0o600))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), got.String())
}

func goldenSnapshot() plan.Snapshot {
	member := func(id string, accelerators ...string) plan.Member {
		return plan.Member{
			ID: id, InstanceID: "instance-" + id, AllocationID: "allocation-1", OrgID: "org-1", OrgSlug: "acme",
			ProjectID: "project-1",
			AppSlug:   "demo", AppVersion: "1.0.0", Revision: 1, CorrelationID: "correlation-1",
			ParametersJSON:   `{"greeting":"hello"}`,
			ManifestEnvelope: signed("manifest"), DelegationEnvelope: signed("delegation"), Features: []string{
				"logs", "exec",
				"logs",
			},
			ReadinessTimeout: 1500 * time.Millisecond,
			Services: []*protocol.Service{
				service("sidecar", 500, 1<<20, nil),
				proto.CloneOf(service("app", 1000, 1<<30, accelerators)),
			},
		}
	}
	s := plan.Snapshot{
		Node: plan.Node{ID: "node-1", AcceleratorIDs: []string{"GPU-00", "GPU-01", "GPU-02", "GPU-03"}},
		Allocations: []plan.Allocation{
			{
				ID: "allocation-1", NodeID: "node-1", OrgID: "org-1", ProjectID: "project-1", CPUMillis: 8000,
				MemoryBytes: 16 << 30, AcceleratorIDs: []string{"GPU-00", "GPU-01"},
			},
			{
				ID: "allocation-2", NodeID: "node-1", OrgID: "org-2", ProjectID: "project-2", CPUMillis: 8000,
				MemoryBytes: 16 << 30, AcceleratorIDs: []string{"GPU-02"},
			},
		},
		Members: []plan.Member{member("member-2", "GPU-01"), member("member-1", "GPU-00")},
	}
	// The cases above spoil the first service of a member; it is the one with the accelerator.
	for i := range s.Members {
		svc := s.Members[i].Services
		svc[0], svc[1] = svc[1], svc[0]
	}
	return s
}

func TestAServiceMayWaitForAnotherOneOfItsMemberOnly(t *testing.T) {
	for name, on := range map[string]string{"itself": "main", "none that there is": "gone"} {
		s := goldenSnapshot()
		s.Members[0].Services[0].Name = "main"
		s.Members[0].Services[0].DependsOn = []*protocol.Dependency{{Service: on}}
		state, err := plan.Compile(s)
		require.NoError(t, err)
		require.ErrorContains(t, plan.Check(s, state), string(plan.RuleServices), name)
	}
}

func sshKey(allocation, project string) *protocol.SSHKey {
	return &protocol.SSHKey{
		AllocationId: allocation, ProjectId: project, OrgSlug: "acme", ManagedBy: "operator", User: "ubuntu",
		PublicKey: []byte("key of " + project),
	}
}

// SSH keys are in the state in one order; those of a banned node, and all where one breaks a rule, are not. Members
// come and go all the same.
func TestSSHKeysOfAStateAreThoseOfItsAllocations(t *testing.T) {
	app := sshKey("allocation-1", "project-1")
	app.ManagedBy, app.User = "app", "svc"
	operator, other := sshKey("allocation-1", "project-1"), sshKey("allocation-2", "project-2")
	other.User = "other"
	for name, c := range map[string]struct {
		keys   []*protocol.SSHKey
		banned bool
		want   []*protocol.SSHKey
	}{
		"of both sets and two projects": {
			keys: []*protocol.SSHKey{other, operator, app},
			want: []*protocol.SSHKey{app, operator, other},
		},
		"a banned node":              {keys: []*protocol.SSHKey{operator}, banned: true},
		"an account of two projects": {keys: []*protocol.SSHKey{operator, sshKey("allocation-2", "project-2")}},
		"an allocation of another":   {keys: []*protocol.SSHKey{operator, sshKey("allocation-2", "project-1")}},
		"an allocation that is gone": {keys: []*protocol.SSHKey{operator, sshKey("gone", "project-1")}},
		"more than a state may have": {keys: slices.Repeat([]*protocol.SSHKey{operator}, protocol.MaxSSHKeys+1)},
	} {
		t.Run(name, func(t *testing.T) {
			s := goldenSnapshot()
			s.SSHKeys, s.Node.Banned = c.keys, c.banned
			state, _, err := plan.CompileEach(s, nil)
			require.NoError(t, err)
			require.Len(t, state.SSHKeys, len(c.want))
			for i, k := range c.want {
				require.True(t, proto.Equal(k, state.SSHKeys[i]), state.SSHKeys[i])
			}
			if !c.banned {
				require.Len(t, state.Parts, len(s.Members))
			}
		})
	}
	// A state that has lost one, or gained one, is not signed.
	s := goldenSnapshot()
	s.SSHKeys = []*protocol.SSHKey{operator}
	state, err := plan.Compile(s)
	require.NoError(t, err)
	state.SSHKeys = nil
	require.ErrorContains(t, plan.Check(s, state), string(plan.RuleSSHKeys))
	s.SSHKeys, state.SSHKeys = nil, []*protocol.SSHKey{operator}
	require.ErrorContains(t, plan.Check(s, state), string(plan.RuleSSHKeys))
}

func TestAPartOfTheLargestSizeIsSigned(t *testing.T) {
	for size, tooLarge := range map[int]bool{protocol.MaxWorkloadBytes: false, protocol.MaxWorkloadBytes + 1: true} {
		snap := goldenSnapshot()
		state, err := plan.Compile(snap)
		require.NoError(t, err)
		state.Parts[0].Bytes = make([]byte, size)
		text := plan.Check(snap, state).Error() // they are not the part's bytes
		require.Equal(t, tooLarge, strings.Contains(text, string(plan.RuleTooLarge)), "%d bytes", size)
	}
}

func TestANodeHasABoundedNumberOfVolumes(t *testing.T) {
	for number, tooMany := range map[int]bool{protocol.MaxVolumes: false, protocol.MaxVolumes + 1: true} {
		snap := goldenSnapshot()
		state, err := plan.Compile(snap)
		require.NoError(t, err)
		state.Volumes = make([]*protocol.ProjectVolume, number)
		for i := range state.Volumes {
			state.Volumes[i] = &protocol.ProjectVolume{Id: fmt.Sprint(i)}
		}
		text := plan.Check(snap, state).Error() // the snapshot has none of them
		require.Equal(t, tooMany, strings.Contains(text, string(plan.RuleTooMany)), "%d volumes", number)
	}
}

// The hub compiles both from the same rows; a node must never go back to something else.
func TestAFallbackIsAnEarlierRevisionOfTheSameMember(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(w, back *protocol.Workload)
		good  bool
	}{
		"an earlier revision": {func(_, _ *protocol.Workload) {}, true},
		"another member":      {func(_, back *protocol.Workload) { back.Id = "x" }, false},
		"another instance":    {func(_, back *protocol.Workload) { back.InstanceId = "x" }, false},
		"another allocation":  {func(_, back *protocol.Workload) { back.AllocationId = "x" }, false},
		"another org":         {func(_, back *protocol.Workload) { back.OrgId = "x" }, false},
		"another project":     {func(_, back *protocol.Workload) { back.ProjectId = "x" }, false},
		"another app":         {func(_, back *protocol.Workload) { back.AppSlug = "x" }, false},
		"the same revision":   {func(w, back *protocol.Workload) { back.Revision = w.GetRevision() }, false},
		"a later revision":    {func(w, back *protocol.Workload) { back.Revision = w.GetRevision() + 1 }, false},
		"a stopped fallback":  {func(_, back *protocol.Workload) { back.Stopped = true }, false},
		"of a stopped member": {func(w, _ *protocol.Workload) { w.Stopped = true }, false},
		"that has a fallback": {func(_, back *protocol.Workload) { back.Fallback = proto.CloneOf(back) }, false},
	} {
		snap := goldenSnapshot()
		state, err := plan.Compile(snap)
		require.NoError(t, err)
		w := state.Parts[0].Workload
		w.Revision, w.Stopped, w.Fallback = 7, false, nil
		back := proto.CloneOf(w)
		back.Revision = 6
		c.spoil(w, back)
		w.Fallback = back
		text := plan.Check(snap, state).Error() // they are not the part's bytes
		require.Equal(t, !c.good, strings.Contains(text, string(plan.RuleFallback)), name)
	}
}
