package link

import (
	"context"
	"sync"

	"github.com/quic-go/quic-go"
)

// pendingConns counts the connections of each peer from their handshake to ReleaseSlot, so that one peer that connects
// and sends nothing cannot take all slots. Peers are counted by the identity that their certificate proves.
type pendingConns struct {
	mu     sync.Mutex
	byPeer map[string]int
}

// add counts a connection of the peer until done is called or life ends; ok is false when the peer has MaxPendingConns
// already.
func (p *pendingConns) add(life context.Context, peer string) (done func(), ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.byPeer == nil {
		p.byPeer = map[string]int{}
	}
	if p.byPeer[peer] >= MaxPendingConns {
		return nil, false
	}
	p.byPeer[peer]++
	release := sync.OnceFunc(func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.byPeer[peer]--; p.byPeer[peer] == 0 {
			delete(p.byPeer, peer)
		}
	})
	stop := context.AfterFunc(life, release)
	return func() { stop(); release() }, true
}

// peerName is the SPIFFE id of the peer's certificate, which TLS has verified.
func peerName(qc *quic.Conn) string {
	chain := qc.ConnectionState().TLS.PeerCertificates
	if len(chain) == 0 || len(chain[0].URIs) == 0 {
		return ""
	}
	return chain[0].URIs[0].String()
}
