package uplink_test

import (
	"context"
	"fmt"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/clock"
	"github.com/gpuaas/gpuaas/agent/internal/accept"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/internal/uplink"
	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/protocol"
)

// testNode is the side under test, with real disk and real time.
type testNode struct {
	t     testing.TB
	dir   string
	creds *uplink.Credentials
	store *state.Store
	clock *state.Clock
	up    *uplink.Uplink
	seen  *observer
	stop  func()
}

// observer stands for the reconciler: it reports what the test sets.
type observer struct {
	mu      sync.Mutex
	report  agent.Report
	pulls   []*protocol.ImagePull
	changed chan struct{}
	clock   func() *state.Clock
	// told are the times of the hub.
	told []time.Time
}

func (o *observer) Report() agent.Report {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.report
}

func (o *observer) Pulls() []*protocol.ImagePull {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.pulls
}

func (o *observer) setPulls(pulls []*protocol.ImagePull) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.pulls = pulls
}

func (o *observer) Subscribe() <-chan struct{} { return o.changed }

func (o *observer) SyncClock(_ context.Context, hub time.Time, took time.Duration) {
	o.mu.Lock()
	o.told = append(o.told, hub)
	o.mu.Unlock()
	next, _ := o.clock().Synced(hub, took)
	o.clock().Set(next)
}

func (o *observer) set(r agent.Report) {
	o.mu.Lock()
	r.Passes = 1
	o.report = r
	o.mu.Unlock()
	select {
	case o.changed <- struct{}{}:
	default:
	}
}

func openNode(t testing.TB) *testNode {
	t.Helper()
	n := &testNode{t: t, dir: t.TempDir(), seen: &observer{changed: make(chan struct{}, 1)}, stop: func() {}}
	n.seen.clock = func() *state.Clock { return n.clock }
	var err error
	n.creds, err = uplink.OpenCredentials(n.dir)
	require.NoError(t, err)
	n.store, err = state.Open(filepath.Join(n.dir, "state"), state.Options{MinFreeBytes: 1})
	require.NoError(t, err)
	require.NoError(t, accept.Resume(n.store, n.creds.Identity().RootFingerprint, "", n.creds.Node()))
	t.Cleanup(func() {
		n.stop()
		require.NoError(t, n.store.Close())
	})
	source, err := state.MachineTime()
	require.NoError(t, err)
	n.clock = state.NewClock(n.store, source, time.Time{})
	return n
}

func (n *testNode) enroll(h *testHub) error {
	return uplink.Enroll(n.t.Context(), uplink.Enrollment{
		APIURL: h.api.URL, RootFingerprint: h.fingerprint(), JoinToken: joinToken, Hostname: "node-one",
	}, n.creds, n.store, n.clock)
}

// newAcceptor fetches bundles through the uplink that is made next, as the agent does.
func (n *testNode) newAcceptor() *accept.Acceptor {
	return accept.New(accept.Config{
		Store: n.store,
		Node:  n.creds.Node,
		FetchBundle: func(ctx context.Context, version uint64) (*protocol.Envelope, error) {
			return n.up.FetchBundle(ctx, version)
		},
	})
}

func (n *testNode) run(cfg uplink.Config) {
	n.t.Helper()
	require.NoError(n.t, n.store.Identify(n.creds.Identity().NodeID, n.creds.Signer()))
	n.up = uplink.New(cfg, n.creds, n.store, n.clock, n.newAcceptor())
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.up.Run(ctx, n.seen) }()
	n.stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(n.t, <-done)
	})
}

// start is a node with an open session.
func start(t testing.TB) (*testHub, *testNode, *hubSession) {
	t.Helper()
	h, n := newHub(t), openNode(t)
	require.NoError(t, n.enroll(h))
	n.run(uplink.Config{AgentVersion: "test"})
	return h, n, h.next()
}

// use seals so many segments.
func (n *testNode) use(segments int) {
	n.t.Helper()
	at := n.clock.Now()
	require.NoError(n.t, n.store.OpenRun(state.Run{ID: fmt.Sprintf("m1.%d", at.UnixNano()), MemberID: "m1", OpenedAt: at}))
	var run string
	for id := range n.store.Runs() {
		run = id
	}
	for range segments + 1 {
		r := meter.Run{RunID: run, MemberID: "m1", StartedAt: n.clock.Now(), Up: true}
		require.NoError(n.t, n.store.SaveSample(meter.Observation{At: at, Runs: []meter.Run{r}, CutEvery: time.Second},
			clock.Stamp{}))
		at = at.Add(10 * time.Second)
	}
	at = at.Add(time.Second)
	require.NoError(n.t, n.store.SaveSample(meter.Observation{At: at}, clock.Stamp{}))
	require.NoError(n.t, n.store.CloseRun(run))
}
