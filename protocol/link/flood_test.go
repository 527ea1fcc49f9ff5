package link_test

import (
	"crypto/rand"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/protocol/link"
)

// forged is a datagram that looks like the first one of a connection; nobody can answer what follows.
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

// Each dial comes after more forged packets, each from an address of its own, than the listener has places. Before
// addresses were validated each of them kept a place for a second, and one dial of eight was let in.
func TestNodesAreLetInWhileForgedPacketsComeInFromManyAddresses(t *testing.T) {
	for name, tokenBytes := range map[string]int{"without a token": 0, "with a forged token": 32} {
		t.Run(name, func(t *testing.T) {
			s := newSetup(t)
			ctx := deadline(t)
			go func() { // or the listener has the places of its beginning only
				for {
					if _, err := s.listener.Accept(ctx); err != nil {
						return
					}
				}
			}()
			const dials, floodPackets = 8, 200
			letIn := 0
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
				letIn++
				require.NoError(t, node.Close(link.CodeOK, ""))
			}
			require.GreaterOrEqual(t, letIn, dials-1)
		})
	}
}

func TestSilentConnectionsOfOneNodeDoNotKeepAnotherOut(t *testing.T) {
	s := newSetup(t)
	ctx := deadline(t)
	const silent = 32
	var nodes []*link.Conn
	for range silent {
		node, err := link.Dial(ctx, s.addr(), s.node, nil)
		require.NoError(t, err)
		nodes = append(nodes, node)
		if len(nodes) <= link.MaxUnsettled {
			_, err = s.listener.Accept(ctx)
			require.NoError(t, err)
			continue
		}
		<-node.Done()
		code, _ := link.CloseCode(node.Err())
		require.Equal(t, link.CodeUnavailable, code)
	}
	other, hub := s.connectAs(t, s.named(t, 2))
	require.NoError(t, other.Err())
	hub.Settle()
	for _, node := range nodes {
		require.NoError(t, node.Close(link.CodeOK, ""))
	}
}

// What was settled does not count, and neither does what has ended.
func TestNodeMayDialAgainOnceItsConnectionsAreSettled(t *testing.T) {
	s := newSetup(t)
	for range 3 * link.MaxUnsettled {
		_, hub := s.connect(t)
		hub.Settle()
	}
}
