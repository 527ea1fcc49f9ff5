package e2e_test

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
// pkg/failpoint. Containerd's own times are the truth; the agent reads them as that machine's clock would have told
// them.
type datedNode struct {
	*steadyNode
	file string
	// off is how far the machine's clock is from the truth, boot counts its boots.
	off  time.Duration
	boot int
	// unseen is for how long containers outlived their agent before the power cuts took them.
	unseen time.Duration
	// billed is up to when its usage can be on a bill, where that is not to the end.
	billed time.Time
}

func (w *world) dated(name string, off time.Duration) *datedNode {
	w.t.Helper()
	n := &datedNode{steadyNode: &steadyNode{w: w}, file: filepath.Join(w.dir, "clock-"+name)}
	n.jump(off)
	c := w.agentConfig(name)
	c.Bin, c.Env = failpointBinaries(w.t), []string{"GPUAAS_FAILPOINT_CLOCK=" + n.file}
	c.ExtraArgs = []string{
		"--metering-interval", beat.String(), "--usage-interval", "1s", "--resync", "5s",
		"--report-interval", "1s",
	}
	n.steadyNode = w.keep(w.startAgent(c))
	return n
}

// jump sets the machine's clock.
func (n *datedNode) jump(off time.Duration) {
	n.w.t.Helper()
	n.off = off
	require.NoError(n.w.t, os.WriteFile(n.file+".next", fmt.Appendf(nil, "%s boot-%d", off, n.boot), 0o600))
	require.NoError(n.w.t, os.Rename(n.file+".next", n.file))
}

// powerCut ends agent and containers; the machine boots again with its clock off by that much.
func (n *datedNode) powerCut(off time.Duration) {
	n.w.t.Helper()
	require.NoError(n.w.t, n.serving(), "the app answered until the power was cut")
	require.NoError(n.w.t, n.agent.Kill9())
	cut := time.Now()
	n.w.removeContainersOf(n.agent)
	n.unseen += time.Since(cut)
	n.boot++
	n.jump(off)
	n.w.restartAgent(n.agent)
}

// back waits until the app that is kept answers again, and begins to ask it.
func (n *datedNode) back() {
	n.w.t.Helper()
	n.w.eventually("the app answers again", func() error { return n.get(n.w.ctx, n.kept) })
	n.ask()
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
	text, err := exec.Command(filepath.Join(n.agent.Config.Bin, "gpuaas-agent"), verb, "-o", "json", "--local-socket",
		n.agent.Ready.LocalSocket).Output()
	return errors.Join(err, json.Unmarshal(text, out))
}

// knows waits until the node tells the time as it is, and whether its machine's clock does.
func (n *datedNode) knows() {
	n.w.t.Helper()
	n.w.eventually("the node knows the time", func() error {
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
		require.NoError(n.w.t, n.tell("status", &s))
		due[i] = s.Usage.LastSegment + 2
	}
	for i, n := range nodes {
		n.w.eventually("usage is sealed", func() error {
			var s nodeTime
			err := n.tell("status", &s)
			return orMissing(err, s.Usage.LastSegment >= due[i])
		})
	}
}

// leaseIsOver waits until the node says so of the app that is kept.
func (n *datedNode) leaseIsOver() {
	n.w.t.Helper()
	n.w.eventually("the node says that the lease is over", func() error {
		var list []struct {
			MemberID string `json:"member_id"`
			Status   string `json:"status"`
			Reason   string `json:"reason"`
		}
		if err := n.tell("workloads", &list); err != nil {
			return err
		}
		for _, x := range list {
			if x.MemberID == n.kept.Members[0].ID && x.Status == "stopped" && x.Reason == "lease_ended" {
				return nil
			}
		}
		return fmt.Errorf("it says %+v", list)
	})
	require.Zero(n.w.t, n.w.containersOn(n.agent, n.kept))
}

// settles waits until hub and node agree that the app is well, and about the time.
func (n *datedNode) settles() {
	n.w.t.Helper()
	n.w.eventually("the hub sees the app in health", func() error {
		i := n.w.instance(n.kept.ID)
		return orMissing(nil, i.Status == api.AppInstanceStatusRunning && i.Health == api.AppInstanceHealthHealthy)
	})
	n.knows()
	if n.billed.IsZero() {
		n.usageGrows()
	}
}

// crash kills an instance's process, and sets the clock before anybody has had time to look.
func (n *datedNode) crash(i api.AppInstance, off time.Duration) {
	n.w.t.Helper()
	pid := n.w.pidOn(n.agent, i)
	require.NoError(n.w.t, syscall.Kill(int(pid), syscall.SIGKILL))
	n.jump(off)
	n.w.eventually("it answers again, as another process", func() error {
		if err := n.get(n.w.ctx, i); err != nil {
			return err
		}
		return orMissing(nil, n.w.pidOn(n.agent, i) != pid)
	})
}

// Laws 3, 5 and 17: two nodes whose clocks are a day ahead and a day behind from their first start on, jump while a hub
// is there and while it is away, lose their power and boot in 1970, boot a day later. What is leased runs on untouched
// or starts again, the bill is the time that has passed by containerd's own clock, and once a hub is there everything
// is as it should be.
func TestLaw17WhateverANodesClockSaysOnlyTimeThatHasPassedIsBilled(t *testing.T) {
	w := newWorld(t)
	began := time.Now()
	w.startContainerd()
	c := w.hubConfig()
	c.ExtraArgs = []string{"--lease-duration", lease.String()}
	w.startHub(c)
	w.newTenant("acme")
	_, err := api.Read[api.Posting](w.tenant.Admin.GrantCredit(w.ctx, api.CreditGrant{
		OrgID:  w.tenant.Org.ID,
		Amount: "9000", Currency: scenario.Currency, Description: "long leases",
	}))
	require.NoError(t, err)
	w.shipApp()
	ahead, behind := w.dated("ahead", day), w.dated("behind", -day)
	nodes := []*datedNode{ahead, behind}
	each := func(do func(n *datedNode)) {
		for _, n := range nodes {
			do(n)
		}
	}
	each((*datedNode).knows)

	// The hub is there: a start by one clock, an exit by another one.
	each(func(n *datedNode) {
		brief, was := n.running(n.request("brief")), n.off
		n.jump(0)
		n.usageGrows()
		n.jump(was)
		w.decommission(brief)
		n.knows()
		n.untouched()
	})

	// The hub is away: a leap over two days, one while the agent is down, one right after a crash.
	crashing := map[*datedNode]api.AppInstance{}
	each(func(n *datedNode) { crashing[n] = n.running(n.request("crashing")) })
	require.NoError(t, w.hub.Kill9())
	each(func(n *datedNode) { n.jump(-n.off) })
	measure(nodes)
	each(func(n *datedNode) {
		require.NoError(t, n.agent.Kill9())
		n.jump(-n.off)
		w.restartAgent(n.agent)
		n.crash(crashing[n], 0)
	})
	ahead.jump(day)
	behind.jump(-day)
	measure(nodes)
	each((*datedNode).untouched)

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
	w.restartHub()
	each((*datedNode).settles)

	// The power goes again. One clock leaps by a day meanwhile, which could have been a day without power: what is
	// measured then lies ahead of the truth, and is not billed. The other one's lost battery is new.
	require.NoError(t, w.hub.Kill9())
	ahead.billed = time.Now()
	ahead.powerCut(ahead.off + day)
	behind.powerCut(0)
	each((*datedNode).back)
	measure(nodes)
	w.restartHub()
	each((*datedNode).settles)

	// And once more, for two days as far as anybody can know: longer than the lease lasts.
	require.NoError(t, w.hub.Kill9())
	ahead.powerCut(ahead.off + 2*day)
	ahead.leaseIsOver()
	w.restartHub()
	ahead.back()
	each((*datedNode).settles)

	each(func(n *datedNode) { n.jump(0) })
	each(func(n *datedNode) {
		n.settles()
		require.NoError(t, n.serving())
		for _, i := range n.all {
			if w.instance(i.ID).Status == api.AppInstanceStatusRunning {
				w.decommission(i)
			}
			n.requireBill(i, began)
		}
	})
	require.Equal(t, []string{"requested", "deploying", "running", "decommission_requested", "decommissioned"},
		w.eventTypes(ahead.kept.ID))
	require.Equal(t, w.eventTypes(ahead.kept.ID), w.eventTypes(behind.kept.ID), "for the operator nothing has happened")
}

// requireBill holds an instance's usage and postings against what containerd saw.
func (n *datedNode) requireBill(i api.AppInstance, began time.Time) {
	t, w := n.w.t, n.w
	t.Helper()
	postings := w.finalPostings(i)
	usage, err := w.tenant.Usage(w.ctx, i.ID)
	require.NoError(t, err)
	billed := requireNoOverlap(t, usage)
	for _, u := range usage {
		require.False(t, u.StartedAt.Before(began.Add(-rightTime)), "%s: usage from %s", i.DisplayName, u.StartedAt)
		require.False(t, u.EndedAt.After(time.Now().Add(rightTime)), "%s: usage to %s", i.DisplayName, u.EndedAt)
		require.False(t, u.EndedAt.Before(u.StartedAt), "%s: usage from %s to %s", i.DisplayName, u.StartedAt, u.EndedAt)
	}
	ran, runs := n.truth.of(t, i.Members[0].ID)
	sure := n.truth.until(i.Members[0].ID, n.billed)
	t.Logf("%s: billed %s s of %s in %d runs", i.DisplayName, billed.FloatString(3), ran, runs)
	slack := time.Duration(runs) * rightTime / 8
	most := big.NewRat((ran + slack).Microseconds(), 1_000_000)
	least := big.NewRat((sure - slack - time.Duration(runs)*beat - n.unseen).Microseconds(), 1_000_000)
	require.LessOrEqual(t, billed.Cmp(most), 0, "%s: billed %s s of %s in %d runs", i.DisplayName, billed.FloatString(3),
		ran, runs)
	require.GreaterOrEqual(t, billed.Cmp(least), 0, "%s: billed %s s of %s in %d runs", i.DisplayName,
		billed.FloatString(3), ran, runs)
	off := new(big.Rat).Sub(debit(t, postings), new(big.Rat).Mul(billed, big.NewRat(1, 1000)))
	require.LessOrEqual(t, off.Abs(off).Cmp(big.NewRat(1, 1_000_000_000)), 0, "%s: paid %s off", i.DisplayName,
		off.FloatString(9))
}

// until is how long a member's containers had run before a moment, or in all when that is zero.
func (tr *truth) until(member string, moment time.Time) (total time.Duration) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	for id, start := range tr.started {
		end := tr.exited[id]
		if !moment.IsZero() && end.After(moment) {
			end = moment
		}
		if memberOf(id) == member && end.After(start) {
			total += end.Sub(start)
		}
	}
	return total
}
