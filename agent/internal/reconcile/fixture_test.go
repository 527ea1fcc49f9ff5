package reconcile_test

import (
	"context"
	"crypto/ed25519"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/accelerator"
	"github.com/gpuaas/gpuaas/agent/internal/accept"
	"github.com/gpuaas/gpuaas/agent/internal/containerfiles"
	"github.com/gpuaas/gpuaas/agent/internal/network"
	"github.com/gpuaas/gpuaas/agent/internal/reconcile"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/internal/volume"
	"github.com/gpuaas/gpuaas/agent/policy"
	"github.com/gpuaas/gpuaas/e2e/containerdtest"
	"github.com/gpuaas/gpuaas/e2e/leakcheck"
	"github.com/gpuaas/gpuaas/e2e/sandbox"
	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/protocol"
)

const nodeID = "node-1"

// appBinary is the demo's app, compiled once.
var appBinary string

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == containerfiles.Name {
		os.Exit(containerfiles.Run(os.Args[2:]))
	}
	// A run that is killed leaves no container, link or mount behind.
	os.Exit(sandbox.RunInTree(func() int { return runTests(m) }))
}

func runTests(m *testing.M) int {
	dir, err := os.MkdirTemp("", "gpuaas-reconcile-app-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = os.RemoveAll(dir) }()
	appBinary = filepath.Join(dir, "app")
	build := exec.Command("go", "build", "-trimpath", "-o", appBinary, "../../../deploy/demo/app")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "compile the test's app: %v\n%s", err, out)
		return 1
	}
	return m.Run()
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
	volCfg volume.Config
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
	// wrapRuntime, wrapStats, wrapNetwork and wrapAccelerators replace what the reconciler uses where a test sets them
	// before it starts the fixture anew.
	wrapRuntime      func(*runtime.Runtime) reconcile.Containers
	wrapStats        func(*runtime.Runtime) reconcile.Stats
	wrapNetwork      func(*network.Network) reconcile.Network
	wrapAccelerators func(reconcile.Accelerators) reconcile.Accelerators
	// devices replaces the runtime's check likewise.
	devices reconcile.Devices
	// configure changes the reconciler's configuration likewise.
	configure func(*reconcile.Config)
}

func newFixture(t testing.TB) *fixture {
	t.Helper()
	skip.Root(t, "containers")
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
	f.volCfg = volume.Config{Dir: f.dir + "/volumes", MountDir: f.dir + "/mounts", ReserveBytes: 1}
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
	volumes, err := volume.Open(f.volCfg)
	require.NoError(f.t, err)
	machine := reconcile.Machine{
		Volumes: volumes, Environments: f.environments(volumes), Devices: f.rt,
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
	if f.devices != nil {
		machine.Devices = f.devices
	}
	if f.wrapStats != nil {
		machine.Stats = f.wrapStats(f.rt)
	}
	if f.wrapAccelerators != nil {
		machine.Accelerators = f.wrapAccelerators(inventory)
	}
	config := reconcile.Config{
		MeteringInterval: 50 * time.Millisecond, UsageInterval: 200 * time.Millisecond, Resync: time.Second,
		CollectEvery: f.collectEvery, DeviceCheckInterval: 500 * time.Millisecond,
		PortFrom: f.from, PortTo: f.from + 9,
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
	volumes, err := volume.Open(f.volCfg)
	require.NoError(f.t, err)
	require.NoError(f.t, f.environments(volumes).Purge(f.ctx()))
	require.NoError(f.t, volumes.Purge(f.ctx()))
}

func (f *fixture) environments(volumes *volume.Volumes) *volume.Environments {
	f.t.Helper()
	e, err := volume.OpenEnvironments(volume.Config{Dir: f.dir + "/environments", MountDir: f.dir + "/mounted"}, volumes)
	require.NoError(f.t, err)
	return e
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
	for _, r := range f.sessionRecords(memberID) {
		require.False(f.t, r.GetStartedAt().AsTime().Before(end), "overlap")
		end = r.GetEndedAt().AsTime()
		total += time.Duration(r.GetQuantity()) * time.Microsecond
		final = final || r.GetFinal()
	}
	return total, final
}

// sessionRecords are the records of a member's running time that are sealed so far.
func (f *fixture) sessionRecords(memberID string) (records []*protocol.UsageRecord) {
	f.t.Helper()
	for number := uint64(1); ; number++ {
		env, err := f.store.Segment(number)
		require.NoError(f.t, err)
		if env == nil {
			return records
		}
		v, err := protocol.VerifySegment(env, f.hub.node.Public().(ed25519.PublicKey))
		require.NoError(f.t, err)
		for _, r := range v.Message().GetRecords() {
			if r.GetMemberId() == memberID && r.GetMeter() == protocol.MeterSessionSeconds {
				records = append(records, r)
			}
		}
	}
}
