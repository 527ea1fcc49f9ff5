package httpapi

import (
	lru "container/list"
	"crypto/sha256"
	"crypto/tls"
	"net"
	"net/netip"
	"sync"

	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

const (
	// maxKnownCredentials bounds the remembered credentials; the one that was used least recently is forgotten first.
	maxKnownCredentials = 16 << 10
	// IPv4 customers have an address, IPv6 customers a /64; providers hand out a /24 and a /48 at once.
	addressBits6 = 64
	prefixBits4  = 24
	prefixBits6  = 48
)

// callerID is whom requests are charged to; the zero value is a caller without a valid credential.
type callerID struct{ key, org string }

func callerOf(p iam.Principal) callerID {
	if p.ID == "" {
		return callerID{}
	}
	return callerID{key: string(p.Type) + "/" + p.ID, org: p.OrgID}
}

// prefixes gives what an address counts for: what one customer has, and what a provider hands out at once.
func prefixes(ip string) (address, prefix string) {
	addr, err := netip.ParseAddr(ip)
	if err != nil {
		return ip, ip
	}
	addr = addr.Unmap().WithZone("")
	if addr.Is4() {
		wide, _ := addr.Prefix(prefixBits4)
		return addr.String(), wide.String()
	}
	own, _ := addr.Prefix(addressBits6)
	wide, _ := addr.Prefix(prefixBits6)
	return own.String(), wide.String()
}

// remoteIP is the address of the other end of the connection.
func remoteIP(remoteAddr string) string {
	host, _, err := net.SplitHostPort(remoteAddr)
	if err != nil {
		return remoteAddr
	}
	return host
}

// nodeOf names the node whose certificate the connection has shown and TLS has verified; empty where there is none.
// Only node authorities are accepted for client certificates (TLSConfig).
func nodeOf(conn *tls.ConnectionState) string {
	if conn == nil || len(conn.VerifiedChains) == 0 || len(conn.PeerCertificates) == 0 ||
		len(conn.PeerCertificates[0].URIs) != 1 {
		return ""
	}
	return conn.PeerCertificates[0].URIs[0].String()
}

// knownCredentials remembers who showed which credential, so that a flood is refused before the database is asked: a
// known credential by its caller's budgets, an unknown one by its address's. It keeps digests, and never decides who a
// caller is.
type knownCredentials struct {
	mu      sync.Mutex
	callers map[[sha256.Size]byte]*lru.Element
	recent  lru.List
}

type knownCredential struct {
	digest [sha256.Size]byte
	id     callerID
}

func (k *knownCredentials) get(digest [sha256.Size]byte) (callerID, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	e, ok := k.callers[digest]
	if !ok {
		return callerID{}, false
	}
	k.recent.MoveToFront(e)
	return e.Value.(knownCredential).id, true //nolint:forcetypeassert // only these are put in
}

func (k *knownCredentials) put(digest [sha256.Size]byte, id callerID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if e, ok := k.callers[digest]; ok {
		e.Value = knownCredential{digest, id}
		return
	}
	if k.callers == nil {
		k.callers = map[[sha256.Size]byte]*lru.Element{}
	}
	if len(k.callers) >= maxKnownCredentials {
		//nolint:forcetypeassert // only these are put in
		delete(k.callers, k.recent.Remove(k.recent.Back()).(knownCredential).digest)
	}
	k.callers[digest] = k.recent.PushFront(knownCredential{digest, id})
}

// drop forgets a credential that does not count any more.
func (k *knownCredentials) drop(digest [sha256.Size]byte) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if e, ok := k.callers[digest]; ok {
		k.recent.Remove(e)
		delete(k.callers, digest)
	}
}
