package delivery

import (
	"net/netip"
	"slices"
)

// notPublic are the IPv4 networks of the special-purpose registry (RFC 6890) that are not globally reachable: private,
// loopback, link-local with the metadata services of clouds, shared (CGNAT), documentation, benchmarks, multicast,
// reserved.
func notPublic() []netip.Prefix {
	return prefixes("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
		"192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24",
		"203.0.113.0/24", "224.0.0.0/3")
}

// notPublic6 are the networks in the global unicast addresses of IPv6 that are not globally reachable or carry an IPv4
// address: Teredo and its neighbours, documentation, 6to4. NAT64 (64:ff9b::/96) is outside of them.
func notPublic6() []netip.Prefix {
	return prefixes("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
}

func prefixes(texts ...string) (out []netip.Prefix) {
	for _, text := range texts {
		out = append(out, netip.MustParsePrefix(text))
	}
	return out
}

// Addresses says which addresses webhooks may reach: public ones, and those of the networks that the operator allows.
type Addresses struct{ Allowed []netip.Prefix }

// MayDial reports whether a webhook may reach an address.
func (a Addresses) MayDial(ip netip.Addr) bool {
	within := func(p netip.Prefix) bool { return p.Contains(ip.Unmap().WithZone("")) }
	switch {
	case slices.ContainsFunc(a.Allowed, within):
		return true
	case ip.Is4():
		return !slices.ContainsFunc(notPublic(), within)
	default:
		return netip.MustParsePrefix("2000::/3").Contains(ip) && !slices.ContainsFunc(notPublic6(), within)
	}
}
