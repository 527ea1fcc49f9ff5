package uplink_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math"
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

// fleet is many nodes that dial one hub; it records each dial where the hub would get it.
type fleet struct {
	t       *testing.T
	network *linktest.Network
	hub     *testHub
	nodes   []*testNode

	mu    sync.Mutex
	gone  bool
	dials []time.Time
	open  []*hubSession
}

func (f *fleet) connect(ctx context.Context, addr string, conf *tls.Config, tokens *link.Tokens) (*link.Conn, error) {
	f.mu.Lock()
	f.dials = append(f.dials, time.Now())
	gone := f.gone
	f.mu.Unlock()
	if gone {
		return nil, errHubGone
	}
	return f.network.Dial(ctx, addr, conf, tokens)
}

// setGone ends the sessions of a hub that goes, and forgets the dials until now.
func (f *fleet) setGone(gone bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.gone, f.dials = gone, nil
	if gone {
		for _, s := range f.open {
			_ = s.conn.Close(link.CodeProtocol, "the hub is gone")
		}
		f.open = nil
	}
}

// counts are the dials since the last change, the most of them within one second, and the open sessions.
func (f *fleet) counts() (dials, busiest, open int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	first := 0
	for last, at := range f.dials {
		for at.Sub(f.dials[first]) > time.Second {
			first++
		}
		busiest = max(busiest, last-first+1)
	}
	return len(f.dials), busiest, len(f.open)
}

// start runs the hub and so many nodes until end is called. Each has an identity of its own: a listener admits few
// connections of one node at a time (link.MaxPendingConns).
func (f *fleet) start(nodes int) (end func()) {
	f.network, f.hub = linktest.New(), newMesh(f.t)
	f.hub.welcome = func(*protocol.Hello) *protocol.HubMessage {
		return &protocol.HubMessage{Message: &protocol.HubMessage_Welcome{Welcome: &protocol.Welcome{
			ProtocolVersion: 1, HubTime: timestamppb.Now(), SessionNo: 1,
		}}}
	}
	f.hub.listener = f.hub.listenOn(f.network)
	ctx, cancel := context.WithCancel(context.WithoutCancel(f.t.Context()))
	var running, serving sync.WaitGroup
	serving.Go(f.hub.serve)
	serving.Go(func() {
		for s := range f.hub.sessions {
			f.mu.Lock()
			f.open = append(f.open, s)
			f.mu.Unlock()
		}
	})
	for i := range nodes {
		n := f.hub.openNode(f.t, fmt.Sprintf("0193c0de-0000-7000-8000-%012d", i))
		n.up = uplink.New(uplink.Config{AgentVersion: "test", ReportInterval: time.Hour}, n.creds, n.store, n.clock,
			n.newAcceptor())
		n.up.SetConnect(f.connect)
		n.up.SetRandom(rand.New(rand.NewPCG(5, uint64(i))).Float64)
		running.Go(func() { _ = n.up.Run(ctx, n.seen) })
		f.nodes = append(f.nodes, n)
		time.Sleep(arrival) // not all in one moment: that is not what is tested
	}
	return func() {
		cancel()
		running.Wait()
		_ = f.hub.listener.Close()
		time.Sleep(arrival)
		synctest.Wait()
		close(f.hub.sessions)
		serving.Wait()
		for _, n := range f.nodes {
			require.NoError(f.t, n.store.Close())
		}
		time.Sleep(arrival)
	}
}

// mostDials is how often one node dials a hub that is away, by the rules of its pauses: the k-th is DialRetryMin·2^k,
// less up to half of it, so that n dials take at least DialRetryMin/2·(2^n - 1). Until the pauses have grown to the
// longest these are log2(2·away/DialRetryMin + 1) dials; after that there is one in half of the longest pause.
func mostDials(away time.Duration) int {
	const longest, shortest = hubsession.DefaultDialRetryMax, hubsession.DialRetryMin
	doublings := math.Ceil(math.Log2(float64(longest) / float64(shortest)))
	grown := time.Duration(float64(shortest/2) * (math.Exp2(doublings) - 1))
	if away < grown {
		return int(math.Log2(2*float64(away)/float64(shortest) + 1))
	}
	return int(doublings) + int((away-grown)/(longest/2))
}

// leastDials is how often a node dials whose pauses are not shortened.
func leastDials(away time.Duration) (dials int) {
	pause := hubsession.DialRetryMin
	for at := pause; at < away; at += pause {
		dials, pause = dials+1, min(2*pause, hubsession.DefaultDialRetryMax)
	}
	return dials
}

// A hub is away and comes back. No node dials more often than its pauses allow and none gives up; then all come back
// within the longest pause that a node may have by now, with one dial each.
func TestLaw13NodesThatAHubComesBackToDialOnceEachAndSpread(t *testing.T) {
	const nodes = 100
	synctest.Test(t, func(t *testing.T) {
		f := &fleet{t: t}
		defer f.start(nodes)()
		for _, c := range []struct {
			name string
			away time.Duration
			// most is mostDials in numbers, last the longest pause that a node may have at the end.
			most int
			last time.Duration
			// busiest bounds the dials within one second after the return.
			busiest int
		}{
			// 0.25 + 0.5 + 1 s are the shortest pauses before the third dial, 4 s the longest before the fourth.
			{"restart", 2 * time.Second, 3, 4 * time.Second, nodes},
			// Of a node with pauses of 15 to 30 s, a second has a dial with a probability of at most 1/15. The random numbers
			// are the same in each run.
			{"long absence", 10 * time.Minute, 6 + 38, hubsession.DefaultDialRetryMax, nodes / 6},
		} {
			require.Equal(t, c.most, mostDials(c.away), c.name)
			// Longer than ten times the pause of a node after the restart: its pauses start from the shortest again.
			time.Sleep(time.Minute)
			synctest.Wait()
			dials, _, open := f.counts()
			require.Equal(t, nodes, open, c.name)
			require.Equal(t, nodes, dials, c.name)

			f.setGone(true)
			time.Sleep(c.away)
			synctest.Wait()
			dials, _, _ = f.counts()
			t.Logf("%s: %d dials while the hub was away, %d to %d by the pauses", c.name, dials, nodes*leastDials(c.away),
				nodes*c.most)
			require.LessOrEqual(t, dials, nodes*c.most, c.name)
			require.GreaterOrEqual(t, dials, nodes*leastDials(c.away), "%s: no node gives up", c.name)

			f.setGone(false)
			time.Sleep(c.last + time.Second)
			synctest.Wait()
			dials, busiest, open := f.counts()
			t.Logf("%s: %d dials after its return, %d within one second", c.name, dials, busiest)
			require.Equal(t, nodes, open, "%s: all are back", c.name)
			require.Equal(t, nodes, dials, "%s: with one dial each", c.name)
			require.LessOrEqual(t, busiest, c.busiest, c.name)
		}
	})
}
