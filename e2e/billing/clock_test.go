package billing_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
	api "github.com/gpuaas/gpuaas/pkg/client"
)

const (
	// day is how far clocks are off: longer than a node's certificate lasts. A lease outlasts one day, but not two.
	day   = 25 * time.Hour
	lease = 36 * time.Hour
	// conditionClock is the condition of a node whose machine's clock is wrong.
	conditionClock = "clock_untrusted"
	// rightTime bounds the difference between a right clock and this test's, and between usage and containerd's times.
	rightTime = 2 * time.Second
)

// datedNode is a node whose machine's clock the test sets, by the clock hook of pkg/failpoint. Containerd's clock is
// right, and the agent reads containerd's times as if the machine's clock had given them.
type datedNode struct {
	*harness.MonitoredNode
	file string
	// off is the error of the machine's clock, boot counts the machine's boots.
	off  time.Duration
	boot int
	// unobserved is the time that containers outlived their agent before the power cuts ended them.
	unobserved time.Duration
	// billed is when billable usage ends, where that is before the end of the last run.
	billed time.Time
}

func newDatedNode(w *harness.Testbed, name string, off time.Duration) *datedNode {
	w.T.Helper()
	n := &datedNode{MonitoredNode: &harness.MonitoredNode{Testbed: w}, file: filepath.Join(w.Dir, "clock-"+name)}
	n.setClock(off)
	c := w.AgentConfig(name)
	c.Bin, c.Env = harness.FailpointBinaries(w.T), []string{"GPUAAS_FAILPOINT_CLOCK=" + n.file}
	c.ExtraArgs = []string{
		"--metering-interval", harness.MeteringInterval.String(), "--usage-interval", "1s", "--resync", "5s",
		"--report-interval", "1s",
	}
	n.MonitoredNode = w.MonitorApp(w.StartAgent(c))
	return n
}

// setClock sets the error of the machine's clock.
func (n *datedNode) setClock(off time.Duration) {
	n.Testbed.T.Helper()
	n.off = off
	require.NoError(n.Testbed.T, os.WriteFile(n.file+".next", fmt.Appendf(nil, "%s boot-%d", off, n.boot), 0o600))
	require.NoError(n.Testbed.T, os.Rename(n.file+".next", n.file))
}

// powerCut ends agent and containers; the machine boots with the given error of its clock.
func (n *datedNode) powerCut(off time.Duration) {
	n.Testbed.T.Helper()
	require.NoError(n.Testbed.T, n.StopCalling(), "the app answered until the power was cut")
	cut := time.Now()
	require.NoError(n.Testbed.T, n.Agent.Kill9())
	n.Testbed.RemoveContainersOf(n.Agent, cut)
	n.unobserved += time.Since(cut)
	n.boot++
	n.setClock(off)
	n.Testbed.RestartAgent(n.Agent)
}

// awaitAnswer waits until the monitored app answers again, and resumes calling it.
func (n *datedNode) awaitAnswer() {
	n.Testbed.T.Helper()
	n.Testbed.Eventually("the app answers again", func() error { return n.Get(n.Testbed.Ctx, n.App) })
	n.StartCalling()
}

// nodeTime is the part of the agent's status that concerns time and usage.
type nodeTime struct {
	Time       time.Time `json:"time"`
	Trusted    bool      `json:"time_trusted"`
	Conditions []string  `json:"conditions"`
	Usage      struct{ LastSegment uint64 }
}

// query runs a command of the agent.
func (n *datedNode) query(verb string, out any) error {
	text, err := exec.Command(filepath.Join(n.Agent.Config.Bin, "gpuaas-agent"), verb, "-o", "json", "--local-socket",
		n.Agent.Ready.LocalSocket).Output()
	return errors.Join(err, json.Unmarshal(text, out))
}

// awaitTime waits until the node's time is right and trusted, and its condition reports whether the clock is wrong.
func (n *datedNode) awaitTime() {
	n.Testbed.T.Helper()
	n.Testbed.Eventually("the node knows the time", func() error {
		var s nodeTime
		err := n.query("status", &s)
		wrong := time.Since(s.Time)
		if err == nil && (!s.Trusted || wrong.Abs() > rightTime || slices.Contains(s.Conditions,
			conditionClock) != (n.off != 0)) {
			err = fmt.Errorf("the node's time is behind by %s, trusted %t, its machine's clock is ahead by %s, conditions %v",
				wrong, s.Trusted, n.off, s.Conditions)
		}
		return err
	})
}

// awaitSealedUsage waits until each node has sealed two more segments, with or without a hub.
func awaitSealedUsage(nodes []*datedNode) {
	due := make([]uint64, len(nodes))
	for i, n := range nodes {
		var s nodeTime
		require.NoError(n.Testbed.T, n.query("status", &s))
		due[i] = s.Usage.LastSegment + 2
	}
	for i, n := range nodes {
		n.Testbed.Eventually("usage is sealed", func() error {
			var s nodeTime
			err := n.query("status", &s)
			return harness.Pending(err, s.Usage.LastSegment >= due[i])
		})
	}
}

// awaitLeaseEnd waits until the node has stopped the monitored app because its lease has ended.
func (n *datedNode) awaitLeaseEnd() {
	n.Testbed.T.Helper()
	n.Testbed.Eventually("the node reports that the lease has ended", func() error {
		var list []struct {
			MemberID string `json:"member_id"`
			Status   string `json:"status"`
			Reason   string `json:"reason"`
		}
		if err := n.query("workloads", &list); err != nil {
			return err
		}
		for _, x := range list {
			if x.MemberID == n.App.Members[0].ID && x.Status == "stopped" && x.Reason == "lease_ended" {
				return nil
			}
		}
		return fmt.Errorf("it says %+v", list)
	})
	require.Zero(n.Testbed.T, n.Testbed.ContainersOn(n.Agent, n.App))
}

// awaitHealthy waits until the hub reports the app as healthy and the node's time is right.
func (n *datedNode) awaitHealthy() {
	n.Testbed.T.Helper()
	n.Testbed.Eventually("the hub sees the app in health", func() error {
		i := n.Testbed.Instance(n.App.ID)
		return harness.Pending(nil, i.Status == api.AppInstanceStatusRunning && i.Health == api.AppInstanceHealthHealthy)
	})
	n.awaitTime()
	if n.billed.IsZero() {
		n.AwaitUsage()
	}
}

// crashApp kills an instance's process, and sets the clock before the agent observes the exit.
func (n *datedNode) crashApp(i api.AppInstance, off time.Duration) {
	n.Testbed.T.Helper()
	n.Testbed.Explain(harness.Faults{Why: "an app is killed", Restarts: 1})
	pid := n.Testbed.PidOn(n.Agent, i)
	require.NoError(n.Testbed.T, syscall.Kill(int(pid), syscall.SIGKILL))
	n.setClock(off)
	n.Testbed.Eventually("it answers again, as another process", func() error {
		if err := n.Get(n.Testbed.Ctx, i); err != nil {
			return err
		}
		return harness.Pending(nil, n.Testbed.PidOn(n.Agent, i) != pid)
	})
}

// newLeasedTenant is a hub with long leases, and a tenant that can pay for them, with an app.
func newLeasedTenant(t *testing.T) *harness.Testbed {
	t.Helper()
	w := harness.New(t)
	w.StartContainerd()
	c := w.HubConfig()
	c.ExtraArgs = []string{"--lease-duration", lease.String()}
	w.StartHub(c)
	w.NewTenant("acme")
	w.GrantCredit()
	w.ShipApp()
	return w
}

// jumpWithoutHub kills the hub and sets the clocks: by two days, while the agents are down, and right after a crash of
// an app.
func jumpWithoutHub(w *harness.Testbed, ahead, behind *datedNode) {
	w.T.Helper()
	nodes := []*datedNode{ahead, behind}
	each := func(do func(n *datedNode)) {
		for _, n := range nodes {
			do(n)
		}
	}
	crashing := map[*datedNode]api.AppInstance{}
	each(func(n *datedNode) { crashing[n] = n.AwaitRunning(n.Request("crashing")) })
	require.NoError(w.T, w.Hub.Kill9())
	each(func(n *datedNode) { n.setClock(-n.off) })
	awaitSealedUsage(nodes)
	each(func(n *datedNode) {
		require.NoError(w.T, n.Agent.Kill9())
		n.setClock(-n.off)
		w.RestartAgent(n.Agent)
		n.crashApp(crashing[n], 0)
	})
	ahead.setClock(day)
	behind.setClock(-day)
	awaitSealedUsage(nodes)
	each((*datedNode).RequireSameProcess)
}

// Laws 3, 5 and 17: two nodes start with their clocks a day ahead and a day behind. The clocks jump with and without a
// hub, and power cuts let them boot in 1970 and a day later. Leased apps run on or start again, the bill is the time
// that containerd saw, and with a hub everything is healthy again.
func TestLaw17WhateverANodesClockSaysOnlyTimeThatHasPassedIsBilled(t *testing.T) {
	w, began := newLeasedTenant(t), time.Now()
	w.Explain(harness.Faults{
		Why:      "clocks are wrong: time that has not passed is not billed, and requireBill bounds what lacks in each bill",
		Suspense: []string{"beyond_elapsed"},
		Unbilled: lease,
	})
	ahead, behind := newDatedNode(w, "ahead", day), newDatedNode(w, "behind", -day)
	nodes := []*datedNode{ahead, behind}
	each := func(do func(n *datedNode)) {
		for _, n := range nodes {
			do(n)
		}
	}
	each((*datedNode).awaitTime)

	// With the hub: an app starts by one clock and exits by another.
	each(func(n *datedNode) {
		brief, was := n.AwaitRunning(n.Request("brief")), n.off
		n.setClock(0)
		n.AwaitUsage()
		n.setClock(was)
		w.Decommission(brief)
		n.awaitTime()
		n.RequireSameProcess()
	})

	// Without the hub: clocks jump, agents and apps crash.
	jumpWithoutHub(w, ahead, behind)

	// Still without a hub, a power cut: one clock keeps its error, the other loses its battery.
	ahead.powerCut(ahead.off)
	behind.powerCut(-time.Since(time.Unix(0, 0)))
	each((*datedNode).awaitAnswer)
	awaitSealedUsage(nodes)
	each(func(n *datedNode) {
		var s nodeTime
		require.NoError(t, n.query("status", &s))
		require.False(t, s.Trusted, "the length of the power cut is unknown")
		require.False(t, s.Time.After(time.Now().Add(rightTime)))
	})
	w.RestartHub()
	each((*datedNode).awaitHealthy)

	// Another power cut. One clock jumps by a day, which could have been a day without power: what is measured then is in
	// the future and is not billed. The other clock has a new battery.
	require.NoError(t, w.Hub.Kill9())
	ahead.billed = time.Now()
	ahead.powerCut(ahead.off + day)
	behind.powerCut(0)
	each((*datedNode).awaitAnswer)
	awaitSealedUsage(nodes)
	w.RestartHub()
	each((*datedNode).awaitHealthy)

	// A third one, of two days by the only clock there is: longer than the lease.
	require.NoError(t, w.Hub.Kill9())
	ahead.powerCut(ahead.off + 2*day)
	ahead.awaitLeaseEnd()
	w.RestartHub()
	ahead.awaitAnswer()
	each((*datedNode).awaitHealthy)

	each(func(n *datedNode) { n.setClock(0) })
	each(func(n *datedNode) {
		n.awaitHealthy()
		require.NoError(t, n.StopCalling())
		for _, i := range n.Instances {
			if w.Instance(i.ID).Status == api.AppInstanceStatusRunning {
				w.Decommission(i)
			}
			n.requireBill(i, began)
		}
	})
	require.Equal(t, []string{"requested", "deploying", "running", "decommission_requested", "decommissioned"},
		w.EventTypes(ahead.App.ID))
	require.Equal(t, w.EventTypes(ahead.App.ID), w.EventTypes(behind.App.ID), "faults are no events of instances")
}

// requireBill compares an instance's usage and postings with what containerd saw.
func (n *datedNode) requireBill(i api.AppInstance, began time.Time) {
	t, w := n.Testbed.T, n.Testbed
	t.Helper()
	postings := w.FinalPostings(i)
	usage, err := w.Tenant.Usage(w.Ctx, i.ID)
	require.NoError(t, err)
	billed := harness.RequireNoOverlap(t, usage)
	for _, u := range usage {
		require.False(t, u.StartedAt.Before(began.Add(-rightTime)), "%s: usage from %s", i.DisplayName, u.StartedAt)
		require.False(t, u.EndedAt.After(time.Now().Add(rightTime)), "%s: usage to %s", i.DisplayName, u.EndedAt)
		require.False(t, u.EndedAt.Before(u.StartedAt), "%s: usage from %s to %s", i.DisplayName, u.StartedAt, u.EndedAt)
	}
	ran, runs := n.Oracle.RunsOf(t, i.Members[0].ID)
	sure := n.Oracle.RunningTimeUntil(i.Members[0].ID, n.billed)
	t.Logf("%s: billed %s s of %s in %d runs", i.DisplayName, billed.FloatString(3), ran, runs)
	slack := time.Duration(runs) * rightTime / 8
	least := sure - slack - time.Duration(runs)*harness.MeteringInterval - n.unobserved
	harness.RequireBilledBetween(t, billed, least, n.Oracle.LongestOf(t, i.Members[0].ID)+slack)
	harness.RequireCost(t, postings, billed, 1)
}
