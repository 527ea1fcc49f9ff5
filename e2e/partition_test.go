package e2e_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/e2e/netem"
	api "github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/protocol/link"
)

// certificateLife is so short that the certificate of a node that is cut off expires within the test, as it does after
// a day with the lifetime that is usual. Cuts of hours are shown in test time: of the connection on real QUIC in
// protocol/link (TestCutOfHoursEndsTheConnectionOnBothSidesAndTheNextDialAfterItWorks), of leases, usage and documents
// in e2e/sim. So is that 10,000 nodes come back without a stampede: TestNodesOfAHubThatWasAwayForLongDialAtAnEvenRate
// in agent/internal/uplink.
const certificateLife = "20s"

// divided is a hub, nodes, and between them a bad network: each in a network namespace of its own. A node's only way to
// anywhere is to the proxy.
type divided struct {
	*world
	proxy *netem.Proxy
	nodes []*farNode
}

// farNode is a node behind the proxy.
type farNode struct {
	*steadyNode
	link *netem.Link
	// cutFor is how long its longest cut took.
	cutFor time.Duration
}

func newDivided(t *testing.T, nodes int) *divided {
	t.Helper()
	seed := rand.Uint64()
	if given, err := strconv.ParseUint(os.Getenv("GPUAAS_E2E_SEED"), 10, 64); err == nil {
		seed = given
	}
	t.Logf("GPUAAS_E2E_SEED=%d", seed)
	d := &divided{world: newWorld(t)}
	net := d.newNetwork("hub", "mid")
	d.startContainerd()
	c := d.hubConfig()
	c.NetNS = net.path("hub")
	c.Listen, c.SessionListen = net.address("hub")+":8443", net.address("hub")+":7843"
	c.AdvertiseAPI, c.AdvertiseSession = net.address("mid")+":8443", net.address("mid")+":7843"
	c.ExtraArgs = []string{"--certificate-lifetime", certificateLife, "--lease-duration", "15m", "--resync", "5s"}
	var err error
	d.proxy, err = netem.Start(netem.Config{
		NetNS: net.path("mid"), ListenUDP: c.AdvertiseSession, HubUDP: c.SessionListen, ListenTCP: c.AdvertiseAPI,
		HubTCP: c.Listen, Seed: seed,
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.proxy.Close()) })
	d.startHub(c)
	d.newTenant("acme")
	d.shipApp()
	for i := range nodes {
		name := fmt.Sprintf("far%d", i)
		address := net.behind("mid", name, i)
		config := d.agentConfig(name)
		config.NetNS = net.path(name)
		d.nodes = append(d.nodes, &farNode{link: d.proxy.Link(address), steadyNode: d.keep(d.startAgent(config))})
	}
	return d
}

// unheard asks for an instance while one direction is cut, and for as long as something else takes the hub cannot know
// that it runs. What ran before goes on, and afterwards it lives as any other.
func (n *farNode) unheard(name string, up, down netem.Conditions, meanwhile func()) {
	n.w.t.Helper()
	began := time.Now()
	n.link.Set(up, down)
	id := n.request(name)
	meanwhile()
	require.NotEqual(n.w.t, api.AppInstanceStatusRunning, n.w.instance(id).Status)
	n.untouched()
	n.link.Set(netem.Conditions{}, netem.Conditions{})
	n.cutFor = max(n.cutFor, time.Since(began))
	n.w.decommission(n.running(id))
}

// lifecycle launches an instance and decommissions it.
func (n *farNode) lifecycle(name string) {
	n.w.t.Helper()
	n.w.decommission(n.running(n.request(name)))
}

// suffers waits until the network has done to packets of both directions what it was told to; an idle node sends few.
func (n *farNode) suffers(what string, done func(netem.Stats) bool) {
	n.w.t.Helper()
	n.w.eventually(what, func() error {
		up, down := n.link.Stats()
		return orMissing(nil, done(up) && done(down))
	})
}

// logged reports whether the agent has written the word.
func (n *farNode) logged(word string) bool {
	data, err := os.ReadFile(n.agent.LogPath)
	return err == nil && strings.Contains(string(data), word)
}

// certificateExpired reports whether the node's certificate has run out by now.
func (n *farNode) certificateExpired() (bool, error) {
	node, err := api.Read[api.Node](n.w.tenant.Admin.GetNode(n.w.ctx, n.agent.Ready.NodeID))
	return err == nil && time.Now().After(node.CertificateExpiresAt), err
}

// Laws 3, 4, 5, 13: whatever the network does, workloads run on, states arrive, and usage is delivered once and in
// order.
func TestWhateverTheNetworkDoesWorkGoesOnAndUsageArrivesOnceInOrder(t *testing.T) {
	d := newDivided(t, 3)
	shaky, moved, gone := d.nodes[0], d.nodes[1], d.nodes[2]
	calm, cut := netem.Conditions{}, netem.Conditions{Cut: true}

	// One node is away for the rest of the test, and its agent is killed meanwhile.
	gone.link.Set(cut, cut)
	away := len(gone.link.Dials())
	require.NoError(t, gone.agent.Kill9())
	d.restartAgent(gone.agent)
	late := gone.request("asked-while-away")

	lossy := netem.Conditions{Loss: 0.05}
	shaky.link.Set(lossy, lossy)
	shaky.lifecycle("loss")

	bursts := netem.Conditions{Bursts: netem.InBursts(0.3, 4)}
	shaky.link.Set(bursts, bursts)
	moved.unheard("hub-hears-nothing", cut, calm, func() {
		shaky.lifecycle("bursts")
		shaky.suffers("both ways lose packets", func(s netem.Stats) bool { return s.Lost > 0 })
	})

	slow := netem.Conditions{Delay: 300 * time.Millisecond}
	shaky.link.Set(slow, slow)
	moved.unheard("node-hears-nothing", calm, cut, func() { shaky.lifecycle("delay") })

	mixed := netem.Conditions{Jitter: 80 * time.Millisecond, Duplicate: 0.2}
	shaky.link.Set(mixed, mixed)
	shaky.lifecycle("reordered")
	for range 3 {
		require.NoError(t, moved.link.Rebind())
		moved.usageGrows()
	}
	shaky.suffers("both ways double packets", func(s netem.Stats) bool { return s.Doubled > 0 })
	for _, n := range d.nodes[:2] {
		// On a machine that is too slow for it a cut may have lasted longer than a session can.
		if n.cutFor < link.IdleTimeout-link.ProbeEvery {
			require.Len(t, n.link.Dials(), 1, "the session outlived all of it")
		}
	}
	shaky.link.Set(calm, calm)

	d.killHub()
	for _, n := range d.nodes[:2] {
		n.usageGrows()
		require.True(t, n.logged("stateless reset"), "the node learns from the next hub that its session is gone")
	}

	d.eventually("the certificate of the node that is away expires", func() error {
		expired, err := gone.certificateExpired()
		return orMissing(err, expired)
	})
	gone.untouched()
	requireSpaced(t, gone.link.Dials()[away:])
	gone.link.Set(calm, calm)
	gone.running(late)

	for _, n := range d.nodes {
		n.untouched()
		require.NoError(t, n.serving(), "the app answered throughout")
		n.settle()
	}
}

// requireSpaced holds that a node that gets no answer goes on dialling, ever more seldom: after each silence a pause
// that is at least twice the least of the one before.
func requireSpaced(t *testing.T, dials []time.Time) {
	t.Helper()
	require.GreaterOrEqual(t, len(dials), 3, "the node tries again and again")
	const silence, leastPause, mostLeast = link.HandshakeTimeout / 2, 250 * time.Millisecond, 15 * time.Second
	for i := 1; i < len(dials); i++ {
		require.Greater(t, dials[i].Sub(dials[i-1]), silence+min(leastPause<<(i-1), mostLeast), "dials at %v", dials)
	}
}

// killHub kills the hub and starts it again.
func (d *divided) killHub() {
	d.t.Helper()
	require.NoError(d.t, d.hub.Kill9())
	fingerprint := d.hub.RootFingerprint
	var err error
	d.hub, err = devcluster.StartHub(d.ctx, d.hub.Config)
	require.NoError(d.t, err)
	d.hub.RootFingerprint = fingerprint
}

// settle decommissions all that runs on the node and holds the bill and the segments against the truth.
func (n *farNode) settle() {
	t, d := n.w.t, n.w
	t.Helper()
	for _, i := range n.all {
		if d.instance(i.ID).Status == api.AppInstanceStatusRunning {
			d.decommission(i)
		}
	}
	for _, i := range n.all {
		postings := d.finalPostings(i)
		usage, err := d.tenant.Usage(d.ctx, i.ID)
		require.NoError(t, err)
		requireWithinBeat(t, n.truth.runningOf(t, i.Members[0].ID), requireContiguous(t, usage, "session_seconds"))
		require.Equal(t, 1, debit(t, postings).Sign())
	}
	n.requireOneChain()
}

// requireOneChain holds that the hub has every record of the node once, in order and in one chain: a chain that is
// begun anew has another incarnation, numbers with a hole make a second range, and the hub refuses what does not
// continue the chain.
func (n *farNode) requireOneChain() {
	t, d := n.w.t, n.w
	t.Helper()
	conn := d.database()
	count := func(query string) (numbers [3]int64) {
		require.NoError(t, conn.QueryRow(d.ctx, query, n.agent.Ready.NodeID).Scan(&numbers[0], &numbers[1], &numbers[2]))
		return numbers
	}
	require.EqualValues(t, 1, count(`SELECT count(*), 0, 0 FROM usage_marks WHERE node_id = $1`)[0], "one incarnation")
	sealed := count(`SELECT count(*), min(from_sequence), max(to_sequence) FROM usage_sequences WHERE node_id = $1`)
	require.Equal(t, [3]int64{1, 1, sealed[2]}, sealed, "one range from the first on")
	posted := count(`SELECT count(*), count(DISTINCT (u.subject_id, u.meter, u.run_id, u.started_at)), 0
		FROM usage_recent u JOIN subjects s ON s.id = u.subject_id WHERE s.node_id = $1 AND s.kind = 'member'`)
	require.Equal(t, posted[0], posted[1], "no record is there twice")
	// The last word on each member is of no length.
	require.Equal(t, sealed[2], posted[0]+int64(len(n.all)), "each record is there")
	require.Zero(t, count(`SELECT count(*), 0, 0 FROM suspense_records WHERE node_id = $1`)[0], "nothing is in doubt")
}
