package trust

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"math/big"
	"net"
	"net/url"
	"sync"
	"time"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	pemCertificate        = "CERTIFICATE"
	pemCertificateRequest = "CERTIFICATE REQUEST"
	// caLifetime is long because replacing an authority is done with a new trust bundle, not by expiry.
	caLifetime = 10 * 365 * 24 * time.Hour
	// backdate tolerates clocks that lag.
	backdate = 5 * time.Minute
	// MinServerTTL bounds the HTTPS certificate from below.
	MinServerTTL = 24 * time.Hour
	// MaxServerTTL bounds it from above: clients refuse longer ones sooner or later.
	MaxServerTTL = 90 * 24 * time.Hour
	// MaxNodeTTL bounds a node certificate: it is renewed at half its life, and a ban ends renewal.
	MaxNodeTTL = 7 * 24 * time.Hour
	minNodeTTL = 15 * time.Second
	// MaxCSRBytes bounds a certificate request in PEM.
	MaxCSRBytes = 16 << 10
)

// newAuthority makes a self-signed authority. The node CA may certify only SPIFFE ids of the trust domain, no host
// names or addresses. The hub CA, which also signs the HTTPS certificate, may certify only the hosts.
func newAuthority(key *ecdsa.PrivateKey, role, trustDomain string, hosts hostNames,
	now time.Time,
) (der []byte, keyID string, err error) {
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: role + " of " + trustDomain},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(caLifetime),
		IsCA:                  true,
		BasicConstraintsValid: true,
		MaxPathLenZero:        true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		// Applies to all name constraints of the certificate, not only to those on DNS names.
		PermittedDNSDomainsCritical: true,
	}
	switch role {
	case protocol.RoleHubCA:
		// No constraint on URIs: browsers know none and would refuse the authority for a critical one. Nodes compare the
		// hub's SPIFFE id with the trust domain themselves (protocol.PeerID).
		template.PermittedDNSDomains, template.PermittedIPRanges = hosts.dns, hosts.ips
		template.PermittedDNSDomainsCritical = len(hosts.dns) > 0 || len(hosts.ips) > 0
	case protocol.RoleNodeCA:
		template.PermittedURIDomains = []string{trustDomain}
		// An empty DNS constraint matches every name (RFC 5280, section 4.2.1.10).
		template.ExcludedDNSDomains = []string{""}
		template.ExcludedEmailAddresses = []string{""}
		template.ExcludedIPRanges = []*net.IPNet{
			{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)},
			{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)},
		}
	}
	der, err = x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, "", err
	}
	spki, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return nil, "", err
	}
	sum := sha256.Sum256(spki)
	return der, hex.EncodeToString(sum[:]), nil
}

// ParseNodeCSR reads a node's certificate request and checks that the node holds its key, which must be Ed25519.
func ParseNodeCSR(csrPEM string) (*x509.CertificateRequest, ed25519.PublicKey, error) {
	invalid := func(reason string, cause error) error {
		return fault.New(fault.Unprocessable, codeCSRInvalid, "The certificate request cannot be used: "+reason+".",
			cause).WithField("/csr_pem", reason)
	}
	if len(csrPEM) > MaxCSRBytes {
		return nil, nil, invalid("it is too long", nil)
	}
	block, _ := pem.Decode([]byte(csrPEM))
	if block == nil || block.Type != pemCertificateRequest {
		return nil, nil, invalid("it is not a PKCS #10 request in PEM", nil)
	}
	csr, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return nil, nil, invalid("it cannot be parsed", err)
	}
	if err := csr.CheckSignature(); err != nil {
		return nil, nil, invalid("its signature is wrong", err)
	}
	pub, ok := csr.PublicKey.(ed25519.PublicKey)
	if !ok {
		return nil, nil, invalid("its key is not Ed25519", nil)
	}
	return csr, pub, nil
}

// NodeCertificate is a node's certificate with its chain.
type NodeCertificate struct {
	CertificatePEM string
	// ChainPEM is the authority's certificate.
	ChainPEM  string
	NotBefore time.Time
	NotAfter  time.Time
}

// IssueNodeCertificate signs for the node id; names in the request are ignored.
func (k *Keys) IssueNodeCertificate(csr *x509.CertificateRequest, nodeID string, ttl time.Duration,
	now time.Time,
) (NodeCertificate, error) {
	ttl = min(max(ttl, minNodeTTL), MaxNodeTTL)
	set := k.current()
	template := &x509.Certificate{
		Subject:     pkix.Name{CommonName: nodeID},
		NotBefore:   now.Add(-backdate),
		NotAfter:    now.Add(ttl),
		URIs:        []*url.URL{protocol.NodeSPIFFE(set.bundle.TrustDomain(), nodeID)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	der, err := set.nodeCA.sign(template, csr.PublicKey)
	if err != nil {
		return NodeCertificate{}, err
	}
	return NodeCertificate{
		CertificatePEM: toPEM(der), ChainPEM: toPEM(set.nodeCA.certificate.Raw), NotBefore: template.NotBefore,
		NotAfter: template.NotAfter,
	}, nil
}

// IssueHubCertificate makes a key and a certificate for this hub's SPIFFE id and for the names (DNS names and IP
// addresses) that the authority permits: clients refuse a certificate with any other name. The key is ECDSA, because
// browsers do not accept Ed25519.
func (k *Keys) IssueHubCertificate(names []string, ttl time.Duration, now time.Time) (*tls.Certificate, error) {
	ttl = min(max(ttl, MinServerTTL), MaxServerTTL)
	set := k.current()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		Subject:     pkix.Name{CommonName: "hub " + k.hubID},
		NotBefore:   now.Add(-backdate),
		NotAfter:    now.Add(ttl),
		URIs:        []*url.URL{protocol.HubSPIFFE(set.bundle.TrustDomain(), k.hubID)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	permitted := hostsOf(set.hubCA.certificate)
	for _, name := range names {
		if !permitted.permit(name) {
			continue
		}
		if ip := net.ParseIP(name); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, name)
		}
	}
	der, err := set.hubCA.sign(template, key.Public())
	if err != nil {
		return nil, err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der, set.hubCA.certificate.Raw}, PrivateKey: key, Leaf: leaf}, nil
}

func (a authority) sign(template *x509.Certificate, pub crypto.PublicKey) ([]byte, error) {
	// 127 random bits: unpredictable and positive (RFC 5280, section 4.1.2.2).
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	template.SerialNumber = serial
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.BasicConstraintsValid = true
	return x509.CreateCertificate(rand.Reader, template, a.certificate, pub, a.key)
}

func toPEM(der []byte) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: pemCertificate, Bytes: der}))
}

// Server holds the hub's own certificate and renews it at half its life, or when its authority was replaced.
type Server struct {
	Keys *Keys
	// Names are the DNS names and IP addresses of the HTTPS server; none for the session listener.
	Names []string
	TTL   time.Duration
	Now   func() time.Time

	mu      sync.Mutex
	current *tls.Certificate
	// issuer is the authority that issued current; nil until issuedBy has checked it.
	issuer *x509.Certificate
}

// Certificate returns the current certificate. It fits tls.Config.GetCertificate (through a closure) and
// link.Certificate.
func (s *Server) Certificate() (*tls.Certificate, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.Now()
	if s.current != nil {
		leaf := s.current.Leaf
		half := leaf.NotBefore.Add(leaf.NotAfter.Sub(leaf.NotBefore) / 2)
		if now.Before(half) && !now.Before(leaf.NotBefore) && s.issuedBy(s.Keys.current().hubCA.certificate) {
			return s.current, nil
		}
	}
	cert, err := s.Keys.IssueHubCertificate(s.Names, s.TTL, now)
	if err != nil {
		return nil, err
	}
	s.current, s.issuer = cert, nil
	return cert, nil
}

// issuedBy reports whether an authority issued the current certificate. It checks the signature once, not at every
// handshake.
func (s *Server) issuedBy(authority *x509.Certificate) bool {
	if s.issuer == nil || !s.issuer.Equal(authority) {
		if s.current.Leaf.CheckSignatureFrom(authority) != nil {
			return false
		}
		s.issuer = authority
	}
	return true
}
