package security_test

import (
	"bytes"
	"encoding/pem"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
	api "github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/pkg/telemetry/telemetrytest"
)

// keyFiles are the files that may hold a key or a token in plain, as ARCHITECTURE.md lists them: 0600, all of them.
func keyFiles() []string {
	return []string{
		"hub/data/admin-token", "hub/data/kek.key", "hub/data/trust/*.key", "hub/keys/passphrase", "hub/keys/*.age",
		"node/data/node.key", "node/join-token",
		"tenant-acme/*.pem", "tenant-acme/publisher.key",
	}
}

// collectorsKey is what hub and agent show to their collector of traces.
const collectorsKey = "the-key-of-the-collector"

// Law 11: after an app's whole lifecycle no secret is in a log, a span, an event, an audit row, a container's spec, a
// database, or any file but the listed ones.
func TestLaw11NoSecretIsWrittenDown(t *testing.T) {
	collector := telemetrytest.NewCollector(t)
	w := harness.New(t)
	w.Env = append(harness.TracesTo(collector.URL), "OTEL_EXPORTER_OTLP_HEADERS=authorization=Bearer "+collectorsKey)
	w.SetUpPlatform()
	secrets := secrets(w)
	i := w.Launch("app")
	_, err := w.Tenant.AwaitCharge(w.Ctx, i.ID)
	require.NoError(t, err)
	specs := containerSpecs(w)
	require.NotEmpty(t, specs)
	events, err := w.Tenant.Events(w.Ctx, w.Operator, i.ID)
	require.NoError(t, err)
	require.NotEmpty(t, events)
	w.Decommission(i)

	for name, secret := range secrets {
		require.Greater(t, len(secret), 16, name)
		for _, spec := range specs {
			require.NotContains(t, spec, secret, "%s in a container's spec", name)
		}
	}
	rows, err := w.Database().Query(w.Ctx,
		`SELECT row_to_json(a)::text FROM audit_rows a UNION ALL SELECT row_to_json(e)::text FROM events e`)
	require.NoError(t, err)
	defer rows.Close()
	read := 0
	for rows.Next() {
		var row string
		require.NoError(t, rows.Scan(&row))
		read++
		for name, secret := range secrets {
			require.NotContains(t, row, secret, name)
		}
	}
	require.NoError(t, rows.Err())
	require.Positive(t, read)

	allowed := keyFilesOf(w)
	// The databases write their buffers out when they end.
	require.NoError(t, w.Agent.Stop())
	require.NoError(t, w.Hub.Stop())
	spans := collector.Text(t)
	require.Contains(t, spans, "StartContainer")
	for name, secret := range secrets {
		require.NotContains(t, spans, secret, "%s in a span", name)
	}
	require.Greater(t, requireNotInFiles(w, secrets, allowed), 50)
	w.RestartHub()
	w.RestartAgent(w.Agent)
}

// requireNotInFiles checks that no file of the testbed but the allowed ones has a secret or a private key, and returns
// how many files it has read.
func requireNotInFiles(w *harness.Testbed, secrets map[string]string, allowed map[string]bool) (scanned int) {
	w.T.Helper()
	for _, root := range []string{w.Dir, w.RunDir} {
		require.NoError(w.T, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			// containerd removes what nobody uses any more.
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err != nil || !d.Type().IsRegular() || allowed[path] || strings.Contains(path, "/containerd/root/") {
				return err
			}
			data, err := os.ReadFile(path)
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err != nil {
				return err
			}
			scanned++
			for name, secret := range secrets {
				if bytes.Contains(data, []byte(secret)) {
					w.T.Errorf("%s is in %s", name, path)
				}
			}
			if bytes.Contains(data, []byte("PRIVATE KEY-----")) {
				w.T.Errorf("a private key is in %s", path)
			}
			return nil
		}))
	}
	return scanned
}

// keyFilesOf are the files that hold keys; only their owner reads them.
func keyFilesOf(w *harness.Testbed) map[string]bool {
	w.T.Helper()
	allowed := map[string]bool{}
	for _, pattern := range keyFiles() {
		files, err := filepath.Glob(filepath.Join(w.Dir, pattern))
		require.NoError(w.T, err)
		for _, f := range files {
			allowed[f] = true
			info, err := os.Stat(f)
			require.NoError(w.T, err)
			require.EqualValues(w.T, 0o600, info.Mode().Perm(), f)
		}
	}
	return allowed
}

// secrets are all that the testbed knows, by name.
func secrets(w *harness.Testbed) map[string]string {
	w.T.Helper()
	read := func(path string) string {
		data, err := os.ReadFile(path)
		require.NoError(w.T, err)
		return strings.TrimSpace(string(data))
	}
	// The inside of a PEM file: its armour is no secret.
	body := func(path string) string {
		block, _ := pem.Decode([]byte(read(path)))
		require.NotNil(w.T, block, path)
		lines := strings.Split(read(path), "\n")
		return strings.Join(slices.DeleteFunc(lines, func(l string) bool { return strings.HasPrefix(l, "-----") }), "\n")
	}
	tenant := filepath.Join(w.Dir, "tenant-acme")
	s := map[string]string{
		"the collector's key":        collectorsKey,
		"the admin token":            read(w.Hub.Ready.TokenFile),
		"the passphrase":             read(w.Hub.Config.PassphraseFile()),
		"the join token":             read(filepath.Join(w.Agent.Config.Dir, "join-token")),
		"the operator's key":         body(filepath.Join(tenant, "operator.pem")),
		"the publisher's key":        body(filepath.Join(tenant, "publisher.key")),
		"the publishing robot's key": body(filepath.Join(tenant, "publisher.pem")),
	}
	intent, err := api.Read[api.PublishIntent](w.Publisher.Hub.CreatePublishIntent(w.Ctx, w.Tenant.Project.ID,
		api.PublishIntentCreate{
			AppSlug: harness.AppSlug, AppVersion: "9.9.9", ArtifactName: "runtime", Channel: api.ChannelDev,
		}))
	require.NoError(w.T, err)
	s["a push credential"] = intent.Credentials.Password
	token, err := w.Tenant.AccessToken(w.Ctx, w.Operator)
	require.NoError(w.T, err)
	s["an access token"] = token
	return s
}

// containerSpecs are the OCI specs and labels of the node's containers, as containerd keeps them.
func containerSpecs(w *harness.Testbed) (specs []string) {
	w.T.Helper()
	cl := w.ContainerdClient(w.Agent)
	defer func() { require.NoError(w.T, cl.Close()) }()
	containers, err := cl.Containers(w.Ctx)
	require.NoError(w.T, err)
	for _, c := range containers {
		info, err := c.Info(w.Ctx)
		require.NoError(w.T, err)
		specs = append(specs, string(info.Spec.GetValue()))
	}
	return specs
}
