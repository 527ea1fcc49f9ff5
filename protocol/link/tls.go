package link

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/protocol"
)

// Peer says whom the other side must prove to be.
type Peer struct {
	// Roots returns the current authorities. Every handshake calls it, because trust bundles rotate.
	Roots func() *x509.CertPool
	// TrustDomain and Kind (protocol.KindHub or KindNode) must be those of the peer's SPIFFE id.
	TrustDomain string
	Kind        string
	// Now is the time that validity is judged by. A node passes its time floor, so that one whose clock says 1970 can
	// still dial.
	Now func() time.Time
	// Earliest, when set, is the earliest time that it may be. A certificate that has expired by Now is judged by that: a
	// clock that once ran ahead must not keep a node away for ever.
	Earliest func() time.Time
	// Behind, when set, says whether Now is known to be behind: then a certificate that is not valid yet tells the time.
	// One that has expired stays refused.
	Behind func() bool
	// Allow, when set, decides last, by the id of the peer's verified certificate.
	Allow func(id string) error
}

// Certificate returns the own current certificate and key. Every handshake calls it, because they are renewed.
type Certificate func() (*tls.Certificate, error)

// ClientTLS is for Dial. The server is known by its SPIFFE id, not by a host name, so any address leads to it.
func ClientTLS(own Certificate, peer Peer) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		NextProtos: []string{protocol.ALPN},
		Time:       peer.Now,
		// The chain, its validity and the SPIFFE id are verified in VerifyConnection; Go's own check needs a host name.
		InsecureSkipVerify: true, //nolint:gosec // replaced by peer.verify, which does more
		VerifyConnection:   peer.verifier(x509.ExtKeyUsageServerAuth),
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return own()
		},
	}
}

// ServerTLS is for Listen.
func ServerTLS(own Certificate, peer Peer) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		NextProtos: []string{protocol.ALPN},
		Time:       peer.Now,
		// The certificate is required here and verified in VerifyConnection, against the current roots.
		ClientAuth:       tls.RequireAnyClientCert,
		VerifyConnection: peer.verifier(x509.ExtKeyUsageClientAuth),
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			return own()
		},
		// A resumed session would skip the current roots and revocations.
		SessionTicketsDisabled: true,
	}
}

func (p Peer) verifier(usage x509.ExtKeyUsage) func(tls.ConnectionState) error {
	return func(state tls.ConnectionState) error {
		if state.NegotiatedProtocol != protocol.ALPN {
			return fmt.Errorf("link: peer does not speak %s", protocol.ALPN)
		}
		_, err := p.Verify(state.PeerCertificates, usage)
		return err
	}
}

// now is the time to judge a chain by.
func (p Peer) now(chain []*x509.Certificate) time.Time {
	now := p.Now()
	if p.Earliest != nil && slices.ContainsFunc(chain, func(c *x509.Certificate) bool { return now.After(c.NotAfter) }) {
		now = p.Earliest()
	}
	if p.Behind == nil || !p.Behind() {
		return now
	}
	for _, c := range chain {
		if c.NotBefore.After(now) {
			now = c.NotBefore
		}
	}
	return now
}

// Verify checks a chain (the peer's own certificate first) and returns the id in the peer's SPIFFE id.
func (p Peer) Verify(chain []*x509.Certificate, usage x509.ExtKeyUsage) (id string, err error) {
	if len(chain) == 0 {
		return "", errors.New("link: peer showed no certificate")
	}
	roots := p.Roots()
	if roots == nil {
		// A nil pool would mean the system's authorities.
		return "", errors.New("link: no authority is known for the peer")
	}
	intermediates := x509.NewCertPool()
	for _, c := range chain[1:] {
		intermediates.AddCert(c)
	}
	_, err = chain[0].Verify(x509.VerifyOptions{
		Roots:         roots,
		Intermediates: intermediates,
		CurrentTime:   p.now(chain),
		KeyUsages:     []x509.ExtKeyUsage{usage},
	})
	if err != nil {
		return "", fmt.Errorf("link: peer's certificate: %w", err)
	}
	id, err = protocol.PeerID(chain[0], p.TrustDomain, p.Kind)
	if err != nil {
		return "", fmt.Errorf("link: peer's identity: %w", err)
	}
	if p.Allow != nil {
		if err := p.Allow(id); err != nil {
			return "", fmt.Errorf("link: peer %s: %w", id, err)
		}
	}
	return id, nil
}
