package reconcile_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/pkg/appkit"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// hub signs, and has a registry.
type hub struct {
	t                             testing.TB
	root, state, lease, cat, node ed25519.PrivateKey
	bundle                        protocol.Bundle
	registry                      *httptest.Server
	image                         string

	away atomic.Bool
	// registryDown makes the registry answer 503.
	registryDown atomic.Bool
	// renewed makes each second credential the renewal of one that has expired, and the registry demands a renewal.
	renewed    atomic.Bool
	pulls      atomic.Int64
	mu         sync.Mutex
	generation uint64
	leaseNo    uint64
	parts      map[[32]byte][]byte
	withheld   bool
	// now is the time of what it signs.
	now func() time.Time
	// readyWithin replaces the manifest's readiness timeout, in seconds.
	readyWithin string
	// accelerators are AMD's, given to the one service.
	accelerators []string
	// configJSON is the config, onChange replaces what the manifest says about a change of it.
	configJSON, onChange string
	// volumes is added to the manifest; chosen are those of the project.
	volumes string
	chosen  []manifest.VolumeChoice
	// nodeVolumes are the volumes of projects.
	nodeVolumes []*protocol.ProjectVolume
	// requirements are those of the environment.
	requirements []string
	// withSecret gives the manifest a secret parameter "token"; secretsOnChange says what a change of it does.
	withSecret      bool
	secretsOnChange string
}

// newSigner is a hub without a registry.
func newSigner(t testing.TB, issued time.Time) *hub {
	t.Helper()
	key := func() ed25519.PrivateKey {
		_, k, err := ed25519.GenerateKey(rand.Reader)
		require.NoError(t, err)
		return k
	}
	h := &hub{
		t: t, root: key(), state: key(), lease: key(), cat: key(), node: key(), parts: map[[32]byte][]byte{}, now: time.Now,
	}
	role := func(name string, k ed25519.PrivateKey) *protocol.Role {
		pub := k.Public().(ed25519.PublicKey)
		return &protocol.Role{Name: name, Threshold: 1, Keys: []*protocol.PublicKey{{
			KeyId:   protocol.KeyID(pub),
			Ed25519: pub,
		}}}
	}
	env, err := protocol.SignMessage(protocol.PayloadBundle, &protocol.TrustBundle{
		TrustDomain: "mesh.example", Version: 1, Epoch: 1, IssuedAt: timestamppb.New(issued),
		Roles: []*protocol.Role{role("root", h.root), role("state", h.state), role("lease", h.lease), role("catalog", h.cat)},
	}, protocol.NewEd25519Signer(h.root))
	require.NoError(t, err)
	h.bundle, err = protocol.VerifyBundle(env, protocol.Fingerprint(h.root.Public().(ed25519.PublicKey)))
	require.NoError(t, err)
	return h
}

func newHub(t testing.TB, word string) *hub {
	t.Helper()
	h := newSigner(t, time.Now())
	images := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	h.registry = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if h.registryDown.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		if _, password, _ := req.BasicAuth(); h.renewed.Load() && password != "renewed" {
			w.Header().Set("WWW-Authenticate", `Basic realm="registry"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		images.ServeHTTP(w, req)
	}))
	h.registry.Config.ErrorLog = log.New(io.Discard, "", 0)
	h.registry.StartTLS()
	t.Cleanup(h.registry.Close)
	h.image = h.push("apps/hello/"+word, "/app")
	return h
}

// push pushes an image with the app's program at a path, and returns its reference.
func (h *hub) push(repository, path string) string {
	h.t.Helper()
	img, err := appkit.ImageFromFiles([]appkit.File{{Path: path, Source: appBinary, Mode: 0o755}},
		appkit.ImageConfig{Entrypoint: []string{path}})
	require.NoError(h.t, err)
	digest, err := img.Digest()
	require.NoError(h.t, err)
	ref, err := name.ParseReference(h.registry.Listener.Addr().String() + "/" + repository + ":latest")
	require.NoError(h.t, err)
	require.NoError(h.t, remote.Write(ref, img, remote.WithTransport(h.registry.Client().Transport)))
	return repository + "@" + digest.String()
}

// workload is a workload as the hub makes one from the demo's manifest.
func (h *hub) workload(parametersJSON string) *protocol.Workload {
	h.t.Helper()
	template, err := os.ReadFile("../../../deploy/demo/app/manifest.yaml")
	require.NoError(h.t, err)
	if h.readyWithin != "" {
		template = bytes.Replace(template, []byte("readiness_timeout_seconds: 30"), []byte("readiness_timeout_seconds: "+
			h.readyWithin), 1)
	}
	if h.onChange != "" {
		template = bytes.Replace(template, []byte("{on_change: signal, signal: SIGHUP}"), []byte("{on_change: "+h.onChange+
			"}"), 1)
	}
	template = bytes.Replace(template, []byte("    resources:"), []byte(h.volumes+"    resources:"), 1)
	if h.withSecret {
		template = bytes.Replace(template, []byte("      greeting: {type"),
			[]byte("      token: {type: string, writeOnly: true}\n      greeting: {type"), 1)
	}
	if h.secretsOnChange != "" {
		template = bytes.Replace(template, []byte("  config_schema:"), []byte("  secrets: "+h.secretsOnChange+
			"\n  config_schema:"), 1)
	}
	template, shape := h.withAccelerators(template)
	shape.Volumes = h.chosen
	if shape.Environment = h.requirements; h.requirements != nil {
		template = bytes.Replace(template, []byte("    resources:"), []byte("    environment: {path: /opt/environment, "+
			"python: /app, max_size_mib: 32, build_timeout_seconds: 60}\n    resources:"), 1)
	}
	doc, err := appkit.FillTemplate(template, map[string]string{"version": "1.0.0", "image": h.image})
	require.NoError(h.t, err)
	env, err := manifest.Sign(doc, protocol.NewEd25519Signer(h.cat))
	require.NoError(h.t, err)
	m, err := manifest.Parse(doc)
	require.NoError(h.t, err)
	params, err := m.CheckParameters([]byte(parametersJSON))
	require.NoError(h.t, err)
	services, err := manifest.Lower(m, manifest.Inputs{Parameters: params, ConfigJSON: h.configJSON}, shape)
	require.NoError(h.t, err)
	return &protocol.Workload{
		Id: uuid.Must(uuid.NewV7()).String(), InstanceId: uuid.Must(uuid.NewV7()).String(), Revision: 1, AppSlug: "hello",
		AppVersion:    "1.0.0",
		CorrelationId: "corr-1", Manifest: env, Services: services, ParametersJson: parametersJSON,
		Features:                m.Features(),
		ReadinessTimeoutSeconds: m.Version.RuntimeProfile.ReadinessTimeoutSeconds,
	}
}

func (h *hub) desired(ws ...*protocol.Workload) (protocol.Verified[*protocol.DesiredState], [][]byte) {
	h.t.Helper()
	me := protocol.NewNodeIdentity(nodeID, h.node.Public().(ed25519.PublicKey))
	h.mu.Lock()
	defer h.mu.Unlock()
	h.generation++
	d := &protocol.DesiredState{
		NodeId: nodeID, NodeKeySha256: me.KeySHA256[:], Epoch: 1, Generation: h.generation,
		IssuedAt: timestamppb.New(h.now()), Volumes: h.nodeVolumes,
	}
	var parts [][]byte
	for _, w := range ws {
		raw, err := proto.Marshal(w)
		require.NoError(h.t, err)
		sum := sha256.Sum256(raw)
		d.Parts = append(d.Parts, &protocol.PartRef{Id: w.GetId(), Sha256: sum[:], SizeBytes: uint64(len(raw))})
		h.parts[sum] = raw
		if !h.withheld {
			parts = append(parts, raw)
		}
	}
	env, err := protocol.SignMessage(protocol.PayloadState, d, protocol.NewEd25519Signer(h.state))
	require.NoError(h.t, err)
	v, err := protocol.VerifyState(env, h.bundle, me)
	require.NoError(h.t, err)
	return v, parts
}

func (h *hub) newLease(memberID string, life time.Duration) *protocol.Lease {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.leaseNo++
	return &protocol.Lease{
		MemberId: memberID, LeaseNo: h.leaseNo, ExpiresAt: timestamppb.New(h.now().Add(life)), EndPolicy: "stop",
		CapNanos: 1 << 60,
		Prices:   []*protocol.FrozenPrice{{Meter: protocol.MeterSessionSeconds, PriceNanos: 1000, PerQuantity: 1_000_000}},
	}
}

func (h *hub) leases(incarnation string, ls ...*protocol.Lease) protocol.Verified[*protocol.LeaseBatch] {
	h.t.Helper()
	env, err := protocol.SignMessage(protocol.PayloadLeases, &protocol.LeaseBatch{
		NodeId: nodeID, Incarnation: incarnation,
		Epoch: 1, Leases: ls,
	},
		protocol.NewEd25519Signer(h.lease))
	require.NoError(h.t, err)
	v, err := protocol.VerifyLeases(env, h.bundle, protocol.NewNodeIdentity(nodeID, h.node.Public().(ed25519.PublicKey)))
	require.NoError(h.t, err)
	return v
}

func (h *hub) gone() error {
	if h.away.Load() {
		return fault.New(fault.Unavailable, "hub_away", "There is no session to a hub at the moment.", nil)
	}
	return nil
}

// PullCredential implements reconcile.Hub.
func (h *hub) PullCredential(context.Context, string) (*protocol.PullCredential, error) {
	n := h.pulls.Add(1)
	if err := h.gone(); err != nil {
		return nil, err
	}
	c := &protocol.PullCredential{
		RegistryHost: h.registry.Listener.Addr().String(), Username: "node", Password: "renewed",
		ExpiresAt: timestamppb.New(time.Now().Add(time.Hour)),
	}
	if h.renewed.Load() && n%2 == 1 {
		c.Password, c.ExpiresAt = "expired", timestamppb.Now()
	}
	return c, nil
}

// RegistryTLS implements reconcile.Hub.
func (h *hub) RegistryTLS() (*tls.Config, error) {
	return h.registry.Client().Transport.(*http.Transport).TLSClientConfig.Clone(), h.gone()
}

// Part implements reconcile.Hub.
func (h *hub) Part(_ context.Context, sum [32]byte) ([]byte, error) {
	if err := h.gone(); err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.parts[sum], nil
}
