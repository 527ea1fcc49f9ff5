package reconcile_test

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/accept"
	"github.com/gpuaas/gpuaas/agent/internal/reconcile"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/e2e/sim"
	"github.com/gpuaas/gpuaas/pkg/appkit"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/pkg/notify"
	"github.com/gpuaas/gpuaas/protocol"
)

// twin is the product's loop beside a node of the simulation, both with the same hub and at the same time.
type twin struct {
	t       *testing.T
	rng     *rand.Rand
	dir     string
	script  *script
	hub     *hub
	node    *sim.Node
	machine *machine
	began   time.Time    // by the test's clock
	genesis time.Time    // the same in the simulation
	ahead   atomic.Int64 // what the machine's clock is ahead, as a time.Duration
	booted  time.Time
	boots   int
	runs    map[string]int

	store *state.Store
	clock *state.Clock
	loop  *reconcile.Reconciler
	// kill ends the agent's process; nil while there is none.
	kill func()

	current map[string]*protocol.Workload
	// claimed is the member that has the accelerator.
	claimed  string
	revision uint64
	images   int
	// beside makes each revision another image that starts first.
	beside bool
	log    []string
	seen   map[string]int
}

// TestTheSimulationExecutesAsTheNode drives the loop and the simulation's executor with the same states, leases,
// failures, exits, kills and power cuts at random. After each step both have recorded the same of members and runs,
// list the same containers, report the same, and have sealed the same usage, all at the same times.
func TestTheSimulationExecutesAsTheNode(t *testing.T) {
	eachTwin(t, 60, func(w *twin) {
		for range 40 {
			w.step()
		}
	}, "ready", "restarted", "failed", "gave up", "fell back", "confirmed", "removed", "lease ended", "lost", "pulling",
		"killed at work", "power cut", "clock set", "waits for a document")
}

// eachTwin drives so many sequences to their end and checks that they came by each of these events. A short test
// drives a fifth of them, and then as many more as it takes to come by each event.
func eachTwin(t *testing.T, sequences uint64, drive func(w *twin), events ...string) {
	t.Helper()
	seen := map[string]int{}
	unseen := func(what string) bool { return seen[what] == 0 }
	for seed := range sequences {
		if testing.Short() && seed >= sequences/5 && !slices.ContainsFunc(events, unseen) {
			break
		}
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newTwin(t, seed)
				defer func() {
					if w.kill != nil {
						w.kill()
					}
				}()
				drive(w)
				w.end()
				for what, n := range w.seen {
					seen[what] += n
				}
			})
		})
	}
	t.Log(seen)
	for _, what := range events {
		require.NotZero(t, seen[what], "no sequence: %s", what)
	}
}

func newTwin(t *testing.T, seed uint64) *twin {
	w := &twin{
		t: t, rng: rand.New(rand.NewPCG(seed, 11)), began: time.Now(), runs: map[string]int{},
		current: map[string]*protocol.Workload{}, seen: map[string]int{},
	}
	w.script = &script{takes: map[string]time.Duration{}, fails: map[string]error{}}
	for _, effect := range []struct {
		kind string
		most time.Duration
	}{
		{"create", 100 * time.Millisecond},
		{"start", time.Second},
		{"answer", 20 * time.Millisecond},
		{"ready", 20 * time.Second},
		{"stop", 5 * time.Second},
		{"remove", time.Second},
		{"network", 300 * time.Millisecond},
		{"remove network", 500 * time.Millisecond},
		{"publish", 100 * time.Millisecond},
		{"retire", 500 * time.Millisecond},
		{"pull", 40 * time.Second},
		{"fetch", time.Second},
	} {
		w.script.takes[effect.kind] = effect.most/10 + w.upTo(effect.most)
	}
	w.dir = inMemory(t)
	require.NoError(t, os.Mkdir(w.dir+"/state", 0o700))
	node := sim.NewNode(nodeID, w.script)
	w.node, w.genesis = node, node.Time()
	w.hub = newSigner(t, w.genesis.Add(-24*time.Hour))
	w.hub.now = w.now
	w.script.hub = w.hub
	w.machine = &machine{
		script: w.script, rtc: w.rtc, events: notify.NewSignal(), containers: map[string]*box{}, networks: map[string]bool{},
		images: map[string]bool{},
	}
	w.powerOn()
	node.SetIncarnation(w.store.Incarnation())
	node.PowerOn()
	return w
}

// inMemory is a directory on a tmpfs where there is one: this test cuts no power while a disk writes.
func inMemory(t *testing.T) string {
	const tmpfs = "/dev/shm"
	if _, err := os.Stat(tmpfs); err != nil {
		return t.TempDir()
	}
	dir, err := os.MkdirTemp(tmpfs, "gpuaas-reconcile-") //nolint:usetesting // t.TempDir cannot be told where
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	return dir
}

func (w *twin) upTo(d time.Duration) time.Duration {
	return time.Duration(w.rng.Int64N(d.Microseconds())) * time.Microsecond
}

// now is the true time.
func (w *twin) now() time.Time { return w.genesis.Add(time.Since(w.began)) }

func (w *twin) rtc() time.Time { return w.now().Add(time.Duration(w.ahead.Load())) }

// powerOn boots the machine of the product's loop and starts it.
func (w *twin) powerOn() {
	w.booted = time.Now()
	w.boots++
	w.startAgent()
}

func (w *twin) startAgent() {
	var err error
	w.store, err = state.Open(w.dir+"/state", state.Options{MinFreeBytes: 1})
	require.NoError(w.t, err)
	require.NoError(w.t, w.store.Identify(nodeID, protocol.NewEd25519Signer(w.hub.node)))
	root, node := w.hub.root.Public().(ed25519.PublicKey), w.hub.node.Public().(ed25519.PublicKey)
	require.NoError(w.t, accept.Resume(w.store, protocol.Fingerprint(root), "", protocol.NewNodeIdentity(nodeID, node)))
	if !w.store.Bundle().Valid() {
		require.NoError(w.t, w.store.InitBundle(w.hub.bundle))
	}
	booted := w.booted
	w.clock = state.NewClock(w.store, state.Source{
		RTC: w.rtc, SinceBoot: func() time.Duration { return time.Since(booted) }, BootID: fmt.Sprint(w.boots),
	}, time.Time{})
	h := agentHandle{w.machine, make(chan struct{})}
	const never = 1000 * time.Hour
	cfg := reconcile.Config{Resync: never, CollectEvery: never, PortFrom: 1, PortTo: 9}
	w.loop = reconcile.New(cfg, w.store, w.clock, reconcile.Machine{
		Containers: h, Images: h, Stats: h, Logs: idle{}, Disk: idle{}, Exec: h, Host: idle{}, Network: netHandle{h},
		Accelerators: idle{}, Devices: idle{}, Volumes: noVolumes{handle: h}, Environments: noEnvironments{},
	}, h)
	w.loop.SetRunIDs(func(memberID string) string {
		w.machine.mu.Lock()
		defer w.machine.mu.Unlock()
		w.runs[memberID]++
		return fmt.Sprintf("%s.%d", memberID, w.runs[memberID])
	})
	ctx, cancel := context.WithCancel(context.WithoutCancel(w.t.Context()))
	done := make(chan error, 1)
	go func() { done <- w.loop.Run(ctx) }()
	w.kill = func() {
		cancel() // first: what fails by it is no failure of an action
		close(h.dead)
		require.NoError(w.t, <-done)
		require.NoError(w.t, w.store.Close())
		w.kill = nil
	}
}

// step does one thing to both, lets some time pass, and compares.
func (w *twin) step() {
	synctest.Wait()
	w.node.Advance(w.now())
	w.act()
	w.pass(w.upTo([]time.Duration{time.Second, 20 * time.Second, 3 * time.Minute}[w.rng.IntN(3)]))
	w.compare()
}

// pass lets time pass for both.
func (w *twin) pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
	w.node.Advance(w.now())
}

func (w *twin) note(format string, args ...any) {
	w.log = append(w.log, w.now().Format("15:04:05.000000 ")+fmt.Sprintf(format, args...))
}

func (w *twin) act() {
	switch dice := w.rng.IntN(20); {
	case dice < 6:
		w.acceptState()
	case dice < 9:
		w.acceptLeases()
	case dice < 12:
		w.exit()
	case dice < 14:
		w.fail([]string{"pull", "start"}[w.rng.IntN(2)])
	case dice < 15:
		w.script.change(func(s *script) { s.away = !s.away })
		w.note("hub away: %t", w.script.HubAway())
	case dice < 17:
		w.note("agent killed")
		w.killBoth()
		w.pass(w.upTo(30 * time.Second))
		w.startAgent()
		w.node.StartAgent()
	case dice < 18:
		w.cutPower()
	case dice < 19:
		w.setClock()
	default:
		w.note("nothing")
	}
}

func (w *twin) killBoth() {
	for _, n := range w.node.Busy() {
		if n.Other {
			w.seen["killed at work"]++
		}
	}
	w.kill()
	w.node.KillAgent()
}

func (w *twin) cutPower() {
	w.seen["power cut"]++
	w.note("power cut")
	w.killBoth()
	w.machine.powerOff()
	w.node.PowerOff()
	w.pass(w.upTo(time.Hour))
	w.powerOn()
	w.node.PowerOn()
}

func (w *twin) setClock() {
	if w.rng.IntN(2) == 0 {
		ahead := w.upTo(2*time.Hour) - time.Hour
		w.ahead.Store(int64(ahead))
		w.node.SetRTC(ahead)
		w.note("machine's clock ahead by %s", ahead)
	}
	hub, took := w.clock.Now().Add(w.upTo(10*time.Minute)-5*time.Minute), w.upTo(time.Second)
	w.note("hub says %s", hub)
	w.seen["clock set"]++
	w.loop.SyncClock(w.t.Context(), hub, took)
	w.node.SyncClock(hub, took)
}

// exit ends a running container.
func (w *twin) exit() {
	for _, c := range w.node.Containers() {
		if c.Status != agent.Running {
			continue
		}
		state, code := runtime.StateExited, uint32(w.rng.IntN(3))
		if w.rng.IntN(4) == 0 {
			state = runtime.StateLost
			w.seen["lost"]++
		}
		w.note("%s exits: %s %d", c.ID, state, code)
		w.machine.end(c.ID, state, code)
		w.node.Exit(c.ID, state == runtime.StateExited, int32(code))
		return
	}
}

// fail chooses how actions of a kind end from now on.
func (w *twin) fail(kind string) {
	failure := []error{
		nil, nil, fmt.Errorf("it is broken"),
		fault.New(fault.Unavailable, "flaky", "It failed.", nil),
		fault.New(fault.Unprocessable, "bad", "It cannot work.", nil).Permanent(),
		fault.New(fault.Unavailable, fault.CodeDiskFull, "The disk is full.", nil),
		fault.New(fault.Unavailable, agent.CodeFeatureMissing, "The agent lacks a feature.", nil),
		fault.New(fault.Unavailable, agent.CodeContainerdUnavailable, "containerd does not answer.", nil),
	}[w.rng.IntN(8)]
	w.script.change(func(s *script) { s.fails[kind] = failure })
	w.note("%s fails: %v", kind, failure)
}

// acceptState changes some members.
func (w *twin) acceptState() {
	for _, id := range []string{"a", "b", "c"} {
		old := w.current[id]
		switch dice := w.rng.IntN(8); {
		case dice < 2 || old == nil && dice < 5:
			w.current[id] = w.workload(id, old)
		case dice == 5:
			delete(w.current, id)
		case dice == 6 && old != nil:
			next := w.workload(id, nil)
			next.Stopped = !old.GetStopped()
			w.current[id] = next
		}
	}
	var all []*protocol.Workload
	for _, id := range []string{"a", "b", "c"} {
		if wl := w.current[id]; wl != nil {
			all = append(all, wl)
			w.note("%s: revision %d stopped %t fallback %d", id, wl.GetRevision(), wl.GetStopped(),
				wl.GetFallback().GetRevision())
		}
	}
	w.hub.withheld = w.rng.IntN(4) == 0
	v, parts := w.hub.desired(all...)
	w.note("accepts generation %d with %d of %d documents", v.Message().GetGeneration(), len(parts), len(all))
	require.NoError(w.t, w.store.AcceptState(v, parts))
	require.NoError(w.t, w.node.AcceptState(v, parts))
	if w.rng.IntN(2) == 0 {
		w.pass(0) // what follows from the state comes before the leases
		w.acceptLeases()
	}
}

func (w *twin) acceptLeases() {
	var leases []*protocol.Lease
	for _, id := range []string{"a", "b", "c"} {
		if w.current[id] == nil || w.rng.IntN(8) == 0 {
			continue
		}
		life := time.Hour
		if w.rng.IntN(4) == 0 {
			life = w.upTo(5 * time.Minute)
		}
		leases = append(leases, w.hub.newLease(id, life))
	}
	v := w.hub.leases(w.store.Incarnation(), leases...)
	w.note("accepts %d leases", len(leases))
	require.NoError(w.t, w.store.AcceptLeases(v))
	require.NoError(w.t, w.node.AcceptLeases(v.Message()))
}

// twinManifest is an app with a probe that needs no network.
const twinManifest = `
schema: gpuaas.app/v1
app: {slug: hello, display_name: Hello, description: An app., category: demo, runtime_backend: launchable_oci}
version:
  version: ${version}
  compatibility: {requires_capacity_shape: [baremetal, gpu_slice]}
  runtime_profile:
    kind: launchable_oci
    image_variants:
      - {name: cpu, accelerator: none, image_ref: "${image}"}
      - {name: gpu, accelerator: nvidia, image_ref: "${image}"}
    command: [/app]
    resources:
      cpu_millis: {min: 50, default: 500, max: 8000}
      memory_mib: {min: 16, default: 64, max: 4096}
    readiness: {kind: exec, command: [/ready], period_millis: 60000, timeout_millis: 60000}
    readiness_timeout_seconds: 10
  metering: {kind: session_seconds}
  upgrade: {strategy: ${strategy}}
`

// workload is the next revision of a member, whose fallback may be the one before.
func (w *twin) workload(id string, before *protocol.Workload) *protocol.Workload {
	if w.images == 0 || w.beside || w.rng.IntN(2) == 0 {
		w.images++
	}
	w.revision++
	image := fmt.Sprintf("apps/hello/%s@sha256:%x", id, sha256.Sum256([]byte{byte(w.images)}))
	doc, err := appkit.FillTemplate([]byte(twinManifest), map[string]string{
		"version": "1.0.0", "image": image, "strategy": map[bool]string{true: "start_first", false: "recreate"}[w.beside],
	})
	require.NoError(w.t, err)
	env, err := manifest.Sign(doc, protocol.NewEd25519Signer(w.hub.cat))
	require.NoError(w.t, err)
	m, err := manifest.Parse(doc)
	require.NoError(w.t, err)
	params, err := m.CheckParameters([]byte(`{}`))
	require.NoError(w.t, err)
	shape := manifest.Shape{}
	if !w.beside && w.rng.IntN(2) == 0 && w.claims(id) {
		shape = manifest.Shape{AcceleratorVendor: manifest.AcceleratorNVIDIA, AcceleratorIDs: []string{"gpu-1"}}
	}
	services, err := manifest.Lower(m, manifest.Inputs{Parameters: params}, shape)
	require.NoError(w.t, err)
	next := &protocol.Workload{
		Id: id, InstanceId: "instance-" + id, Revision: w.revision, AppSlug: "hello", AppVersion: "1.0.0",
		CorrelationId: fmt.Sprint("correlation-", w.revision), Manifest: env, Services: services, ParametersJson: `{}`,
		Features:                m.Features(),
		ReadinessTimeoutSeconds: m.Version.RuntimeProfile.ReadinessTimeoutSeconds,
	}
	if before != nil && !before.GetStopped() && (w.beside || w.rng.IntN(3) > 0) {
		next.Fallback = before
		before.Fallback = nil
	}
	return next
}

// claims gives the machine's accelerator to the member, unless another one may still have it.
func (w *twin) claims(id string) bool {
	if m, known := w.store.Members()[w.claimed]; known && m.Removal == nil || w.current[w.claimed] != nil {
		return w.claimed == id
	}
	w.claimed = id
	return true
}

// end removes all members, so that all usage is sealed.
func (w *twin) end() {
	w.script.change(func(s *script) {
		s.away = false
		clear(s.fails)
	})
	v, parts := w.hub.desired()
	require.NoError(w.t, w.store.AcceptState(v, parts))
	require.NoError(w.t, w.node.AcceptState(v, parts))
	w.note("all leave")
	w.pass(5 * time.Minute)
	w.compare()
	for id, m := range w.store.Members() {
		require.NotNil(w.t, m.Removal, id)
		w.seen["removed"]++
	}
	w.kill()
}
