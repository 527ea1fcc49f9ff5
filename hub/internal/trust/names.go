package trust

import (
	"crypto/x509"
	"net"
	"regexp"
	"slices"
	"strings"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// hostNames are the host names and addresses that the hub CA may certify (RFC 5280, section 4.2.1.10): a client that
// imports ca.pem trusts the hub for no others.
type hostNames struct {
	dns []string
	ips []*net.IPNet
}

var hostNameForm = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$`)

// privateRanges are addresses that no public CA certifies (RFC 1918, 4193, 6598, 3927, 4291).
func privateRanges() []string {
	return []string{
		"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16", "fc00::/7",
		"fe80::/10",
	}
}

// permittedHosts returns what a new hub CA may certify: the machine itself and the operator's names; without names,
// those below the trust domain and all private addresses.
func permittedHosts(names []string, hostname, trustDomain string) (hostNames, error) {
	ranges, dns := []string{"127.0.0.0/8", "::1/128"}, []string{"localhost"}
	if hostname = strings.ToLower(hostname); hostNameForm.MatchString(hostname) {
		dns = append(dns, hostname)
	}
	if len(names) == 0 {
		dns, ranges = append(dns, trustDomain), append(ranges, privateRanges()...)
	}
	for _, name := range names {
		host := strings.TrimPrefix(strings.ToLower(name), "*.")
		switch ip := net.ParseIP(name); {
		case ip != nil && ip.To4() != nil:
			ranges = append(ranges, ip.String()+"/32")
		case ip != nil:
			ranges = append(ranges, ip.String()+"/128")
		case hostNameForm.MatchString(host):
			dns = append(dns, host)
		default:
			return hostNames{}, fault.New(fault.Malformed, codeTLSNameInvalid, "The name "+name+" is neither a host name nor "+
				"an address.", nil)
		}
	}
	h := hostNames{dns: dns}
	for _, r := range ranges {
		_, block, err := net.ParseCIDR(r)
		if err != nil {
			return hostNames{}, err
		}
		h.ips = append(h.ips, block)
	}
	return h, nil
}

// hostsOf returns what an authority may certify; the zero value for one without constraints.
func hostsOf(authority *x509.Certificate) hostNames {
	return hostNames{dns: authority.PermittedDNSDomains, ips: authority.PermittedIPRanges}
}

// permit reports whether a certificate under these constraints may carry the name.
func (h hostNames) permit(name string) bool {
	if len(h.dns) == 0 && len(h.ips) == 0 {
		return true
	}
	if ip := net.ParseIP(name); ip != nil {
		return slices.ContainsFunc(h.ips, func(block *net.IPNet) bool { return block.Contains(ip) })
	}
	name = "." + strings.ToLower(name)
	return slices.ContainsFunc(h.dns, func(domain string) bool { return strings.HasSuffix(name, "."+domain) })
}

// Permits reports whether the hub CA may certify a host name or an address.
func (k *Keys) Permits(name string) bool { return hostsOf(k.current().hubCA.certificate).permit(name) }
