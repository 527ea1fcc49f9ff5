package agent_test

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/protocol"
)

// mall is an app of several services: a proxy before the web servers, and a database with a volume, which stays as it
// is. Revision 1 has a cache, revision 2 a queue.
func mall(revision uint64) agent.Workload {
	digit := string(rune('0' + revision))
	service := func(name, of string, dependsOn ...string) agent.Service {
		s := agent.Service{
			Name: name, Images: []string{"image"}, SpecDigest: name + of, Copy: of, Spec: &protocol.Service{},
		}
		for _, on := range dependsOn {
			s.DependsOn = append(s.DependsOn, agent.Dependency{
				Service: on, Condition: protocol.Dependency_SERVICE_HEALTHY,
			})
		}
		return s
	}
	db := service("db", "")
	db.Spec.Volumes = []*protocol.VolumeMount{{Name: "data"}}
	w := agent.Workload{
		MemberID: "web", InstanceID: "i-web", Revision: revision, ReadinessTimeout: time.Minute,
		Services: []agent.Service{service("proxy", digit, "web"), service("web", digit, "db"), db},
	}
	if revision == 1 {
		w.Services = append(w.Services, service("cache", "1"))
	} else {
		w.Services = append(w.Services, service("queue", digit))
	}
	return w
}

func mallUpgrade() agent.Workload {
	w, back := mall(2), mall(1)
	w.Fallback = &back
	return w
}

// become makes the running containers of a service ready.
func (m *machine) become(service string, revision uint64) {
	for i, c := range m.Containers {
		if c.Service == service && c.Revision == revision && c.Status == agent.Running && c.ReadyAt.IsZero() {
			m.Containers[i].ReadyAt = m.now
		}
	}
}

// open is a machine on which revision 1 of the mall is ready.
func open(t require.TestingT) *machine {
	m := newMachine()
	m.Images["image"] = true
	for range 4 {
		m.runToFixedPoint(t, desired(mall(1)), week("web"))
		m.ready(1)
	}
	m.runToFixedPoint(t, desired(mall(1)), week("web"))
	require.Equal(t, protocol.WorkloadStatus_READY, statusOf(mall(1), m).GetStatus())
	return m
}

// running are the ids of the running containers of a service.
func (m *machine) running(service string) (ids []string) {
	for _, c := range m.Containers {
		if c.Service == service && c.Status == agent.Running {
			ids = append(ids, c.ID)
		}
	}
	return ids
}

// requireServed requires that the ports of a service lead to a container that is ready.
func (m *machine) requireServed(t require.TestingT, service string) {
	to := m.Members["web"].Services[service].Published
	require.True(t, slices.ContainsFunc(m.Containers, func(c agent.Container) bool {
		return c.Service == service && c.Copy == to && c.Status == agent.Running && !c.ReadyAt.IsZero()
	}), "nothing serves as %s", service)
}

func TestAnUpgradeOfSeveralServicesStartsThoseThatDifferBesideTheOthers(t *testing.T) {
	m, w := open(t), mallUpgrade()
	db, proxy, web := m.running("db"), m.running("proxy"), m.running("web")
	upgrade := func() {
		for range 30 {
			for _, a := range agent.Diff(desired(w), week("web"), m.Observed, m.now) {
				m.do(a)
				m.requireServed(t, "proxy")
				m.requireServed(t, "web")
				require.Equal(t, db, m.running("db"), "what is as before goes on")
			}
		}
	}
	upgrade()
	require.Len(t, m.running("web"), 2)
	require.Equal(t, proxy, m.running("proxy"), "it waits for the web servers of its own")
	m.become("web", 2)
	m.become("queue", 2)
	upgrade()
	require.Len(t, m.running("proxy"), 2)
	require.Len(t, m.running("cache"), 1, "the old ones may need it")
	require.Equal(t, "1", m.Members["web"].Services["web"].Published, "the ports move when all are ready")
	require.Empty(t, m.Members["web"].Services["queue"].Published)
	require.Equal(t, protocol.WorkloadStatus_STARTING, statusOf(w, m).GetStatus())

	m.become("proxy", 2)
	upgrade()
	require.Len(t, m.Containers, 4)
	require.NotEqual(t, web, m.running("web"))
	require.Equal(t, "2", m.Members["web"].Services["queue"].Published)
	require.Equal(t, protocol.WorkloadStatus_READY, statusOf(w, m).GetStatus())
	require.Len(t, m.Networks, 4)
}

func TestAnUpgradeOfSeveralServicesThatFailsLeavesAllThatServed(t *testing.T) {
	m, w := open(t), mallUpgrade()
	before := slices.Clone(m.Containers)
	m.runToFixedPoint(t, desired(w), week("web"))
	m.become("web", 2)
	m.runToFixedPoint(t, desired(w), week("web"))
	m.now = m.now.Add(2 * time.Minute) // the proxy never becomes ready
	m.runToFixedPoint(t, desired(w), week("web"))
	require.Equal(t, uint64(2), m.Members["web"].FellBackFrom)
	require.Equal(t, before, m.Containers)
	require.Len(t, m.Networks, 4)
	require.Equal(t, protocol.WorkloadStatus_READY, statusOf(w, m).GetStatus())
}

func TestServicesWithoutRoomForTwoCopiesAreRecreated(t *testing.T) {
	m, w := open(t), mallUpgrade()
	for i := range w.Services {
		w.Services[i].Recreate = w.Services[i].Copy != ""
	}
	db := m.running("db")
	for range 30 {
		for _, a := range agent.Diff(desired(w), week("web"), m.Observed, m.now) {
			m.do(a)
			require.LessOrEqual(t, len(m.running("web")), 1)
			require.Equal(t, db, m.running("db"))
		}
		m.ready(2)
	}
	require.Len(t, m.Containers, 4)
	require.Equal(t, protocol.WorkloadStatus_READY, statusOf(w, m).GetStatus())
}

func TestARollbackThatIsNotReadyNeverReturns(t *testing.T) {
	m, w := open(t), mallUpgrade()
	w.RollsBack = true
	m.runToFixedPoint(t, desired(w), week("web"))
	m.now = m.now.Add(2 * time.Minute)
	m.runToFixedPoint(t, desired(w), week("web"))
	require.Zero(t, m.Members["web"].FellBackFrom)
	require.Equal(t, protocol.WorkloadStatus_FAILED, statusOf(w, m).GetStatus())
	m.requireServed(t, "proxy")
	w.Fallback = nil // the hub has read it
	m.runToFixedPoint(t, desired(w), week("web"))
	require.Len(t, m.running("web"), 1)
}

func TestServicesSettleWhateverFails(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := open(t)
		m.failAtRandom(t, mallUpgrade(), func() { require.LessOrEqual(t, len(m.running("db")), 1, "it has a volume") },
			func() { m.ready(2) },
			func() {
				m.become(rapid.SampledFrom([]string{"proxy", "web", "db", "queue"}).Draw(t, "service"), 2)
			})
		require.Len(t, m.Containers, 4)
		require.Len(t, m.Networks, 4)
		m.requireServed(t, "proxy")
		m.requireServed(t, "web")
	})
}
