package upgrade_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/e2e/load"
	api "github.com/gpuaas/gpuaas/pkg/client"
)

// startFirst are the changes of a manifest that asks for start_first.
func startFirst(more ...string) []string {
	return append([]string{"metering:", "upgrade: {strategy: start_first}\n  metering:"}, more...)
}

// upgradeData is the data of the last request for an upgrade or a rollback.
func upgradeData(w *harness.Testbed, id string) (data api.EventData) {
	w.T.Helper()
	for _, e := range w.Events(id) {
		if e.Type == "apps.instance.upgrade_requested" || e.Type == "apps.instance.rollback_requested" {
			data = e.Data
		}
	}
	return data
}

// requireAlone waits until no container of a revision is left.
func requireAlone(w *harness.Testbed, i api.AppInstance, without int) {
	w.T.Helper()
	cl := w.ContainerdClient(w.Agent)
	defer func() { require.NoError(w.T, cl.Close()) }()
	w.Eventually("the other copy is gone", func() error {
		left, err := cl.Containers(w.Ctx, fmt.Sprintf("labels.%q==%q,labels.%q==%q", "gpuaas.instance", i.ID,
			"gpuaas.revision", fmt.Sprint(without)))
		return harness.Pending(err, len(left) == 0)
	})
}

func TestAnUpgradeThatStartsFirstFailsNoRequest(t *testing.T) {
	w := harness.NewPlatform(t)
	containers := w.WatchContainerd(w.Agent.Config.ContainerdNamespace)
	first := w.Launch("app")
	w.ShipVersion("2.0.0", startFirst(harness.FirstGreeting, harness.SecondGreeting)...)
	w.ShipVersion("3.0.0", startFirst("path: /healthz", "path: /nowhere", "readiness_timeout_seconds: 30",
		"readiness_timeout_seconds: 4")...)

	requests := load.Start(w.Ctx, first.Endpoints[0].URL+"/", 200)
	second, err := w.Tenant.Upgrade(w.Ctx, w.Operator, first.ID, "2.0.0", nil)
	require.NoError(t, err)
	requireSamePlace(t, first, second)
	requireGreeting(w, second, harness.SecondGreeting)
	require.Equal(t, "start_first", upgradeData(w, first.ID).Strategy)
	requireAlone(w, second, 1)
	pid := w.PidOf(second)

	// The next one is never ready: the node removes it, and the one that serves has never stopped.
	_, err = api.Read[api.AppInstance](w.Operator.UpgradeAppInstance(w.Ctx, w.Tenant.Project.ID, first.ID,
		api.AppInstanceUpgrade{TargetVersion: "3.0.0"}))
	require.NoError(t, err)
	w.Eventually("the node has gone back", func() error {
		got := w.Instance(first.ID)
		return harness.Pending(nil, got.Status == api.AppInstanceStatusRunning && got.Version == "2.0.0" &&
			len(w.Events(first.ID)) > 6)
	})
	requireAlone(w, second, 3)
	require.Equal(t, pid, w.PidOf(second))
	result := requests.Stop()
	require.Zero(t, result.Failed, "%d of %d requests failed: %v", result.Failed, result.Requests, result.Errors)
	require.Equal(t, []string{
		"requested", "deploying", "running", "upgrade_requested", "upgraded", "upgrade_requested", "failed", "rolled_back",
	}, w.EventTypes(first.ID))

	w.Decommission(first)
	w.RequireRuns(containers, first, 1)
}

func TestAnUpgradeStartsFirstOnlyWhereBothHaveRoom(t *testing.T) {
	w := harness.NewPlatform(t)
	first, second := w.Launch("app"), w.Launch("neighbour")
	w.ShipVersion("2.0.0", startFirst(harness.FirstGreeting, harness.SecondGreeting)...)
	for _, c := range []struct {
		i                api.AppInstance
		strategy, reason string
	}{
		{first, "recreate", "the allocation has no room for both"},
		{second, "start_first", ""},
	} {
		i, err := w.Tenant.Upgrade(w.Ctx, w.Operator, c.i.ID, "2.0.0", nil)
		require.NoError(t, err)
		requireGreeting(w, i, harness.SecondGreeting)
		data := upgradeData(w, c.i.ID)
		require.Equal(t, []string{c.strategy, c.reason}, []string{data.Strategy, data.StrategyReason})
		if c.reason != "" {
			w.Decommission(c.i)
		}
	}
	_, err := scenario.Get(w.Ctx, fmt.Sprint(second.Endpoints[0].URL, "/"))
	require.NoError(t, err)
	w.Decommission(second)
}
