package agent_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/protocol"
)

var update = flag.Bool("update", false, "rewrite the golden files")

var noon = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)

// machine is the smallest thing that actions can be executed on.
type machine struct {
	agent.Observed
	now  time.Time
	runs int
}

func newMachine() *machine {
	return &machine{Observed: agent.Observed{Members: map[string]agent.Member{}, Images: map[string]bool{}}, now: noon}
}

// remember is what accepting a state and seeing a container do in the store.
func (m *machine) remember(id string) {
	if old, known := m.Members[id]; !known || old.Removal != nil {
		m.Members[id] = agent.Member{ID: id}
	}
}

func (m *machine) accept(d agent.Desired) {
	for _, w := range d.Workloads {
		m.remember(w.MemberID)
	}
	for _, p := range d.Missing {
		m.remember(p.MemberID)
	}
	for _, id := range m.KnownMembers() {
		if _, known := m.Members[id]; !known {
			m.remember(id)
		}
	}
}

func (m *machine) container(id string) *agent.Container {
	for i := range m.Containers {
		if m.Containers[i].ID == id {
			return &m.Containers[i]
		}
	}
	return nil
}

func (m *machine) do(a agent.Action) {
	switch a := a.(type) {
	case agent.ConfirmRevision:
		member := m.Members[a.MemberID]
		member.ConfirmedRevision = a.Revision
		m.Members[a.MemberID] = member
	case agent.FallBack:
		member := m.Members[a.MemberID]
		member.FellBackFrom, member.FallbackReason, member.FallbackDetail = a.Revision, a.Reason, a.Detail
		m.Members[a.MemberID] = member
	case agent.CancelPull:
		delete(m.Busy, a.MemberID)
	case agent.StopContainer:
		c := m.container(a.ContainerID)
		c.Status, c.ExitedAt = agent.Exited, m.now
	case agent.RecordExit:
		c := m.container(a.ContainerID)
		c.ExitRecorded = true
		if a.Unasked {
			m.Members[a.MemberID] = m.Members[a.MemberID].Failed(a.Revision, protocol.WorkloadStatus_CRASH_LOOP, "", false,
				c.ExitedAt.Sub(c.StartedAt), m.now)
		}
	case agent.RemoveContainer:
		m.Containers = slices.DeleteFunc(m.Containers, func(c agent.Container) bool { return c.ID == a.ContainerID })
	case agent.RemoveNetwork:
		m.Networks = slices.DeleteFunc(m.Networks, func(n agent.Network) bool { return n.MemberID == a.MemberID })
	case agent.RetireMember:
		member := m.Members[a.MemberID]
		member.Removal = &protocol.RemovalProof{}
		m.Members[a.MemberID] = member
	case agent.FetchPart:
	case agent.PullImage:
		m.Images[a.Image] = true
	case agent.SetupNetwork:
		m.Networks = slices.DeleteFunc(m.Networks, func(n agent.Network) bool { return n.MemberID == a.MemberID })
		m.Networks = append(m.Networks, agent.Network{MemberID: a.MemberID, Revision: a.Revision})
		for _, start := range a.Start {
			m.do(start)
		}
	case agent.StartContainer:
		m.runs++
		m.Containers = append(m.Containers, agent.Container{
			ID: fmt.Sprintf("c%d", m.runs), RunID: fmt.Sprintf("r%d", m.runs), MemberID: a.MemberID, Service: a.Service.Name,
			Revision: a.Revision, SpecDigest: a.Service.SpecDigest, Status: agent.Running, StartedAt: m.now,
			AcceleratorIDs: a.Service.AcceleratorIDs,
		})
	}
}

func workloads(t *rapid.T) []agent.Workload {
	ids := rapid.SliceOfDistinct(rapid.SampledFrom([]string{"m1", "m2", "m3", "m4"}), rapid.ID[string]).Draw(t, "members")
	gpus := []string{"gpu0", "gpu1", "gpu2"}
	var all []agent.Workload
	for _, id := range ids {
		w := agent.Workload{
			MemberID: id, InstanceID: "i-" + id, Revision: rapid.Uint64Range(1, 3).Draw(t, "revision"),
			Stopped: rapid.IntRange(0, 4).Draw(t, "stopped") == 0,
		}
		if rapid.IntRange(0, 6).Draw(t, "refused") == 0 {
			w.Refused = rapid.SampledFrom([]protocol.WorkloadStatus_Reason{
				protocol.WorkloadStatus_MANIFEST_NOT_ADMITTED,
				protocol.WorkloadStatus_OWNER_REFUSED,
			}).Draw(t, "reason")
		}
		for i := range rapid.IntRange(1, 2).Draw(t, "services") {
			s := agent.Service{Name: fmt.Sprintf("s%d", i), Image: rapid.SampledFrom([]string{"a@sha256:1", "b@sha256:2"}).Draw(
				t, "image")}
			// The hub never claims one accelerator twice; over time one moves from member to member.
			if len(gpus) > 0 && rapid.Bool().Draw(t, "gpu") {
				s.AcceleratorIDs, gpus = gpus[:1], gpus[1:]
			}
			s.SpecDigest = fmt.Sprintf("%s/%d/%v", s.Image, w.Revision, s.AcceleratorIDs)
			w.Services = append(w.Services, s)
		}
		if w.Revision > 1 && !w.Stopped && rapid.IntRange(0, 2).Draw(t, "fallback") == 0 {
			back := agent.Workload{MemberID: id, InstanceID: w.InstanceID, Revision: w.Revision - 1, CorrelationID: "before"}
			for _, s := range w.Services {
				s.SpecDigest += "/back"
				back.Services = append(back.Services, s)
			}
			w.Fallback = &back
		}
		all = append(all, w)
	}
	return all
}

func leases(t *rapid.T) agent.Leases {
	all := agent.Leases{}
	for _, id := range []string{"m1", "m2", "m3", "m4"} {
		all[id] = agent.Lease{
			MemberID: id, No: rapid.Uint64Range(0, 2).Draw(t, "lease_no"),
			ExpiresAt:    noon.Add(time.Duration(rapid.IntRange(-1, 50).Draw(t, "hours")) * time.Hour),
			Exhausted:    rapid.IntRange(0, 8).Draw(t, "exhausted") == 0,
			RunsUnbilled: rapid.IntRange(0, 8).Draw(t, "unbilled") == 0,
		}
	}
	return all
}

// mess is whatever a crash, an operator or an older state may have left.
func (m *machine) mess(t *rapid.T) {
	for range rapid.IntRange(0, 5).Draw(t, "leftovers") {
		m.runs++
		m.Containers = append(m.Containers, agent.Container{
			ID: fmt.Sprintf("c%d", m.runs), RunID: fmt.Sprintf("r%d", m.runs),
			MemberID: rapid.SampledFrom([]string{"", "m1", "m2", "m9"}).Draw(t, "member"),
			Service:  rapid.SampledFrom([]string{"s0", "s1", "s9"}).Draw(t, "service"),
			Revision: rapid.Uint64Range(0, 3).Draw(t, "revision"), SpecDigest: "whatever",
			Status: rapid.SampledFrom([]agent.ContainerStatus{
				agent.Created, agent.Running, agent.Exited,
				agent.Unknown,
			}).Draw(t, "status"),
			StartedAt:      noon.Add(-time.Duration(rapid.IntRange(0, 100).Draw(t, "minutes")) * time.Minute),
			AcceleratorIDs: rapid.SampledFrom([][]string{nil, {"gpu0"}, {"gpu1"}}).Draw(t, "gpus"),
		})
	}
	for _, id := range []string{"m1", "m3", "m8"} {
		if rapid.Bool().Draw(t, "network") {
			m.Networks = append(m.Networks, agent.Network{MemberID: id, Revision: rapid.Uint64Range(0, 3).Draw(t, "revision")})
		}
	}
}

func (m *machine) settle(t require.TestingT, d agent.Desired, l agent.Leases) {
	m.accept(d)
	for range 40 {
		actions := agent.Diff(d, l, m.Observed, m.now)
		checkOrder(t, actions)
		effective := 0
		for _, a := range actions {
			if _, waits := a.(agent.FetchPart); !waits {
				effective++
			}
			m.do(a)
			m.checkOneLiveCopy(t)
		}
		if effective == 0 {
			return
		}
	}
	require.Fail(t, "no fixed point after 40 passes")
}

func checkOrder(t require.TestingT, actions []agent.Action) {
	released := map[string]bool{}
	acquiring := false
	for _, a := range actions {
		if agent.Releases(a) {
			require.False(t, acquiring, "a release after an acquisition")
			released[agent.MemberOf(a)] = true
			continue
		}
		acquiring = true
		require.False(t, released[agent.MemberOf(a)], "a member gives and takes in one pass")
	}
}

func (m *machine) checkOneLiveCopy(t require.TestingT) {
	started := map[string]bool{}
	held := map[string]bool{}
	for _, c := range m.Containers {
		if c.SpecDigest == "whatever" {
			continue // left by the mess, not started by an action
		}
		key := c.MemberID + "/" + c.Service
		require.False(t, started[key], "two copies of %s", key)
		started[key] = true
		for _, gpu := range c.AcceleratorIDs {
			require.False(t, held[gpu], "%s given twice", gpu)
			held[gpu] = true
		}
	}
}

func TestDiffReachesAFixedPointThatIsWhatWasAskedFor(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newMachine()
		m.mess(t)
		var d agent.Desired
		var l agent.Leases
		for range rapid.IntRange(1, 4).Draw(t, "states") {
			d, l = agent.Desired{Workloads: workloads(t)}, leases(t)
			m.settle(t, d, l)
			m.now = m.now.Add(time.Hour)
		}
		m.settle(t, d, l)

		want := map[string]bool{}
		may := map[string]bool{}
		known := map[string]bool{}
		for _, signed := range d.Workloads {
			w := signed.Effective(m.Members[signed.MemberID])
			known[w.MemberID] = true
			if w.Stopped || w.Refused == protocol.WorkloadStatus_OWNER_REFUSED || !l[w.MemberID].Covers(m.now) {
				continue
			}
			for _, s := range w.Services {
				name := fmt.Sprintf("%s/%s/%d/%s", w.MemberID, s.Name, w.Revision, s.SpecDigest)
				may[name] = true
				if w.Refused == 0 {
					want[name] = true
				}
			}
		}
		have := map[string]bool{}
		for _, c := range m.Containers {
			require.Equal(t, agent.Running, c.Status)
			have[fmt.Sprintf("%s/%s/%d/%s", c.MemberID, c.Service, c.Revision, c.SpecDigest)] = true
		}
		require.Subset(t, have, want, "what is in the state and covered by a lease runs")
		require.Subset(t, may, have, "nothing else does, but for what was started before it was refused")
		for id, member := range m.Members {
			require.Equal(t, !known[id], member.Removal != nil, "member %s has its proof when it has left the state", id)
		}
		for _, n := range m.Networks {
			require.True(t, known[n.MemberID], "network of %s left behind", n.MemberID)
		}
		require.Empty(t, agent.Diff(d, l, m.Observed, m.now))
	})
}

// However late and in whatever portions actions are executed, there is never a second live copy.
func TestDiffNeverAsksForTwoLiveCopies(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newMachine()
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			d, l := agent.Desired{Workloads: workloads(t)}, leases(t)
			m.accept(d)
			for _, a := range agent.Diff(d, l, m.Observed, m.now) {
				if rapid.IntRange(0, 3).Draw(t, "executed") > 0 {
					m.do(a)
					m.checkOneLiveCopy(t)
				}
			}
			for i := range m.Containers {
				if m.Containers[i].Status == agent.Running && rapid.IntRange(0, 5).Draw(t, "dies") == 0 {
					m.Containers[i].Status, m.Containers[i].ExitedAt = agent.Exited, m.now
				}
			}
			m.now = m.now.Add(time.Duration(rapid.IntRange(0, 60).Draw(t, "seconds")) * time.Second)
		}
	})
}

func TestDiffDoesNotDependOnTheOrderOfItsInput(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newMachine()
		m.mess(t)
		d, l := agent.Desired{Workloads: workloads(t)}, leases(t)
		m.accept(d)
		first := agent.Diff(d, l, m.Observed, m.now)
		m.Containers = rapid.Permutation(m.Containers).Draw(t, "containers")
		d.Workloads = rapid.Permutation(d.Workloads).Draw(t, "workloads")
		require.Equal(t, first, agent.Diff(d, l, m.Observed, m.now))
	})
}

func web(revision uint64) agent.Workload {
	return agent.Workload{
		MemberID: "web", InstanceID: "i-web", Revision: revision, CorrelationID: "corr",
		Services: []agent.Service{{
			Name: "app", Image: "org/acme/web/app@sha256:1", SpecDigest: fmt.Sprint("spec", revision),
			StopGrace: 3 * time.Second,
		}},
	}
}

func running(w agent.Workload) agent.Container {
	return agent.Container{
		ID: "c1", RunID: "r1", MemberID: w.MemberID, InstanceID: w.InstanceID, Service: "app", Revision: w.Revision,
		SpecDigest: w.Services[0].SpecDigest, Status: agent.Running, StartedAt: noon.Add(-time.Hour),
		ReadyAt: noon.Add(-59 * time.Minute),
	}
}

func week(id string) agent.Leases {
	return agent.Leases{id: {MemberID: id, No: 1, ExpiresAt: noon.Add(7 * 24 * time.Hour)}}
}

// TestGoldenDiffs shows each decision as a file: the actions and the status for one situation.
func TestGoldenDiffs(t *testing.T) {
	w := web(2)
	member := map[string]agent.Member{"web": {ID: "web", InstanceID: "i-web"}}
	net := []agent.Network{{MemberID: "web", Revision: 2}}
	ready := agent.Observed{Containers: []agent.Container{running(w)}, Networks: net, Members: member}
	exited := running(w)
	exited.Status, exited.ExitedAt, exited.ExitCode, exited.ReadyAt = agent.Exited, noon, 1, time.Time{}
	recorded := exited
	recorded.ExitRecorded = true
	slow := running(w)
	slow.ReadyAt = time.Time{}
	failing := running(w)
	failing.Failing = true
	stopped, refused := w, w
	stopped.Stopped = true
	refused.Refused, refused.RefusedDetail = protocol.WorkloadStatus_MANIFEST_NOT_ADMITTED,
		"the image is not in the manifest"
	unwelcome := w
	unwelcome.Refused, unwelcome.RefusedDetail = protocol.WorkloadStatus_OWNER_REFUSED, "closed"
	failures := func(n int, reason protocol.WorkloadStatus_Reason) map[string]agent.Member {
		m := member["web"]
		for range n {
			m = m.Failed(2, reason, "exit code 1", false, time.Second, noon)
		}
		return map[string]agent.Member{"web": m}
	}
	next := web(3)
	next.Fallback = &w
	next.ReadinessTimeout = time.Minute
	late := running(next)
	late.ReadyAt = time.Time{}
	refusedNext := next
	refusedNext.Refused, refusedNext.RefusedDetail = protocol.WorkloadStatus_MANIFEST_NOT_ADMITTED,
		"the image is not in the manifest"
	refusedBare := refusedNext
	refusedBare.Fallback = nil
	net3 := []agent.Network{{MemberID: "web", Revision: 3}}
	failed3 := func(n int, reason protocol.WorkloadStatus_Reason) map[string]agent.Member {
		m := member["web"]
		for range n {
			m = m.Failed(3, reason, "exit code 1", false, time.Second, noon)
		}
		return map[string]agent.Member{"web": m}
	}
	fellBack := func(members map[string]agent.Member) map[string]agent.Member {
		m := members["web"]
		m.FellBackFrom, m.FallbackReason, m.FallbackDetail = 3, protocol.WorkloadStatus_READINESS_TIMEOUT,
			"not ready within 1m0s"
		return map[string]agent.Member{"web": m}
	}
	settled := func(members map[string]agent.Member) map[string]agent.Member {
		m := members["web"]
		m.ConfirmedRevision = 3
		return map[string]agent.Member{"web": m}
	}
	gone := member["web"].Failed(1, 0, "", false, 0, noon)
	gone.Removal = &protocol.RemovalProof{Absent: []string{"container"}}
	images := map[string]bool{"org/acme/web/app@sha256:1": true}
	wanted := agent.Desired{Workloads: []agent.Workload{w}}

	for name, c := range map[string]struct {
		desired  agent.Desired
		leases   agent.Leases
		observed agent.Observed
	}{
		"first start":                 {wanted, week("web"), agent.Observed{Members: member}},
		"only the network is missing": {wanted, week("web"), agent.Observed{Members: member, Images: images}},
		"image and network are there": {wanted, week("web"), agent.Observed{
			Members: member, Networks: net,
			Images: images,
		}},
		"ready": {wanted, week("web"), ready},
		"probe fails after ready": {wanted, week("web"), agent.Observed{
			Containers: []agent.Container{failing},
			Networks:   net, Members: member,
		}},
		"not ready in time": {wanted, week("web"), agent.Observed{
			Containers: []agent.Container{slow},
			Networks:   net, Members: member,
		}},
		"no lease yet": {wanted, nil, agent.Observed{Members: member}},
		"lease ended": {
			wanted,
			agent.Leases{"web": {MemberID: "web", No: 3, ExpiresAt: noon}},
			ready,
		},
		"lease ended and stopped": {
			wanted,
			agent.Leases{"web": {MemberID: "web", No: 3, ExpiresAt: noon}},
			agent.Observed{Members: member},
		},
		"lease spent": {
			wanted,
			agent.Leases{"web": {MemberID: "web", No: 3, ExpiresAt: noon.Add(time.Hour), Exhausted: true}},
			ready,
		},
		"stop": {agent.Desired{Workloads: []agent.Workload{stopped}}, week("web"), ready},
		"stopped": {
			agent.Desired{Workloads: []agent.Workload{stopped}},
			week("web"),
			agent.Observed{Members: member},
		},
		"refused while it runs": {agent.Desired{Workloads: []agent.Workload{refused}}, week("web"), ready},
		"refused while it runs and it ends": {
			agent.Desired{Workloads: []agent.Workload{refused}},
			week("web"),
			agent.Observed{Containers: []agent.Container{recorded}, Networks: net, Members: member},
		},
		"refused while it runs unleased": {agent.Desired{Workloads: []agent.Workload{refused}}, nil, ready},
		"refused by the owner":           {agent.Desired{Workloads: []agent.Workload{unwelcome}}, week("web"), ready},
		"refused": {
			agent.Desired{Workloads: []agent.Workload{refused}},
			week("web"),
			agent.Observed{Members: member},
		},
		"upgrade":                      {agent.Desired{Workloads: []agent.Workload{web(3)}}, week("web"), ready},
		"upgrade gets its image first": {agent.Desired{Workloads: []agent.Workload{next}}, week("web"), ready},
		"upgrade waits for its image": {
			agent.Desired{Workloads: []agent.Workload{next}},
			week("web"),
			agent.Observed{
				Containers: ready.Containers, Networks: net,
				Members: failed3(2, protocol.WorkloadStatus_IMAGE_PULL_FAILED),
			},
		},
		"upgrade with its image there": {
			agent.Desired{Workloads: []agent.Workload{next}},
			week("web"),
			agent.Observed{Containers: ready.Containers, Networks: net, Members: member, Images: images},
		},
		"upgrade ready": {
			agent.Desired{Workloads: []agent.Workload{next}},
			week("web"),
			agent.Observed{Containers: []agent.Container{running(next)}, Networks: net3, Members: member},
		},
		"upgrade never gets its image": {
			agent.Desired{Workloads: []agent.Workload{next}},
			week("web"),
			agent.Observed{Containers: ready.Containers, Networks: net, Members: failed3(agent.GiveUpAfter,
				protocol.WorkloadStatus_IMAGE_PULL_FAILED)},
		},
		"upgrade is not ready in time": {
			agent.Desired{Workloads: []agent.Workload{next}},
			week("web"),
			agent.Observed{Containers: []agent.Container{late}, Networks: net3, Members: member},
		},
		"upgrade crashes": {
			agent.Desired{Workloads: []agent.Workload{next}},
			week("web"),
			agent.Observed{
				Networks: net3, Members: failed3(agent.CrashLoopAfter, protocol.WorkloadStatus_CRASH_LOOP),
				Images: images,
			},
		},
		"upgrade is refused":                  {agent.Desired{Workloads: []agent.Workload{refusedNext}}, week("web"), ready},
		"upgrade without fallback is refused": {agent.Desired{Workloads: []agent.Workload{refusedBare}}, week("web"), ready},
		"upgrade settled and crashes": {
			agent.Desired{Workloads: []agent.Workload{next}},
			week("web"),
			agent.Observed{
				Networks: net3, Members: settled(failed3(agent.CrashLoopAfter, protocol.WorkloadStatus_CRASH_LOOP)),
				Images: images,
			},
		},
		"fallback the failed one ends": {
			agent.Desired{Workloads: []agent.Workload{next}},
			week("web"),
			agent.Observed{Containers: []agent.Container{late}, Networks: net3, Members: fellBack(member), Images: images},
		},
		"fallback network": {
			agent.Desired{Workloads: []agent.Workload{next}},
			week("web"),
			agent.Observed{Networks: net3, Members: fellBack(member), Images: images},
		},
		"fallback starts": {
			agent.Desired{Workloads: []agent.Workload{next}},
			week("web"),
			agent.Observed{Networks: net, Members: fellBack(member), Images: images},
		},
		"fallback runs": {
			agent.Desired{Workloads: []agent.Workload{next}},
			week("web"),
			agent.Observed{Containers: []agent.Container{running(w)}, Networks: net, Members: fellBack(member)},
		},
		"fallback fails too": {
			agent.Desired{Workloads: []agent.Workload{next}},
			week("web"),
			agent.Observed{
				Networks: net, Members: fellBack(failures(agent.CrashLoopAfter, protocol.WorkloadStatus_CRASH_LOOP)),
				Images: images,
			},
		},
		"fallback refused main": {
			agent.Desired{Workloads: []agent.Workload{refusedNext}},
			week("web"),
			agent.Observed{Containers: []agent.Container{running(w)}, Networks: net, Members: fellBack(member)},
		},
		"fallback lease ended": {
			agent.Desired{Workloads: []agent.Workload{next}},
			agent.Leases{"web": {MemberID: "web", No: 3, ExpiresAt: noon}},
			agent.Observed{
				Containers: []agent.Container{late},
				Networks:   net3, Members: member,
			},
		},
		"upgrade network": {
			agent.Desired{Workloads: []agent.Workload{web(3)}},
			week("web"),
			agent.Observed{Networks: net, Members: member, Images: images},
		},
		"document missing": {
			agent.Desired{Missing: []agent.MissingPart{{MemberID: "web", SHA256: [32]byte{1}}}}, week("web"), ready,
		},
		"exited": {wanted, week("web"), agent.Observed{
			Containers: []agent.Container{exited},
			Networks:   net, Members: member,
		}},
		"exit recorded": {wanted, week("web"), agent.Observed{
			Containers: []agent.Container{recorded},
			Networks:   net, Members: failures(1, protocol.WorkloadStatus_CRASH_LOOP),
		}},
		"pause before restart": {wanted, week("web"), agent.Observed{
			Networks: net,
			Members:  failures(2, protocol.WorkloadStatus_CRASH_LOOP), Images: images,
		}},
		"crash loop": {wanted, week("web"), agent.Observed{
			Networks: net,
			Members:  failures(5, protocol.WorkloadStatus_CRASH_LOOP), Images: images,
		}},
		"image pull failed": {wanted, week("web"), agent.Observed{
			Networks: net,
			Members:  failures(1, protocol.WorkloadStatus_IMAGE_PULL_FAILED),
		}},
		"decommission": {agent.Desired{}, nil, ready},
		"decommission exited": {agent.Desired{}, nil, agent.Observed{
			Containers: []agent.Container{recorded},
			Networks:   net, Members: member,
		}},
		"decommission network":      {agent.Desired{}, nil, agent.Observed{Networks: net, Members: member}},
		"decommission nothing left": {agent.Desired{}, nil, agent.Observed{Members: member}},
		"decommissioned": {
			agent.Desired{},
			nil,
			agent.Observed{Members: map[string]agent.Member{"web": gone}},
		},
		"decommission during the pull": {agent.Desired{}, nil, agent.Observed{
			Members: member,
			Busy:    map[string]agent.Work{"web": {Pulling: true}},
		}},
		"busy": {agent.Desired{}, nil, agent.Observed{
			Members: member,
			Busy:    map[string]agent.Work{"web": {Other: true}},
		}},
		"accelerator still held": {
			agent.Desired{Workloads: []agent.Workload{{
				MemberID: "next", Revision: 1,
				Services: []agent.Service{{Name: "app", Image: "i", AcceleratorIDs: []string{"gpu0"}}},
			}}},
			week("next"),
			agent.Observed{
				Containers: []agent.Container{{
					ID: "c0", MemberID: "old", Service: "app", Status: agent.Running,
					AcceleratorIDs: []string{"gpu0"}, StartedAt: noon,
				}},
				Networks: []agent.Network{{MemberID: "next", Revision: 1}}, Members: map[string]agent.Member{
					"next": {ID: "next"},
				}, Images: map[string]bool{"i": true},
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			type step struct {
				Action string
				On     agent.Action
			}
			var out struct {
				Actions  []step
				Statuses []*protocol.WorkloadStatus
				Next     time.Time `json:"Next,omitzero"`
			}
			for _, a := range agent.Diff(c.desired, c.leases, c.observed, noon) {
				out.Actions = append(out.Actions, step{fmt.Sprintf("%T", a), a})
			}
			out.Statuses = agent.Statuses(c.desired, c.leases, c.observed, noon)
			out.Next = agent.NextChange(c.desired, c.leases, c.observed, noon)
			got, err := json.MarshalIndent(out, "", "  ")
			require.NoError(t, err)
			path := filepath.Join("testdata", filepath.Base(t.Name())+".golden.json")
			if *update {
				require.NoError(t, os.WriteFile(path, append(got, '\n'), 0o600))
			}
			golden, err := os.ReadFile(path)
			require.NoError(t, err, "run with -update to write it")
			require.JSONEq(t, string(golden), string(got))
		})
	}
}

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
			Networks: []agent.Network{{MemberID: "web", Revision: 2}},
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

// Whatever happens to an upgrade, and in whatever portions it is executed: the node goes back only from a revision that
// was never ready, it goes back for good, and a revision that was ready once is never left by itself.
func TestANodeGoesBackOnceAndOnlyFromWhatWasNeverReady(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newMachine()
		old := web(2)
		next := web(3)
		next.Fallback, next.ReadinessTimeout = &old, time.Minute
		next.Services[0].Image = "other@sha256:2"
		leases := week("web")
		m.accept(agent.Desired{Workloads: []agent.Workload{old}})
		d := agent.Desired{Workloads: []agent.Workload{next}}
		wasReady := false
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			before := m.Members["web"]
			for _, a := range agent.Diff(d, leases, m.Observed, m.now) {
				if rapid.IntRange(0, 3).Draw(t, "executed") == 0 {
					continue
				}
				if _, pull := a.(agent.PullImage); pull && rapid.Bool().Draw(t, "pull fails") {
					m.Members["web"] = m.Members["web"].Failed(a.(agent.PullImage).Revision, protocol.WorkloadStatus_IMAGE_PULL_FAILED,
						"", false, 0,
						m.now)
					continue
				}
				if _, back := a.(agent.FallBack); back {
					require.False(t, wasReady, "a revision that was ready is left by itself")
				}
				m.do(a)
				m.checkOneLiveCopy(t)
			}
			after := m.Members["web"]
			if before.FellBackFrom != 0 {
				require.Equal(t, before.FellBackFrom, after.FellBackFrom, "it goes back for good")
			}
			require.False(t, after.FellBackFrom == 3 && after.ConfirmedRevision == 3, "both at once")
			for _, s := range agent.Statuses(d, leases, m.Observed, m.now) {
				if s.GetFallbackFromRevision() == 0 {
					require.False(t, s.GetStatus() == protocol.WorkloadStatus_FAILED && after.ConfirmedRevision != 3,
						"the hub would end what has something to go back to")
					continue
				}
				require.EqualValues(t, 3, s.GetFallbackFromRevision())
				require.EqualValues(t, 2, s.GetRevision())
				require.NotEmpty(t, s.GetReason(), "it says why")
			}
			for i := range m.Containers {
				c := &m.Containers[i]
				if c.Status != agent.Running {
					continue
				}
				switch rapid.IntRange(0, 5).Draw(t, "fate") {
				case 0:
					c.Status, c.ExitedAt = agent.Exited, m.now
				case 1:
					c.ReadyAt = m.now
				}
			}
			wasReady = m.Members["web"].ConfirmedRevision == 3
			m.now = m.now.Add(time.Duration(rapid.IntRange(0, 40).Draw(t, "seconds")) * time.Second)
		}
	})
}
