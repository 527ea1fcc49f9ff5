package security_test

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/appkit"
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/protocol"
)

// attacker holds the hub's online state key and its database, the worst result of a break-in at the hub.
type attacker struct {
	w        *harness.Testbed
	key      ed25519.PrivateKey
	envelope *protocol.Envelope
	state    *protocol.DesiredState
}

func newAttacker(w *harness.Testbed) *attacker {
	w.T.Helper()
	a := &attacker{w: w, key: stateKey(w), envelope: &protocol.Envelope{}, state: &protocol.DesiredState{}}
	var stored []byte
	require.NoError(w.T, w.Database().QueryRow(w.Ctx,
		`SELECT envelope FROM node_states WHERE node_id = $1 ORDER BY epoch DESC, generation DESC LIMIT 1`,
		w.Agent.Ready.NodeID).Scan(&stored))
	require.NoError(w.T, proto.Unmarshal(stored, a.envelope))
	require.NoError(w.T, proto.Unmarshal(a.envelope.GetPayload(), a.state))
	return a
}

// stateKey reads the hub's online state key from its data directory.
func stateKey(w *harness.Testbed) ed25519.PrivateKey {
	w.T.Helper()
	files, err := filepath.Glob(filepath.Join(w.Hub.Config.DataDir(), "trust", "state-*.key"))
	require.NoError(w.T, err)
	require.Len(w.T, files, 1)
	data, err := os.ReadFile(files[0])
	require.NoError(w.T, err)
	block, _ := pem.Decode(data)
	require.NotNil(w.T, block)
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	require.NoError(w.T, err)
	key, ok := parsed.(ed25519.PrivateKey)
	require.True(w.T, ok)
	return key
}

// apply hands a document to the running agent and returns what it printed; it must refuse.
func (a *attacker) apply(env *protocol.Envelope) string {
	a.w.T.Helper()
	doc, err := protocol.EnvelopeToJSON(env)
	require.NoError(a.w.T, err)
	file := filepath.Join(a.w.Dir, "forged.json")
	require.NoError(a.w.T, os.WriteFile(file, doc, 0o600))
	out, err := exec.Command(filepath.Join(harness.Binaries(a.w.T), "gpuaas-agent"), "apply", file, "--local-socket",
		a.w.Agent.Ready.LocalSocket).CombinedOutput()
	require.Error(a.w.T, err, "the node took it: %s", out)
	return string(out)
}

func (a *attacker) sign(key ed25519.PrivateKey, change func(*protocol.DesiredState)) *protocol.Envelope {
	a.w.T.Helper()
	s, ok := proto.Clone(a.state).(*protocol.DesiredState)
	require.True(a.w.T, ok)
	s.Generation++
	// An accepted one would stop what runs: it has no parts.
	s.Parts = nil
	if change != nil {
		change(s)
	}
	env, err := protocol.SignMessage(protocol.PayloadState, s, protocol.NewEd25519Signer(key))
	require.NoError(a.w.T, err)
	return env
}

// Laws 1 and 2: a node refuses forged and old states with a reason that the hub shows, and what runs goes on.
func TestLaw01AndLaw02ANodeRefusesForgedAndOldStates(t *testing.T) {
	w := harness.NewPlatform(t)
	i := w.Launch("app")
	pid := w.PidOf(i)
	a := newAttacker(w)
	_, stranger, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)

	refused := func(name string, reason protocol.Nack_Reason, env *protocol.Envelope) {
		t.Helper()
		out := a.apply(env)
		require.Contains(t, out, reason.Text(), name)
		w.Eventually(name+": the hub shows the refusal", func() error {
			n, err := client.Read[client.Node](w.Tenant.Admin.GetNode(w.Ctx, w.Agent.Ready.NodeID))
			return harness.Pending(err, n.LastRefusal.Reason == reason.Text())
		})
		require.Equal(t, pid, w.PidOf(i), name)
		w.RequireAnswer(i)
	}
	refused("forged", protocol.Nack_SIGNATURE_INVALID, a.sign(stranger, nil))
	refused("for another node", protocol.Nack_WRONG_NODE, a.sign(a.key, func(s *protocol.DesiredState) {
		s.NodeId = w.Tenant.Org.ID
	}))
	refused("for another key of this node", protocol.Nack_WRONG_NODE, a.sign(a.key, func(s *protocol.DesiredState) {
		s.NodeKeySha256 = make([]byte, 32)
	}))
	refused("older", protocol.Nack_GENERATION_OLDER, a.sign(a.key, func(s *protocol.DesiredState) {
		s.Generation = a.state.GetGeneration() - 1
	}))
	refused("same generation, other content", protocol.Nack_GENERATION_CONFLICT,
		a.sign(a.key, func(s *protocol.DesiredState) {
			s.Generation = a.state.GetGeneration()
		}))
	refused("unknown epoch", protocol.Nack_EPOCH_UNKNOWN, a.sign(a.key, func(s *protocol.DesiredState) { s.Epoch++ }))
	oversized, err := protocol.Sign(protocol.PayloadState, make([]byte, protocol.MaxEnvelopeBytes+1),
		protocol.NewEd25519Signer(a.key))
	require.NoError(t, err)
	refused("oversized", protocol.Nack_TOO_LARGE, oversized)

	// The key is revoked: the next bundle reaches the node, and what the old key signs afterwards is worth nothing.
	old := a.sign(a.key, func(s *protocol.DesiredState) { s.Generation += 100 })
	pub, ok := a.key.Public().(ed25519.PublicKey)
	require.True(t, ok)
	c := w.Hub.Config
	out, err := exec.Command(filepath.Join(c.Bin, "gpuaas-hub"), "trust", "revoke", "--data-dir", c.DataDir(), "--key-dir",
		c.KeyDir(),
		"--passphrase-file", c.PassphraseFile(), "--key-id", protocol.KeyID(pub)).CombinedOutput()
	require.NoError(t, err, "%s", out)
	w.Eventually("the node has the new bundle", func() error {
		out, err := exec.Command(filepath.Join(c.Bin, "gpuaas-agent"), "status", "-o", "json", "--local-socket",
			w.Agent.Ready.LocalSocket).Output()
		if err != nil {
			return err
		}
		var status struct {
			BundleVersion int `json:"bundle_version"`
		}
		return harness.Pending(json.Unmarshal(out, &status), status.BundleVersion == 2)
	})
	refused("signed by a revoked key", protocol.Nack_KEY_REVOKED, old)

	// The hub itself goes on with the new key.
	w.Decommission(i)
}

// Law 1: the hub's database was altered, and the node still trusts only the publisher's signature.
func TestLaw01AManifestThatThePublisherDidNotSignNeverRuns(t *testing.T) {
	w := harness.NewPlatform(t)
	running := w.Launch("honest")
	_, stranger, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	db := w.Database()
	var stored []byte
	require.NoError(t,
		db.QueryRow(w.Ctx, `SELECT manifest_envelope FROM app_versions WHERE app_slug = $1 AND version = '1.0.0'`,
			harness.AppSlug).Scan(&stored))
	env := &protocol.Envelope{}
	require.NoError(t, proto.Unmarshal(stored, env))
	// The same manifest with another command, signed with another key.
	changed := strings.ReplaceAll(string(env.GetPayload()), "/app", "/app2")
	require.NotEqual(t, string(env.GetPayload()), changed)
	forged, err := protocol.Sign(protocol.PayloadManifest, []byte(changed), protocol.NewEd25519Signer(stranger))
	require.NoError(t, err)
	data, err := proto.Marshal(forged)
	require.NoError(t, err)
	_, err = db.Exec(w.Ctx, `UPDATE app_versions SET manifest_envelope = $1 WHERE app_slug = $2`, data, harness.AppSlug)
	require.NoError(t, err)

	launchRefused(w, "forged", "1.0.0", client.StatusReasonImageSignatureInvalid, client.StatusReasonManifestNotAdmitted)
	w.RequireAnswer(running)
}

// Law 1: the registry serves content that does not match its digest.
func TestLaw01AnImageThatIsNotItsDigestNeverRuns(t *testing.T) {
	w := harness.NewPlatform(t)
	running := w.Launch("honest")
	r := w.Release("2.0.0")
	var err error
	r.Image, err = appkit.ImageFromFiles([]appkit.File{
		{Path: "/app", Source: harness.DemoBinary(t), Mode: 0o755}, {Path: "/second", Content: []byte("second"), Mode: 0o644},
	}, appkit.ImageConfig{Entrypoint: []string{"/app"}, User: "1000:1000"})
	require.NoError(t, err)
	_, err = w.Tenant.Ship(w.Ctx, w.Publisher, r)
	require.NoError(t, err)
	layers, err := r.Image.Layers()
	require.NoError(t, err)
	digest, err := layers[0].Digest()
	require.NoError(t, err)
	blob := filepath.Join(w.Hub.Config.DataDir(), "registry", "docker", "registry", "v2", "blobs", "sha256",
		digest.Hex[:2], digest.Hex, "data")
	data, err := os.ReadFile(blob)
	require.NoError(t, err)
	data[len(data)/2] ^= 0xff
	sum := sha256.Sum256(data)
	require.NotEqual(t, digest.Hex, hex.EncodeToString(sum[:]))
	require.NoError(t, os.WriteFile(blob, data, 0o600))

	launchRefused(w, "altered", "2.0.0", client.StatusReasonImagePullFailed, client.StatusReasonImageSignatureInvalid)
	w.RequireAnswer(running)
}

// launchRefused creates an instance that must fail with one of the reasons, and decommissions it.
func launchRefused(w *harness.Testbed, name, version string, reasons ...client.StatusReason) {
	w.T.Helper()
	_, _, err := w.Tenant.Launch(w.Ctx, w.Operator, client.AppInstanceCreate{
		AppSlug: harness.AppSlug, Version: version, DisplayName: name, PlacementIntent: client.PlacementIntent{
			AllocationIds: []string{w.Allocation.ID},
		},
	}, nil)
	var failed *client.InstanceError
	require.ErrorAs(w.T, err, &failed)
	require.Equal(w.T, client.AppInstanceStatusFailed, failed.Instance.Status)
	require.Contains(w.T, reasons, failed.Instance.StatusReason)
	events, err := w.Tenant.Events(w.Ctx, w.Operator, failed.Instance.ID)
	require.NoError(w.T, err)
	require.Equal(w.T, "apps.instance.failed", events[len(events)-1].Type)
	w.Decommission(failed.Instance)
}
