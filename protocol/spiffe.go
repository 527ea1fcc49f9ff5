package protocol

import (
	"crypto/x509"
	"fmt"
	"net/url"
	"strings"
)

// Kinds of SPIFFE identity.
const (
	KindNode = "node"
	KindHub  = "hub"
)

// NodeSPIFFE is spiffe://<trust-domain>/node/<node-id>.
func NodeSPIFFE(trustDomain, nodeID string) *url.URL { return spiffe(trustDomain, KindNode, nodeID) }

// HubSPIFFE is spiffe://<trust-domain>/hub/<hub-id>.
func HubSPIFFE(trustDomain, hubID string) *url.URL { return spiffe(trustDomain, KindHub, hubID) }

func spiffe(trustDomain, kind, id string) *url.URL {
	return &url.URL{Scheme: "spiffe", Host: trustDomain, Path: "/" + kind + "/" + id}
}

// SPIFFE ID, section 2: path segments of letters, digits, dots, dashes and underscores.
func validSegment(s string) bool {
	if s == "" || len(s) > 128 || s == "." || s == ".." {
		return false
	}
	for _, r := range s {
		if (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("._-", r) {
			return false
		}
	}
	return true
}

// ParseSPIFFE splits an identity of this system.
func ParseSPIFFE(u *url.URL) (trustDomain, kind, id string, err error) {
	parts := strings.Split(strings.TrimPrefix(u.Path, "/"), "/")
	if u.Scheme != "spiffe" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" || len(parts) != 2 {
		return "", "", "", fmt.Errorf("%q is not a SPIFFE id of this system", u.Redacted())
	}
	if (parts[0] != KindNode && parts[0] != KindHub) || !validSegment(parts[1]) {
		return "", "", "", fmt.Errorf("%q names no node and no hub", u.Redacted())
	}
	return u.Host, parts[0], parts[1], nil
}

// PeerID returns the id in a certificate that was verified already. It must hold exactly one URI name (SPIFFE
// X.509-SVID, section 2), of the trust domain and kind.
func PeerID(cert *x509.Certificate, trustDomain, kind string) (string, error) {
	if len(cert.URIs) != 1 {
		return "", fmt.Errorf("the certificate has %d URI names, one SPIFFE id is needed", len(cert.URIs))
	}
	domain, gotKind, id, err := ParseSPIFFE(cert.URIs[0])
	if err != nil {
		return "", err
	}
	if domain != trustDomain || gotKind != kind {
		return "", fmt.Errorf("the certificate is for a %s of %q, wanted a %s of %q", gotKind, domain, kind, trustDomain)
	}
	return id, nil
}
