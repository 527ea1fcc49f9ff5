package recovery_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
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
	bundle := hubtest.Next(l, func(m *protocol.HubMessage) (*protocol.Envelope, bool) {
		return m.GetPushBundle().GetEnvelope(), m.GetPushBundle() != nil
	})
	var err error
	n.Bundle, err = n.Bundle.Succeed(bundle)
	require.NoError(t, err)
	l.Ack(protocol.Envelope_BUNDLE, 0, n.Bundle.Version())
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
