package agent_test

import (
	"fmt"
	"slices"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/protocol"
)

var noon = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)

// machine executes actions in memory.
type machine struct {
	agent.Observed
	now  time.Time
	runs int
	// asked are the containers whose exit the agent asked for.
	asked map[string]bool
	// leads is the copy that the published ports of the last service lead to. While crashing, that is not recorded.
	leads    string
	crashing bool
}

func newMachine() *machine {
	return &machine{
		Observed: agent.Observed{Members: map[string]agent.Member{}, Images: map[string]bool{}}, now: noon,
		asked: map[string]bool{},
	}
}

// remember adds a member, as the store does when it accepts a state or lists a container.
func (m *machine) remember(id string) {
	if old, known := m.Members[id]; !known || old.Removal != nil {
		m.Members[id] = agent.Member{ID: id}
	}
}

func (m *machine) rememberUnknown(id string) {
	if _, known := m.Members[id]; !known {
		m.remember(id)
	}
}

func (m *machine) accept(d agent.Desired) {
	for _, w := range d.Workloads {
		m.remember(w.MemberID)
	}
	for _, p := range d.Missing {
		m.remember(p.MemberID)
	}
	for _, c := range m.Containers {
		m.rememberUnknown(c.MemberID)
	}
	for _, n := range m.Networks {
		m.rememberUnknown(n.MemberID)
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
		c.Status, c.ExitedAt, c.ExitCode = agent.Exited, m.now, 143
		run := agent.Run{}
		a.RecordIntent(&run)
		m.asked[c.ID] = run.StopRequested
	case agent.RecordExit:
		c, member := m.container(a.ContainerID), m.Members[a.MemberID]
		run := agent.Run{StartedAt: c.StartedAt, ReadyAt: c.ReadyAt, StopRequested: m.asked[c.ID]}
		if c.NotAlive {
			run.NotAlive = "no answer"
		}
		a.RecordMember(&member, run, agent.Listed{ExitCode: c.ExitCode}, c.ExitedAt, m.now)
		m.Members[a.MemberID], c.ExitRecorded = member, true
	case agent.RemoveContainer:
		m.Containers = slices.DeleteFunc(m.Containers, func(c agent.Container) bool { return c.ID == a.ContainerID })
	case agent.RemoveNetwork:
		m.Networks = slices.DeleteFunc(m.Networks, func(n agent.Network) bool {
			return n.MemberID == a.MemberID && n.Service == a.Service && n.Copy == a.Copy
		})
		member := m.Members[a.MemberID]
		a.Record(&member)
		m.Members[a.MemberID] = member
	case agent.RetireMember:
		member := m.Members[a.MemberID]
		member.Removal = &protocol.RemovalProof{}
		m.Members[a.MemberID] = member
	case agent.FetchPart:
	case agent.PullImage:
		m.Images[a.Image] = true
	case agent.SetupNetwork:
		m.setupNetwork(a)
	case agent.StartContainer:
		m.runs++
		m.Containers = append(m.Containers, agent.Container{
			ID: fmt.Sprintf("c%d", m.runs), MemberID: a.MemberID, Service: a.Service.Name, Copy: a.Service.Copy,
			Revision: a.Revision, SpecDigest: a.Service.SpecDigest, Status: agent.Running, StartedAt: m.now,
			AcceleratorIDs: a.Service.AcceleratorIDs, ConfigSHA256: a.Service.ConfigSHA256,
			SecretsSHA256: a.Service.SecretsSHA256,
			DependsOn:     namesOf(a.Service.DependsOn), Restart: a.Service.Spec.GetRestartPolicy(),
		})
	case agent.PublishPorts:
		m.publishPorts(a)
	case agent.DeliverConfig:
		m.container(a.ContainerID).ConfigSHA256 = a.Service.ConfigSHA256
	case agent.DeliverSecrets:
		m.container(a.ContainerID).SecretsSHA256 = a.Service.SecretsSHA256
	}
}

func (m *machine) setupNetwork(a agent.SetupNetwork) {
	m.Networks = slices.DeleteFunc(m.Networks, func(n agent.Network) bool {
		return n.MemberID == a.MemberID && slices.Contains(a.Services, n.Service) &&
			agent.Service{Name: n.Service, Copy: n.Copy}.Attachment() == a.Attachment(n.Service)
	})
	member := m.Members[a.MemberID]
	a.RecordIntent(&member)
	a.Record(&member)
	m.Members[a.MemberID] = member
	if len(a.Unpublished) == 0 {
		m.leads = a.Workload.Services[0].Copy
	}
	for _, service := range a.Services {
		m.Networks = append(m.Networks, member.Network(a.Attachment(service)))
	}
	for _, start := range a.Start {
		m.do(start)
	}
}

func (m *machine) publishPorts(a agent.PublishPorts) {
	member := m.Members[a.MemberID]
	a.RecordIntent(&member)
	m.Members[a.MemberID] = member
	m.leads = a.Service.Copy
	if !m.crashing {
		a.Record(&member)
		m.Members[a.MemberID] = member
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
			s := agent.Service{Name: fmt.Sprintf("s%d", i), Images: rapid.SliceOfNDistinct(
				rapid.SampledFrom([]string{"a@sha256:1", "b@sha256:2"}), 1, 2, rapid.ID).Draw(t, "images")}
			// The hub never claims one accelerator twice; over time one moves from member to member.
			if len(gpus) > 0 && rapid.Bool().Draw(t, "gpu") {
				s.AcceleratorIDs, gpus = gpus[:1], gpus[1:]
			}
			s.SpecDigest = fmt.Sprintf("%s/%d/%v", s.Images, w.Revision, s.AcceleratorIDs)
			s.ConfigSHA256 = rapid.SampledFrom([]string{"", "0a", "0b"}).Draw(t, "config")
			s.SecretsSHA256 = rapid.SampledFrom([]string{"", "0a", "0b"}).Draw(t, "secrets")
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

// addLeftovers adds what a crash, an operator or an older state may have left.
func (m *machine) addLeftovers(t *rapid.T) {
	for range rapid.IntRange(0, 5).Draw(t, "leftovers") {
		m.runs++
		m.Containers = append(m.Containers, agent.Container{
			ID:       fmt.Sprintf("c%d", m.runs),
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
			m.Networks = append(m.Networks, agent.Network{
				MemberID: id, Service: rapid.SampledFrom([]string{"s0", "s1", "s9"}).Draw(t, "attached"),
				PortsDigest: rapid.SampledFrom([]string{"", "80"}).Draw(t, "ports"), Ready: rapid.Bool().Draw(t, "ready"),
			})
		}
	}
}

// runToFixedPoint executes actions until Diff returns none but fetches.
func (m *machine) runToFixedPoint(t require.TestingT, d agent.Desired, l agent.Leases) {
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
	inUse := map[string]bool{}
	for _, c := range m.Containers {
		if c.SpecDigest == "whatever" {
			continue // a leftover, not started by an action
		}
		key := c.MemberID + "/" + c.Service + "/" + c.Copy
		require.False(t, started[key], "two copies of %s", key)
		started[key] = true
		for _, gpu := range c.AcceleratorIDs {
			require.False(t, inUse[gpu], "%s given twice", gpu)
			inUse[gpu] = true
		}
	}
}

func namesOf(dependencies []agent.Dependency) []string {
	var names []string
	for _, d := range dependencies {
		names = append(names, d.Service)
	}
	return names
}
