package lifecycle_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// identity is what the demo app says of its own instance, which it reads from the hub.
type identity struct {
	ServiceAccountID string             `json:"service_account_id"`
	KeyID            string             `json:"key_id"`
	NodeID           string             `json:"node_id"`
	Instance         client.AppInstance `json:"instance"`
}

// Law 11: an app finds its service account in a file in memory, and with it reads its own instance from the hub; the
// hub renews the key under the running container. The key is nowhere else.
func TestLaw11AnAppReadsItsOwnInstanceByItsOwnServiceAccount(t *testing.T) {
	w := harness.New(t)
	network := w.NewNetwork("hub")
	w.StartContainerd()
	w.StartHub(w.HubConfigIn(network))
	w.NewTenant("acme")
	policy := filepath.Join(w.Dir, "policy.yaml")
	require.NoError(t, os.WriteFile(policy, []byte("egress: {allow: ['"+network.Address("hub")+":8443']}\n"), 0o600))
	node := w.AgentConfig("node")
	node.ExtraArgs = append(node.ExtraArgs, "--policy", policy)
	w.Agent = w.StartAgent(node)
	w.ShipApp()
	w.Allocate(w.Agent)
	w.ShipVersion("2.0.0", "  metering: {", "  instance_identity: service_account\n"+
		"  secrets: {on_change: none}\n  metering: {")
	i, _, err := w.Tenant.Launch(w.Ctx, w.Operator, client.AppInstanceCreate{
		AppSlug: harness.AppSlug, Version: "2.0.0", DisplayName: "itself",
	}, nil)
	require.NoError(t, err)
	require.NotContains(t, i.Parameters, "service-account.json")
	pid := w.PidOf(i)
	ask := func() (own identity, err error) {
		body, err := scenario.Get(w.Ctx, i.Endpoints[0].URL+"/identity")
		if err == nil {
			err = json.Unmarshal([]byte(body), &own)
		}
		return own, err
	}
	first, err := ask()
	require.NoError(t, err)
	require.Equal(t, i.ID, first.Instance.ID)
	require.Equal(t, w.Agent.Ready.NodeID, first.NodeID)
	before := requireAccountFile(w, pid)
	require.Equal(t, first.KeyID, before.KeyID)

	db := w.Database()
	_, err = db.Exec(w.Ctx, `UPDATE instance_identities SET renew_at = now()`)
	require.NoError(t, err)
	require.NoError(t, db.Close(w.Ctx))
	w.Eventually("the app has its next key", func() error {
		next, err := ask()
		return harness.Pending(err, next.KeyID != first.KeyID && next.Instance.ID == i.ID)
	})
	require.Equal(t, pid, w.PidOf(i), "the container goes on")
	require.Zero(t, w.Instance(i.ID).Members[0].Restarts)
	after := requireAccountFile(w, pid)
	require.Equal(t, before.ServiceAccountID, after.ServiceAccountID)
	for _, a := range []accountFile{before, after} {
		requireSealed(w, i, strings.Split(a.PrivateKeyPEM, "\n")[1])
	}

	token := after.token(w)
	path := "/projects/" + w.Tenant.Project.ID + "/app-instances"
	for at, status := range map[string]int{
		path + "/" + i.ID: 200, path: 403, "/projects/" + i.ID + "/app-instances": 404,
	} {
		answer := w.Ask(w.PlainClient(), http.MethodGet, at, "", map[string]string{"Authorization": "Bearer " + token})
		require.Equal(t, status, answer.Status, at)
	}
	w.Decommission(i)
	answer := w.Ask(w.PlainClient(), http.MethodGet, path, "", map[string]string{"Authorization": "Bearer " + token})
	require.Equal(t, http.StatusUnauthorized, answer.Status, "the account ends with its instance")
}

// accountFile is what the app finds.
type accountFile struct {
	ServiceAccountID string `json:"service_account_id"`
	KeyID            string `json:"key_id"`
	PrivateKeyPEM    string `json:"private_key_pem"`
}

func requireAccountFile(w *harness.Testbed, pid uint32) (a accountFile) {
	w.T.Helper()
	path := fmt.Sprintf("/proc/%d/root/run/gpuaas-parameters/service-account.json", pid)
	raw, err := os.ReadFile(path)
	require.NoError(w.T, err)
	require.NoError(w.T, json.Unmarshal(raw, &a))
	require.True(w.T, harness.InMemory(path))
	return a
}

func (a accountFile) token(w *harness.Testbed) string {
	w.T.Helper()
	body, err := json.Marshal(map[string]string{
		"service_account_id": a.ServiceAccountID, "key_id": a.KeyID, "private_key_pem": a.PrivateKeyPEM,
	})
	require.NoError(w.T, err)
	answer := w.Ask(w.PlainClient(), http.MethodPost, "/auth/service-account/token", string(body), nil)
	require.Equal(w.T, http.StatusOK, answer.Status)
	var token client.Token
	require.NoError(w.T, json.Unmarshal(answer.Body, &token))
	return token.AccessToken
}
