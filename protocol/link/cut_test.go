package link_test

import (
	"context"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/quic-go/quic-go/testutils/simnet"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

// latency is one way.
const latency = 10 * time.Millisecond

// wire is a network in test time. Packets of a node pass a NAT, whose outer port can change, and can be lost either
// way.
type wire struct {
	mu               sync.Mutex
	sockets          map[string]simnet.PacketReceiver
	loseUp, loseDown bool
	outside          int
	packets          int
	// longest is the longest datagram that passes; 0 bounds none.
	longest int
}

var (
	hubAddr  = &net.UDPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 8443}
	nodeAddr = &net.UDPAddr{IP: net.IPv4(10, 0, 0, 2), Port: 40000}
)

func newWire() *wire {
	return &wire{sockets: map[string]simnet.PacketReceiver{}, outside: nodeAddr.Port}
}

// AddNode implements simnet.Router.
func (w *wire) AddNode(addr net.Addr, r simnet.PacketReceiver) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sockets[addr.String()] = r
}

// SendPacket implements simnet.Router.
func (w *wire) SendPacket(p simnet.Packet) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.packets++
	if w.longest > 0 && len(p.Data) > w.longest {
		return nil
	}
	to := p.To
	if p.From.String() == hubAddr.String() {
		if w.loseDown || p.To.(*net.UDPAddr).Port != w.outside {
			return nil
		}
		to = nodeAddr
	} else {
		if w.loseUp {
			return nil
		}
		p.From = &net.UDPAddr{IP: nodeAddr.IP, Port: w.outside}
	}
	receiver := w.sockets[to.String()]
	time.AfterFunc(latency, func() {
		if receiver != nil {
			receiver.RecvPacket(p)
		}
	})
	return nil
}

func (w *wire) lose(up, down bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.loseUp, w.loseDown = up, down
}

func (w *wire) rebind(port int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.outside = port
}

func (w *wire) count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.packets
}

// far is a hub and a node with a network in between, in a bubble of test time.
type far struct {
	*setup
	t     *testing.T
	wire  *wire
	reset link.ResetKey
	hub   *link.Listener
}

func newFar(t *testing.T) *far {
	f := &far{
		setup: &setup{hubCA: newAuthority(t), nodeCA: newAuthority(t)}, t: t, wire: newWire(),
		reset: link.ResetKey{1},
	}
	f.node = link.ClientTLS(f.nodeCA.issue(t, protocol.NodeSPIFFE(domain, "node-1")), f.hubCA.vouchesFor(protocol.KindHub))
	f.startHub()
	return f
}

func (f *far) startHub() {
	f.t.Helper()
	hub := f.hubCA.issue(f.t, protocol.HubSPIFFE(domain, "hub-1"))
	var err error
	f.hub, err = link.ListenOn(simnet.NewSimConn(hubAddr, f.wire),
		link.ServerTLS(hub, f.nodeCA.vouchesFor(protocol.KindNode)), &f.reset)
	require.NoError(f.t, err)
}

// kill ends the hub without a word to its peers.
func (f *far) kill() { require.NoError(f.t, f.hub.Close()) }

func (f *far) dial() (*link.Conn, error) {
	return link.DialFrom(context.Background(), simnet.NewSimConn(nodeAddr, f.wire), hubAddr, f.node, nil)
}

func (f *far) connect() (node, hub *link.Conn) {
	f.t.Helper()
	node, err := f.dial()
	require.NoError(f.t, err)
	hub, err = f.hub.Accept(context.Background())
	require.NoError(f.t, err)
	return node, hub
}

// talk sends a message each way.
func (f *far) talk(node, hub *link.Conn) {
	f.t.Helper()
	up, down := f.open(f.t, node, hub, protocol.StreamHeader_KIND_CONTROL)
	require.NoError(f.t, up.Send(&protocol.Hello{AgentVersion: "1"}))
	require.NoError(f.t, down.Receive(&protocol.Hello{}, protocol.MaxControlBytes))
	require.NoError(f.t, down.Send(&protocol.Welcome{SessionNo: 7}))
	require.NoError(f.t, up.Receive(&protocol.Welcome{}, protocol.MaxControlBytes))
	require.NoError(f.t, up.Close())
	require.NoError(f.t, down.Close())
}

func (f *far) end(conns ...*link.Conn) {
	for _, c := range conns {
		_ = c.Close(link.CodeOK, "")
	}
	f.kill()
	synctest.Wait()
}

// lasted waits for the end of the connection and says how long that took.
func lasted(c *link.Conn) time.Duration {
	began := time.Now()
	<-c.Done()
	return time.Since(began)
}

func inTestTime(t *testing.T, fn func(*far)) {
	synctest.Test(t, func(t *testing.T) { fn(newFar(t)) })
}

func TestNodeOfAKilledHubLearnsOfItFromTheNextHubWithinOneProbe(t *testing.T) {
	inTestTime(t, func(f *far) {
		node, _ := f.connect()
		time.Sleep(10 * time.Minute)
		f.kill()
		time.Sleep(2 * time.Second)
		f.startHub()
		require.LessOrEqual(t, lasted(node), link.ProbeEvery+2*latency)
		again, hub := f.connect()
		f.talk(again, hub)
		f.end(again, hub)
	})
}

func TestNodeOfAKilledHubWaitsForTheIdleTimeoutWhenTheNextHubHasAnotherKey(t *testing.T) {
	inTestTime(t, func(f *far) {
		node, _ := f.connect()
		time.Sleep(10 * time.Minute)
		f.kill()
		f.reset = link.ResetKey{2}
		f.startHub()
		took := lasted(node)
		require.Greater(t, took, link.ProbeEvery+2*latency)
		require.LessOrEqual(t, took, link.IdleTimeout+link.ProbeEvery)
		f.end()
	})
}

func TestIdleConnectionLivesForHoursOnFewPackets(t *testing.T) {
	inTestTime(t, func(f *far) {
		node, hub := f.connect()
		f.talk(node, hub)
		time.Sleep(time.Minute) // what the handshake and the search for the packet size cost
		const hours = 6 * time.Hour
		before := f.wire.count()
		time.Sleep(hours)
		require.NoError(t, node.Err())
		require.NoError(t, hub.Err())
		// A probe and its acknowledgement, and now and then one of those in turn.
		require.LessOrEqual(t, f.wire.count()-before, 2*int(hours/link.ProbeEvery)*11/10)
		f.talk(node, hub)
		f.end(node, hub)
	})
}

func TestConnectionSurvivesACutShorterThanTheIdleTimeout(t *testing.T) {
	inTestTime(t, func(f *far) {
		node, hub := f.connect()
		time.Sleep(time.Minute)
		f.wire.lose(true, true)
		time.Sleep(link.IdleTimeout - link.ProbeEvery - time.Second)
		f.wire.lose(false, false)
		f.talk(node, hub)
		f.end(node, hub)
	})
}

func TestCutOfHoursEndsTheConnectionOnBothSidesAndTheNextDialAfterItWorks(t *testing.T) {
	inTestTime(t, func(f *far) {
		node, hub := f.connect()
		time.Sleep(time.Minute)
		f.wire.lose(true, true)
		bound := link.IdleTimeout + 2*link.ProbeEvery
		require.LessOrEqual(t, lasted(node), bound)
		require.LessOrEqual(t, lasted(hub), bound)
		for began := time.Now(); time.Since(began) < 6*time.Hour; time.Sleep(10 * time.Minute) {
			dialled := time.Now()
			_, err := f.dial()
			require.Error(t, err)
			require.LessOrEqual(t, time.Since(dialled), link.HandshakeTimeout)
		}
		f.wire.lose(false, false)
		node, hub = f.connect()
		f.talk(node, hub)
		f.end(node, hub)
	})
}

func TestCutInOneDirectionEndsTheConnectionOnBothSides(t *testing.T) {
	for name, c := range map[string]struct{ up, down bool }{"to the hub": {up: true}, "to the node": {down: true}} {
		t.Run(name, func(t *testing.T) {
			inTestTime(t, func(f *far) {
				node, hub := f.connect()
				time.Sleep(time.Minute)
				f.wire.lose(c.up, c.down)
				// The side that still hears the other believes in it until that one gives up.
				bound := 2*link.IdleTimeout + 2*link.ProbeEvery
				began := time.Now()
				<-node.Done()
				<-hub.Done()
				require.LessOrEqual(t, time.Since(began), bound)
				f.wire.lose(false, false)
				node, hub = f.connect()
				f.talk(node, hub)
				f.end(node, hub)
			})
		})
	}
}

// A tunnel of 1280 bytes takes that much less its own header, and says nothing about what it drops. No path of QUIC
// takes less than 1200 bytes (RFC 9000, section 14).
func TestConnectionPassesAPathOfTheSmallestPackets(t *testing.T) {
	inTestTime(t, func(f *far) {
		f.wire.longest = 1200
		node, hub := f.connect()
		f.talk(node, hub)
		up, down := f.open(f.t, node, hub, protocol.StreamHeader_KIND_CONTROL)
		large := &protocol.PushState{Parts: [][]byte{make([]byte, 1<<20)}}
		go func() { _ = down.Send(large) }()
		require.NoError(t, up.Receive(&protocol.PushState{}, protocol.MaxControlBytes))
		f.end(node, hub)
	})
}

func TestConnectionKnowsHowLongTheWayIs(t *testing.T) {
	inTestTime(t, func(f *far) {
		node, hub := f.connect()
		f.talk(node, hub)
		require.InDelta(t, latency.Seconds(), node.OneWay().Seconds(), 0.002)
		f.end(node, hub)
	})
}

func TestConnectionOutlivesANewPortOfTheNAT(t *testing.T) {
	inTestTime(t, func(f *far) {
		node, hub := f.connect()
		f.talk(node, hub)
		for port := range 5 {
			f.wire.rebind(50000 + port)
			time.Sleep(2 * link.ProbeEvery)
			require.NoError(t, node.Err())
			require.Equal(t, 50000+port, hub.RemoteAddr().(*net.UDPAddr).Port)
			f.talk(node, hub)
		}
		f.end(node, hub)
	})
}
