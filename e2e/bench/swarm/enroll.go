package swarm

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

// perAddress is how many nodes share a source address: the hub limits requests by address and by /24.
const perAddress = 100

// enroller calls the hub's API for nodes that have no certificate yet.
type enroller struct {
	in     Enroll
	bundle protocol.Bundle
	// clients have one source address each and serve perAddress nodes.
	clients []*http.Client
}

// siteAddress is the address of the n-th site; each site has its own /24 of the loopback network.
func siteAddress(n int) net.IP { return net.IPv4(127, byte(64+n>>8), byte(n), 1) }

func newEnroller(ctx context.Context, in Enroll) (*enroller, error) {
	d := &enroller{in: in}
	for i := range 1 + len(in.Tokens)/perAddress {
		dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: siteAddress(i)}}
		d.clients = append(d.clients, &http.Client{Transport: &http.Transport{
			DialContext: dialer.DialContext, MaxIdleConnsPerHost: enrolling,
			// The root fingerprint authenticates the bundle; the connection need not be authenticated.
			TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
		}})
	}
	var raw json.RawMessage
	if err := d.call(ctx, 0, http.MethodGet, "/api/v1/trust/bundle", nil, &raw); err != nil {
		return nil, err
	}
	env, err := protocol.EnvelopeFromJSON(raw)
	if err != nil {
		return nil, err
	}
	d.bundle, err = protocol.VerifyBundle(env, in.RootFingerprint)
	return d, err
}

// call repeats a request that the hub throttles after the time that it names, as an agent does.
func (d *enroller) call(ctx context.Context, nth int, method, path string, in, out any) error {
	for {
		after, err := d.callOnce(ctx, nth, method, path, in, out)
		if err == nil || after == 0 {
			return err
		}
		t := time.NewTimer(after)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return err
		}
	}
}

// callOnce returns the pause before the request may be repeated; 0 means never.
func (d *enroller) callOnce(ctx context.Context, nth int, method, path string, in,
	out any,
) (after time.Duration, err error) {
	body, err := json.Marshal(in)
	if err != nil {
		return 0, err
	}
	req, err := http.NewRequestWithContext(ctx, method, d.in.APIURL+path, bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	} else {
		req.Body, req.ContentLength = nil, 0
	}
	res, err := d.clients[nth/perAddress].Do(req)
	if err != nil {
		return 0, err
	}
	defer func() { _ = res.Body.Close() }()
	raw, err := io.ReadAll(res.Body)
	if err != nil {
		return 0, err
	}
	if res.StatusCode >= http.StatusBadRequest {
		if res.StatusCode == http.StatusTooManyRequests {
			seconds, _ := strconv.Atoi(res.Header.Get("Retry-After"))
			after = time.Duration(max(seconds, 1)) * time.Second
		}
		return after, fmt.Errorf("%s answered %s: %s", path, res.Status, raw)
	}
	return 0, json.Unmarshal(raw, out)
}

// enroll makes a key, and exchanges the token for a certificate of it.
func (d *enroller) enroll(ctx context.Context, index int, token string, rtt *atomic.Int64) (*node, error) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.CreateCertificateRequest(rand.Reader,
		&x509.CertificateRequest{Subject: pkix.Name{CommonName: "simulated"}}, key)
	if err != nil {
		return nil, err
	}
	csr := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
	var answer struct {
		NodeID         string   `json:"node_id"`
		CertificatePEM string   `json:"certificate_pem"`
		Chain          []string `json:"chain"`
		SessionAddr    string   `json:"session_addr"`
	}
	hostname := fmt.Sprintf("simulated-%d", index)
	err = d.call(ctx, index%(perAddress*len(d.clients)), http.MethodPost, "/api/v1/nodes/enroll",
		map[string]string{"join_token": token, "csr_pem": string(csr), "hostname": hostname}, &answer)
	if err != nil {
		return nil, err
	}
	chain := strings.Join(append([]string{strings.TrimSpace(answer.CertificatePEM)}, answer.Chain...), "\n")
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	certificate, err := tls.X509KeyPair([]byte(chain), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}))
	if err != nil {
		return nil, err
	}
	n := &node{
		id: answer.NodeID, hostname: hostname, addr: answer.SessionAddr,
		site: siteAddress(index / perAddress % len(d.clients)), tokens: &link.Tokens{}, rtt: rtt,
		reportNow:   make(chan struct{}, 1),
		incarnation: uuid.NewString(), key: key, bundle: d.bundle,
		identity: protocol.NodeIdentity{ID: answer.NodeID, KeySHA256: sha256.Sum256(key.Public().(ed25519.PublicKey))},
	}
	n.chain = spool.Chain{NodeID: n.id, Incarnation: n.incarnation}
	n.tls = link.ClientTLS(func() (*tls.Certificate, error) { return &certificate, nil }, link.Peer{
		Roots: d.bundle.HubCAs, TrustDomain: d.bundle.TrustDomain(), Kind: protocol.KindHub, Now: time.Now,
	})
	return n, nil
}
