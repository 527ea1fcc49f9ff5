// Package linktest is a network in memory on which a hub and its nodes speak QUIC in test time (testing/synctest). No
// packet is lost, and each takes a microsecond.
package linktest

import (
	"context"
	"crypto/tls"
	"net"
	"sync"
	"time"

	"github.com/quic-go/quic-go/testutils/simnet"

	"github.com/gpuaas/gpuaas/protocol/link"
)

// latency is not zero: QUIC ignores a round trip that takes no time, and would pace what it sends by the next one,
// which includes the delay of an acknowledgement.
const latency = time.Microsecond

// Network has one hub and any number of nodes. Make one with New.
type Network struct {
	mu      sync.Mutex
	sockets map[string]simnet.PacketReceiver
	port    int
}

// New is a network without a hub.
func New() *Network { return &Network{sockets: map[string]simnet.PacketReceiver{}, port: 40_000} }

func hubAddr() *net.UDPAddr { return &net.UDPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 8443} }

// AddNode implements simnet.Router.
func (n *Network) AddNode(addr net.Addr, r simnet.PacketReceiver) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.sockets[addr.String()] = r
}

// SendPacket implements simnet.Router.
func (n *Network) SendPacket(p simnet.Packet) error {
	time.Sleep(latency)
	n.mu.Lock()
	receiver := n.sockets[p.To.String()]
	n.mu.Unlock()
	if receiver != nil {
		receiver.RecvPacket(p)
	}
	return nil
}

// Listen makes the hub.
func (n *Network) Listen(tlsConf *tls.Config) (*link.Listener, error) {
	return link.ListenOn(simnet.NewBlockingSimConn(hubAddr(), n), tlsConf, nil)
}

// Dial is link.Dial from an address of its own to the hub.
func (n *Network) Dial(ctx context.Context, _ string, tlsConf *tls.Config, tokens *link.Tokens) (*link.Conn, error) {
	n.mu.Lock()
	n.port++
	from := &net.UDPAddr{IP: net.IPv4(10, 0, 0, 2), Port: n.port}
	n.mu.Unlock()
	return link.DialFrom(ctx, simnet.NewBlockingSimConn(from, n), hubAddr(), tlsConf, tokens)
}
