package link_test

import (
	"net"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
	"github.com/gpuaas/gpuaas/protocol/link/admission"
)

// retries counts the Retry packets that a socket receives (RFC 9000, section 17.2.5).
type retries struct {
	net.PacketConn
	seen atomic.Int32
}

func (r *retries) ReadFrom(b []byte) (int, net.Addr, error) {
	n, from, err := r.PacketConn.ReadFrom(b)
	const longHeader, version1Retry = 0x80, 3
	if n > 4 && b[0]&longHeader != 0 && b[4] == 1 && b[0]>>4&3 == version1Retry {
		r.seen.Add(1)
	}
	return n, from, err
}

// A successor with the same reset key knows the tokens of its predecessor: a node that comes back needs no Retry. One
// with another key sends it one and lets it in.
func TestATokenSparesANodeTheRetryAlsoAfterARestartOfTheHub(t *testing.T) {
	first, other := &link.ResetKey{1}, &link.ResetKey{2}
	s := newSetup(t)
	restart := func(key *link.ResetKey) {
		at := s.addr()
		require.NoError(t, s.listener.Close())
		var err error
		hub := s.hubCA.issue(t, protocol.HubSPIFFE(domain, "hub-1"))
		s.listener, err = link.Listen(at, link.ServerTLS(hub, s.nodeCA.vouchesFor(protocol.KindNode)), key)
		require.NoError(t, err)
		t.Cleanup(func() { _ = s.listener.Close() })
	}
	number := 0
	dial := func(tokens *link.Tokens) (retried bool) {
		number++
		plain, err := net.ListenPacket("udp", "127.0.0.1:0")
		require.NoError(t, err)
		socket := &retries{PacketConn: plain}
		t.Cleanup(func() { require.NoError(t, socket.Close()) })
		ctx := deadline(t)
		node, err := link.DialFrom(ctx, socket, s.listener.Addr(), s.named(t, number), tokens)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, node.Close(link.CodeOK, "")) })
		hub, err := s.listener.Accept(ctx)
		require.NoError(t, err)
		// What the hub opens arrives behind its token.
		_, err = hub.Open(ctx, &protocol.StreamHeader{Kind: protocol.StreamHeader_KIND_TUNNEL})
		require.NoError(t, err)
		_, _, err = node.Accept(ctx)
		require.NoError(t, err)
		return socket.seen.Load() > 0
	}
	// Connections whose hello is not answered keep their slots: soon none is left for dials without a token.
	fillSlots := func() {
		for range admission.Slots() / 2 {
			if dial(nil) {
				return
			}
		}
		require.Fail(t, "no dial had to validate its address")
	}

	restart(first)
	tokens := &link.Tokens{}
	dial(tokens)
	for range 2 {
		restart(first)
		fillSlots()
		require.True(t, dial(nil))
		require.False(t, dial(tokens))
		require.False(t, dial(tokens), "also when it is shown again")
	}
	restart(other)
	fillSlots()
	require.True(t, dial(tokens))
}
