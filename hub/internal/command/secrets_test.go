package command_test

import (
	"crypto/ed25519"
	"crypto/rand"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// sealingNode gives the node a key of its own and a sealing key that it has signed.
func (w *world) sealingNode() protocol.SealingKeyPair {
	w.T.Helper()
	pub, node, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(w.T, err)
	pair, err := protocol.DeriveSealingKey(w.Node, node.Seed())
	require.NoError(w.T, err)
	env, err := pair.Sign(protocol.NewEd25519Signer(node))
	require.NoError(w.T, err)
	facts, err := protojson.Marshal(&protocol.NodeFacts{Hostname: "n1", SealingKey: env})
	require.NoError(w.T, err)
	w.Exec(`UPDATE nodes SET facts = $2, public_key = $3 WHERE id = $1`, w.Node, string(facts), []byte(pub))
	return pair
}

// publishWithSecret publishes version 3.0.0 of the demo, with a secret parameter.
func (w *world) publishWithSecret() {
	w.T.Helper()
	doc := strings.Replace(commandtest.Manifest(), "greeting: {type", "token: {type: string, writeOnly: true}, "+
		"greeting: {type", 1)
	require.NotEqual(w.T, commandtest.Manifest(), doc)
	verified, env := w.Sign(strings.Replace(doc, "version: 1.0.0", "version: 3.0.0", 1))
	w.PublishVersion("3.0.0", verified, env)
}

// opened are the secret parameters of an instance, as its node opens them.
func opened(t *testing.T, pair protocol.SealingKeyPair, i instance.Instance) map[string]string {
	t.Helper()
	out := map[string]string{}
	for name, sealed := range protocol.SealedParameters(i.ParametersJSON) {
		secret, err := pair.Open(i.Members[0].ID, name, sealed)
		require.NoError(t, err)
		out[name] = string(secret)
	}
	return out
}

// Law 11: the hub stores a secret parameter only as the node of the member can open it.
func TestLaw11ASecretParameterIsStoredSealed(t *testing.T) {
	w := newWorld(t)
	w.Allocation()
	w.publishWithSecret()
	create := func(params map[string]any) (instance.Instance, error) {
		in := w.InstanceInput()
		in.Version, in.Parameters = "3.0.0", params
		return w.Commands().CreateInstance(t.Context(), w.Meta("with a secret"), in)
	}
	before := w.Contents()
	_, err := create(map[string]any{"greeting": "hello", "token": "correct-horse"})
	require.EqualValues(t, "feature_missing", fault.As(err).Code, "the node has no sealing key")
	require.Equal(t, before, w.Contents())
	pair := w.sealingNode()
	_, err = create(map[string]any{"token": map[string]any{"$sealed": "eA=="}})
	require.Equal(t, manifest.CodeParametersInvalid, fault.As(err).Code)
	i, err := create(map[string]any{"greeting": "hello", "token": "correct-horse"})
	require.NoError(t, err)
	require.Equal(t, map[string]string{"token": "correct-horse"}, opened(t, pair, i))
	i = w.ready(i)

	i, err = w.upgrade(i, command.UpgradeInstanceInput{Version: "3.0.0", Parameters: map[string]any{"greeting": "again"}})
	require.NoError(t, err)
	require.Equal(t, map[string]string{"token": "correct-horse"}, opened(t, pair, i), "what nobody can read stays")
	i = w.ready(i)
	i, err = w.upgrade(i, command.UpgradeInstanceInput{Version: "3.0.0", Parameters: map[string]any{"token": "battery"}})
	require.NoError(t, err)
	require.Equal(t, map[string]string{"token": "battery"}, opened(t, pair, i))
	i = w.ready(i)
	i, err = w.upgrade(i, command.UpgradeInstanceInput{Version: "3.0.0", Parameters: map[string]any{"token": nil}})
	require.NoError(t, err)
	require.Empty(t, opened(t, pair, i))
	w.RequireHidden("correct-horse", "battery")
}
