package billing_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	api "github.com/gpuaas/gpuaas/pkg/client"
)

const (
	// day is how far clocks are off here: longer than a node's certificate lasts. A lease lasts longer than one, and not
	// two.
	day   = 25 * time.Hour
	lease = 36 * time.Hour
	// conditionClock is what a node reports whose machine's clock does not tell the time.
	conditionClock = "clock_untrusted"
	// rightTime is how far a clock that is right may be from this test's, and a record of usage from containerd's times.
	rightTime = 2 * time.Second
)

// datedNode is a node whose machine's clock says what the test wants: its agent is built with the clock hook of
// pkg/failpoint. Containerd's own times are right; the agent reads them as that machine's clock would have told
// them.
type datedNode struct {
	*harness.MonitoredNode
	file string
	// off is how far the machine's clock is from real time, boot counts its boots.
	off  time.Duration
	boot int
	// unseen is for how long containers outlived their agent before the power cuts took them.
	unseen time.Duration
	// billed is up to when its usage can be on a bill, where that is not to the end.
	billed time.Time
}

func dated(w *harness.Testbed, name string, off time.Duration) *datedNode {
	w.T.Helper()
	n := &datedNode{MonitoredNode: &harness.MonitoredNode{Testbed: w}, file: filepath.Join(w.Dir, "clock-"+name)}
	n.jump(off)
	c := w.AgentConfig(name)
	c.Bin, c.Env = harness.FailpointBinaries(w.T), []string{"GPUAAS_FAILPOINT_CLOCK=" + n.file}
	c.ExtraArgs = []string{
		"--metering-interval", harness.MeteringInterval.String(), "--usage-interval", "1s", "--resync", "5s",
		"--report-interval", "1s",
	}
	n.MonitoredNode = w.MonitorApp(w.StartAgent(c))
	return n
}

// jump sets the machine's clock.
func (n *datedNode) jump(off time.Duration) {
	n.Testbed.T.Helper()
	n.off = off
	require.NoError(n.Testbed.T, os.WriteFile(n.file+".next", fmt.Appendf(nil, "%s boot-%d", off, n.boot), 0o600))
	require.NoError(n.Testbed.T, os.Rename(n.file+".next", n.file))
}

// powerCut ends agent and containers; the machine boots again with its clock off by that much.
func (n *datedNode) powerCut(off time.Duration) {
	n.Testbed.T.Helper()
	require.NoError(n.Testbed.T, n.StopCalling(), "the app answered until the power was cut")
	require.NoError(n.Testbed.T, n.Agent.Kill9())
	cut := time.Now()
	n.Testbed.RemoveContainersOf(n.Agent)
	n.unseen += time.Since(cut)
	n.boot++
	n.jump(off)
	n.Testbed.RestartAgent(n.Agent)
}

// back waits until the app that is kept answers again, and begins to ask it.
func (n *datedNode) back() {
	n.Testbed.T.Helper()
	n.Testbed.Eventually("the app answers again", func() error { return n.Get(n.Testbed.Ctx, n.App) })
	n.StartCalling()
}

// nodeTime is what the agent tells the owner of its machine.
type nodeTime struct {
	Time       time.Time `json:"time"`
	Trusted    bool      `json:"time_trusted"`
	Conditions []string  `json:"conditions"`
	Usage      struct{ LastSegment uint64 }
}

// tell asks the agent itself.
func (n *datedNode) tell(verb string, out any) error {
	text, err := exec.Command(filepath.Join(n.Agent.Config.Bin, "gpuaas-agent"), verb, "-o", "json", "--local-socket",
		n.Agent.Ready.LocalSocket).Output()
	return errors.Join(err, json.Unmarshal(text, out))
}

// knows waits until the node tells the time as it is, and whether its machine's clock does.
func (n *datedNode) knows() {
	n.Testbed.T.Helper()
	n.Testbed.Eventually("the node knows the time", func() error {
		var s nodeTime
		err := n.tell("status", &s)
		if err == nil && (!s.Trusted || time.Since(s.Time).Abs() > rightTime || slices.Contains(s.Conditions,
			conditionClock) != (n.off != 0)) {
			err = fmt.Errorf("it is %s by the node, trusted %t, conditions %v", s.Time, s.Trusted, s.Conditions)
		}
		return err
	})
}

// measure waits until each node has sealed usage twice more, whether there is a hub or not.
func measure(nodes []*datedNode) {
	due := make([]uint64, len(nodes))
	for i, n := range nodes {
		var s nodeTime
		require.NoError(n.Testbed.T, n.tell("status", &s))
		due[i] = s.Usage.LastSegment + 2
	}
	for i, n := range nodes {
		n.Testbed.Eventually("usage is sealed", func() error {
			var s nodeTime
			err := n.tell("status", &s)
			return harness.Pending(err, s.Usage.LastSegment >= due[i])
		})
	}
}

// leaseIsOver waits until the node says so of the app that is kept.
func (n *datedNode) leaseIsOver() {
	n.Testbed.T.Helper()
	n.Testbed.Eventually("the node says that the lease is over", func() error {
		var list []struct {
			MemberID string `json:"member_id"`
			Status   string `json:"status"`
			Reason   string `json:"reason"`
		}
		if err := n.tell("workloads", &list); err != nil {
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

// settles waits until hub and node agree that the app is well, and about the time.
func (n *datedNode) settles() {
	n.Testbed.T.Helper()
	n.Testbed.Eventually("the hub sees the app in health", func() error {
		i := n.Testbed.Instance(n.App.ID)
		return harness.Pending(nil, i.Status == api.AppInstanceStatusRunning && i.Health == api.AppInstanceHealthHealthy)
	})
	n.knows()
	if n.billed.IsZero() {
		n.AwaitUsage()
	}
}

// crash kills an instance's process, and sets the clock before the agent observes that.
func (n *datedNode) crash(i api.AppInstance, off time.Duration) {
	n.Testbed.T.Helper()
	pid := n.Testbed.PidOn(n.Agent, i)
	require.NoError(n.Testbed.T, syscall.Kill(int(pid), syscall.SIGKILL))
	n.jump(off)
	n.Testbed.Eventually("it answers again, as another process", func() error {
		if err := n.Get(n.Testbed.Ctx, i); err != nil {
			return err
		}
		return harness.Pending(nil, n.Testbed.PidOn(n.Agent, i) != pid)
	})
}

// newLeasedTenant is a hub that leases for long, with a tenant that can pay for it and an app.
func newLeasedTenant(t *testing.T) *harness.Testbed {
	t.Helper()
	w := harness.New(t)
	w.StartContainerd()
	c := w.HubConfig()
	c.ExtraArgs = []string{"--lease-duration", lease.String()}
	w.StartHub(c)
	w.NewTenant("acme")
	_, err := api.Read[api.Posting](w.Tenant.Admin.GrantCredit(w.Ctx, api.CreditGrant{
		OrgID:  w.Tenant.Org.ID,
		Amount: "9000", Currency: scenario.Currency, Description: "long leases",
	}))
	require.NoError(t, err)
	w.ShipApp()
	return w
}

// jumpWithoutHub kills the hub and lets the clocks jump over two days, while the agents are down, and right after a
// crash of an app.
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
	each(func(n *datedNode) { n.jump(-n.off) })
	measure(nodes)
	each(func(n *datedNode) {
		require.NoError(w.T, n.Agent.Kill9())
		n.jump(-n.off)
		w.RestartAgent(n.Agent)
		n.crash(crashing[n], 0)
	})
	ahead.jump(day)
	behind.jump(-day)
	measure(nodes)
	each((*datedNode).RequireSameProcess)
}

// Laws 3, 5 and 17: two nodes whose clocks are a day ahead and a day behind from their first start on, jump while a hub
// is there and while it is away, lose their power and boot in 1970, boot a day later. What is leased runs on untouched
// or starts again, the bill is the time that has passed by containerd's own clock, and once a hub is there everything
// is as it should be.
func TestLaw17WhateverANodesClockSaysOnlyTimeThatHasPassedIsBilled(t *testing.T) {
	w, began := newLeasedTenant(t), time.Now()
	ahead, behind := dated(w, "ahead", day), dated(w, "behind", -day)
	nodes := []*datedNode{ahead, behind}
	each := func(do func(n *datedNode)) {
		for _, n := range nodes {
			do(n)
		}
	}
	each((*datedNode).knows)

	// The hub is there: a start by one clock, an exit by another one.
	each(func(n *datedNode) {
		brief, was := n.AwaitRunning(n.Request("brief")), n.off
		n.jump(0)
		n.AwaitUsage()
		n.jump(was)
		w.Decommission(brief)
		n.knows()
		n.RequireSameProcess()
	})

	// The hub is away: clocks jump, agents and apps crash.
	jumpWithoutHub(w, ahead, behind)

	// Still without a hub the power goes: one clock was wrong before and is as wrong after, one has lost its battery.
	ahead.powerCut(ahead.off)
	behind.powerCut(-time.Since(time.Unix(0, 0)))
	each((*datedNode).back)
	measure(nodes)
	each(func(n *datedNode) {
		var s nodeTime
		require.NoError(t, n.tell("status", &s))
		require.False(t, s.Trusted, "nobody knows how long the power was off")
		require.False(t, s.Time.After(time.Now().Add(rightTime)))
	})
	w.RestartHub()
	each((*datedNode).settles)

	// The power goes again. One clock leaps by a day meanwhile, which could have been a day without power: what is
	// measured then lies in the future, and is not billed. The other one's lost battery is new.
	require.NoError(t, w.Hub.Kill9())
	ahead.billed = time.Now()
	ahead.powerCut(ahead.off + day)
	behind.powerCut(0)
	each((*datedNode).back)
	measure(nodes)
	w.RestartHub()
	each((*datedNode).settles)

	// And once more, for two days as far as anybody can know: longer than the lease lasts.
	require.NoError(t, w.Hub.Kill9())
	ahead.powerCut(ahead.off + 2*day)
	ahead.leaseIsOver()
	w.RestartHub()
	ahead.back()
	each((*datedNode).settles)

	each(func(n *datedNode) { n.jump(0) })
	each(func(n *datedNode) {
		n.settles()
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
	require.Equal(t, w.EventTypes(ahead.App.ID), w.EventTypes(behind.App.ID), "for the operator nothing has happened")
}

// requireBill holds an instance's usage and postings against what containerd saw.
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
	most := big.NewRat((ran + slack).Microseconds(), 1_000_000)
	least := big.NewRat((sure - slack - time.Duration(runs)*harness.MeteringInterval - n.unseen).Microseconds(), 1_000_000)
	require.LessOrEqual(t, billed.Cmp(most), 0, "%s: billed %s s of %s in %d runs", i.DisplayName, billed.FloatString(3),
		ran, runs)
	require.GreaterOrEqual(t, billed.Cmp(least), 0, "%s: billed %s s of %s in %d runs", i.DisplayName,
		billed.FloatString(3), ran, runs)
	off := new(big.Rat).Sub(harness.UsageCost(t, postings), new(big.Rat).Mul(billed, big.NewRat(1, 1000)))
	require.LessOrEqual(t, off.Abs(off).Cmp(big.NewRat(1, 1_000_000_000)), 0, "%s: paid %s off", i.DisplayName,
		off.FloatString(9))
}
