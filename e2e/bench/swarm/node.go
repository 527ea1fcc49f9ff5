package swarm

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/agent/hubsession"
	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

// node is one simulated node.
type node struct {
	id, hostname, addr string
	// site is the address that it dials from.
	site        net.IP
	tokens      *link.Tokens
	incarnation string
	key         ed25519.PrivateKey
	identity    protocol.NodeIdentity
	bundle      protocol.Bundle
	tls         *tls.Config
	// stop ends the sessions, stopped is closed when they have ended; nil while the node does not dial.
	stop    context.CancelFunc
	stopped chan struct{}
	// rtt is the round-trip time of the node's path to the hub, in nanoseconds; 0: that of loopback.
	rtt *atomic.Int64

	// sealed waits to be uploaded.
	sealed []sealed
	// measuredTo is the end of the last record of live usage.
	measuredTo time.Time

	mu        sync.Mutex
	chain     spool.Chain
	workloads []workload
	// reportNow asks for a report before the next periodic one.
	reportNow  chan struct{}
	conn       *link.Conn
	usage      *link.Stream
	welcomedAt time.Time
	epoch      uint64
	generation uint64
	sha256     []byte
	bundleNo   uint64
	last       error
	backoff    hubsession.Backoff
}

// resetBackoff lets the node dial as after a session that lasted.
func (n *node) resetBackoff() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.backoff = hubsession.Backoff{}
}

func (n *node) welcomed() time.Time {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.welcomedAt
}

// runs reports whether the node has accepted a state with so many workloads, or more, and holds a session.
func (n *node) runs(workloads int) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.generation > 0 && n.conn != nil && len(n.workloads) >= workloads
}

// lastError is why the last session ended.
func (n *node) lastError() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.last
}

// run keeps the node connected: it dials again after each session, with backoff.
func (n *node) run(ctx context.Context, c *fleet) {
	for ctx.Err() == nil {
		c.dials.Add(1)
		lasted, err := n.session(ctx)
		c.outcomes.ended(err)
		n.mu.Lock()
		n.conn, n.usage, n.last = nil, nil, err
		if code, known := link.CloseCode(err); known && code == link.CodeShutdown {
			err = hubsession.ErrGoAway
		}
		pause := n.backoff.Pause(lasted, err, rand.Float64())
		n.mu.Unlock()
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// session opens one session, serves it until it ends and returns how long it was open.
func (n *node) session(ctx context.Context) (lasted time.Duration, err error) {
	to, err := net.ResolveUDPAddr("udp4", n.addr)
	if err != nil {
		return 0, err
	}
	socket, err := net.ListenUDP("udp4", &net.UDPAddr{IP: n.site})
	if err != nil {
		return 0, err
	}
	defer func() { _ = socket.Close() }()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	conn, err := link.DialFrom(ctx, delayed(ctx, socket, time.Duration(n.rtt.Load())), to, n.tls, n.tokens)
	if err != nil {
		return 0, err
	}
	defer func() { _ = conn.Close(link.CodeOK, "the node is stopping") }()
	control, err := n.openControl(ctx, conn)
	if err != nil {
		return 0, err
	}
	usage, err := conn.Open(ctx, &protocol.StreamHeader{Kind: protocol.StreamHeader_KIND_USAGE})
	if err != nil {
		return 0, err
	}
	began := time.Now()
	n.mu.Lock()
	n.conn, n.usage, n.welcomedAt = conn, usage, began
	n.mu.Unlock()
	defer context.AfterFunc(ctx, func() { _ = conn.Close(link.CodeOK, "the node is stopping") })()
	var reporting sync.WaitGroup
	defer reporting.Wait()
	reporting.Go(func() { n.report(conn, control) })
	err = n.receive(control)
	if connErr := conn.Err(); connErr != nil {
		err = connErr
	}
	_ = conn.Close(link.CodeOK, "the session has ended")
	return time.Since(began), err
}

func (n *node) openControl(ctx context.Context, conn *link.Conn) (*link.Stream, error) {
	ctx, cancel := context.WithTimeout(ctx, hubsession.HelloTimeout)
	defer cancel()
	control, err := conn.Open(ctx, &protocol.StreamHeader{Kind: protocol.StreamHeader_KIND_CONTROL})
	if err != nil {
		return nil, err
	}
	_ = control.SetDeadline(time.Now().Add(hubsession.HelloTimeout))
	n.mu.Lock()
	hello := &protocol.Hello{
		Features:        manifest.KnownFeatures(),
		ProtocolVersion: protocol.Version, AgentVersion: "simulated", Incarnation: n.incarnation, Epoch: n.epoch,
		Generation:  n.generation,
		StateSha256: n.sha256, BundleVersion: max(n.bundleNo, n.bundle.Version()), LastSegment: n.chain.Number,
		Facts: &protocol.NodeFacts{
			Hostname: n.hostname, Os: "Debian GNU/Linux 12 (bookworm)", Kernel: "6.18.0", Architecture: "amd64", CpuCores: 64,
			MemoryBytes:       256 << 30,
			ContainerdVersion: "1.6.20", RuncVersion: "1.1.5", BootTime: timestamppb.New(time.Unix(1_700_000_000, 0)),
		},
	}
	n.mu.Unlock()
	if err := control.Send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Hello{Hello: hello}}); err != nil {
		return nil, err
	}
	answer := &protocol.HubMessage{}
	if err := control.Receive(answer, protocol.MaxControlBytes); err != nil {
		return nil, err
	}
	switch {
	case answer.GetGoAway() != nil:
		return nil, fmt.Errorf("the hub refuses the session: %s", answer.GetGoAway().GetReason())
	case answer.GetWelcome() == nil:
		return nil, errors.New("the hub does not answer the hello")
	case answer.GetWelcome().GetNewIncarnation():
		return nil, errors.New("the hub takes this node for another")
	}
	return control, control.SetDeadline(time.Time{})
}

// receive handles the hub's messages until the session ends.
func (n *node) receive(control *link.Stream) error {
	for {
		m := &protocol.HubMessage{}
		if err := control.Receive(m, protocol.MaxControlBytes); err != nil {
			return err
		}
		accepted, err := n.accept(m)
		if err != nil {
			return err
		}
		if accepted == nil {
			continue
		}
		if err := control.Send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Ack{
			Ack: accepted,
		}}); err != nil {
			return err
		}
	}
}

func (n *node) accept(m *protocol.HubMessage) (*protocol.Ack, error) {
	switch x := m.GetMessage().(type) {
	case *protocol.HubMessage_PushState:
		v, err := protocol.VerifyState(x.PushState.GetEnvelope(), n.bundle, n.identity)
		if err != nil {
			return nil, err
		}
		sum := sha256.Sum256(x.PushState.GetEnvelope().GetPayload())
		workloads, err := workloadsOf(v.Message(), x.PushState.GetParts())
		if err != nil {
			return nil, err
		}
		n.mu.Lock()
		n.epoch, n.generation, n.sha256 = v.Message().GetEpoch(), v.Message().GetGeneration(), sum[:]
		n.workloads = succeed(n.workloads, workloads, time.Now())
		n.mu.Unlock()
		select {
		case n.reportNow <- struct{}{}:
		default: // one is due already
		}
		return &protocol.Ack{
				Document: protocol.Envelope_STATE, Epoch: v.Message().GetEpoch(),
				Generation: v.Message().GetGeneration(),
			},
			nil
	case *protocol.HubMessage_PushLeases:
		v, err := protocol.VerifyLeases(x.PushLeases.GetEnvelope(), n.bundle, n.identity)
		if err != nil {
			return nil, err
		}
		return &protocol.Ack{Document: protocol.Envelope_LEASES, Epoch: v.Message().GetEpoch()}, nil
	case *protocol.HubMessage_GoAway:
		return nil, fmt.Errorf("the hub ends the session: %s", x.GoAway.GetReason())
	default:
		return nil, nil
	}
}

// report sends the observed state when it has changed, and periodically.
func (n *node) report(conn *link.Conn, control *link.Stream) {
	for counter := uint64(1); ; counter++ {
		n.mu.Lock()
		r := &protocol.Report{
			Counter: counter, At: timestamppb.Now(), Epoch: n.epoch, Generation: n.generation,
			Workloads: statusesOf(n.workloads, n.site, n.incarnation),
		}
		n.mu.Unlock()
		if control.Send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Report{Report: r}}) != nil {
			return
		}
		select {
		case <-conn.Done():
			return
		case <-n.reportNow:
		case <-time.After(hubsession.DefaultReportInterval):
		}
	}
}
