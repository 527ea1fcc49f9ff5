package link_test

import (
	"crypto/rand"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/protocol/link"
	"github.com/gpuaas/gpuaas/protocol/link/admission"
)

// forged is a datagram in the form of a connection's first; its sender cannot answer what follows.
func forged(t *testing.T, tokenBytes int) []byte {
	t.Helper()
	b := make([]byte, 1200)
	_, err := rand.Read(b)
	require.NoError(t, err)
	b[0], b[1], b[2], b[3], b[4] = 0xc3, 0, 0, 0, 1
	b[5], b[14] = 8, 8 // lengths of the connection ids
	b[23] = byte(tokenBytes)
	at := 24 + tokenBytes
	b[at], b[at+1] = 0x44, 0x00 // the length of the rest: 1024
	return b
}

// Before each dial the listener gets more forged packets, each from an address of its own, than it has slots. Without
// address validation each took a slot for a second, and one dial of eight was admitted.
func TestNodesAreAdmittedWhileForgedPacketsComeInFromManyAddresses(t *testing.T) {
	for name, tokenBytes := range map[string]int{"without a token": 0, "with a forged token": 32} {
		t.Run(name, func(t *testing.T) {
			s := newSetup(t)
			ctx := deadline(t)
			go func() { // or the listener has only the slots before Start
				for {
					if _, err := s.listener.Accept(ctx); err != nil {
						return
					}
				}
			}()
			const dials, floodPackets = 8, 200
			admitted := 0
			for i := range dials {
				for range floodPackets {
					socket, err := net.Dial("udp", s.addr())
					require.NoError(t, err)
					_, err = socket.Write(forged(t, tokenBytes))
					require.NoError(t, err)
					require.NoError(t, socket.Close())
				}
				node, err := link.Dial(ctx, s.addr(), s.named(t, i), nil)
				if err != nil {
					continue
				}
				admitted++
				require.NoError(t, node.Close(link.CodeOK, ""))
			}
			require.GreaterOrEqual(t, admitted, dials-1)
		})
	}
}

func TestSilentConnectionsOfOneNodeDoNotKeepAnotherOut(t *testing.T) {
	s := newSetup(t)
	ctx := deadline(t)
	silent := admission.Slots() + 2*link.MaxPendingConns // more than there are goroutines that accept connections
	var nodes []*link.Conn
	for n := range silent {
		if n >= link.MaxPendingConns {
			code, _ := link.CloseCode(s.refused(t, s.node))
			require.Equal(t, link.CodeUnavailable, code)
			continue
		}
		node, err := link.Dial(ctx, s.addr(), s.node, nil)
		require.NoError(t, err)
		nodes = append(nodes, node)
		_, err = s.listener.Accept(ctx)
		require.NoError(t, err)
	}
	other, hub := s.connectAs(t, s.named(t, 2))
	require.NoError(t, other.Err())
	hub.ReleaseSlot()
	for _, node := range nodes {
		require.NoError(t, node.Close(link.CodeOK, ""))
	}
}

// Released connections do not count, and neither do ended ones.
func TestNodeMayDialAgainOnceItsConnectionsAreReleased(t *testing.T) {
	s := newSetup(t)
	for range 3 * link.MaxPendingConns {
		_, hub := s.connect(t)
		hub.ReleaseSlot()
	}
}
