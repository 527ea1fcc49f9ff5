package uplink_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"math/big"
	"net/http"
	"net/http/httptest"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

const (
	domain    = "mesh.example"
	nodeID    = "0193c0de-0000-7000-8000-000000000001"
	joinToken = "join-token-0123456789"
)

func newKey(t testing.TB) ed25519.PrivateKey {
	t.Helper()
	_, k, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	return k
}

func pub(k ed25519.PrivateKey) ed25519.PublicKey { return k.Public().(ed25519.PublicKey) }

// testHub is the other side: real TLS, real QUIC, real signatures, and no opinion.
type testHub struct {
	t                                 testing.TB
	root, state, lease, hubCA, nodeCA ed25519.PrivateKey
	hubCert, nodeCACert               *x509.Certificate
	bundle                            protocol.Bundle
	revoked                           []string
	version                           uint64

	api      *httptest.Server
	listener *link.Listener
	lifetime time.Duration

	mu       sync.Mutex
	cert     *tls.Certificate
	nodeKey  ed25519.PublicKey
	used     bool
	renewals int
	// age is how old certificates are when they are issued; shown counts the renewals on a connection that shows one.
	age   time.Duration
	shown int
	// shutOut is why the node is refused, in the handshake and at a renewal.
	shutOut string
	// limited says that enrollments are refused for their rate.
	limited bool
	// welcome makes the answer to a hello.
	welcome func(*protocol.Hello) *protocol.HubMessage
	// fetches answers the fetch streams.
	fetches  func(*protocol.FetchRequest) *protocol.FetchResponse
	sessions chan *hubSession
}

// hubSession is one node's connection as the hub sees it.
type hubSession struct {
	t       testing.TB
	conn    *link.Conn
	control *link.Stream
	hello   *protocol.Hello
	usage   chan *link.Stream
}

// newMesh is a hub that signs, without an address.
func newMesh(t testing.TB) *testHub {
	t.Helper()
	h := &testHub{
		t: t, root: newKey(t), state: newKey(t), lease: newKey(t), hubCA: newKey(t), nodeCA: newKey(t),
		lifetime: time.Hour, sessions: make(chan *hubSession, 16), version: 1,
	}
	h.hubCert, h.nodeCACert = selfSigned(t, h.hubCA), selfSigned(t, h.nodeCA)
	b, err := protocol.VerifyBundle(h.bundleEnvelope(), protocol.Fingerprint(pub(h.root)))
	require.NoError(t, err)
	h.bundle = b
	return h
}

func newHub(t testing.TB) *testHub {
	t.Helper()
	h := newMesh(t)
	h.welcome = func(*protocol.Hello) *protocol.HubMessage {
		return &protocol.HubMessage{Message: &protocol.HubMessage_Welcome{Welcome: &protocol.Welcome{
			ProtocolVersion: 1, HubTime: timestamppb.Now(), SessionNo: 1,
		}}}
	}
	h.certify()
	h.api = httptest.NewUnstartedServer(h.mux())
	current := func(*tls.ClientHelloInfo) (*tls.Config, error) {
		cert, err := h.own()
		return &tls.Config{
			ClientAuth: tls.RequestClientCert, MinVersion: tls.VersionTLS13,
			Certificates: []tls.Certificate{*cert},
		}, err
	}
	h.api.TLS = &tls.Config{MinVersion: tls.VersionTLS13, GetConfigForClient: current}
	h.api.StartTLS()
	t.Cleanup(h.api.Close)
	peer := link.Peer{
		Roots: func() *x509.CertPool { return h.bundle.NodeCAs() }, TrustDomain: domain, Kind: protocol.KindNode,
		Now: time.Now, Allow: h.allow,
	}
	var err error
	h.listener, err = link.Listen("127.0.0.1:0", link.ServerTLS(h.own, peer), nil)
	require.NoError(t, err)
	var serving sync.WaitGroup
	serving.Go(h.serve)
	t.Cleanup(func() {
		_ = h.listener.Close()
		serving.Wait()
	})
	return h
}

// certify gives the hub a certificate of its authority.
func (h *testHub) certify() {
	cert := h.issue(h.hubCert, h.hubCA, newKey(h.t), protocol.HubSPIFFE(domain, "hub-1"), time.Now(), time.Hour)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.cert = cert
}

func (h *testHub) own() (*tls.Certificate, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.cert, nil
}

func (h *testHub) allow(string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.shutOut != "" {
		return errors.New(h.shutOut)
	}
	return nil
}

func (h *testHub) setShutOut(reason string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.shutOut = reason
}

func (h *testHub) setWelcome(welcome func(*protocol.Hello) *protocol.HubMessage) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.welcome = welcome
}

func (h *testHub) setFetches(answer func(*protocol.FetchRequest) *protocol.FetchResponse) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.fetches = answer
}

func (h *testHub) fingerprint() string { return protocol.Fingerprint(pub(h.root)) }

func (h *testHub) bundleEnvelope() *protocol.Envelope {
	role := func(name string, k ed25519.PrivateKey) *protocol.Role {
		return &protocol.Role{Name: name, Threshold: 1, Keys: []*protocol.PublicKey{{
			KeyId:   protocol.KeyID(pub(k)),
			Ed25519: pub(k),
		}}}
	}
	ca := func(name string, c *x509.Certificate) *protocol.Role {
		return &protocol.Role{Name: name, Keys: []*protocol.PublicKey{{KeyId: name, Certificate: c.Raw}}}
	}
	env, err := protocol.SignMessage(protocol.PayloadBundle, &protocol.TrustBundle{
		TrustDomain: domain, Version: h.version, Epoch: 1, IssuedAt: timestamppb.New(time.Now().Add(-time.Minute)),
		RevokedKeyIds: h.revoked,
		Roles: []*protocol.Role{
			role("root", h.root), role("state", h.state), role("lease", h.lease), ca("hub-ca", h.hubCert),
			ca("node-ca", h.nodeCACert),
		},
	}, protocol.NewEd25519Signer(h.root))
	require.NoError(h.t, err)
	return env
}

func selfSigned(t testing.TB, key ed25519.PrivateKey) *x509.Certificate {
	t.Helper()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(24 * time.Hour),
		IsCA:     true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, pub(key), key)
	require.NoError(t, err)
	c, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	return c
}

func (h *testHub) issue(ca *x509.Certificate, caKey, key ed25519.PrivateKey, id *url.URL, from time.Time,
	life time.Duration,
) *tls.Certificate {
	return &tls.Certificate{Certificate: [][]byte{h.certificate(ca, caKey, pub(key), id, from, life)}, PrivateKey: key}
}

func (h *testHub) certificate(ca *x509.Certificate, caKey ed25519.PrivateKey, key ed25519.PublicKey, id *url.URL,
	from time.Time, life time.Duration,
) []byte {
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), NotBefore: from.Add(-time.Second), NotAfter: from.Add(life),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}, URIs: []*url.URL{id},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca, key, caKey)
	require.NoError(h.t, err)
	return der
}

func (h *testHub) mux() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/v1/trust/bundle", func(w http.ResponseWriter, _ *http.Request) {
		raw, err := protocol.EnvelopeToJSON(h.bundle.Envelope())
		if err == nil {
			_, _ = w.Write(raw)
		}
	})
	mux.HandleFunc("POST /api/v1/nodes/enroll", func(w http.ResponseWriter, r *http.Request) {
		var in struct {
			JoinToken string `json:"join_token"`
			CSR       string `json:"csr_pem"`
			Hostname  string `json:"hostname"`
		}
		key, ok := h.readCSR(r, &in, &in.CSR)
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.limited {
			w.WriteHeader(http.StatusTooManyRequests)
			_, _ = w.Write([]byte(`{"code":"rate_limited","detail":"Too many requests. Try again later."}`))
			return
		}
		if !ok || in.JoinToken != joinToken || in.Hostname == "" || (h.used && !key.Equal(h.nodeKey)) {
			w.WriteHeader(http.StatusUnauthorized)
			_, _ = w.Write(
				[]byte(`{"code":"join_token_invalid","detail":"The join token was used by another node. Make a new one."}`))
			return
		}
		h.used, h.nodeKey = true, key
		h.credentials(w, key)
	})
	mux.HandleFunc("POST /api/v1/nodes/renew", func(w http.ResponseWriter, r *http.Request) {
		var in struct {
			NodeID    string `json:"node_id"`
			CSR       string `json:"csr_pem"`
			IssuedAt  string `json:"issued_at"`
			Signature string `json:"signature"`
		}
		key, ok := h.readCSR(r, &in, &in.CSR)
		h.mu.Lock()
		defer h.mu.Unlock()
		sig, err := base64.StdEncoding.DecodeString(in.Signature)
		if !ok || err != nil || !key.Equal(h.nodeKey) || !ed25519.Verify(key, []byte(in.NodeID+"\n"+in.CSR+"\n"+in.IssuedAt),
			sig) {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		if h.shutOut != "" {
			w.WriteHeader(http.StatusForbidden)
			_ = json.NewEncoder(w).Encode(map[string]string{"code": h.shutOut, "detail": "This node is shut out."})
			return
		}
		h.renewals++
		h.shown += min(1, len(r.TLS.PeerCertificates))
		h.credentials(w, key)
	})
	return mux
}

func (h *testHub) readCSR(r *http.Request, in any, csrPEM *string) (ed25519.PublicKey, bool) {
	if json.NewDecoder(r.Body).Decode(in) != nil {
		return nil, false
	}
	block, _ := pem.Decode([]byte(*csrPEM))
	if block == nil {
		return nil, false
	}
	csr, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil || csr.CheckSignature() != nil {
		return nil, false
	}
	key, ok := csr.PublicKey.(ed25519.PublicKey)
	return key, ok
}

func (h *testHub) credentials(w http.ResponseWriter, key ed25519.PublicKey) {
	from := time.Now()
	from = from.Add(-h.age)
	if h.lifetime < 0 {
		from = from.Add(h.lifetime) // long expired
	}
	der := h.certificate(h.nodeCACert, h.nodeCA, key, protocol.NodeSPIFFE(domain, nodeID), from,
		max(h.lifetime, time.Second))
	w.WriteHeader(http.StatusCreated)
	_ = json.NewEncoder(w).Encode(map[string]any{
		"node_id": nodeID, "certificate_pem": string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})),
		"chain":        []string{string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: h.nodeCACert.Raw}))},
		"session_addr": h.listener.Addr().String(), "registry_host": "registry.example", "hub_id": "hub-1",
	})
}

func (h *testHub) serve() {
	for {
		conn, err := h.listener.Accept(context.Background())
		if err != nil {
			return
		}
		go h.exchangeHello(conn)
	}
}

func (h *testHub) exchangeHello(conn *link.Conn) {
	ctx := context.Background()
	control, header, err := conn.Accept(ctx)
	if err != nil || header.GetKind() != protocol.StreamHeader_KIND_CONTROL {
		return
	}
	m := &protocol.NodeMessage{}
	if control.Receive(m, protocol.MaxControlBytes) != nil || m.GetHello() == nil {
		return
	}
	h.mu.Lock()
	answer := h.welcome(m.GetHello())
	h.mu.Unlock()
	if control.Send(answer) != nil {
		return
	}
	conn.ReleaseSlot()
	s := &hubSession{t: h.t, conn: conn, control: control, hello: m.GetHello(), usage: make(chan *link.Stream, 4)}
	go func() {
		for {
			stream, header, err := conn.Accept(ctx)
			if err != nil {
				return
			}
			switch header.GetKind() {
			case protocol.StreamHeader_KIND_USAGE:
				s.usage <- stream
			case protocol.StreamHeader_KIND_FETCH:
				go h.answerFetch(stream)
			default:
				stream.Abort()
			}
		}
	}()
	h.sessions <- s
}

func (h *testHub) answerFetch(stream *link.Stream) {
	defer func() { _ = stream.Close() }()
	request := &protocol.FetchRequest{}
	if stream.Receive(request, protocol.MaxHeaderBytes) != nil {
		return
	}
	h.mu.Lock()
	answer := h.fetches(request)
	h.mu.Unlock()
	_ = stream.Send(answer)
}

// next waits for the node's next session.
func (h *testHub) next() *hubSession {
	h.t.Helper()
	select {
	case s := <-h.sessions:
		return s
	case <-time.After(30 * time.Second):
		require.Fail(h.t, "the node does not dial")
		return nil
	}
}

// until reads what the node sends until want takes a message.
func (s *hubSession) until(want func(*protocol.NodeMessage) bool) {
	s.t.Helper()
	require.NoError(s.t, s.control.SetReadDeadline(time.Now().Add(30*time.Second)))
	for {
		m := &protocol.NodeMessage{}
		require.NoError(s.t, s.control.Receive(m, protocol.MaxControlBytes))
		if want(m) {
			return
		}
	}
}

func (s *hubSession) push(m *protocol.HubMessage) {
	s.t.Helper()
	require.NoError(s.t, s.control.Send(m))
}

func (s *hubSession) pushState(env *protocol.Envelope, parts ...[]byte) {
	s.push(&protocol.HubMessage{Message: &protocol.HubMessage_PushState{PushState: &protocol.PushState{
		Envelope: env,
		Parts:    parts,
	}}})
}

// sendTooLarge sends a state that is above the limit. The node reads only its length, so that the rest may not go out.
func (s *hubSession) sendTooLarge() {
	go func() {
		_ = s.control.Send(&protocol.HubMessage{Message: &protocol.HubMessage_PushState{PushState: &protocol.PushState{
			Parts: [][]byte{make([]byte, protocol.MaxControlBytes)},
		}}})
	}()
}

func (s *hubSession) accepted() *protocol.Ack {
	var a *protocol.Ack
	s.until(func(m *protocol.NodeMessage) bool {
		a = m.GetAck()
		require.Nil(s.t, m.GetNack(), "refused instead")
		return a != nil
	})
	return a
}

func (s *hubSession) refused() *protocol.Nack {
	var r *protocol.Nack
	s.until(func(m *protocol.NodeMessage) bool {
		r = m.GetNack()
		require.Nil(s.t, m.GetAck(), "accepted instead")
		return r != nil
	})
	return r
}

// desired signs a state for the node with the given key.
func (h *testHub) desired(signer ed25519.PrivateKey, change func(*protocol.DesiredState),
	ws ...*protocol.Workload,
) (*protocol.Envelope, [][]byte) {
	h.t.Helper()
	h.mu.Lock()
	sum := sha256.Sum256(h.nodeKey)
	h.mu.Unlock()
	d := &protocol.DesiredState{
		NodeId: nodeID, NodeKeySha256: sum[:], Epoch: 1, Generation: 1,
		IssuedAt: timestamppb.Now(),
	}
	var parts [][]byte
	for _, w := range ws {
		raw, err := proto.Marshal(w)
		require.NoError(h.t, err)
		digest := sha256.Sum256(raw)
		d.Parts = append(d.Parts, &protocol.PartRef{Id: w.GetId(), Sha256: digest[:], SizeBytes: uint64(len(raw))})
		parts = append(parts, raw)
	}
	if change != nil {
		change(d)
	}
	env, err := protocol.SignMessage(protocol.PayloadState, d, protocol.NewEd25519Signer(signer))
	require.NoError(h.t, err)
	return env, parts
}
