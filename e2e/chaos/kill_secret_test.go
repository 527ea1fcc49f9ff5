package chaos_test

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	api "github.com/gpuaas/gpuaas/pkg/client"
)

// takesSecret are the changes of the app's manifest for a secret parameter, of which a signal tells the app.
func takesSecret() []string {
	const parameter, config = "      greeting: {type", "  config: {on_change"
	return []string{
		parameter, "      token: {type: string, writeOnly: true}\n" + parameter,
		config, "  secrets: {on_change: signal, signal: SIGHUP}\n" + config,
	}
}

// issueSecret makes the secret that the instances of the rounds refer to.
func (k *killTest) issueSecret() {
	k.T.Helper()
	k.value = rand.Text()
	var err error
	k.secret, err = api.Read[api.Secret](k.Tenant.Admin.CreateSecret(k.Ctx, k.Tenant.Project.ID, api.SecretCreate{
		Name: "rotated", Value: k.value,
	}))
	require.NoError(k.T, err)
}

func (k *killTest) refersToSecret() map[string]any {
	return map[string]any{"token": map[string]any{"$secret": k.secret.Name}}
}

// rotateSecret gives the secret another value: one request makes one version, the app gets it without a restart, and
// it is stored nowhere but in memory.
func (k *killTest) rotateSecret(l *instanceHistory) {
	k.T.Helper()
	before, pid := k.secret.Version, k.PidOf(k.Instance(l.id))
	k.value = rand.Text()
	value := k.value
	k.step(rotate, api.AppInstanceStatusRunning, l, func(ctx context.Context, once api.RequestEditorFn) (err error) {
		k.secret, err = api.Read[api.Secret](k.Tenant.Admin.RotateSecret(ctx, k.Tenant.Project.ID, k.secret.ID,
			api.SecretRotate{Value: value}, once))
		return err
	})
	require.Equal(k.T, before+1, k.secret.Version, "the answer")
	now, err := api.Read[api.Secret](k.Tenant.Admin.GetSecret(k.Ctx, k.Tenant.Project.ID, k.secret.ID,
		&api.GetSecretParams{}))
	require.NoError(k.T, err)
	require.Equal(k.T, k.secret, now, "one version for one request")
	require.Equal(k.T, []int64{now.Version, before}, k.auditedVersions()[:2], "one audit row for one version")
	require.Equal(k.T, pid, k.PidOf(k.Instance(l.id)), "the app is told, not restarted")
	require.True(k.T, harness.InMemory(fmt.Sprintf("/proc/%d/root/run/gpuaas-parameters/token", pid)))
	k.RequireNowhereStored(value)
}

// auditedVersions are those of the secret in the audit trail, the newest first.
func (k *killTest) auditedVersions() (versions []int64) {
	k.T.Helper()
	rows, err := api.Read[api.AuditRowList](k.Tenant.Admin.ListAudit(k.Ctx, &api.ListAuditParams{ResourceID: k.secret.ID}))
	require.NoError(k.T, err)
	for _, r := range rows.Items {
		after, ok := r.After.(map[string]any)
		require.True(k.T, ok, "%+v", r)
		version, ok := after["version"].(float64)
		require.True(k.T, ok, "%+v", r)
		versions = append(versions, int64(version))
	}
	return versions
}

// checkSecret returns an error until an instance has loaded the newest version of its secret, and no other file.
func (k *killTest) checkSecret(ctx context.Context, i api.AppInstance) error {
	if i.AppSlug != harness.AppSlug {
		return nil
	}
	body, err := scenario.Get(ctx, i.Endpoints[0].URL+"/secrets")
	if err != nil {
		return err
	}
	var shown struct{ Loaded, Files map[string]string }
	if err := json.Unmarshal([]byte(body), &shown); err != nil {
		return err
	}
	digest := sha256.Sum256([]byte(k.value))
	want := map[string]string{"token": hex.EncodeToString(digest[:])}
	if !maps.Equal(want, shown.Files) || !maps.Equal(want, shown.Loaded) {
		return fmt.Errorf("its secrets are %s, not %v", body, want)
	}
	return nil
}
