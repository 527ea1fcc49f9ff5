package e2e_test

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/pkg/appkit"
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/protocol"
)

// attacker holds the hub's online state key and its database: the worst that a break-in at the hub gives.
type attacker struct {
	w        *world
	key      ed25519.PrivateKey
	envelope *protocol.Envelope
	state    *protocol.DesiredState
}

func (w *world) attacker() *attacker {
	w.t.Helper()
	a := &attacker{w: w, key: w.stateKey(), envelope: &protocol.Envelope{}, state: &protocol.DesiredState{}}
	var stored []byte
	require.NoError(w.t, w.database().QueryRow(w.ctx,
		`SELECT envelope FROM node_states WHERE node_id = $1 ORDER BY epoch DESC, generation DESC LIMIT 1`,
		w.agent.Ready.NodeID).Scan(&stored))
	require.NoError(w.t, proto.Unmarshal(stored, a.envelope))
	require.NoError(w.t, proto.Unmarshal(a.envelope.GetPayload(), a.state))
	return a
}

// stateKey reads the hub's online state key from its data directory.
func (w *world) stateKey() ed25519.PrivateKey {
	w.t.Helper()
	files, err := filepath.Glob(filepath.Join(w.hub.Config.DataDir(), "trust", "state-*.key"))
	require.NoError(w.t, err)
	require.Len(w.t, files, 1)
	data, err := os.ReadFile(files[0])
	require.NoError(w.t, err)
	block, _ := pem.Decode(data)
	require.NotNil(w.t, block)
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	require.NoError(w.t, err)
	key, ok := parsed.(ed25519.PrivateKey)
	require.True(w.t, ok)
	return key
}

// database opens the hub's private PostgreSQL, which lets root in through its socket.
func (w *world) database() *pgx.Conn {
	w.t.Helper()
	socket := filepath.Join(w.hub.Config.DataDir(), "postgres", "run")
	u := url.URL{
		Scheme: "postgres", User: url.User("gpuaas"), Path: "/gpuaas",
		RawQuery: url.Values{"host": {socket}}.Encode(),
	}
	conn, err := pgx.Connect(w.ctx, u.String())
	require.NoError(w.t, err)
	w.t.Cleanup(func() { _ = conn.Close(w.ctx) })
	return conn
}

// apply hands a document to the running agent and returns what it printed; it must refuse.
func (a *attacker) apply(env *protocol.Envelope) string {
	a.w.t.Helper()
	doc, err := protocol.EnvelopeToJSON(env)
	require.NoError(a.w.t, err)
	file := filepath.Join(a.w.dir, "forged.json")
	require.NoError(a.w.t, os.WriteFile(file, doc, 0o600))
	out, err := exec.Command(filepath.Join(binaries(a.w.t), "gpuaas-agent"), "apply", file, "--local-socket",
		a.w.agent.Ready.LocalSocket).CombinedOutput()
	require.Error(a.w.t, err, "the node took it: %s", out)
	return string(out)
}

func (a *attacker) sign(key ed25519.PrivateKey, change func(*protocol.DesiredState)) *protocol.Envelope {
	a.w.t.Helper()
	s, ok := proto.Clone(a.state).(*protocol.DesiredState)
	require.True(a.w.t, ok)
	s.Generation++
	// An accepted one would stop what runs: it has no parts.
	s.Parts = nil
	if change != nil {
		change(s)
	}
	env, err := protocol.SignMessage(protocol.PayloadState, s, protocol.NewEd25519Signer(key))
	require.NoError(a.w.t, err)
	return env
}

// Laws 1 and 2, seen from outside: what a node refuses, it refuses with a reason that the hub shows, and what runs goes
// on.
func TestLaw01AndLaw02ANodeRefusesForgedAndOldStates(t *testing.T) {
	w := platform(t)
	i := w.launch("app")
	pid := w.pidOf(i)
	a := w.attacker()
	_, stranger, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)

	refused := func(name, reason string, env *protocol.Envelope) {
		t.Helper()
		out := a.apply(env)
		require.Contains(t, out, reason, name)
		w.eventually(name+": the hub shows the refusal", func() error {
			n, err := client.Read[client.Node](w.tenant.Admin.GetNode(w.ctx, w.agent.Ready.NodeID))
			return orMissing(err, n.LastRefusal.Reason == reason)
		})
		require.Equal(t, pid, w.pidOf(i), name)
		w.answers(i)
	}
	refused("forged", protocol.RefusalSignature, a.sign(stranger, nil))
	refused("for another node", protocol.RefusalWrongNode, a.sign(a.key, func(s *protocol.DesiredState) {
		s.NodeId = w.tenant.Org.ID
	}))
	refused("for another key of this node", protocol.RefusalWrongNode, a.sign(a.key, func(s *protocol.DesiredState) {
		s.NodeKeySha256 = make([]byte, 32)
	}))
	refused("older", protocol.RefusalOlder, a.sign(a.key, func(s *protocol.DesiredState) {
		s.Generation = a.state.GetGeneration() - 1
	}))
	refused("same generation, other content", protocol.RefusalConflict, a.sign(a.key, func(s *protocol.DesiredState) {
		s.Generation = a.state.GetGeneration()
	}))
	refused("unknown epoch", protocol.RefusalEpoch, a.sign(a.key, func(s *protocol.DesiredState) { s.Epoch++ }))
	oversized, err := protocol.Sign(protocol.PayloadState, make([]byte, protocol.MaxEnvelopeBytes+1),
		protocol.NewEd25519Signer(a.key))
	require.NoError(t, err)
	refused("oversized", protocol.RefusalTooLarge, oversized)

	// The key is revoked: the next bundle reaches the node, and what the old key signs afterwards is worth nothing.
	old := a.sign(a.key, func(s *protocol.DesiredState) { s.Generation += 100 })
	pub, ok := a.key.Public().(ed25519.PublicKey)
	require.True(t, ok)
	c := w.hub.Config
	out, err := exec.Command(filepath.Join(c.Bin, "gpuaas-hub"), "trust", "revoke", "--data-dir", c.DataDir(), "--key-dir",
		c.KeyDir(),
		"--passphrase-file", c.PassphraseFile(), "--key-id", protocol.KeyID(pub)).CombinedOutput()
	require.NoError(t, err, "%s", out)
	w.eventually("the node has the new bundle", func() error {
		out, err := exec.Command(filepath.Join(c.Bin, "gpuaas-agent"), "status", "-o", "json", "--local-socket",
			w.agent.Ready.LocalSocket).Output()
		if err != nil {
			return err
		}
		var status struct {
			BundleVersion int `json:"bundle_version"`
		}
		return orMissing(json.Unmarshal(out, &status), status.BundleVersion == 2)
	})
	refused("signed by a revoked key", protocol.RefusalKeyRevoked, old)

	// The hub itself goes on with the new key.
	w.decommission(i)
}

// Law 1: the hub's database was altered; the publisher's signature is what the node believes.
func TestLaw01AManifestThatThePublisherDidNotSignNeverRuns(t *testing.T) {
	w := platform(t)
	running := w.launch("honest")
	_, stranger, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	db := w.database()
	var stored []byte
	require.NoError(t,
		db.QueryRow(w.ctx, `SELECT manifest_envelope FROM app_versions WHERE app_slug = $1 AND version = '1.0.0'`,
			appSlug).Scan(&stored))
	env := &protocol.Envelope{}
	require.NoError(t, proto.Unmarshal(stored, env))
	// The very manifest, but with another command, signed by somebody else.
	changed := strings.ReplaceAll(string(env.GetPayload()), "/app", "/app2")
	require.NotEqual(t, string(env.GetPayload()), changed)
	forged, err := protocol.Sign(protocol.PayloadManifest, []byte(changed), protocol.NewEd25519Signer(stranger))
	require.NoError(t, err)
	data, err := proto.Marshal(forged)
	require.NoError(t, err)
	_, err = db.Exec(w.ctx, `UPDATE app_versions SET manifest_envelope = $1 WHERE app_slug = $2`, data, appSlug)
	require.NoError(t, err)

	w.launchRefused("forged", "1.0.0", client.StatusReasonImageSignatureInvalid, client.StatusReasonManifestNotAdmitted)
	w.answers(running)
}

// Law 1: what the registry serves is not what the digest says.
func TestLaw01AnImageThatIsNotItsDigestNeverRuns(t *testing.T) {
	w := platform(t)
	running := w.launch("honest")
	r := w.release("2.0.0")
	var err error
	r.Image, err = appkit.ImageFromFiles([]appkit.File{
		{Path: "/app", Source: demoBinary(t), Mode: 0o755}, {Path: "/second", Content: []byte("second"), Mode: 0o644},
	}, appkit.ImageConfig{Entrypoint: []string{"/app"}, User: "1000:1000"})
	require.NoError(t, err)
	_, err = w.tenant.Ship(w.ctx, w.publisher, r)
	require.NoError(t, err)
	layers, err := r.Image.Layers()
	require.NoError(t, err)
	digest, err := layers[0].Digest()
	require.NoError(t, err)
	blob := filepath.Join(w.hub.Config.DataDir(), "registry", "docker", "registry", "v2", "blobs", "sha256",
		digest.Hex[:2], digest.Hex, "data")
	data, err := os.ReadFile(blob)
	require.NoError(t, err)
	data[len(data)/2] ^= 0xff
	sum := sha256.Sum256(data)
	require.NotEqual(t, digest.Hex, hex.EncodeToString(sum[:]))
	require.NoError(t, os.WriteFile(blob, data, 0o600))

	w.launchRefused("altered", "2.0.0", client.StatusReasonImagePullFailed, client.StatusReasonImageSignatureInvalid)
	w.answers(running)
}

// launchRefused creates an instance that must fail with one of the reasons, and decommissions it.
func (w *world) launchRefused(name, version string, reasons ...client.StatusReason) {
	w.t.Helper()
	_, _, err := w.tenant.Launch(w.ctx, w.operator, client.AppInstanceCreate{
		AppSlug: appSlug, Version: version, DisplayName: name, PlacementIntent: client.PlacementIntent{
			AllocationIds: []string{w.allocation.ID},
		},
	}, nil)
	var failed *client.InstanceError
	require.ErrorAs(w.t, err, &failed)
	require.Equal(w.t, client.AppInstanceStatusFailed, failed.Instance.Status)
	require.Contains(w.t, reasons, failed.Instance.StatusReason)
	events, err := w.tenant.Events(w.ctx, w.operator, failed.Instance.ID)
	require.NoError(w.t, err)
	require.Equal(w.t, "apps.instance.failed", events[len(events)-1].Type)
	w.decommission(failed.Instance)
}

// Two nodes: the hub in one network namespace, a node in another, addresses and ports set as for a remote site.
func TestTwoNodesAcrossNetworkNamespaces(t *testing.T) {
	w := newWorld(t)
	net := w.newNetwork("hub", "far")
	w.startContainerd()
	w.startHub(w.hubConfigIn(net))
	w.newTenant("acme")
	w.agent = w.startAgent(w.agentConfig("here"))
	far := w.agentConfig("far")
	far.NetNS = net.path("far")
	remote := w.startAgent(far)
	w.shipApp()

	for _, node := range []*devcluster.Agent{w.agent, remote} {
		w.allocate(node)
		i := w.launch("on-" + filepath.Base(node.Config.Dir))
		require.Equal(t, node.Ready.NodeID, i.Endpoints[0].NodeID)
		if node == remote {
			_, err := scenario.Get(w.ctx, i.Endpoints[0].URL+"/")
			require.Error(t, err, "a private endpoint is on its own node only")
			out, err := exec.Command("nsenter", "--net="+far.NetNS, "curl", "-sf", i.Endpoints[0].URL+"/").CombinedOutput()
			require.NoError(t, err, "%s", out)
		} else {
			w.answers(i)
		}
		_, err := w.tenant.AwaitCharge(w.ctx, i.ID)
		require.NoError(t, err)
		w.decommission(i)
	}
}
