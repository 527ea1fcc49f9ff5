package e2e_test

import (
	"bytes"
	"encoding/pem"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/client"
	"github.com/stretchr/testify/require"

	api "github.com/gpuaas/gpuaas/pkg/client"
)

// keyFiles are the files that may hold a key or a token in plain, as ARCHITECTURE.md lists them: 0600, all of them.
func keyFiles() []string {
	return []string{
		"hub/data/admin-token", "hub/data/kek.key", "hub/data/trust/*.key", "hub/keys/passphrase", "hub/keys/*.age",
		"node/data/node.key", "node/join-token",
		"tenant-acme/*.pem", "tenant-acme/publisher.key",
	}
}

// Law 11: after a whole life of an app, no secret stands in a log, an event, an audit row, a container's spec, a
// database, or any file but the listed ones.
func TestLaw11NoSecretIsWrittenDown(t *testing.T) {
	w := platform(t)
	secrets := w.secrets()
	i := w.launch("app")
	_, err := w.tenant.AwaitCharge(w.ctx, i.ID)
	require.NoError(t, err)
	specs := w.containerSpecs()
	require.NotEmpty(t, specs)
	events, err := w.tenant.Events(w.ctx, w.operator, i.ID)
	require.NoError(t, err)
	require.NotEmpty(t, events)
	w.decommission(i)

	for name, secret := range secrets {
		require.Greater(t, len(secret), 16, name)
		for _, spec := range specs {
			require.NotContains(t, spec, secret, "%s in a container's spec", name)
		}
	}
	rows, err := w.database().Query(w.ctx,
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

	allowed := map[string]bool{}
	for _, pattern := range keyFiles() {
		files, err := filepath.Glob(filepath.Join(w.dir, pattern))
		require.NoError(t, err)
		for _, f := range files {
			allowed[f] = true
			info, err := os.Stat(f)
			require.NoError(t, err)
			require.EqualValues(t, 0o600, info.Mode().Perm(), f)
		}
	}
	// The databases write their buffers out when they end.
	require.NoError(t, w.agent.Stop())
	require.NoError(t, w.hub.Stop())
	scanned := 0
	for _, root := range []string{w.dir, w.run} {
		require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() || allowed[path] || strings.Contains(path, "/containerd/root/") {
				return err
			}
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			scanned++
			for name, secret := range secrets {
				if bytes.Contains(data, []byte(secret)) {
					t.Errorf("%s is in %s", name, path)
				}
			}
			if bytes.Contains(data, []byte("PRIVATE KEY-----")) {
				t.Errorf("a private key is in %s", path)
			}
			return nil
		}))
	}
	require.Greater(t, scanned, 50)
	w.restartHub()
	w.restartAgent(w.agent)
}

// secrets are all that this world knows, by name.
func (w *world) secrets() map[string]string {
	w.t.Helper()
	read := func(path string) string {
		data, err := os.ReadFile(path)
		require.NoError(w.t, err)
		return strings.TrimSpace(string(data))
	}
	// The inside of a PEM file: its armour is no secret.
	body := func(path string) string {
		block, _ := pem.Decode([]byte(read(path)))
		require.NotNil(w.t, block, path)
		lines := strings.Split(read(path), "\n")
		return strings.Join(slices.DeleteFunc(lines, func(l string) bool { return strings.HasPrefix(l, "-----") }), "\n")
	}
	tenant := filepath.Join(w.dir, "tenant-acme")
	s := map[string]string{
		"the admin token":            read(w.hub.Ready.TokenFile),
		"the passphrase":             read(w.hub.Config.PassphraseFile()),
		"the join token":             read(filepath.Join(w.agent.Config.Dir, "join-token")),
		"the operator's key":         body(filepath.Join(tenant, "operator.pem")),
		"the publisher's key":        body(filepath.Join(tenant, "publisher.key")),
		"the publishing robot's key": body(filepath.Join(tenant, "publisher.pem")),
	}
	intent, err := api.Read[api.PublishIntent](w.publisher.Hub.CreatePublishIntent(w.ctx, w.tenant.Project.ID,
		api.PublishIntentCreate{
			AppSlug: appSlug, AppVersion: "9.9.9", ArtifactName: "runtime", Channel: api.ChannelDev,
		}))
	require.NoError(w.t, err)
	s["a push credential"] = intent.Credentials.Password
	token, err := w.tenant.AccessToken(w.ctx, w.operator)
	require.NoError(w.t, err)
	s["an access token"] = token
	return s
}

// containerSpecs are the OCI specs and labels of the node's containers, as containerd keeps them.
func (w *world) containerSpecs() (specs []string) {
	w.t.Helper()
	cl, err := client.New(w.containerd.Address, client.WithDefaultNamespace(w.agent.Config.ContainerdNamespace))
	require.NoError(w.t, err)
	defer func() { require.NoError(w.t, cl.Close()) }()
	containers, err := cl.Containers(w.ctx)
	require.NoError(w.t, err)
	for _, c := range containers {
		info, err := c.Info(w.ctx)
		require.NoError(w.t, err)
		specs = append(specs, string(info.Spec.GetValue()))
	}
	return specs
}
