package upgrade_test

import (
	"fmt"
	"math/big"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	api "github.com/gpuaas/gpuaas/pkg/client"
)

func requireGreeting(w *harness.Testbed, i api.AppInstance, greeting string) {
	w.T.Helper()
	body, err := scenario.Get(w.Ctx, i.Endpoints[0].URL+"/")
	require.NoError(w.T, err)
	require.Contains(w.T, body, greeting)
}

// requireSamePlace holds that an instance is where it was: member, allocation, address and port.
func requireSamePlace(t *testing.T, before, after api.AppInstance) {
	t.Helper()
	require.Len(t, after.Members, 1)
	require.Equal(t, before.Members[0].ID, after.Members[0].ID)
	require.Equal(t, before.Members[0].AllocationID, after.Members[0].AllocationID)
	require.Equal(t, before.Endpoints, after.Endpoints)
}

func TestUpgradeAndRollbackStayInPlaceAndAreBilledOnce(t *testing.T) {
	w := harness.NewPlatform(t)
	containers := w.WatchContainerd(w.Agent.Config.ContainerdNamespace)
	first := w.Launch("app")
	requireGreeting(w, first, harness.FirstGreeting)
	priceIsKnown(w, first)
	w.ShipVersion("2.0.0", harness.FirstGreeting, harness.SecondGreeting)

	second, err := w.Tenant.Upgrade(w.Ctx, w.Operator, first.ID, "2.0.0", nil)
	require.NoError(t, err)
	require.Equal(t, "2.0.0", second.Version)
	require.Equal(t, "1.0.0", second.PreviousVersion)
	requireSamePlace(t, first, second)
	requireGreeting(w, second, harness.SecondGreeting)

	back, err := w.Tenant.Rollback(w.Ctx, w.Operator, first.ID, nil)
	require.NoError(t, err)
	require.Equal(t, "1.0.0", back.Version)
	requireSamePlace(t, first, back)
	requireGreeting(w, back, harness.FirstGreeting)
	require.EqualValues(t, 3, back.Revision)

	w.Decommission(first)
	require.Equal(t, []string{
		"requested", "deploying", "running", "upgrade_requested", "upgraded", "rollback_requested", "rolled_back",
		"decommission_requested", "decommissioned",
	}, w.EventTypes(first.ID))
	w.RequireRuns(containers, first, 3)
}

// The hub is killed as soon as the node has the state with the upgrade in it: what follows is the node's alone.
func TestLaw03AFailedUpgradeGoesBackWithoutTheHub(t *testing.T) {
	w := harness.NewPlatform(t)
	containers := w.WatchContainerd(w.Agent.Config.ContainerdNamespace)
	i := w.Launch("app")
	pid := w.PidOf(i)
	// It starts and is never ready.
	w.ShipVersion("2.0.0", "path: /healthz", "path: /nowhere", "readiness_timeout_seconds: 30",
		"readiness_timeout_seconds: 4")
	_, err := api.Read[api.AppInstance](w.Operator.UpgradeAppInstance(w.Ctx, w.Tenant.Project.ID, i.ID,
		api.AppInstanceUpgrade{TargetVersion: "2.0.0"}))
	require.NoError(t, err)
	w.Eventually("the node has the upgrade", func() error { return harness.Pending(nil, !runsAt(w, i, 1)) })
	require.NoError(t, w.Hub.Kill9())

	w.Eventually("the node runs the first version again, by itself", func() error {
		return harness.Pending(nil, runsAt(w, i, 1))
	})
	w.Eventually("it answers", func() error {
		_, err := scenario.Get(w.Ctx, i.Endpoints[0].URL+"/")
		return err
	})
	alone := w.PidOf(i)
	require.NotEqual(t, pid, alone)

	w.RestartHub()
	w.Eventually("the hub follows", func() error {
		got, err := api.Read[api.AppInstance](w.Operator.GetAppInstance(w.Ctx, w.Tenant.Project.ID, i.ID))
		return harness.Pending(err, got.Status == api.AppInstanceStatusRunning && got.Health == api.AppInstanceHealthHealthy)
	})
	after := w.Instance(i.ID)
	require.Equal(t, "1.0.0", after.Version)
	requireSamePlace(t, i, after)
	require.Equal(t, []string{"requested", "deploying", "running", "upgrade_requested", "failed", "rolled_back"},
		w.EventTypes(i.ID))
	events := w.Events(i.ID)
	require.Equal(t, "readiness_timeout", events[4].Data.Reason)
	require.Equal(t, "rolling_back", events[4].Data.To)
	require.Equal(t, events[3].Data.CorrelationID, events[5].Data.CorrelationID)

	// The hub wants the very revision now that runs: once the node has that state, nothing was started again.
	w.ShipVersion("3.0.0", harness.FirstGreeting, harness.SecondGreeting)
	require.Equal(t, alone, w.PidOf(i))
	upgraded, err := w.Tenant.Upgrade(w.Ctx, w.Operator, i.ID, "3.0.0", nil)
	require.NoError(t, err)
	require.Equal(t, "3.0.0", upgraded.Version)
	require.EqualValues(t, 3, upgraded.Revision)
	requireGreeting(w, upgraded, harness.SecondGreeting)
	w.Decommission(i)
	w.RequireRuns(containers, i, 4)
}

// The hub is killed while a sidecar that never is ready replaces the one that runs: the node returns to that by itself,
// and the server is not touched.
func TestLaw03ASidecarThatFailsGoesBackWithoutTheHub(t *testing.T) {
	w := harness.NewPlatform(t)
	const always = "        restart: always\n"
	w.ShipProject(map[string][]string{"1.0.0": nil, "2.0.0": {
		always, always + "        readiness: {kind: exec, command: [/app, exit, \"9\"]}\n",
		"readiness_timeout_seconds: 30", "readiness_timeout_seconds: 4",
	}})
	containers := w.WatchContainerd(w.Agent.Config.ContainerdNamespace)
	i := w.LaunchProject("project")
	first, serving := w.Running(i), w.KeepCalling(i)
	sidecarAt := func(revision string) error {
		now := w.Running(i)["sidecar"]
		return harness.Pending(nil, now.Revision == revision && now.ID != first["sidecar"].ID)
	}
	_, err := api.Read[api.AppInstance](w.Operator.UpgradeAppInstance(w.Ctx, w.Tenant.Project.ID, i.ID,
		api.AppInstanceUpgrade{TargetVersion: "2.0.0"}))
	require.NoError(t, err)
	w.Eventually("the node has the upgrade", func() error { return sidecarAt("2") })
	require.NoError(t, w.Hub.Kill9())
	w.Eventually("the node runs the first sidecar again", func() error { return sidecarAt("1") })
	w.RestartHub()
	w.Eventually("the hub follows", func() error {
		now := w.Instance(i.ID)
		return harness.Pending(nil, now.Status == api.AppInstanceStatusRunning && now.Version == "1.0.0" &&
			now.Health == api.AppInstanceHealthHealthy)
	})
	require.NoError(t, serving(), "the server answered throughout")
	require.Equal(t, first["web"], w.Running(i)["web"])
	require.Equal(t, []string{"requested", "deploying", "running", "upgrade_requested", "failed", "rolled_back"},
		w.EventTypes(i.ID))
	w.Decommission(i)
	w.RequireRuns(containers, i, 2) // the service that runs once, and then the others without a gap
}

// priceIsKnown holds what an app was said to cost before its launch against what a running instance of it says.
func priceIsKnown(w *harness.Testbed, i api.AppInstance) {
	w.T.Helper()
	perHour := func(text string) string {
		r, ok := new(big.Rat).SetString(text)
		require.True(w.T, ok, text)
		return r.FloatString(2)
	}
	estimate, err := api.Read[api.CostEstimate](w.Operator.EstimateCost(w.Ctx, w.Tenant.Project.ID, harness.AppSlug,
		i.Version,
		&api.EstimateCostParams{AllocationID: w.Allocation.ID}))
	require.NoError(w.T, err)
	require.Equal(w.T, harness.PricePerHour, perHour(estimate.PerHour))
	require.Equal(w.T, scenario.Currency, estimate.Currency)
	cost := w.Instance(i.ID).Cost
	require.Equal(w.T, harness.PricePerHour, perHour(cost.PerHour))
	require.Equal(w.T, scenario.Currency, cost.Currency)
	w.Eventually("what it has cost so far grows", func() error {
		spent, ok := new(big.Rat).SetString(w.Instance(i.ID).Cost.Spent)
		return harness.Pending(nil, ok && spent.Sign() > 0)
	})
}

// runsAt reports whether the instance's one container is of the revision.
func runsAt(w *harness.Testbed, i api.AppInstance, revision int) bool {
	w.T.Helper()
	cl := w.ContainerdClient(w.Agent)
	defer func() { require.NoError(w.T, cl.Close()) }()
	containers, err := cl.Containers(w.Ctx, fmt.Sprintf("labels.%q==%q,labels.%q==%q", "gpuaas.instance", i.ID,
		"gpuaas.revision", fmt.Sprint(revision)))
	require.NoError(w.T, err)
	for _, c := range containers {
		if _, err := c.Task(w.Ctx, nil); err == nil {
			return true
		}
	}
	return false
}

func TestStopAndStartKeepThePlaceAndBillOnlyWhatRan(t *testing.T) {
	w := harness.NewPlatform(t)
	containers := w.WatchContainerd(w.Agent.Config.ContainerdNamespace)
	first := w.Launch("app")
	stopped, err := w.Tenant.Stop(w.Ctx, w.Operator, first.ID)
	require.NoError(t, err)
	require.Equal(t, first.Revision, stopped.Revision)
	_, err = scenario.Get(w.Ctx, first.Endpoints[0].URL+"/")
	require.Error(t, err, "nothing answers")
	require.False(t, runsAt(w, first, 1))
	_, err = api.Read[api.Allocation](w.Tenant.Admin.ReleaseAllocation(w.Ctx, w.Tenant.Project.ID, w.Allocation.ID))
	require.Error(t, err, "the allocation is still in use")

	// A restart of the node's agent starts nothing that is stopped.
	require.NoError(t, w.Agent.Kill9())
	w.RestartAgent(w.Agent)
	w.AwaitOnline(w.Agent.Ready.NodeID)
	require.False(t, runsAt(w, first, 1))

	started, err := w.Tenant.Start(w.Ctx, w.Operator, first.ID)
	require.NoError(t, err)
	requireSamePlace(t, first, started)
	require.Equal(t, "1.0.0", started.Version)
	requireGreeting(w, started, harness.FirstGreeting)
	w.Decommission(first)
	require.Equal(t, []string{
		"requested", "deploying", "running", "stop_requested", "stopped", "start_requested", "running",
		"decommission_requested", "decommissioned",
	}, w.EventTypes(first.ID))
	w.RequireRuns(containers, first, 2)
}
