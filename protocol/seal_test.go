package protocol_test

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/protocol"
)

func TestASecretOpensOnlyOnItsNodeForItsMemberAndName(t *testing.T) {
	pub, node, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	secret := make([]byte, 32)
	_, _ = rand.Read(secret)
	pair, err := protocol.DeriveSealingKey("node-1", secret)
	require.NoError(t, err)
	env, err := pair.Sign(protocol.NewEd25519Signer(node))
	require.NoError(t, err)
	key, err := protocol.VerifySealingKey(env, "node-1", pub)
	require.NoError(t, err)
	sealed, err := protocol.Seal(key, "m1", "token", []byte("hush"))
	require.NoError(t, err)
	require.NotContains(t, string(sealed), "hush")
	again, err := protocol.DeriveSealingKey("node-1", secret)
	require.NoError(t, err)
	opened, err := again.Open("m1", "token", sealed)
	require.NoError(t, err)
	require.Equal(t, "hush", string(opened), "also after a restart of the agent")
	other, err := protocol.DeriveSealingKey("node-2", secret)
	require.NoError(t, err)
	secret[0]++
	foreign, err := protocol.DeriveSealingKey("node-1", secret)
	require.NoError(t, err)
	for why, open := range map[string]func() ([]byte, error){
		"another member": func() ([]byte, error) { return pair.Open("m2", "token", sealed) },
		"another name":   func() ([]byte, error) { return pair.Open("m1", "other", sealed) },
		"another node":   func() ([]byte, error) { return other.Open("m1", "token", sealed) },
		"another key":    func() ([]byte, error) { return foreign.Open("m1", "token", sealed) },
		"changed bytes":  func() ([]byte, error) { return pair.Open("m1", "token", append(sealed[:40:40], 1)) },
		"nothing":        func() ([]byte, error) { return pair.Open("m1", "token", nil) },
	} {
		_, err := open()
		require.Error(t, err, why)
	}

	_, err = protocol.VerifySealingKey(env, "node-2", pub)
	require.Error(t, err, "of another node")
	stranger, _, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	_, err = protocol.VerifySealingKey(env, "node-1", stranger)
	require.Error(t, err, "signed by another key: a hub's database alone cannot exchange it")
	_, err = protocol.VerifySealingKey(nil, "node-1", pub)
	require.Error(t, err)
	nothing, err := protocol.SignMessage(protocol.PayloadSealingKey, &protocol.SealingKey{
		NodeId: "node-1", X25519: make([]byte, 32),
	}, protocol.NewEd25519Signer(node))
	require.NoError(t, err)
	_, err = protocol.VerifySealingKey(nothing, "node-1", pub)
	require.Error(t, err, "a point of low order, to which nothing can be sealed")
}

func TestSealedParametersAreToldApartFromOthers(t *testing.T) {
	doc, err := json.Marshal(map[string]any{
		"token": protocol.SealedValue([]byte("x")), "plain": "x", "object": map[string]any{"a": "b"},
		"more": map[string]any{"$sealed": "eA==", "b": 1}, "broken": map[string]any{"$sealed": "!"},
	})
	require.NoError(t, err)
	require.Equal(t, map[string][]byte{"token": []byte("x")}, protocol.SealedParameters(string(doc)))
	require.Empty(t, protocol.SealedParameters("{"))
}
