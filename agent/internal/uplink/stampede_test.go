package uplink_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/agent/hubsession"
	"github.com/gpuaas/gpuaas/agent/internal/uplink"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
	"github.com/gpuaas/gpuaas/protocol/link/linktest"
)

var errHubGone = errors.New("no hub listens")

// crowd is many nodes that dial one hub; it notes each dial where the hub would get it.
type crowd struct {
	t       *testing.T
	network *linktest.Network
	hub     *testHub
	mu      sync.Mutex
	gone    bool
	dials   []time.Time
	open    []*hubSession
}

func (c *crowd) connect(ctx context.Context, addr string, conf *tls.Config, tokens *link.Tokens) (*link.Conn, error) {
	c.mu.Lock()
	c.dials = append(c.dials, time.Now())
	gone := c.gone
	c.mu.Unlock()
	if gone {
		return nil, errHubGone
	}
	return c.network.Dial(ctx, addr, conf, tokens)
}

// setGone ends the sessions of a hub that goes, and forgets the dials until now.
func (c *crowd) setGone(gone bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gone, c.dials = gone, nil
	if gone {
		for _, s := range c.open {
			_ = s.conn.Close(link.CodeProtocol, "the hub is gone")
		}
		c.open = nil
	}
}

// counts are the dials since the last change, the most of them within one second, and the open sessions.
func (c *crowd) counts() (dials, busiest, open int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	first := 0
	for last, at := range c.dials {
		for at.Sub(c.dials[first]) > time.Second {
			first++
		}
		busiest = max(busiest, last-first+1)
	}
	return len(c.dials), busiest, len(c.open)
}

// start runs the hub and so many nodes until end is called.
func (c *crowd) start(nodes int) (end func()) {
	w := &twin{t: c.t, mesh: newMesh(c.t)}
	w.openNode()
	c.network, c.hub = linktest.New(), w.mesh
	c.hub.welcome = func(*protocol.Hello) *protocol.HubMessage {
		return &protocol.HubMessage{Message: &protocol.HubMessage_Welcome{Welcome: &protocol.Welcome{
			ProtocolVersion: 1, HubTime: timestamppb.Now(), SessionNo: 1,
		}}}
	}
	cert := c.hub.issue(c.hub.hubCert, c.hub.hubCA, newKey(c.t), protocol.HubSPIFFE(domain, "hub-1"), time.Now(),
		24*time.Hour)
	var err error
	c.hub.listener, err = c.network.Listen(link.ServerTLS(func() (*tls.Certificate, error) { return cert, nil },
		link.Peer{
			Roots: func() *x509.CertPool { return c.hub.bundle.NodeCAs() }, TrustDomain: domain, Kind: protocol.KindNode,
			Now: time.Now,
		}))
	require.NoError(c.t, err)
	ctx, cancel := context.WithCancel(context.WithoutCancel(c.t.Context()))
	var running, serving sync.WaitGroup
	serving.Go(c.hub.serve)
	serving.Go(func() {
		for s := range c.hub.sessions {
			c.mu.Lock()
			c.open = append(c.open, s)
			c.mu.Unlock()
		}
	})
	random := rand.New(rand.NewPCG(5, 6))
	for range nodes {
		n := w.node
		up := uplink.New(uplink.Config{AgentVersion: "test", ReportInterval: time.Hour}, n.creds, n.store, n.clock,
			n.newAcceptor())
		up.SetConnect(c.connect)
		up.SetRandom(rand.New(rand.NewPCG(random.Uint64(), 7)).Float64)
		seen := &observer{changed: make(chan struct{}, 1), clock: n.seen.clock}
		running.Go(func() { _ = up.Run(ctx, seen) })
	}
	return func() {
		cancel()
		running.Wait()
		_ = c.hub.listener.Close()
		time.Sleep(arrival)
		synctest.Wait()
		close(c.hub.sessions)
		serving.Wait()
		require.NoError(c.t, w.node.store.Close())
		time.Sleep(arrival)
	}
}

// A hub is gone for ten minutes and comes back. Each node dials no more often than its pauses allow, the nodes come
// back within the longest pause and with one dial each, and spread.
func TestLaw13NodesThatAHubComesBackToDialOnceEachAndSpread(t *testing.T) {
	const nodes, away = 100, 10 * time.Minute
	synctest.Test(t, func(t *testing.T) {
		c := &crowd{t: t}
		defer c.start(nodes)()
		time.Sleep(time.Second)
		synctest.Wait()
		dials, _, open := c.counts()
		require.Equal(t, nodes, dials)
		require.Equal(t, nodes, open)

		c.setGone(true)
		time.Sleep(away)
		dials, _, _ = c.counts()
		most := 0 // dials of a node whose pauses are the shortest possible
		for at, pause := time.Duration(0), hubsession.DialRetryMin; at < away; most++ {
			at, pause = at+pause/2, min(2*pause, hubsession.DefaultDialRetryMax)
		}
		t.Logf("%d dials while the hub was away, at most %d", dials, nodes*most)
		require.LessOrEqual(t, dials, nodes*most)
		require.GreaterOrEqual(t, dials, nodes*int(away/hubsession.DefaultDialRetryMax), "no node gives up")

		c.setGone(false)
		time.Sleep(hubsession.DefaultDialRetryMax + time.Second)
		synctest.Wait()
		dials, busiest, open := c.counts()
		t.Logf("%d dials after its return, %d within one second", dials, busiest)
		require.Equal(t, nodes, open, "all are back")
		require.Equal(t, nodes, dials, "with one dial each")
		require.LessOrEqual(t, busiest, nodes/6, "an even rate is a thirtieth to a fifteenth in each second")
	})
}
