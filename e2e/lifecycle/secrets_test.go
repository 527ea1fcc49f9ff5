package lifecycle_test

import (
	"fmt"
	"net/http"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// Law 11: a secret parameter is readable in the container, from a file in memory, and nowhere else: not in an answer,
// a table, a log, the agent's store, containerd's, an argument or an environment.
func TestLaw11ASecretParameterIsAFileInMemory(t *testing.T) {
	const secret, later = "correct-horse-battery", "staple-donkey-candle"
	w := harness.NewPlatform(t)
	w.ShipVersion("2.0.0", "      greeting: {type", "      token: {type: string, writeOnly: true}\n      greeting: {type")
	i, _, err := w.Tenant.Launch(w.Ctx, w.Operator, client.AppInstanceCreate{
		AppSlug: harness.AppSlug, Version: "2.0.0", DisplayName: "keeper", Parameters: map[string]any{"token": secret},
	}, nil)
	require.NoError(t, err)
	require.NotContains(t, i.Parameters, "token")
	requireSecret(t, w.PidOf(i), secret)
	_, err = w.Tenant.Stop(w.Ctx, w.Operator, i.ID)
	require.NoError(t, err)
	i, err = w.Tenant.Start(w.Ctx, w.Operator, i.ID)
	require.NoError(t, err)
	requireSecret(t, w.PidOf(i), secret)

	upgrade := func(parameters map[string]any) {
		_, err := client.Read[client.AppInstance](w.Operator.UpgradeAppInstance(w.Ctx, w.Tenant.Project.ID, i.ID,
			client.AppInstanceUpgrade{TargetVersion: "2.0.0", Parameters: parameters}))
		require.NoError(t, err)
		w.Eventually("the upgrade is done", func() error {
			i = w.Instance(i.ID)
			return harness.Pending(nil, i.Status == client.AppInstanceStatusRunning)
		})
	}
	upgrade(map[string]any{"greeting": "again"})
	requireSecret(t, w.PidOf(i), secret)
	upgrade(map[string]any{"token": later})
	requireSecret(t, w.PidOf(i), later)
	i, err = w.Tenant.Rollback(w.Ctx, w.Operator, i.ID, nil)
	require.NoError(t, err)
	requireSecret(t, w.PidOf(i), secret)

	for _, text := range []string{secret, later} {
		requireSealed(w, i, text)
	}
	w.Decommission(i)
	for _, text := range []string{secret, later} {
		require.Empty(t, w.TablesWith(text))
	}
}

// requireSealed searches for a secret in what the hub answers, and in all that is stored.
func requireSealed(w *harness.Testbed, i client.AppInstance, secret string) {
	w.T.Helper()
	w.RequireNowhereStored(secret)
	require.NotEmpty(w.T, w.TablesWith("$sealed"), "the search finds what is there")
	project := "/projects/" + w.Tenant.Project.ID
	token, err := w.Tenant.AccessToken(w.Ctx, w.Operator)
	require.NoError(w.T, err)
	for path, token := range map[string]string{
		project + "/app-instances": token, project + "/app-instances/" + i.ID: token,
		project + "/app-instances/" + i.ID + "/events": token, "/audit": w.AdminToken(),
	} {
		answer := w.Ask(w.PlainClient(), http.MethodGet, path, "", map[string]string{"Authorization": "Bearer " + token})
		require.Equal(w.T, http.StatusOK, answer.Status, path)
		require.NotContains(w.T, string(answer.Body), secret, path)
	}
}

// requireSecret checks where a process finds the secret, and that its arguments and environment have no more than the
// way there.
func requireSecret(t *testing.T, pid uint32, secret string) {
	t.Helper()
	environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	require.NoError(t, err)
	require.Contains(t, string(environ), "GPUAAS_PARAMETERS_DIR=/run/gpuaas-parameters\x00")
	require.NotContains(t, string(environ), secret)
	arguments, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	require.NoError(t, err)
	require.NotContains(t, string(arguments), secret)
	path := fmt.Sprintf("/proc/%d/root/run/gpuaas-parameters/token", pid)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, secret, string(text))
	require.True(t, harness.InMemory(path))
	require.ErrorIs(t, os.WriteFile(path, nil, 0o600), unix.EROFS)
}
