package swarm

import (
	"context"
	"errors"
	"net"
	"time"
)

// inFlight bounds the packets of one node that are on their way; further ones are lost, as in a full router.
const inFlight = 1024

// delayedPath carries a node's packets to the hub a round-trip time later. What comes from the hub is not delayed: no
// side can tell where on the way a round trip takes its time.
type delayedPath struct {
	net.PacketConn
	rtt     time.Duration
	packets chan packet
}

type packet struct {
	due  time.Time
	data []byte
	to   net.Addr
}

// delayed returns the socket itself for a path without delay. The goroutine that it starts otherwise ends with ctx
// or with the socket.
func delayed(ctx context.Context, socket net.PacketConn, rtt time.Duration) net.PacketConn {
	if rtt <= 0 {
		return socket
	}
	d := &delayedPath{PacketConn: socket, rtt: rtt, packets: make(chan packet, inFlight)}
	go d.carry(ctx)
	return d
}

// WriteTo takes a packet along.
func (d *delayedPath) WriteTo(data []byte, to net.Addr) (int, error) {
	p := packet{due: time.Now().Add(d.rtt), data: append([]byte(nil), data...), to: to}
	select {
	case d.packets <- p:
	default:
	}
	return len(data), nil
}

// carry sends the packets in their order.
func (d *delayedPath) carry(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case p := <-d.packets:
			time.Sleep(time.Until(p.due))
			if _, err := d.PacketConn.WriteTo(p.data, p.to); errors.Is(err, net.ErrClosed) {
				return
			}
		}
	}
}
