package link

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"

	"github.com/quic-go/quic-go"

	"github.com/gpuaas/gpuaas/protocol/link/gro"
)

// Tokens keeps the newest token that a listener gave a caller whose address it has validated (RFC 9000, section 8.1.3):
// shown with each dial, it spares the caller a Retry packet. All dials of a node share one; nil keeps none. A token is
// shown again when a dial fails: the RFC advises against it only for callers that do not want to be recognised.
type Tokens struct {
	mu     sync.Mutex
	newest *quic.ClientToken
}

// Pop implements quic.TokenStore.
func (t *Tokens) Pop(string) *quic.ClientToken {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.newest
}

// Put implements quic.TokenStore.
func (t *Tokens) Put(_ string, token *quic.ClientToken) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.newest = token
}

func (t *Tokens) config() *quic.Config {
	c := config()
	if t != nil {
		c.TokenStore = t
	}
	return c
}

// Dial connects to addr (host:port, UDP), at the first of the host's addresses where a listener with the right identity
// answers: one of them may be unreachable from here, or of a hub that is gone. tlsConf comes from ClientTLS.
func Dial(ctx context.Context, addr string, tlsConf *tls.Config, tokens *Tokens) (*Conn, error) {
	all, err := resolve(ctx, addr)
	if err != nil {
		return nil, fmt.Errorf("link: dial %s: %w", addr, err)
	}
	var failed []error
	for _, to := range all {
		c, err := dialAt(ctx, to, tlsConf, tokens)
		if err == nil {
			return c, nil
		}
		failed = append(failed, err)
	}
	return nil, errors.Join(failed...)
}

// resolve returns the addresses of host:port, those first that this machine can reach.
func resolve(ctx context.Context, addr string) ([]*net.UDPAddr, error) {
	host, service, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	port, err := net.DefaultResolver.LookupPort(ctx, "udp", service)
	if err != nil {
		return nil, err
	}
	ips, err := net.DefaultResolver.LookupIPAddr(ctx, host)
	all := make([]*net.UDPAddr, 0, len(ips))
	for _, ip := range ips {
		all = append(all, &net.UDPAddr{IP: ip.IP, Zone: ip.Zone, Port: port})
	}
	return all, err
}

// dialAt is Dial at one address.
func dialAt(ctx context.Context, to *net.UDPAddr, tlsConf *tls.Config, tokens *Tokens) (*Conn, error) {
	socket, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4zero})
	if err != nil {
		return nil, fmt.Errorf("link: dial %s: %w", to, err)
	}
	c, err := DialFrom(ctx, gro.New(socket), to, tlsConf, tokens)
	if err != nil {
		_ = socket.Close()
		return nil, err
	}
	context.AfterFunc(c.life, func() { _ = socket.Close() }) //nolint:contextcheck // the connection's own life counts
	return c, nil
}

// DialFrom is Dial on a socket that the caller has bound and closes once the connection has ended.
func DialFrom(ctx context.Context, socket net.PacketConn, to net.Addr, tlsConf *tls.Config,
	tokens *Tokens,
) (*Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, HandshakeTimeout)
	defer cancel()
	qc, err := quic.Dial(ctx, socket, to, tlsConf, tokens.config())
	if err != nil {
		return nil, fmt.Errorf("link: dial %s: %w", to, err)
	}
	return dialled(qc), nil
}

func dialled(qc *quic.Conn) *Conn {
	c := newConn(qc)
	go c.probe()
	return c
}
