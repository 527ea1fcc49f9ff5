package lifecycle_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// loadedConfig asks the app which config it has loaded.
func loadedConfig(w *harness.Testbed, i client.AppInstance) string {
	w.T.Helper()
	body, err := scenario.Get(w.Ctx, i.Endpoints[0].URL+"/config")
	require.NoError(w.T, err)
	var config struct{ Loaded string }
	require.NoError(w.T, json.Unmarshal([]byte(body), &config))
	return config.Loaded
}

// changeConfig changes the motto and returns the instance once its containers are said to have it.
func changeConfig(w *harness.Testbed, id, motto string, meanwhile func()) client.AppInstance {
	w.T.Helper()
	i, err := client.Read[client.AppInstance](w.Operator.ChangeAppInstance(w.Ctx, w.Tenant.Project.ID, id,
		client.AppInstanceChange{Config: map[string]any{"motto": motto}}))
	require.NoError(w.T, err)
	require.False(w.T, i.Members[0].ConfigCurrent)
	meanwhile()
	w.Eventually("the node has the config "+motto, func() error {
		i = w.Instance(id)
		return harness.Pending(nil, i.Members[0].ConfigCurrent && i.Status == client.AppInstanceStatusRunning)
	})
	return i
}

func TestAConfigReachesTheAppAsItsManifestSays(t *testing.T) {
	w := harness.NewPlatform(t)
	first := w.Launch("app")
	require.Equal(t, "{}", loadedConfig(w, first))
	pid := w.PidOf(first)

	_, err := client.Read[client.AppInstance](w.Operator.ChangeAppInstance(w.Ctx, w.Tenant.Project.ID, first.ID,
		client.AppInstanceChange{Config: map[string]any{"moto": "misspelt"}}))
	require.ErrorContains(t, err, "config_invalid")

	i := changeConfig(w, first.ID, "one", func() {})
	w.Eventually("the app has reloaded at the signal", func() error {
		return harness.Pending(nil, loadedConfig(w, i) == `{"motto":"one"}`)
	})
	require.NoError(t, w.Agent.Kill9())
	i = changeConfig(w, first.ID, "while the node is away", func() { w.RestartAgent(w.Agent) })
	w.Eventually("the node that is back delivers it", func() error {
		return harness.Pending(nil, loadedConfig(w, i) == `{"motto":"while the node is away"}`)
	})
	require.Equal(t, pid, w.PidOf(first), "nothing was restarted")
	require.Equal(t, first.Revision, i.Revision)

	w.ShipVersion("2.0.0", "{on_change: signal, signal: SIGHUP}", "{on_change: restart}")
	second, err := w.Tenant.Upgrade(w.Ctx, w.Operator, first.ID, "2.0.0", nil)
	require.NoError(t, err)
	require.JSONEq(t, `{"motto":"while the node is away"}`, loadedConfig(w, second), "an upgrade keeps it")
	pid = w.PidOf(second)
	third := changeConfig(w, first.ID, "two", func() {})
	require.JSONEq(t, `{"motto":"two"}`, loadedConfig(w, third))
	require.NotEqual(t, pid, w.PidOf(third))
	require.Equal(t, second.Endpoints, third.Endpoints)

	back, err := w.Tenant.Rollback(w.Ctx, w.Operator, first.ID, nil)
	require.NoError(t, err)
	require.JSONEq(t, `{"motto":"while the node is away"}`, loadedConfig(w, back), "a revision has the config of its time")
	require.Equal(t, map[string]any{"motto": "while the node is away"}, back.Config)
	w.Decommission(first)
}
