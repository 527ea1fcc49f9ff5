package reconcile_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
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

	"github.com/gpuaas/gpuaas/agent/internal/accelerator"
	"github.com/gpuaas/gpuaas/agent/internal/accept"
	"github.com/gpuaas/gpuaas/agent/internal/network"
	"github.com/gpuaas/gpuaas/agent/internal/reconcile"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/policy"
	"github.com/gpuaas/gpuaas/e2e/containerdtest"
	"github.com/gpuaas/gpuaas/e2e/leakcheck"
	"github.com/gpuaas/gpuaas/pkg/appkit"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

const nodeID = "node-1"

// appBinary is the demo's app, compiled once.
var appBinary string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "gpuaas-reconcile-app-")
	if err != nil {
		log.Fatal(err)
	}
	appBinary = filepath.Join(dir, "app")
	build := exec.Command("go", "build", "-trimpath", "-o", appBinary, "../../../deploy/demo/app")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	code := 1
	if out, err := build.CombinedOutput(); err == nil {
		code = m.Run()
	} else {
		fmt.Fprintf(os.Stderr, "compile the test's app: %v\n%s", err, out)
	}
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

var fixtures atomic.Int64

// fixture is a node with a real containerd, real networks and a real disk; only the hub is a stand-in that signs.
type fixture struct {
	t      testing.TB
	word   string
	dir    string
	daemon *containerdtest.Daemon
	hub    *hub
	rtCfg  runtime.Config
	nwCfg  network.Config
	// collectEvery is the reconciler's default when zero.
	collectEvery time.Duration
	disk         state.Options
	from         uint16

	store *state.Store
	clock *state.Clock
	rt    *runtime.Runtime
	nw    *network.Network
	re    *reconcile.Reconciler
	stop  func()
	// owner is what the owner of the machine allows.
	owner atomic.Pointer[policy.Policy]
	// inventory is where the machine's accelerators are found.
	inventory accelerator.Config
	// weak is what the machine is said to lack.
	weak []string
	// wrapRuntime and wrapNetwork replace what the reconciler uses where a test sets them before it starts the fixture
	// anew.
	wrapRuntime func(*runtime.Runtime) reconcile.Containers
	wrapNetwork func(*network.Network) reconcile.Network
	// configure changes the reconciler's configuration likewise.
	configure func(*reconcile.Config)
}

func newFixture(t testing.TB) *fixture {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("containers need root")
	}
	n := fixtures.Add(1)
	f := &fixture{t: t, word: fmt.Sprintf("rc%dx%d", os.Getpid()%100000, n), stop: func() {}}
	f.from = uint16(30000 + (os.Getpid()*8+int(n))%2000*10)
	leakcheck.Guard(t, leakcheck.Scope{Contains: []string{f.word}})
	f.dir = filepath.Join(os.TempDir(), f.word)
	require.NoError(t, os.Mkdir(f.dir, 0o711))
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(f.dir)) })
	f.daemon = containerdtest.Start(t)
	f.hub = newHub(t, f.word)
	f.rtCfg = runtime.Config{
		Address: f.daemon.Address, Namespace: f.word, StateDir: f.dir + "/containers", LogDir: f.dir + "/logs",
		RuncRoot: f.dir + "/runc", CgroupParent: "/" + f.word,
	}
	f.nwCfg = network.Config{
		Bridge: f.word[:min(len(f.word), 15)], CIDR: fmt.Sprintf("10.%d.%d.0/24", 100+os.Getpid()%100, n), StateDir: f.dir +
			"/network", SharedDir: f.dir + "/shared",
	}
	f.disk.MinFreeBytes = 1
	f.inventory.Root = f.dir + "/machine" // with no accelerators, whatever the machine of the test has
	f.owner.Store(&policy.Policy{})
	t.Cleanup(f.purge)
	f.start()
	return f
}

func (f *fixture) ctx() context.Context { return context.WithoutCancel(f.t.Context()) }

// start is the agent's start; stop its end, however rude.
func (f *fixture) start() {
	f.t.Helper()
	var err error
	f.store, err = state.Open(f.dir+"/state", f.disk)
	require.NoError(f.t, err)
	require.NoError(f.t, f.store.Identify(nodeID, protocol.NewEd25519Signer(f.hub.node)))
	root, node := f.hub.root.Public().(ed25519.PublicKey), f.hub.node.Public().(ed25519.PublicKey)
	require.NoError(f.t, accept.Resume(f.store, protocol.Fingerprint(root), "", protocol.NewNodeIdentity(nodeID, node)))
	if !f.store.Bundle().Valid() {
		require.NoError(f.t, f.store.InitBundle(f.hub.bundle))
	}
	source, err := state.MachineTime()
	require.NoError(f.t, err)
	f.clock = state.NewClock(f.store, source, time.Time{})
	f.rt, err = runtime.Open(f.ctx(), f.rtCfg)
	require.NoError(f.t, err)
	f.nwCfg.UIDMapSize = 0
	if available, base, size := f.rt.UserNamespaces(); available {
		f.nwCfg.UIDMapBase, f.nwCfg.UIDMapSize = base, size
	}
	f.nw, err = network.Open(f.ctx(), f.nwCfg)
	require.NoError(f.t, err)
	machine := reconcile.Machine{
		Containers: f.rt, Images: f.rt, Stats: f.rt, Logs: f.rt, Disk: f.rt, Exec: f.rt, Host: f.rt, Network: f.nw,
	}
	inventory := accelerator.New(f.inventory)
	machine.Accelerators = inventory
	if f.wrapRuntime != nil {
		machine.Containers = f.wrapRuntime(f.rt)
	}
	if f.wrapNetwork != nil {
		machine.Network = f.wrapNetwork(f.nw)
	}
	config := reconcile.Config{
		MeteringInterval: 50 * time.Millisecond, UsageInterval: 200 * time.Millisecond, Resync: time.Second,
		CollectEvery: f.collectEvery,
		PortFrom:     f.from, PortTo: f.from + 9,
		Policy: func() (policy.Policy, error) { return *f.owner.Load(), nil }, WeakIsolation: f.weak,
		Log: slog.New(slog.NewTextHandler(f.t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	if f.configure != nil {
		f.configure(&config)
	}
	f.re = reconcile.New(config, f.store, f.clock, machine, f.hub)
	ctx, cancel := context.WithCancel(f.ctx())
	done := make(chan error, 1)
	go func() { done <- f.re.Run(ctx) }()
	scans := make(chan error, 1)
	go func() { scans <- inventory.Run(ctx) }()
	f.stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(f.t, <-done)
		require.NoError(f.t, <-scans)
		f.nw.Abandon()
		require.NoError(f.t, f.rt.Close())
		require.NoError(f.t, f.store.Close())
	})
}

func (f *fixture) restart() {
	f.t.Helper()
	f.stop()
	f.start()
}

func (f *fixture) purge() {
	f.stop()
	require.NoError(f.t, f.daemon.Start(f.ctx()))
	rt, err := runtime.Open(f.ctx(), f.rtCfg)
	require.NoError(f.t, err)
	require.NoError(f.t, rt.Purge(f.ctx()))
	require.NoError(f.t, rt.Close())
	nw, err := network.Open(f.ctx(), f.nwCfg)
	require.NoError(f.t, err)
	require.NoError(f.t, nw.Purge(f.ctx()))
}

// push accepts the next state with these workloads, and a lease for each.
func (f *fixture) push(ws ...*protocol.Workload) {
	f.t.Helper()
	v, parts := f.hub.desired(ws...)
	require.NoError(f.t, f.store.AcceptState(v, parts))
	var leases []*protocol.Lease
	for _, w := range ws {
		leases = append(leases, f.hub.newLease(w.GetId(), time.Hour))
	}
	f.lease(leases...)
}

func (f *fixture) lease(leases ...*protocol.Lease) {
	f.t.Helper()
	require.NoError(f.t, f.store.AcceptLeases(f.hub.leases(f.store.Incarnation(), leases...)))
}

// until waits until the report says so of the member, woken by the reconciler itself.
func (f *fixture) until(memberID string, says func(*protocol.WorkloadStatus) bool) *protocol.WorkloadStatus {
	f.t.Helper()
	changed := f.re.Subscribe()
	bound := time.After(90 * time.Second)
	for {
		for _, w := range f.re.Report().Workloads {
			if w.GetMemberId() == memberID && says(w) {
				return w
			}
		}
		select {
		case <-changed:
		case <-bound:
			f.t.Fatalf("member %s is not as expected: %v", memberID, f.re.Report())
		}
	}
}

func (f *fixture) untilStatus(memberID string, status protocol.WorkloadStatus_Status) *protocol.WorkloadStatus {
	f.t.Helper()
	return f.until(memberID, func(w *protocol.WorkloadStatus) bool { return w.GetStatus() == status })
}

// container is the one container of the member, as the runtime sees it.
func (f *fixture) container(memberID string) runtime.Container {
	f.t.Helper()
	found := f.containersOf(memberID)
	require.Len(f.t, found, 1)
	return found[0]
}

func url(w *protocol.WorkloadStatus, path string) string {
	e := w.GetEndpoints()[0]
	return fmt.Sprintf("http://%s:%d%s", e.GetHost(), e.GetPort(), path)
}

func get(t testing.TB, url string) string {
	t.Helper()
	resp, err := http.Get(url)
	require.NoError(t, err)
	raw, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, http.StatusOK, resp.StatusCode)
	return string(raw)
}

// measured is the running time of a member that is sealed so far, which must be one line without gap or overlap in each
// run.
func (f *fixture) measured(memberID string) (total time.Duration, final bool) {
	f.t.Helper()
	var end time.Time
	for number := uint64(1); ; number++ {
		env, err := f.store.Segment(number)
		require.NoError(f.t, err)
		if env == nil {
			return total, final
		}
		v, err := protocol.VerifySegment(env, f.hub.node.Public().(ed25519.PublicKey))
		require.NoError(f.t, err)
		for _, r := range v.Message().GetRecords() {
			if r.GetMemberId() != memberID || r.GetMeter() != protocol.MeterSessionSeconds {
				continue
			}
			require.False(f.t, r.GetStartedAt().AsTime().Before(end), "overlap")
			end = r.GetEndedAt().AsTime()
			total += time.Duration(r.GetQuantity()) * time.Microsecond
			final = final || r.GetFinal()
		}
	}
}

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
	pulls        atomic.Int64
	mu           sync.Mutex
	generation   uint64
	leaseNo      uint64
	parts        map[[32]byte][]byte
	withheld     bool
	// now is the time of what it signs.
	now func() time.Time
	// readyWithin replaces the manifest's readiness timeout, in seconds.
	readyWithin string
	// accelerators are AMD's, given to the one service.
	accelerators []string
	// configJSON is the config, onChange replaces what the manifest says about a change of it.
	configJSON, onChange string
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
		images.ServeHTTP(w, req)
	}))
	h.registry.Config.ErrorLog = log.New(io.Discard, "", 0)
	h.registry.StartTLS()
	t.Cleanup(h.registry.Close)
	img, err := appkit.ImageFromFiles([]appkit.File{{Path: "/app", Source: appBinary, Mode: 0o755}},
		appkit.ImageConfig{Entrypoint: []string{"/app"}})
	require.NoError(t, err)
	digest, err := img.Digest()
	require.NoError(t, err)
	repository := "apps/hello/" + word
	ref, err := name.ParseReference(h.registry.Listener.Addr().String() + "/" + repository + ":latest")
	require.NoError(t, err)
	require.NoError(t, remote.Write(ref, img, remote.WithTransport(h.registry.Client().Transport)))
	h.image = repository + "@" + digest.String()
	return h
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
	template, shape := h.withAccelerators(template)
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
		IssuedAt: timestamppb.New(h.now()),
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
	h.pulls.Add(1)
	if err := h.gone(); err != nil {
		return nil, err
	}
	return &protocol.PullCredential{
		RegistryHost: h.registry.Listener.Addr().String(), Username: "node", Password: "secret",
		ExpiresAt: timestamppb.New(time.Now().Add(time.Hour)),
	}, nil
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
