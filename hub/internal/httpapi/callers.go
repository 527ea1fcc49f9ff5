package httpapi

import (
	"crypto/tls"
	"net"
	"net/netip"

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

// prefixes returns the range of addresses that one customer usually has, and the one that a provider hands out at once.
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
