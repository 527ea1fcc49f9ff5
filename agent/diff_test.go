package agent_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestDiffReachesAFixedPointThatIsWhatWasAskedFor(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newMachine()
		m.addLeftovers(t)
		var d agent.Desired
		var l agent.Leases
		for range rapid.IntRange(1, 4).Draw(t, "states") {
			d, l = agent.Desired{Workloads: workloads(t)}, leases(t)
			m.runToFixedPoint(t, d, l)
			m.now = m.now.Add(time.Hour)
		}
		m.runToFixedPoint(t, d, l)

		want := map[string]bool{}
		may := map[string]bool{}
		known, refused, held := map[string]bool{}, map[string]bool{}, map[string]bool{}
		for _, signed := range d.Workloads {
			w := signed.Effective(m.Members[signed.MemberID])
			for _, c := range m.Containers { // a refused revision goes on, with its accelerators
				for _, id := range c.AcceleratorIDs {
					held[id] = held[id] || w.Refused != 0 && c.MemberID == w.MemberID
				}
			}
		}
		for _, signed := range d.Workloads {
			w := signed.Effective(m.Members[signed.MemberID])
			known[w.MemberID], refused[w.MemberID] = true, w.Refused != 0
			if w.Stopped || w.Refused == protocol.WorkloadStatus_OWNER_REFUSED || !l[w.MemberID].Covers(m.now) {
				continue
			}
			for _, s := range w.Services {
				name := fmt.Sprintf("%s/%s/%d/%s", w.MemberID, s.Name, w.Revision, s.SpecDigest)
				may[name] = true
				if w.Refused == 0 {
					want[name] = !slices.ContainsFunc(s.AcceleratorIDs, func(id string) bool { return held[id] })
					continue
				}
				for _, c := range m.Containers { // a refused revision goes on with the spec that it was started with
					if c.MemberID == w.MemberID && c.Service == s.Name && c.Revision == w.Revision {
						may[fmt.Sprintf("%s/%s/%d/%s", c.MemberID, c.Service, c.Revision, c.SpecDigest)] = true
					}
				}
			}
		}
		have := map[string]bool{}
		for _, c := range m.Containers {
			// What a refused revision goes on with is left alone while its state is unknown.
			if c.Status != agent.Unknown || !refused[c.MemberID] {
				require.Equal(t, agent.Running, c.Status)
			}
			have[fmt.Sprintf("%s/%s/%d/%s", c.MemberID, c.Service, c.Revision, c.SpecDigest)] = true
		}
		maps.DeleteFunc(want, func(_ string, is bool) bool { return !is })
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
		m.addLeftovers(t)
		d, l := agent.Desired{Workloads: workloads(t)}, leases(t)
		m.accept(d)
		first := agent.Diff(d, l, m.Observed, m.now)
		m.Containers = rapid.Permutation(m.Containers).Draw(t, "containers")
		d.Workloads = rapid.Permutation(d.Workloads).Draw(t, "workloads")
		require.Equal(t, first, agent.Diff(d, l, m.Observed, m.now))
	})
}

// Whatever happens to an upgrade, and in whatever portions it is executed: the node goes back only from a revision that
// was never ready, it goes back for good, and a revision that was ready once is never left by itself.
func TestANodeGoesBackOnceAndOnlyFromWhatWasNeverReady(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newMachine()
		old := web(2)
		next := web(3)
		next.Fallback, next.ReadinessTimeout = &old, time.Minute
		next.Services[0].Images = []string{"other@sha256:2"}
		leases := week("web")
		m.accept(desired(old))
		d := desired(next)
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

// The log of a container goes with it: one that has crashed stays until the pause before its next start ends. What
// fills the disk or has an accelerator that another service waits for does not.
func TestACrashedContainerStaysForItsLogUntilTheNextStart(t *testing.T) {
	tried := func(reason protocol.WorkloadStatus_Reason) agent.Member {
		m := member()
		m.Services = map[string]agent.ServiceRecord{"app": {Tries: agent.Tries{
			Failures: 3, FailedRevision: 2, RetryAt: noon.Add(4 * time.Second), Reason: reason,
		}}}
		return m
	}
	w := web(2)
	w.Services[0].AcceleratorIDs = []string{"gpu0"}
	shared := web(2)
	shared.Services = append(w.Services[:1:1], agent.Service{
		Name: "second", Images: w.Services[0].Images, AcceleratorIDs: []string{"gpu0"},
		DependsOn: []agent.Dependency{{Service: "app"}},
	})
	const crashLoop, diskLimit = protocol.WorkloadStatus_CRASH_LOOP, protocol.WorkloadStatus_DISK_LIMIT
	for name, test := range map[string]struct {
		w       agent.Workload
		reason  protocol.WorkloadStatus_Reason
		at      time.Time
		removed bool
	}{
		"pause":                  {w, crashLoop, noon, false},
		"next start":             {w, crashLoop, noon.Add(4 * time.Second), true},
		"disk limit":             {w, diskLimit, noon, true},
		"stop":                   {stopped(w), crashLoop, noon, true},
		"accelerator of another": {shared, crashLoop, noon, true},
	} {
		c := exited(w, true)
		c.AcceleratorIDs = []string{"gpu0"}
		actions := agent.Diff(desired(test.w), week("web"), withImage(observed(tried(test.reason), 2, c)), test.at)
		removed := slices.Contains(actions, agent.Action(agent.RemoveContainer{
			MemberID: "web", ContainerID: "c1", Service: "app",
		}))
		require.Equal(t, test.removed, removed, name)
	}
}

func TestANetworkForOtherPortsIsMadeAnew(t *testing.T) {
	w := web(2)
	w.Services[0].PortsDigest = "443"
	for digest, stays := range map[string]bool{"443": true, "80": false} {
		o := withImage(observed(member(), 2))
		o.Networks[0].PortsDigest = digest
		actions := agent.Diff(desired(w), week("web"), o, noon)
		removes := slices.Contains(actions, agent.Action(agent.RemoveNetwork{MemberID: "web", Service: "app"}))
		require.Equal(t, !stays, removes, digest)
	}
}

// awaited is an upgrade whose image is missing.
func awaited() agent.Workload {
	w := upgrade()
	w.Services[0].Images = []string{"other@sha256:2"}
	for _, one := range w.MayRun() {
		one.Services[0].PortsDigest = "80"
	}
	return w
}

// withNetwork is the member once it was given a network.
func withNetwork() agent.Member {
	m := member()
	m.Services = map[string]agent.ServiceRecord{"app": {PortsDigest: "80"}}
	return m
}

// The images of an upgrade may take hours, or wait for a hub that is away. Until they are there the fallback goes on:
// one that ends, also with a reboot of the machine, starts again.
func TestLaw03AFallbackStartsAgainUntilTheImagesOfItsUpgradeAreThere(t *testing.T) {
	next := awaited()
	m := newMachine()
	m.Observed = withImage(observed(withNetwork(), 0, exited(web(2), false)))
	pull := agent.PullImage{
		MemberID: "web", Revision: 3, Image: "other@sha256:2", Services: []string{"app"}, Beside: true,
	}
	for range 8 {
		actions := agent.Diff(desired(next), week("web"), m.Observed, m.now)
		checkOrder(t, actions)
		for _, a := range actions {
			if _, pulls := a.(agent.PullImage); pulls {
				require.Equal(t, pull, a)
				continue // the hub is away
			}
			m.do(a)
		}
		if tries := m.Members["web"].Services["app"].Tries; tries.RetryAt.After(m.now) {
			require.Equal(t, tries.RetryAt, agent.NextChange(desired(next), week("web"), m.Observed, m.now))
		}
		m.now = m.now.Add(time.Second)
	}
	require.Len(t, m.Containers, 1)
	c := &m.Containers[0]
	require.EqualValues(t, 2, c.Revision)
	require.Equal(t, agent.Running, c.Status)
	service, probed := next.Probed(*c, m.Members["web"], m.now)
	require.True(t, probed)
	require.Equal(t, "spec2", service.SpecDigest)

	m.do(pull)
	c.ReadyAt = m.now
	m.runToFixedPoint(t, desired(next), week("web"))
	require.Len(t, m.Containers, 1)
	require.EqualValues(t, 3, m.Containers[0].Revision, "the upgrade follows")
}

// The failures of a fallback that goes on and those of the pulls beside it do not count as each other's: both pauses
// grow.
func TestAFallbackThatCrashesAndAPullThatFailsHavePausesOfTheirOwn(t *testing.T) {
	next := awaited()
	m := newMachine()
	m.Observed = withImage(observed(withNetwork(), 0))
	var pulls int
	for range 60 {
		for _, a := range agent.Diff(desired(next), week("web"), m.Observed, m.now) {
			if _, is := a.(agent.PullImage); is {
				pulls++
				m.Members["web"] = m.Members["web"].FailedBy(a, errors.New("no route"), m.now)
				continue
			}
			m.do(a)
		}
		for i := range m.Containers {
			m.Containers[i].Status, m.Containers[i].ExitedAt, m.Containers[i].ExitCode = agent.Exited, m.now, 1
		}
		m.now = m.now.Add(time.Second)
	}
	require.Equal(t, 6, pulls, "after 0, 1, 3, 7, 15 and 31 seconds")
	require.Equal(t, 6, m.runs, "likewise")
}

// A fallback that nobody may start goes on as long as it runs; one that the owner refuses ends.
func TestARefusedFallbackIsNotStartedWhileImagesAreMissing(t *testing.T) {
	next := awaited()
	for reason, ends := range map[protocol.WorkloadStatus_Reason]bool{
		protocol.WorkloadStatus_MANIFEST_NOT_ADMITTED: false, protocol.WorkloadStatus_OWNER_REFUSED: true,
	} {
		next.Fallback.Refused = reason
		stops := slices.ContainsFunc(agent.Diff(desired(next), week("web"), withImage(ready()), noon),
			func(a agent.Action) bool { _, is := a.(agent.StopContainer); return is })
		require.Equal(t, ends, stops, reason)
		for _, a := range agent.Diff(desired(next), week("web"), withImage(observed(withNetwork(), 0)), noon) {
			_, starts := a.(agent.StartContainer)
			require.False(t, starts, reason)
		}
	}
}

// Nor is one that was stopped when the upgrade came.
func TestAStoppedFallbackIsNotStartedWhileImagesAreMissing(t *testing.T) {
	pulls := agent.Diff(desired(awaited()), week("web"), withImage(observed(withNetwork(), 0)), noon)[0]
	require.Equal(t, agent.PullImage{
		MemberID: "web", Revision: 3, Image: "other@sha256:2", Services: []string{"app"}, Beside: true,
	}, pulls)
	m := withNetwork()
	agent.RemoveNetwork{MemberID: "web", Service: "app", Ends: true}.Record(&m)
	for _, a := range agent.Diff(desired(awaited()), week("web"), withImage(observed(m, 0)), noon) {
		if setup, is := a.(agent.SetupNetwork); is {
			require.EqualValues(t, 3, setup.Revision)
			require.Empty(t, setup.Start)
		}
	}
}

// While the image of a revision is pulled, nothing is decided about the revision: the pull may still succeed.
func TestANodeDoesNotGoBackDuringAPull(t *testing.T) {
	o := observed(failed(3, agent.GiveUpAfter, protocol.WorkloadStatus_IMAGE_PULL_FAILED), 2, running(web(2)))
	goesBack := func(o agent.Observed) bool {
		return slices.ContainsFunc(agent.Diff(desired(upgrade()), week("web"), o, noon), func(a agent.Action) bool {
			_, is := a.(agent.FallBack)
			return is
		})
	}
	require.True(t, goesBack(o))
	require.False(t, goesBack(withBusy(o, agent.Work{Pulling: upgrade().Services[0].Images})))
}

// A pull may take hours. Of a member whose newer document is missing, the image may be another one by then, and its
// lease may end.
func TestAPullDelaysNeitherADocumentNorTheEndOfALease(t *testing.T) {
	part := agent.MissingPart{MemberID: "web", SHA256: [32]byte{1}}
	next := func(leases agent.Leases) []agent.Action {
		o := withBusy(ready(), agent.Work{Pulling: []string{"org/acme/web/app@sha256:3"}})
		return agent.Diff(agent.Desired{Missing: []agent.MissingPart{part}}, leases, o, noon)
	}
	require.Equal(t, []agent.Action{agent.FetchPart(part)}, next(week("web")))
	actions := next(leaseUntil(noon, false))
	require.Len(t, actions, 2)
	stop, _ := actions[0].(agent.StopContainer)
	require.Equal(t, "c1", stop.ContainerID)
	require.Equal(t, agent.FetchPart(part), actions[1])
}

// What a member has used may be unknown, because its record was altered: its lease says nothing then, and nothing of
// the member ends, also while its document is missing.
func TestLaw03ALeaseThatCannotBeVerifiedEndsNothing(t *testing.T) {
	leases := week("web")
	unverified := leases["web"]
	unverified.Unverified = true
	leases["web"] = unverified
	part := agent.MissingPart{MemberID: "web", SHA256: [32]byte{1}}

	require.Empty(t, agent.Diff(desired(web(2)), leases, ready(), noon))
	require.Equal(t, []agent.Action{agent.FetchPart(part)},
		agent.Diff(agent.Desired{Missing: []agent.MissingPart{part}}, leases, ready(), noon))
	require.Empty(t, agent.Diff(agent.Desired{Unverified: true}, leases, ready(), noon))
	require.Empty(t, agent.Diff(desired(web(2)), leases, withImage(observed(member(), 2)), noon), "and nothing starts")
}

// A lease says when it ends, also where it cannot be told what of it is used.
func TestALeaseWhoseUseIsUnknownEndsInTime(t *testing.T) {
	leases := leaseUntil(noon, false)
	lease := leases["web"]
	lease.Unverified = true
	leases["web"] = lease
	for what, d := range map[string]agent.Desired{
		"its document is here":    desired(web(2)),
		"its document is missing": {Missing: []agent.MissingPart{{MemberID: "web"}}},
		"no state verifies":       {Unverified: true},
	} {
		stops := func(now time.Time) bool {
			return slices.ContainsFunc(agent.Diff(d, leases, ready(), now), func(a agent.Action) bool {
				stop, is := a.(agent.StopContainer)
				return is && stop.Why == "lease_ended"
			})
		}
		require.False(t, stops(noon.Add(-time.Second)), what)
		require.True(t, stops(noon), what)
	}
}
