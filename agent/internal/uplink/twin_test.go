package uplink_test

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/clock"
	"github.com/gpuaas/gpuaas/agent/internal/accept"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/internal/uplink"
	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/e2e/sim"
	"github.com/gpuaas/gpuaas/e2e/sim/nodestore"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
	"github.com/gpuaas/gpuaas/protocol/link/linktest"
)

// twin is the product's session, over QUIC in memory, beside the simulation's, each with a hub that answers the same.
type twin struct {
	t     *testing.T
	rng   *rand.Rand
	mesh  *testHub
	node  *testNode
	model *sim.Session
	// product and modelled are the hubs, compared how much of what they were told is compared.
	product, modelled *twinHub
	compared          [2]int
	log               []string

	generation uint64
	// member is in the accepted state, removed are those that have left, uses counts sealed segments.
	member        string
	members, uses int
	removed       []string
}

// TestTheSimulationsSessionIsTheNodes drives agent/internal/uplink and the simulation's uplink with the same hub,
// reports and segments, at random and in test time. After each step both hubs were told the same at the same times, and
// both stores have the same marks.
func TestTheSimulationsSessionIsTheNodes(t *testing.T) {
	sequences := uint64(40)
	if testing.Short() {
		sequences = 8
	}
	seen := map[string]int{}
	for seed := range sequences {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, end := newTwin(t, seed)
				defer end()
				for range 60 {
					w.act()
					w.pass(time.Duration(w.rng.Int64N(int64([]time.Duration{
						2 * time.Second, 20 * time.Second, 3 * time.Minute,
					}[w.rng.IntN(3)]))))
					w.compare()
				}
				for what, n := range w.product.seen {
					seen[what] += n
				}
			})
		})
	}
	t.Log(seen)
	if t.Failed() || testing.Short() {
		return
	}
	for _, what := range []string{
		"silent", "hello unanswered", "hello refused", "new incarnation", "restored", "posted too much", "other digest",
		"state uploaded", "acknowledged UNAVAILABLE", "acknowledged OUT_OF_ORDER", "acknowledged CHAIN_BROKEN",
		"acknowledged too much", "acknowledged another digest", "closed", "go-away",
	} {
		require.NotZero(t, seen[what], "no sequence: %s", what)
	}
}

func newTwin(t *testing.T, seed uint64) (w *twin, end func()) {
	w = &twin{t: t, rng: rand.New(rand.NewPCG(seed, 3)), generation: 1}
	w.product = &twinHub{t: t, seed: seed, now: time.Now, autoUsage: true, autoReports: true, seen: map[string]int{}}
	w.modelled = &twinHub{t: t, seed: seed, autoUsage: true, autoReports: true, seen: map[string]int{}}
	w.model = sim.NewSession(nodeID, rand.New(rand.NewPCG(seed, 4)), simPeer{w})
	w.modelled.now = w.model.Time
	time.Sleep(time.Until(w.model.Time()))
	w.mesh = newMesh(t)
	w.openNode()
	w.product.node, w.modelled.node = diskStore{w.node.store}, modelStore{w.model.Store()}
	w.model.SetIncarnation(w.node.store.Incarnation())

	network := linktest.New()
	listener := w.mesh.listenOn(network)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	serving, running := make(chan struct{}), make(chan error, 1)
	go func() {
		w.product.serveQUIC(ctx, listener)
		close(serving)
	}()
	const never = 1000 * time.Hour
	n := w.node
	n.up = uplink.New(uplink.Config{AgentVersion: "test", ReportInterval: never}, n.creds, n.store, n.clock,
		n.newAcceptor())
	n.up.SetConnect(network.Dial)
	n.up.SetRandom(rand.New(rand.NewPCG(seed, 4)).Float64)
	go func() { running <- n.up.Run(ctx, n.seen) }()
	w.pass(arrival)
	return w, func() {
		cancel()
		require.NoError(t, <-running)
		<-serving
		_ = listener.Close()
		require.NoError(t, n.store.Close())
		time.Sleep(arrival) // for the last packets
	}
}

// listenOn listens in test time.
func (h *testHub) listenOn(network *linktest.Network) *link.Listener {
	cert := h.issue(h.hubCert, h.hubCA, newKey(h.t), protocol.HubSPIFFE(domain, "hub-1"), time.Now(), 24*time.Hour)
	listener, err := network.Listen(link.ServerTLS(func() (*tls.Certificate, error) { return cert, nil }, link.Peer{
		Roots: func() *x509.CertPool { return h.bundle.NodeCAs() }, TrustDomain: domain, Kind: protocol.KindNode,
		Now: time.Now,
	}))
	require.NoError(h.t, err)
	return listener
}

// openNode makes the enrolled node.
func (w *twin) openNode() { w.node = w.mesh.openNode(w.t, nodeID) }

// openNode makes an enrolled node in test time.
func (h *testHub) openNode(t *testing.T, id string) *testNode {
	dir := inMemory(t)
	n := &testNode{t: t, dir: dir, seen: &observer{changed: make(chan struct{}, 1)}}
	n.seen.clock = func() *state.Clock { return n.clock }
	var err error
	n.creds, err = uplink.OpenCredentials(dir)
	require.NoError(t, err)
	h.nodeKey = n.creds.PublicKey()
	leaf := h.certificate(h.nodeCACert, h.nodeCA, n.creds.PublicKey(), protocol.NodeSPIFFE(domain, id), time.Now(),
		1000*time.Hour)
	require.NoError(t, n.creds.Save(uplink.Identity{
		NodeID: id, SessionAddr: "hub:1", RootFingerprint: h.fingerprint(),
	}, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: leaf})))
	n.store, err = state.Open(dir+"/state", state.Options{MinFreeBytes: 1})
	require.NoError(t, err)
	require.NoError(t, accept.Resume(n.store, h.fingerprint(), "", n.creds.Node()))
	require.NoError(t, n.store.InitBundle(h.bundle))
	require.NoError(t, n.store.Identify(id, n.creds.Signer()))
	booted := time.Now()
	n.clock = state.NewClock(n.store, state.Source{
		RTC: time.Now, SinceBoot: func() time.Duration { return time.Since(booted) }, BootID: "1",
	}, time.Time{})
	return n
}

// inMemory is a directory on a tmpfs where there is one: this test cuts no power.
func inMemory(t *testing.T) string {
	const tmpfs = "/dev/shm"
	if _, err := os.Stat(tmpfs); err != nil {
		return t.TempDir()
	}
	dir, err := os.MkdirTemp(tmpfs, "gpuaas-uplink-") //nolint:usetesting // t.TempDir cannot be told where
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	return dir
}

// arrival is enough for a message and its answer, but for acknowledgements of usage (sim.UsageAckTakes).
const arrival = time.Millisecond

// pass lets time pass for both.
func (w *twin) pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
	w.model.Advance(time.Now())
}

func (w *twin) note(format string, args ...any) {
	w.log = append(w.log, time.Now().Format("15:04:05.000000 ")+fmt.Sprintf(format, args...))
}

// act does one thing to both.
func (w *twin) act() {
	switch dice := w.rng.IntN(20); {
	case dice < 5:
		w.observe(1 + w.rng.IntN(3))
	case dice < 8:
		w.use(1 + w.rng.IntN(4))
	case dice < 9:
		w.use(20)
	case dice < 12:
		for range 1 + w.rng.IntN(6) {
			w.both("acknowledges a segment", func(h *twinHub) { h.acknowledgeUsage(true) })
			w.pass(2 * sim.UsageAckTakes)
		}
	case dice < 13:
		w.both("acknowledges a report", (*twinHub).acknowledgeReport)
	case dice < 14:
		w.both("acknowledges usage at once, or no more", func(h *twinHub) { h.autoUsage = !h.autoUsage })
	case dice < 15:
		w.both("acknowledges reports at once, or no more", func(h *twinHub) { h.autoReports = !h.autoReports })
	case dice < 17:
		goAway, message := w.rng.IntN(2) == 0, w.rng.IntN(2) == 0
		w.both(fmt.Sprint("closes, go-away ", goAway, " ", message), func(h *twinHub) { h.end(goAway, message) })
	case dice < 19:
		w.changeMembers()
	default:
		w.note("nothing")
	}
}

// both lets both hubs do something.
func (w *twin) both(what string, do func(*twinHub)) {
	w.note("the hub %s", what)
	for _, h := range []*twinHub{w.product, w.modelled} {
		h.mu.Lock()
		do(h)
		h.mu.Unlock()
	}
	w.pass(arrival)
}

// end closes the connection.
func (h *twinHub) end(goAway, message bool) {
	goAway = goAway && h.welcomed
	h.seen["closed"]++
	if goAway {
		h.seen["go-away"]++
	}
	h.line.close(goAway, message)
}

// observe changes what is reported, so often in a row.
func (w *twin) observe(times int) {
	for range times {
		var all []*protocol.WorkloadStatus
		for _, id := range w.removed {
			all = append(all, &protocol.WorkloadStatus{
				MemberId: id, Status: protocol.WorkloadStatus_REMOVED, Removal: w.node.store.Members()[id].Removal,
			})
		}
		all = append(all, &protocol.WorkloadStatus{
			MemberId: "observed", Status: protocol.WorkloadStatus_READY, Restarts: w.rng.Uint32N(1000),
		})
		w.note("reports %d", all[len(all)-1].GetRestarts())
		w.node.seen.set(agent.Report{Workloads: all})
		w.model.Observe(all)
		w.pass(arrival)
	}
}

// use seals segments, one at a time.
func (w *twin) use(segments int) {
	w.note("seals %d", segments)
	for range segments {
		w.uses++
		id, now := fmt.Sprint("use-", w.uses), time.Now().UTC()
		began := now.Add(-time.Minute)
		r := meter.Run{RunID: id + ".1", MemberID: id, StartedAt: began, Up: true}
		w.sample(began, r)
		r.Up, r.ExitedAt = false, now
		w.sample(now, r)
		w.model.Sealed()
		w.pass(arrival)
	}
}

func (w *twin) sample(at time.Time, r meter.Run) {
	o := meter.Observation{At: at, Runs: []meter.Run{r}}
	require.NoError(w.t, w.node.store.SaveSample(o, clock.Stamp{}))
	require.NoError(w.t, w.model.Store().SaveSample(o, clock.Stamp{}))
}

// changeMembers accepts a state with a new member, or without the one that there was, which is then removed.
func (w *twin) changeMembers() {
	w.generation++
	left := w.member
	var all []*protocol.Workload
	if w.member = ""; left == "" {
		w.members++
		w.member = fmt.Sprint("member-", w.members)
		all = append(all, &protocol.Workload{Id: w.member})
	}
	env, parts := w.mesh.desired(w.mesh.state, func(d *protocol.DesiredState) { d.Generation = w.generation }, all...)
	v, err := protocol.VerifyState(env, w.mesh.bundle, w.node.creds.Node())
	require.NoError(w.t, err)
	require.NoError(w.t, w.node.store.AcceptState(v, parts))
	require.NoError(w.t, w.model.Store().AcceptState(v, parts))
	w.note("accepts generation %d, %q leaves", w.generation, left)
	if left == "" {
		return
	}
	now := time.Now().UTC()
	require.NoError(w.t, w.node.store.Retire(left, protocol.RemovalKinds(), now))
	require.NoError(w.t, w.model.Store().Retire(left, now))
	w.model.Sealed()
	w.pass(arrival)
	w.removed = append(w.removed, left)
	w.observe(1)
}

// maxApart is how much the times of both may differ: packets take microseconds, and the simulation counts whole ones.
const maxApart = 5 * time.Millisecond

func (w *twin) compare() {
	w.t.Helper()
	require.NoError(w.t, w.model.Broken())
	w.product.mu.Lock()
	defer w.product.mu.Unlock()
	what := func() string { return "the product and the simulation, after:\n" + strings.Join(w.log, "\n") }
	for i, logs := range [][2][]told{
		{w.product.control, w.modelled.control}, {w.product.usage, w.modelled.usage},
	} {
		a, b := logs[0][w.compared[i]:], logs[1][w.compared[i]:]
		if !equal(a, b) {
			require.Equal(w.t, texts(a), texts(b), what())
			require.Fail(w.t, "other times", what())
		}
		w.compared[i] = len(logs[0])
	}
	if a, b := w.progress(w.product), w.progress(w.modelled); a != b {
		require.Equal(w.t, a, b, what())
	}
	for id, m := range w.node.store.Members() {
		if m.Reported != w.model.Store().Members[id].Reported {
			require.Equal(w.t, m.Reported, !m.Reported, "reported %s: %s", id, what())
		}
	}
}

// progress is how far the hub has come with the store's usage.
func (w *twin) progress(h *twinHub) string {
	name, last, marks := h.node.spool()
	return fmt.Sprint("life ", h.life(name), " segment ", last, " marks ", marks)
}

func equal(a, b []told) bool {
	for i := range min(len(a), len(b)) {
		if a[i].what != b[i].what || a[i].at.Sub(b[i].at).Abs() > maxApart || a[i].sealed.Sub(b[i].sealed).Abs() > maxApart {
			return false
		}
	}
	return len(a) == len(b)
}

func texts(all []told) (out []string) {
	for _, m := range all {
		out = append(out, m.at.Format("15:04:05.000 ")+m.what)
	}
	return out
}

// diskStore and modelStore are the nodes' stores.
type diskStore struct{ *state.Store }

func (s diskStore) spool() (string, uint64, spool.Marks) {
	p := s.Spool()
	return p.Incarnation, p.LastSegment, p.Marks
}

func (s diskStore) digest(number uint64) []byte {
	env, err := s.Segment(number)
	if env == nil || err != nil {
		return nil
	}
	sum := sha256.Sum256(env.GetPayload())
	return sum[:]
}

type modelStore struct{ *nodestore.Store }

func (s modelStore) spool() (string, uint64, spool.Marks) {
	return s.Incarnation(), s.Chain.Number, s.Marks
}

func (s modelStore) digest(number uint64) []byte {
	sealed, there := s.Segments[number]
	if !there {
		return nil
	}
	sum := sha256.Sum256(sealed.Payload)
	return sum[:]
}

// simPeer is the hub as the simulation's session knows it.
type simPeer struct{ w *twin }

func (p simPeer) Hello(attempt int, g sim.Hello) { p.w.modelled.hello(simLine{p.w.model, attempt}, g) }

func (p simPeer) StateUpload(generation uint64, parts int) {
	p.w.modelled.stateUpload(generation, parts)
}

func (p simPeer) Usage(no int, s spool.Sealed) { p.w.modelled.segment(no, s.Payload) }

func (p simPeer) Report(counter uint64, all []*protocol.WorkloadStatus) {
	p.w.modelled.report(counter, all)
}

// simLine is a connection of the simulation.
type simLine struct {
	s       *sim.Session
	attempt int
}

func (l simLine) welcome(m *protocol.Welcome) { l.s.Welcome(l.attempt, m) }

func (l simLine) refuse() { l.s.Close(l.attempt, false) }

func (l simLine) close(goAway, _ bool) { l.s.Close(l.attempt, goAway) }

func (l simLine) acknowledgeUsage(no int, a *protocol.UsageAck) {
	l.s.AcknowledgeUsage(l.attempt, no, a)
}

func (l simLine) acknowledgeReport(counter uint64) { l.s.AcknowledgeReport(l.attempt, counter) }
