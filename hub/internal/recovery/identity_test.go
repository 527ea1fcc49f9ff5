package recovery_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"maps"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/periodic"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
	"github.com/gpuaas/gpuaas/protocol"
)

// keysOf are the ids of the service-account keys that a state delivers, by instance.
func keysOf(t *testing.T, pair protocol.SealingKeyPair, push *protocol.PushState) map[string]string {
	t.Helper()
	keys := map[string]string{}
	for _, part := range push.GetParts() {
		var w protocol.Workload
		require.NoError(t, proto.Unmarshal(part, &w))
		sealed := protocol.SealedParameters(w.GetParametersJson())[protocol.InstanceIdentityParameter]
		text, err := pair.Open(w.GetId(), protocol.InstanceIdentityParameter, sealed)
		require.NoError(t, err)
		var file struct {
			KeyID string `json:"key_id"`
		}
		require.NoError(t, json.Unmarshal(text, &file))
		keys[w.GetInstanceId()] = file.KeyID
	}
	return keys
}

// Law 16: a restored hub first tells its node what it was told, and then issues another key to each app instance: of
// one that was made after the backup it knows neither the account nor the key.
func TestLaw16ARestoredHubIssuesAppInstancesOtherKeys(t *testing.T) {
	h, n, l, pair, hello := hubtest.NewWithIdentity(t)
	kept := h.Launch()
	before, _ := l.ExpectState(1)
	l.Report(before.GetGeneration(), hubtest.Ready(kept))
	backup := h.Backup()
	made := h.Launch()
	state, push := l.ExpectState(2)
	old := keysOf(t, pair, push)
	require.Len(t, old, 2)
	leases := h.SignedLeases(l)
	l.Report(state.GetGeneration(), hubtest.Ready(kept), hubtest.Ready(made))
	require.NoError(t, l.Conn.Close(0, "the hub is gone"))

	again := h.Restore(backup)
	n.Hub = again
	back := holds("i1", state, push.GetEnvelope())
	back.Facts = hello.GetFacts()
	l = n.Connect(back)
	passes := periodic.Passes{DB: again.DB, Log: slog.New(slog.DiscardHandler)}
	renew := func() {
		require.NoError(t, passes.RenewIdentities(t.Context(), change.Hub{URL: "https://hub.test"}, again.Now()))
	}
	renew()
	require.Equal(t, 1, hubtest.Count(again, `SELECT count(*) FROM service_account_keys`), "the node has not spoken yet")
	l.UploadState(&protocol.StateUpload{
		State: push.GetEnvelope(), Parts: push.GetParts(), Leases: []*protocol.Envelope{leases},
		Bundle: n.Bundle.Envelope(), Last: true,
	})
	takeBundle(t, n, l)
	_, compiled := l.ExpectState(2)
	require.ElementsMatch(t, push.GetParts(), compiled.GetParts(), "the very documents that the node was told before")
	require.NotContains(t, again.Instance(made.ID).ParametersJSON, "$sealed")

	hubtest.Tx(again, func(ctx context.Context, tx db.Tx) (int, error) { // the first pass has postponed it
		return 0, secret.PostponeIdentity(ctx, tx, kept.Members[0].ID, again.Now())
	})
	renew()
	_, renewed := l.ExpectState(2)
	for id, key := range keysOf(t, pair, renewed) {
		require.NotEqual(t, old[id], key)
		require.Equal(t, 1, hubtest.Count(again, `SELECT count(*) FROM service_account_keys k
			JOIN service_accounts s ON s.id = k.service_account_id WHERE k.id = $1 AND s.app_instance_id = $2`, key, id))
	}
}

// tokensOf are the parameters token of the instances that a state names, by what names calls them.
func tokensOf(t *testing.T, pair protocol.SealingKeyPair, push *protocol.PushState, names map[string]string,
) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, part := range push.GetParts() {
		var w protocol.Workload
		require.NoError(t, proto.Unmarshal(part, &w))
		text, err := pair.Open(w.GetId(), "token", protocol.SealedParameters(w.GetParametersJson())["token"])
		require.NoError(t, err)
		out[names[w.GetInstanceId()]] = string(text)
	}
	return out
}

// Law 16: what a node holds of a secret is the secret's again, by its name, so that a rotation reaches it. Of a secret
// that was issued, rotated or revoked after the backup, the hub has no value, says so, and gives none out.
func TestLaw16AnAdoptedInstanceRefersToItsSecretsAgain(t *testing.T) {
	h, n, l, pair, hello := hubtest.NewWithSecret(t)
	commands := func(h *hubtest.Hub) *command.Service {
		return &command.Service{DB: h.DB, Sealer: hubtest.PlainSealer{}, Bundle: h.Keys.Bundle, LeaseDuration: time.Hour}
	}
	issue := func(name, value string) secret.Secret {
		v, err := commands(h).CreateSecret(t.Context(), h.Tenant("issue"+name), h.Project.ID, name, value)
		require.NoError(t, err)
		return v
	}
	launch := func(name string) instance.Instance {
		return h.LaunchWith(map[string]any{"token": map[string]any{protocol.SecretReferenceKey: name}})
	}
	issue("kept", "kept-1")
	rotated, revoked := issue("rotated", "rotated-1"), issue("revoked", "revoked-1")
	backup := h.Backup()
	issue("fresh", "fresh-1")
	names := map[string]string{}
	for _, name := range []string{"kept", "rotated", "revoked", "fresh"} {
		names[launch(name).ID] = name
	}
	_, err := commands(h).RotateSecret(t.Context(), h.Tenant("rotate"), h.Project.ID, rotated.ID, "rotated-2")
	require.NoError(t, err)
	_, err = commands(h).RevokeSecret(t.Context(), h.Tenant("revoke"), h.Project.ID, revoked.ID)
	require.NoError(t, err)
	state, push := l.ExpectState(4)
	want := map[string]string{"kept": "kept-1", "rotated": "rotated-2", "revoked": "", "fresh": "fresh-1"}
	for !maps.Equal(want, tokensOf(t, pair, push, names)) {
		state, push = l.ExpectState(4)
	}
	leases := h.SignedLeases(l)
	require.NoError(t, l.Conn.Close(0, "the hub is gone"))

	again := h.Restore(backup)
	n.Hub = again
	back := holds("i1", state, push.GetEnvelope())
	back.Facts = hello.GetFacts()
	l = n.Connect(back)
	l.UploadState(&protocol.StateUpload{
		State: push.GetEnvelope(), Parts: push.GetParts(), Leases: []*protocol.Envelope{leases},
		Bundle: n.Bundle.Envelope(), Last: true,
	})
	takeBundle(t, n, l)
	_, compiled := l.ExpectState(4)
	require.ElementsMatch(t, push.GetParts(), compiled.GetParts(), "the very documents that the node was told before")
	for id, name := range names {
		require.JSONEq(t, `{"token":{"$secret":"`+name+`"}}`, again.Instance(id).ParametersJSON)
	}
	require.Equal(t, 3, hubtest.Count(again, `SELECT count(*) FROM runtime_secrets WHERE status = 'revoked'
		AND sealed = '' AND project_id = $1`, h.Project.ID))
	require.Equal(t, 3, hubtest.Count(again, `SELECT count(*) FROM recovery_findings WHERE kind = 'secret_unknown'`))

	_, err = commands(again).CreateSecret(t.Context(), again.Tenant("anew"), h.Project.ID, "fresh", "fresh-2")
	require.NoError(t, err)
	want["fresh"] = "fresh-2"
	_, next := l.ExpectState(4)
	require.Equal(t, want, tokensOf(t, pair, next, names))
}
