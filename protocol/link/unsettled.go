package link

import (
	"context"
	"sync"

	"github.com/quic-go/quic-go"
)

// unsettled counts, for each peer, the connections whose handshake is done and that are not settled: one peer that
// opens connections and says nothing must not take the places of all. It counts only what the peer's key has proved.
type unsettled struct {
	mu     sync.Mutex
	byPeer map[string]int
}

// add counts a connection of the peer until settled is called or life ends; ok is false when the peer has MaxUnsettled
// already.
func (u *unsettled) add(life context.Context, peer string) (settled func(), ok bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.byPeer == nil {
		u.byPeer = map[string]int{}
	}
	if u.byPeer[peer] >= MaxUnsettled {
		return nil, false
	}
	u.byPeer[peer]++
	release := sync.OnceFunc(func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		if u.byPeer[peer]--; u.byPeer[peer] == 0 {
			delete(u.byPeer, peer)
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
