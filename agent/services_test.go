package agent_test

import (
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/protocol"
)

// shop is a workload of a database, a migration that runs once, a server and a sidecar. The specs of all but the
// sidecar are the same in each revision.
func shop(revision uint64) agent.Workload {
	const (
		started   = protocol.Dependency_SERVICE_STARTED
		healthy   = protocol.Dependency_SERVICE_HEALTHY
		completed = protocol.Dependency_SERVICE_COMPLETED_SUCCESSFULLY
	)
	service := func(name string, policy protocol.Service_RestartPolicy, on ...agent.Dependency) agent.Service {
		return agent.Service{
			Name: name, Images: []string{"org/acme/shop/" + name + "@sha256:1"}, SpecDigest: "spec-" + name, DependsOn: on,
			Spec: &protocol.Service{RestartPolicy: policy},
		}
	}
	w := agent.Workload{
		MemberID: "web", InstanceID: "i-web", Revision: revision, CorrelationID: "corr", ReadinessTimeout: time.Minute,
		Services: []agent.Service{
			service("db", protocol.Service_ALWAYS),
			service("migrate", protocol.Service_ON_FAILURE, agent.Dependency{Service: "db", Condition: healthy}),
			service("server", protocol.Service_ALWAYS, agent.Dependency{Service: "migrate", Condition: completed}),
			service("sidecar", protocol.Service_ALWAYS, agent.Dependency{Service: "server", Condition: started}),
		},
	}
	w.Services[3].SpecDigest += string(rune('0' + revision))
	return w
}

// shopUpgrade is revision 3 with revision 2 as its fallback.
func shopUpgrade() agent.Workload {
	w, back := shop(3), shop(2)
	w.Fallback = &back
	return w
}

// of is a container of one of the workload's services, ready for a while.
func of(w agent.Workload, service string) agent.Container {
	c := running(w)
	for _, s := range w.Services {
		if s.Name == service {
			c.ID, c.Service, c.SpecDigest, c.Restart = service+"-1", service, s.SpecDigest, s.Spec.GetRestartPolicy()
			for _, d := range s.DependsOn {
				c.DependsOn = append(c.DependsOn, d.Service)
			}
		}
	}
	return c
}

func changed(c agent.Container, change func(*agent.Container)) agent.Container {
	change(&c)
	return c
}

func isExited(c *agent.Container) {
	c.Status, c.ExitedAt, c.ExitCode, c.ReadyAt = agent.Exited, noon, 1, time.Time{}
}
func isStarting(c *agent.Container) { c.StartedAt, c.ReadyAt = noon.Add(-time.Second), time.Time{} }

// shopMachine is a machine with the workload's images and networks, and these containers.
func shopMachine(m agent.Member, containers ...agent.Container) agent.Observed {
	o := agent.Observed{Members: map[string]agent.Member{m.ID: m}, Containers: containers, Images: map[string]bool{}}
	for _, s := range shop(2).Services {
		o.Images[s.Images[0]] = true
		o.Networks = append(o.Networks, agent.Network{MemberID: m.ID, Service: s.Name, Ready: true})
	}
	return o
}

// withServices is the member with records of services.
func withServices(services map[string]agent.ServiceRecord) agent.Member {
	m := member()
	m.Services = services
	return m
}

// migrated is the member whose migration is done under revision 2.
func migrated(more map[string]agent.ServiceRecord) agent.Member {
	records := map[string]agent.ServiceRecord{
		"migrate": {Completed: []agent.Completion{{Revision: 2, SpecDigest: "spec-migrate"}}, ExitedAt: noon},
	}
	maps.Copy(records, more)
	return withServices(records)
}

func tries(revision uint64, n uint32, retry time.Duration) agent.Tries {
	return agent.Tries{
		Failures: n, FailedRevision: revision, RetryAt: noon.Add(retry), Reason: protocol.WorkloadStatus_CRASH_LOOP,
		Detail: "exit code 1",
	}
}

func serviceSituations() map[string]situation {
	w, l := shop(2), week("web")
	d := desired(w)
	db, migrate, server, sidecar := of(w, "db"), of(w, "migrate"), of(w, "server"), of(w, "sidecar")
	lacking := shopMachine(member())
	lacking.Networks = lacking.Networks[1:]
	two := of(shop(2), "sidecar")
	pulling := shopMachine(member(), changed(db, isExited))
	pulling.Images["org/acme/shop/sidecar@sha256:1"] = false
	pulling.Busy = map[string]agent.Work{"web": {Pulling: []string{"org/acme/shop/sidecar@sha256:1"}}}
	stopping := shopMachine(migrated(nil), db, server, sidecar)
	stopping.Busy = map[string]agent.Work{"web": {Services: map[string]bool{"sidecar": true}}}
	down := agent.ServiceRecord{Tries: tries(2, 2, time.Second), ReadyRevision: 2, Restarts: 2}
	never := agent.ServiceRecord{Tries: tries(2, agent.CrashLoopAfter, time.Minute)}
	fell := migrated(nil)
	fell.FellBackFrom, fell.FallbackReason = 3, protocol.WorkloadStatus_CRASH_LOOP
	return map[string]situation{
		"services first start":            {d, l, agent.Observed{Members: map[string]agent.Member{"web": member()}}},
		"services one network is missing": {d, l, lacking},
		"services wait for the database":  {d, l, shopMachine(member(), changed(db, isStarting))},
		"services database is healthy":    {d, l, shopMachine(member(), db)},
		"services migration runs":         {d, l, shopMachine(member(), db, migrate)},
		"services migration takes too long": {d, l, shopMachine(member(), db, changed(migrate, func(c *agent.Container) {
			c.StartedAt = noon.Add(-time.Hour)
		}))},
		"services migration exits":   {d, l, shopMachine(member(), db, changed(migrate, isExited))},
		"services migration is done": {d, l, shopMachine(migrated(nil), db)},
		"services ready":             {d, l, shopMachine(migrated(nil), db, server, sidecar)},
		"services probe fails": {d, l, shopMachine(migrated(nil), db, server, changed(sidecar, func(c *agent.Container) {
			c.Failing = true
		}))},
		"services sidecar is not alive": {d, l, shopMachine(migrated(nil), db, server,
			changed(sidecar, func(c *agent.Container) { c.NotAlive = true }))},
		"services sidecar is down": {d, l, shopMachine(migrated(map[string]agent.ServiceRecord{"sidecar": down}), db,
			server)},
		"services sidecar never came": {
			d, l, shopMachine(migrated(map[string]agent.ServiceRecord{"sidecar": never}), db, server),
		},
		"services pull delays no other":  {d, l, pulling},
		"services stop in reverse order": {desired(stopped(w)), l, shopMachine(migrated(nil), db, server, sidecar)},
		"services left the state":        {agent.Desired{}, nil, shopMachine(migrated(nil), db, server, sidecar)},
		"services one is busy":           {d, l, stopping},
		"services upgrade": {
			desired(shopUpgrade()), l, shopMachine(migrated(nil), db, server, two),
		},
		"services upgrade replaces what was never ready": {
			desired(shopUpgrade()), l, shopMachine(migrated(nil), changed(db, isStarting), server),
		},
		"services upgrade is ready": {
			desired(shopUpgrade()), l, shopMachine(migrated(nil), db, server, of(shop(3), "sidecar")),
		},
		"services go back": {
			desired(shopUpgrade()), l, shopMachine(fell, db, server, changed(of(shop(3), "sidecar"), isStarting)),
		},
	}
}

func TestGoldenServices(t *testing.T) {
	for name, s := range serviceSituations() {
		t.Run(name, func(t *testing.T) { compareGolden(t, s) })
	}
}

// A one-shot service is run once for a revision, and again by a revision that follows a stop.
func TestAOneShotServiceRunsOnce(t *testing.T) {
	m, l := newMachine(), week("web")
	finish := func(code int32) {
		for i := range m.Containers {
			if c := &m.Containers[i]; c.Service == "migrate" && c.Status == agent.Running {
				c.Status, c.ExitedAt, c.ExitCode = agent.Exited, m.now, code
			} else if c.Status == agent.Running && c.ReadyAt.IsZero() {
				c.ReadyAt = m.now
			}
		}
		m.now = m.now.Add(time.Minute)
	}
	runs := func() (n int) {
		for i := range m.Containers {
			if m.Containers[i].Service == "migrate" {
				n++
			}
		}
		return n
	}
	settle := func(d agent.Desired, code int32) {
		for range 6 {
			m.runToFixedPoint(t, d, l)
			finish(code)
		}
	}
	status := func(d agent.Desired) *protocol.WorkloadStatus { return agent.Statuses(d, l, m.Observed, m.now)[0] }
	one := desired(shop(1))
	m.runToFixedPoint(t, one, l)
	finish(0) // the database is ready
	m.runToFixedPoint(t, one, l)
	finish(3)
	require.Empty(t, m.Members["web"].Services["migrate"].Completed)
	settle(one, 0)
	require.Equal(t, protocol.WorkloadStatus_READY, status(one).GetStatus(), status(one))
	require.EqualValues(t, 1, m.Members["web"].Services["migrate"].Restarts, "it failed once")
	require.Equal(t, 1, runs(), "it stays for its log")
	before := m.runs

	two := desired(shop(2))
	settle(two, 0)
	require.Equal(t, protocol.WorkloadStatus_READY, status(two).GetStatus())
	require.Equal(t, before+1, m.runs, "only the sidecar differs")

	m.runToFixedPoint(t, desired(stopped(shop(3))), l)
	require.Empty(t, m.Containers)
	require.Empty(t, m.Networks)
	settle(desired(shop(4)), 0)
	require.Equal(t, before+1+4, m.runs, "all of it starts again")
	require.Equal(t, protocol.WorkloadStatus_READY, status(desired(shop(4))).GetStatus())
}

// An agent that was away while a new revision became ready probes it first, and does not leave a healthy revision.
func TestTheTimeWithoutAnAgentCountsAgainstNoUpgrade(t *testing.T) {
	w := shopUpgrade()
	w.ReadinessTimeout = time.Minute
	i := slices.IndexFunc(w.Services, func(s agent.Service) bool { return s.Name == "server" })
	w.Services[i].SpecDigest = "spec-server-3"
	d, l := desired(w), week("web")
	machine := func(watched time.Duration) agent.Observed {
		server := changed(of(w, "server"), func(c *agent.Container) {
			c.StartedAt, c.ReadyAt, c.WatchedSince = noon.Add(-time.Hour), time.Time{}, noon.Add(-watched)
		})
		return shopMachine(migrated(nil), of(w, "db"), server, of(w, "sidecar"))
	}
	o := machine(10 * time.Second)
	require.Empty(t, agent.Diff(d, l, o, noon))
	require.Equal(t, noon.Add(50*time.Second), agent.NextChange(d, l, o, noon))
	_, probed := w.Probed(o.Containers[1], o.Members["web"], noon)
	require.True(t, probed)

	for _, watched := range []time.Duration{time.Minute, 2 * time.Hour} {
		o = machine(watched)
		back, is := agent.Diff(d, l, o, noon)[0].(agent.FallBack)
		require.True(t, is)
		require.Equal(t, "service server: not ready within 1m0s", back.Detail)
		_, probed = w.Probed(o.Containers[1], o.Members["web"], noon)
		require.False(t, probed)
	}
}

// The server goes on from the revision before while the new revision's migration runs: the upgrade is neither ready nor
// confirmed before that is done, and falls back where it fails or takes too long.
func TestAnUpgradeWaitsForAOneShotServiceThatRuns(t *testing.T) {
	w := shopUpgrade()
	w.Services[1].SpecDigest = "spec-migrate-3"
	d, l := desired(w), week("web")
	machine := func(m agent.Member, more ...agent.Container) agent.Observed {
		return shopMachine(m, append(more, of(w, "db"), of(w, "server"), of(w, "sidecar"))...)
	}
	actions := func(o agent.Observed) []agent.Action { return agent.Diff(d, l, o, noon) }
	status := func(o agent.Observed) protocol.WorkloadStatus_Status {
		return agent.Statuses(d, l, o, noon)[0].GetStatus()
	}
	runs := changed(of(w, "migrate"), func(c *agent.Container) {
		c.StartedAt, c.ReadyAt = noon.Add(-time.Second), noon.Add(-time.Second)
	})
	require.Empty(t, actions(machine(migrated(nil), runs)))
	require.Equal(t, protocol.WorkloadStatus_STARTING, status(machine(migrated(nil), runs)))

	late := machine(migrated(nil), changed(runs, func(c *agent.Container) { c.StartedAt = noon.Add(-time.Minute) }))
	require.IsType(t, agent.FallBack{}, actions(late)[0])
	gaveUp := machine(migrated(map[string]agent.ServiceRecord{"migrate": {Tries: tries(3, agent.CrashLoopAfter, 0)}}))
	require.IsType(t, agent.FallBack{}, actions(gaveUp)[0])

	done := machine(migrated(map[string]agent.ServiceRecord{
		"migrate": {Completed: []agent.Completion{{Revision: 3, SpecDigest: "spec-migrate-3"}}, ExitedAt: noon},
	}))
	require.Equal(t, []agent.Action{agent.ConfirmRevision{MemberID: "web", Revision: 3}}, actions(done))
	require.Equal(t, protocol.WorkloadStatus_STARTING, status(done), "a crash now may still lead to a fallback")
	confirmed := done.Members["web"]
	confirmed.ConfirmedRevision = 3
	done.Members = map[string]agent.Member{"web": confirmed}
	require.Equal(t, protocol.WorkloadStatus_READY, status(done))
}

// What an earlier revision with the same spec has completed is not repeated after a time without a lease, nor where a
// network is made again while the member runs.
func TestAOneShotServiceOfAnEarlierRevisionIsNotRunAgain(t *testing.T) {
	w, l := shop(3), week("web")
	m := migrated(nil)
	for _, a := range agent.Diff(desired(w), agent.Leases{}, shopMachine(m), noon) {
		removal, is := a.(agent.RemoveNetwork)
		require.True(t, is, "%T", a)
		removal.Record(&m)
	}
	starts := func(m agent.Member, w agent.Workload) (started bool) {
		for _, a := range agent.Diff(desired(w), l, shopMachine(m, of(w, "db")), noon) {
			start, is := a.(agent.StartContainer)
			started = started || is && start.Service.Name == "migrate"
		}
		return started
	}
	require.False(t, starts(m, w), "it is done")
	require.True(t, starts(m, shop(4)), "a revision that follows runs it")

	m = migrated(nil)
	halfMade := shopMachine(m, of(w, "db"), of(w, "server"), of(w, "sidecar"))
	halfMade.Networks[1].Ready = false
	actions := agent.Diff(desired(w), l, halfMade, noon)
	require.Equal(t, []agent.Action{agent.RemoveNetwork{MemberID: "web", Service: "migrate"}}, actions)
	actions[0].(agent.RemoveNetwork).Record(&m)
	require.False(t, starts(m, w))
}

// However an order of stops was left, everything stops in the end.
func TestContainersThatDependOnEachOtherStop(t *testing.T) {
	a, b := of(shop(2), "db"), of(shop(2), "server")
	a.DependsOn, b.DependsOn = []string{"server"}, []string{"db"}
	require.Len(t, agent.Diff(agent.Desired{}, nil, shopMachine(member(), a, b), noon), 2)
}

// What has done its work stays for its log, unless it keeps an accelerator from others.
func TestWhatIsDoneGivesItsAcceleratorBack(t *testing.T) {
	w := shop(2)
	done := changed(of(w, "migrate"), func(c *agent.Container) {
		isExited(c)
		c.ExitCode, c.ExitRecorded = 0, true
	})
	diff := func() []agent.Action {
		o := shopMachine(migrated(nil), of(w, "db"), done, of(w, "server"), of(w, "sidecar"))
		return agent.Diff(desired(w), week("web"), o, noon)
	}
	require.Empty(t, diff())
	w.Services[1].AcceleratorIDs, done.AcceleratorIDs = []string{"GPU-1"}, []string{"GPU-1"}
	require.Equal(t, []agent.Action{
		agent.RemoveContainer{MemberID: "web", ContainerID: done.ID, Service: "migrate"},
	}, diff())
}
