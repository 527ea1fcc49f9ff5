package agent_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/protocol"
)

// site is an app of one service that starts first.
func site(revision uint64) agent.Workload {
	digest := "spec-of-revision-" + string(rune('0'+revision))
	return agent.Workload{
		MemberID: "web", InstanceID: "i-web", Revision: revision, ReadinessTimeout: time.Minute,
		Services: []agent.Service{{
			Name: "app", Images: []string{"org/acme/site/app@sha256:1"}, SpecDigest: digest, Copy: digest[len(digest)-1:],
			Spec: &protocol.Service{},
		}},
	}
}

func siteUpgrade(revision uint64) agent.Workload {
	w, back := site(revision), site(revision-1)
	w.Fallback = &back
	return w
}

// served is the container that the published ports of the app lead to; nil where there is none.
func (m *machine) served() *agent.Container {
	for i, c := range m.Containers {
		if c.Copy == m.leads && c.Status == agent.Running {
			return &m.Containers[i]
		}
	}
	return nil
}

func (m *machine) ready(revision uint64) {
	for i, c := range m.Containers {
		if c.Revision == revision && c.Status == agent.Running && c.ReadyAt.IsZero() {
			m.Containers[i].ReadyAt = m.now
		}
	}
}

// serving is a machine on which revision 1 of the site is ready.
func serving(t require.TestingT) *machine {
	m := newMachine()
	m.Images[site(1).Services[0].Images[0]] = true
	m.runToFixedPoint(t, desired(site(1)), week("web"))
	m.ready(1)
	m.runToFixedPoint(t, desired(site(1)), week("web"))
	require.Equal(t, uint64(1), m.served().Revision)
	return m
}

func statusOf(w agent.Workload, m *machine) *protocol.WorkloadStatus {
	return agent.Statuses(desired(w), week("web"), m.Observed, m.now)[0]
}

func TestAnUpgradeThatStartsFirstAlwaysServes(t *testing.T) {
	m := serving(t)
	old := m.served().ID
	w := siteUpgrade(2)
	m.runToFixedPoint(t, desired(w), week("web"))
	require.Len(t, m.Containers, 2)
	require.Equal(t, old, m.served().ID, "the ports stay until the new one is ready")
	require.Equal(t, protocol.WorkloadStatus_STARTING, statusOf(w, m).GetStatus())
	m.ready(2)

	var kinds []agent.Action
	for range 20 {
		actions := agent.Diff(desired(w), week("web"), m.Observed, m.now)
		for _, a := range actions {
			m.do(a)
			require.NotNil(t, m.served(), "nothing serves after %#v", a)
			require.False(t, m.served().ReadyAt.IsZero())
		}
		kinds = append(kinds, actions...)
	}
	require.Len(t, m.Containers, 1)
	require.Equal(t, uint64(2), m.served().Revision)
	require.Equal(t, protocol.WorkloadStatus_READY, statusOf(w, m).GetStatus())
	require.Len(t, m.Networks, 1)
	require.IsType(t, agent.PublishPorts{}, kinds[0])
	require.IsType(t, agent.ConfirmRevision{}, kinds[1])
	stop, is := kinds[2].(agent.StopContainer)
	require.True(t, is)
	require.True(t, stop.Drain)
	require.Equal(t, old, stop.ContainerID)
}

// The document of a newer state is on its way: what runs is reported as it is, whichever copy of its service it is.
func TestAnAppThatStartsFirstIsReadyWhileItsDocumentIsMissing(t *testing.T) {
	m := serving(t)
	on := agent.Desired{Missing: []agent.MissingPart{{MemberID: "web", SHA256: [32]byte{1}}}}
	s := agent.Statuses(on, week("web"), m.Observed, m.now)[0]
	require.Equal(t, protocol.WorkloadStatus_READY, s.GetStatus())
	require.NotNil(t, s.GetReadyAt())
	gone := m.Containers[0]
	gone.ID, gone.Copy, gone.Status, gone.StartedAt = "earlier", "0", agent.Exited, gone.StartedAt.Add(-time.Hour)
	m.Containers = append(m.Containers, gone)
	s = agent.Statuses(on, week("web"), m.Observed, m.now)[0]
	require.Equal(t, protocol.WorkloadStatus_READY, s.GetStatus(), "one that has ended is another copy")
}

func TestAnUpgradeThatIsNotReadyInTimeNeverStopsTheOldContainer(t *testing.T) {
	m := serving(t)
	old := *m.served()
	w := siteUpgrade(2)
	m.runToFixedPoint(t, desired(w), week("web"))
	m.now = m.now.Add(2 * time.Minute)
	m.runToFixedPoint(t, desired(w), week("web"))
	require.Equal(t, []agent.Container{old}, m.Containers)
	require.Equal(t, uint64(2), m.Members["web"].FellBackFrom)
	require.Len(t, m.Networks, 1)
	require.Equal(t, protocol.WorkloadStatus_READY, statusOf(w, m).GetStatus())
	require.Equal(t, uint64(2), statusOf(w, m).GetFallbackFromRevision())
}

func TestWhatIsSharedIsNeverGivenToTwoCopies(t *testing.T) {
	for name, share := range map[string]func(*agent.Service){
		"accelerator": func(s *agent.Service) { s.AcceleratorIDs = []string{"gpu0"} },
		"volume": func(s *agent.Service) {
			s.Spec = &protocol.Service{Volumes: []*protocol.VolumeMount{{Name: "data"}}}
		},
	} {
		for _, whose := range []string{"next", "fallback"} {
			t.Run(name+" of the "+whose, func(t *testing.T) {
				m := serving(t)
				w := siteUpgrade(2)
				if whose == "next" {
					share(&w.Services[0])
				} else {
					share(&w.Fallback.Services[0])
				}
				m.runToFixedPoint(t, desired(w), week("web"))
				require.Len(t, m.Containers, 1)
				require.Equal(t, uint64(2), m.Containers[0].Revision)
			})
		}
	}
}

func TestOfTwoCopiesTheOlderOneIsMetered(t *testing.T) {
	now := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	run := func(id, service string, age time.Duration, status agent.ContainerStatus) agent.Listed {
		return agent.Listed{ID: id, MemberID: "web", Service: service, Status: status, StartedAt: now.Add(-age)}
	}
	require.Equal(t, map[string]bool{"b": true}, agent.CopiesBeside([]agent.Listed{
		run("b", "app", time.Minute, agent.Running), run("a", "app", time.Hour, agent.Running),
		run("c", "app", 2*time.Hour, agent.Exited), run("d", "db", time.Minute, agent.Running),
	}))
}

// failAtRandom upgrades while, at random, what the agent was to record is lost, containers exit, time passes, and one
// of ready makes containers ready; check runs after each action. Then nothing fails any more, and the upgrade ends.
func (m *machine) failAtRandom(t *rapid.T, w agent.Workload, check func(), ready ...func()) {
	m.accept(desired(w))
	for range rapid.IntRange(1, 60).Draw(t, "passes") {
		for _, a := range agent.Diff(desired(w), week("web"), m.Observed, m.now) {
			m.crashing = rapid.IntRange(0, 4).Draw(t, "crash") == 0
			if _, publishes := a.(agent.PublishPorts); m.crashing && !publishes {
				break // the agent died before it
			}
			m.do(a)
			if m.crashing {
				break
			}
			check()
		}
		switch rapid.IntRange(0, 5).Draw(t, "event") {
		case 0, 1:
			rapid.SampledFrom(ready).Draw(t, "ready")()
		case 2:
			if len(m.Containers) == 0 {
				break
			}
			c := &m.Containers[rapid.IntRange(0, len(m.Containers)-1).Draw(t, "exits")]
			if c.Status == agent.Running {
				c.Status, c.ExitedAt, c.ReadyAt = agent.Exited, m.now, time.Time{}
			}
		case 3:
			m.now = m.now.Add(time.Duration(rapid.IntRange(1, 90).Draw(t, "seconds")) * time.Second)
		}
	}
	m.crashing = false
	for range 10 {
		m.now = m.now.Add(30 * time.Second)
		m.runToFixedPoint(t, desired(w), week("web"))
		m.ready(1)
		m.ready(2)
	}
	m.runToFixedPoint(t, desired(w), week("web"))
	require.Equal(t, protocol.WorkloadStatus_READY, statusOf(w, m).GetStatus())
}

func TestOneCopyServesWhateverFails(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := serving(t)
		m.failAtRandom(t, siteUpgrade(2), func() { require.LessOrEqual(t, len(m.Containers), 2) },
			func() { m.ready(2) }, func() { m.ready(1) })
		require.Len(t, m.Containers, 1)
		require.Len(t, m.Networks, 1)
		require.NotNil(t, m.served())
	})
}
