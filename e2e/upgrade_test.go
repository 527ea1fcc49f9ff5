package e2e_test

import (
	"fmt"
	"math/big"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/client"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	api "github.com/gpuaas/gpuaas/pkg/client"
)

const (
	firstGreeting  = "Hello from GPUaaS"
	secondGreeting = "Hello from the second version"
)

// shipVersion ships another version of the app with the same image: the manifest is what differs.
func (w *world) shipVersion(version string, changes ...string) {
	w.t.Helper()
	r := w.release(version)
	r.Template = []byte(strings.NewReplacer(changes...).Replace(string(r.Template)))
	_, err := w.tenant.Ship(w.ctx, w.publisher, r)
	require.NoError(w.t, err)
}

func (w *world) greets(i api.AppInstance, greeting string) {
	w.t.Helper()
	body, err := scenario.Get(w.ctx, i.Endpoints[0].URL+"/")
	require.NoError(w.t, err)
	require.Contains(w.t, body, greeting)
}

func (w *world) instance(id string) api.AppInstance {
	w.t.Helper()
	i, err := api.Read[api.AppInstance](w.operator.GetAppInstance(w.ctx, w.tenant.Project.ID, id))
	require.NoError(w.t, err)
	return i
}

func (w *world) eventTypes(id string) (types []string) {
	w.t.Helper()
	events, err := w.tenant.Events(w.ctx, w.operator, id)
	require.NoError(w.t, err)
	for _, e := range events {
		types = append(types, strings.TrimPrefix(e.Type, "apps.instance."))
	}
	return types
}

// samePlace holds that an instance is where it was: member, allocation, address and port.
func samePlace(t *testing.T, before, after api.AppInstance) {
	t.Helper()
	require.Len(t, after.Members, 1)
	require.Equal(t, before.Members[0].ID, after.Members[0].ID)
	require.Equal(t, before.Members[0].AllocationID, after.Members[0].AllocationID)
	require.Equal(t, before.Endpoints, after.Endpoints)
}

// requireRuns holds the bill of an ended instance against what containerd saw: so many runs, each measured without a
// gap and none overlapping another, and every second charged once at the price of a tenth of a cent.
func (w *world) requireRuns(containers *truth, id string, runs int) {
	w.t.Helper()
	var postings []api.Posting
	w.eventually("the bill is final", func() (err error) {
		postings, err = w.tenant.Postings(w.ctx, id)
		return orMissing(err, hasKind(postings, api.PostingKindHoldClosed))
	})
	usage, err := w.tenant.Usage(w.ctx, id)
	require.NoError(w.t, err)
	var mine []api.UsageRecord
	for _, u := range usage {
		if u.Meter == "session_seconds" && !u.EndedAt.Equal(u.StartedAt) {
			mine = append(mine, u)
		}
	}
	sortByStart(mine)
	total, gaps := new(big.Rat), 0
	for n, u := range mine {
		q, ok := new(big.Rat).SetString(u.Quantity)
		require.True(w.t, ok)
		total.Add(total, q)
		require.Equal(w.t, mine[0].AllocationID, u.AllocationID)
		if n == 0 || mine[n-1].EndedAt.Equal(u.StartedAt) {
			continue
		}
		require.True(w.t, mine[n-1].EndedAt.Before(u.StartedAt), "usage from %s overlaps usage to %s", u.StartedAt,
			mine[n-1].EndedAt)
		gaps++
	}
	require.Equal(w.t, runs-1, gaps, "one gap between two runs, none within one")
	ran := containers.running(w.t)
	truth, slack := big.NewRat(ran.Microseconds(), 1_000_000), big.NewRat(int64(runs), 4)
	off := new(big.Rat).Sub(total, truth)
	require.LessOrEqual(w.t, off.Cmp(slack), 0, "billed %s s of %s", total.FloatString(3), ran)
	require.GreaterOrEqual(w.t,
		off.Cmp(new(big.Rat).Neg(new(big.Rat).Add(slack, big.NewRat(beat.Microseconds(), 1_000_000)))), 0,
		"billed %s s of %s", total.FloatString(3), ran)
	paid := new(big.Rat).Sub(debit(w.t, postings), new(big.Rat).Mul(total, big.NewRat(1, 1000)))
	require.LessOrEqual(w.t, paid.Abs(paid).Cmp(big.NewRat(1, 1_000_000_000)), 0, "paid %s off", paid.FloatString(9))
}

func TestUpgradeAndRollbackStayInPlaceAndAreBilledOnce(t *testing.T) {
	w := platform(t)
	containers := w.listen(w.agent.Config.ContainerdNamespace)
	first := w.launch("app")
	w.greets(first, firstGreeting)
	w.priceIsKnown(first)
	w.shipVersion("2.0.0", firstGreeting, secondGreeting)

	second, err := w.tenant.Upgrade(w.ctx, w.operator, first.ID, "2.0.0", nil)
	require.NoError(t, err)
	require.Equal(t, "2.0.0", second.Version)
	require.Equal(t, "1.0.0", second.PreviousVersion)
	samePlace(t, first, second)
	w.greets(second, secondGreeting)

	back, err := w.tenant.Rollback(w.ctx, w.operator, first.ID, nil)
	require.NoError(t, err)
	require.Equal(t, "1.0.0", back.Version)
	samePlace(t, first, back)
	w.greets(back, firstGreeting)
	require.EqualValues(t, 3, back.Revision)

	w.decommission(first)
	require.Equal(t, []string{
		"requested", "deploying", "running", "upgrade_requested", "upgraded", "rollback_requested", "rolled_back",
		"decommission_requested", "decommissioned",
	}, w.eventTypes(first.ID))
	w.requireRuns(containers, first.ID, 3)
}

// The hub is killed as soon as the node has the state with the upgrade in it: what follows is the node's alone.
func TestLaw03AFailedUpgradeGoesBackWithoutTheHub(t *testing.T) {
	w := platform(t)
	containers := w.listen(w.agent.Config.ContainerdNamespace)
	i := w.launch("app")
	pid := w.pidOf(i)
	// It starts and is never ready.
	w.shipVersion("2.0.0", "path: /healthz", "path: /nowhere", "readiness_timeout_seconds: 30",
		"readiness_timeout_seconds: 4")
	_, err := api.Read[api.AppInstance](w.operator.UpgradeAppInstance(w.ctx, w.tenant.Project.ID, i.ID,
		api.AppInstanceUpgrade{TargetVersion: "2.0.0"}))
	require.NoError(t, err)
	w.eventually("the node has the upgrade", func() error { return orMissing(nil, !w.runsAt(i, 1)) })
	require.NoError(t, w.hub.Kill9())

	w.eventually("the node runs the first version again, by itself", func() error {
		return orMissing(nil, w.runsAt(i, 1))
	})
	w.eventually("it answers", func() error {
		_, err := scenario.Get(w.ctx, i.Endpoints[0].URL+"/")
		return err
	})
	alone := w.pidOf(i)
	require.NotEqual(t, pid, alone)

	w.restartHub()
	w.eventually("the hub follows", func() error {
		got, err := api.Read[api.AppInstance](w.operator.GetAppInstance(w.ctx, w.tenant.Project.ID, i.ID))
		return orMissing(err, got.Status == api.AppInstanceStatusRunning && got.Health == api.AppInstanceHealthHealthy)
	})
	after := w.instance(i.ID)
	require.Equal(t, "1.0.0", after.Version)
	samePlace(t, i, after)
	require.Equal(t, []string{"requested", "deploying", "running", "upgrade_requested", "failed", "rolled_back"},
		w.eventTypes(i.ID))
	events, err := w.tenant.Events(w.ctx, w.operator, i.ID)
	require.NoError(t, err)
	require.Equal(t, "readiness_timeout", events[4].Data.Reason)
	require.Equal(t, "rolling_back", events[4].Data.To)
	require.Equal(t, events[3].Data.CorrelationID, events[5].Data.CorrelationID)

	// The hub wants the very revision now that runs: once the node has that state, nothing was started again.
	w.shipVersion("3.0.0", firstGreeting, secondGreeting)
	require.Equal(t, alone, w.pidOf(i))
	upgraded, err := w.tenant.Upgrade(w.ctx, w.operator, i.ID, "3.0.0", nil)
	require.NoError(t, err)
	require.Equal(t, "3.0.0", upgraded.Version)
	require.EqualValues(t, 3, upgraded.Revision)
	w.greets(upgraded, secondGreeting)
	w.decommission(i)
	w.requireRuns(containers, i.ID, 4)
}

// priceIsKnown holds what an app was said to cost before its launch against what a running instance of it says.
func (w *world) priceIsKnown(i api.AppInstance) {
	w.t.Helper()
	perHour := func(text string) string {
		r, ok := new(big.Rat).SetString(text)
		require.True(w.t, ok, text)
		return r.FloatString(2)
	}
	estimate, err := api.Read[api.CostEstimate](w.operator.EstimateCost(w.ctx, w.tenant.Project.ID, appSlug, i.Version,
		&api.EstimateCostParams{AllocationID: w.allocation.ID}))
	require.NoError(w.t, err)
	require.Equal(w.t, pricePerHour, perHour(estimate.PerHour))
	require.Equal(w.t, scenario.Currency, estimate.Currency)
	cost := w.instance(i.ID).Cost
	require.Equal(w.t, pricePerHour, perHour(cost.PerHour))
	require.Equal(w.t, scenario.Currency, cost.Currency)
	w.eventually("what it has cost so far grows", func() error {
		spent, ok := new(big.Rat).SetString(w.instance(i.ID).Cost.Spent)
		return orMissing(nil, ok && spent.Sign() > 0)
	})
}

// runsAt reports whether the instance's one container is of the revision.
func (w *world) runsAt(i api.AppInstance, revision int) bool {
	w.t.Helper()
	cl, err := client.New(w.containerd.Address, client.WithDefaultNamespace(w.agent.Config.ContainerdNamespace))
	require.NoError(w.t, err)
	defer func() { require.NoError(w.t, cl.Close()) }()
	containers, err := cl.Containers(w.ctx, fmt.Sprintf("labels.%q==%q,labels.%q==%q", "gpuaas.instance", i.ID,
		"gpuaas.revision", fmt.Sprint(revision)))
	require.NoError(w.t, err)
	for _, c := range containers {
		if _, err := c.Task(w.ctx, nil); err == nil {
			return true
		}
	}
	return false
}

func TestStopAndStartKeepThePlaceAndBillOnlyWhatRan(t *testing.T) {
	w := platform(t)
	containers := w.listen(w.agent.Config.ContainerdNamespace)
	first := w.launch("app")
	stopped, err := w.tenant.Stop(w.ctx, w.operator, first.ID)
	require.NoError(t, err)
	require.Equal(t, first.Revision, stopped.Revision)
	_, err = scenario.Get(w.ctx, first.Endpoints[0].URL+"/")
	require.Error(t, err, "nothing answers")
	require.False(t, w.runsAt(first, 1))
	_, err = api.Read[api.Allocation](w.tenant.Admin.ReleaseAllocation(w.ctx, w.tenant.Project.ID, w.allocation.ID))
	require.Error(t, err, "the allocation is still in use")

	// A restart of the node's agent starts nothing that is stopped.
	require.NoError(t, w.agent.Kill9())
	w.restartAgent(w.agent)
	_, err = scenario.AwaitNode(w.ctx, w.admin(), w.agent.Ready.NodeID)
	require.NoError(t, err)
	require.False(t, w.runsAt(first, 1))

	started, err := w.tenant.Start(w.ctx, w.operator, first.ID)
	require.NoError(t, err)
	samePlace(t, first, started)
	require.Equal(t, "1.0.0", started.Version)
	w.greets(started, firstGreeting)
	w.decommission(first)
	require.Equal(t, []string{
		"requested", "deploying", "running", "stop_requested", "stopped", "start_requested", "running",
		"decommission_requested", "decommissioned",
	}, w.eventTypes(first.ID))
	w.requireRuns(containers, first.ID, 2)
}
