package network_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/e2e/netem"
	api "github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/protocol/link"
)

// certificateLife is so short that the certificate of a node that is cut off expires within the test, as it does after
// a day with the lifetime that is usual. Cuts of hours are shown in test time: of the connection on real QUIC in
// protocol/link (TestCutOfHoursEndsTheConnectionOnBothSidesAndTheNextDialAfterItWorks), of leases, usage and documents
// in e2e/sim. So is that nodes come back without a stampede: TestNodesOfAHubThatWasAwayForLongDialAtAnEvenRate in
// agent/hubsession, TestLaw13NodesThatAHubComesBackToDialOnceEachAndSpread in agent/internal/uplink.
const certificateLife = "20s"

// partitionedNetwork is a hub and nodes in network namespaces of their own; a node reaches only the proxy between them.
type partitionedNetwork struct {
	*harness.Testbed
	proxy *netem.Proxy
	nodes []*farNode
}

// farNode is a node behind the proxy.
type farNode struct {
	*harness.MonitoredNode
	link *netem.Link
	// cutFor is how long its longest cut took.
	cutFor time.Duration
}

func newPartitionedNetwork(t *testing.T, nodes int) *partitionedNetwork {
	t.Helper()
	seed := rand.Uint64()
	if given, err := strconv.ParseUint(os.Getenv("GPUAAS_E2E_SEED"), 10, 64); err == nil {
		seed = given
	}
	t.Logf("GPUAAS_E2E_SEED=%d", seed)
	d := &partitionedNetwork{Testbed: harness.New(t)}
	net := d.NewNetwork("hub", "mid")
	d.StartContainerd()
	c := d.HubConfig()
	c.NetNS = net.Path("hub")
	c.Listen, c.SessionListen = net.Address("hub")+":8443", net.Address("hub")+":7843"
	c.AdvertiseAPI, c.AdvertiseSession = net.Address("mid")+":8443", net.Address("mid")+":7843"
	c.ExtraArgs = []string{"--certificate-lifetime", certificateLife, "--lease-duration", "15m", "--resync", "5s"}
	var err error
	d.proxy, err = netem.Start(netem.Config{
		NetNS: net.Path("mid"), ListenUDP: c.AdvertiseSession, HubUDP: c.SessionListen, ListenTCP: c.AdvertiseAPI,
		HubTCP: c.Listen, Seed: seed,
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.proxy.Close()) })
	d.StartHub(c)
	d.NewTenant("acme")
	d.ShipApp()
	for i := range nodes {
		name := fmt.Sprintf("far%d", i)
		address := net.Behind("mid", name, i)
		config := d.AgentConfig(name)
		config.NetNS = net.Path(name)
		d.nodes = append(d.nodes, &farNode{link: d.proxy.Link(address), MonitoredNode: d.MonitorApp(d.StartAgent(config))})
	}
	return d
}

// launchWhileCut creates an instance while one direction is cut, so that the hub cannot know whether it runs. Running
// apps go on, and after the cut the new one runs too.
func (n *farNode) launchWhileCut(name string, up, down netem.Conditions, meanwhile func()) {
	n.Testbed.T.Helper()
	began := time.Now()
	n.link.Set(up, down)
	id := n.Request(name)
	meanwhile()
	require.NotEqual(n.Testbed.T, api.AppInstanceStatusRunning, n.Testbed.Instance(id).Status)
	n.RequireSameProcess()
	n.link.Set(netem.Conditions{}, netem.Conditions{})
	n.cutFor = max(n.cutFor, time.Since(began))
	n.Testbed.Decommission(n.AwaitRunning(id))
}

// lifecycle launches an instance and decommissions it.
func (n *farNode) lifecycle(name string) {
	n.Testbed.T.Helper()
	n.Testbed.Decommission(n.AwaitRunning(n.Request(name)))
}

// awaitPacketFaults waits until the network has done to packets of both directions what it was told to; an idle node
// sends few.
func (n *farNode) awaitPacketFaults(what string, done func(netem.Stats) bool) {
	n.Testbed.T.Helper()
	n.Testbed.Eventually(what, func() error {
		up, down := n.link.Stats()
		return harness.Pending(nil, done(up) && done(down))
	})
}

// logged reports whether the agent's log contains the text.
func (n *farNode) logged(word string) bool {
	data, err := os.ReadFile(n.Agent.LogPath)
	return err == nil && strings.Contains(string(data), word)
}

// certificateExpired reports whether the node's certificate has run out by now.
func (n *farNode) certificateExpired() (bool, error) {
	node, err := api.Read[api.Node](n.Testbed.Tenant.Admin.GetNode(n.Testbed.Ctx, n.Agent.Ready.NodeID))
	return err == nil && time.Now().After(node.CertificateExpiresAt), err
}

// Laws 3, 4, 5, 13: through every fault of the network, workloads run on, states arrive, and usage is delivered once
// and in order.
func TestWorkloadsAndUsageSurviveEveryFaultOfTheNetwork(t *testing.T) {
	d := newPartitionedNetwork(t, 3)
	shaky, moved, gone := d.nodes[0], d.nodes[1], d.nodes[2]
	healthy, cut := netem.Conditions{}, netem.Conditions{Cut: true}

	// One node is cut off for the rest of the test, and its agent is killed meanwhile.
	gone.link.Set(cut, cut)
	away := len(gone.link.Dials())
	require.NoError(t, gone.Agent.Kill9())
	d.RestartAgent(gone.Agent)
	late := gone.Request("asked-while-away")

	lossy := netem.Conditions{Loss: 0.05}
	shaky.link.Set(lossy, lossy)
	shaky.lifecycle("loss")

	bursts := netem.Conditions{Bursts: netem.InBursts(0.3, 4)}
	shaky.link.Set(bursts, bursts)
	moved.launchWhileCut("hub-hears-nothing", cut, healthy, func() {
		shaky.lifecycle("bursts")
		shaky.awaitPacketFaults("both ways lose packets", func(s netem.Stats) bool { return s.Lost > 0 })
	})

	slow := netem.Conditions{Delay: 300 * time.Millisecond}
	shaky.link.Set(slow, slow)
	moved.launchWhileCut("node-hears-nothing", healthy, cut, func() { shaky.lifecycle("delay") })

	mixed := netem.Conditions{Jitter: 80 * time.Millisecond, Duplicate: 0.2}
	shaky.link.Set(mixed, mixed)
	shaky.lifecycle("reordered")
	for range 3 {
		require.NoError(t, moved.link.Rebind())
		moved.AwaitUsage()
	}
	shaky.awaitPacketFaults("both ways double packets", func(s netem.Stats) bool { return s.Doubled > 0 })
	for _, n := range d.nodes[:2] {
		// On a machine that is too slow for it a cut may have lasted longer than a session can.
		if n.cutFor < link.IdleTimeout-link.ProbeEvery {
			require.Len(t, n.link.Dials(), 1, "the session outlived all of it")
		}
	}
	shaky.link.Set(healthy, healthy)

	d.killHub()
	for _, n := range d.nodes[:2] {
		n.AwaitUsage()
		require.True(t, n.logged("stateless reset"), "the node learns from the next hub that its session is gone")
	}

	d.Eventually("the certificate of the node that is away expires", func() error {
		expired, err := gone.certificateExpired()
		return harness.Pending(err, expired)
	})
	gone.RequireSameProcess()
	gone.requireSpaced(away)
	gone.link.Set(healthy, healthy)
	gone.AwaitRunning(late)

	for _, n := range d.nodes {
		n.RequireSameProcess()
		require.NoError(t, n.StopCalling(), "the app answered throughout")
		n.requireFinalBill()
	}
}

// requireSpaced waits until a node without an answer has dialled repeatedly and checks that each dial waited for the
// end of the one before. How the pauses between them grow is shown in test time, in agent/hubsession: here the time
// that a packet takes through a busy machine would count as pause.
func (n *farNode) requireSpaced(away int) {
	t := n.Testbed.T
	t.Helper()
	var dials []time.Time
	n.Testbed.Eventually("the node goes on dialling", func() error {
		dials = n.link.Dials()[away:]
		return harness.Pending(nil, len(dials) >= 3)
	})
	const silence = link.HandshakeTimeout / 2
	require.Greater(t, dials[len(dials)-1].Sub(dials[0]), time.Duration(len(dials)-2)*silence, "dials at %v", dials)
}

// killHub kills the hub and starts it again.
func (d *partitionedNetwork) killHub() {
	d.T.Helper()
	require.NoError(d.T, d.Hub.Kill9())
	d.RestartHub()
}

// requireFinalBill decommissions all that runs on the node and compares the bill and the segments with what containerd
// saw.
func (n *farNode) requireFinalBill() {
	t, d := n.Testbed.T, n.Testbed
	t.Helper()
	for _, i := range n.Instances {
		if d.Instance(i.ID).Status == api.AppInstanceStatusRunning {
			d.Decommission(i)
		}
	}
	for _, i := range n.Instances {
		postings := d.FinalPostings(i)
		usage, err := d.Tenant.Usage(d.Ctx, i.ID)
		require.NoError(t, err)
		n.Oracle.RequireBilledTime(t, i.Members[0].ID, harness.RequireContiguous(t, usage))
		require.Equal(t, 1, harness.UsageCost(t, postings).Sign())
	}
	n.requireOneChain()
}

// requireOneChain holds that the hub has every record of the node once, in order and in one chain: a chain that is
// begun anew has another incarnation, a gap leaves segments beyond it, and the hub refuses what does not continue the
// chain.
func (n *farNode) requireOneChain() {
	t, d := n.Testbed.T, n.Testbed
	t.Helper()
	conn := d.Database()
	count := func(query string) (numbers [3]int64) {
		require.NoError(t, conn.QueryRow(d.Ctx, query, n.Agent.Ready.NodeID).Scan(&numbers[0], &numbers[1], &numbers[2]))
		return numbers
	}
	sealed := count(`SELECT count(*), 0, max(last_record) FROM usage_watermarks WHERE node_id = $1`)
	require.EqualValues(t, 1, sealed[0], "one incarnation")
	require.Zero(t, count(`SELECT count(*), 0, 0 FROM usage_ahead WHERE node_id = $1`)[0], "no gap")
	posted := count(`SELECT count(*), count(DISTINCT (u.subject_id, u.meter, u.run_id, u.started_at)), 0
		FROM usage_recent u JOIN subjects s ON s.id = u.subject_id WHERE s.node_id = $1 AND s.kind = 'member'`)
	require.Equal(t, posted[0], posted[1], "no record is there twice")
	// The final record of each member has no length.
	require.Equal(t, sealed[2], posted[0]+int64(len(n.Instances)), "each record is there")
	require.Zero(t, count(`SELECT count(*), 0, 0 FROM suspense_records WHERE node_id = $1`)[0], "nothing is in doubt")
}
