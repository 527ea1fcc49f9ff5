package hubtest

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

// ExpectEndAfter sends a first message and waits for the hub to end the connection.
func (n *Node) ExpectEndAfter(first *protocol.NodeMessage) {
	t := n.Hub.T
	t.Helper()
	conn, err := n.Dial()
	require.NoError(t, err)
	control, err := conn.Open(t.Context(), &protocol.StreamHeader{Kind: protocol.StreamHeader_KIND_CONTROL})
	require.NoError(t, err)
	_ = control.Send(first) // the hub need not read all of it
	<-conn.Done()
}

// Node is an enrolled node that speaks the protocol and runs nothing.
type Node struct {
	Hub         *Hub
	ID          string
	Key         ed25519.PrivateKey
	Certificate tls.Certificate
	Identity    protocol.NodeIdentity
	Bundle      protocol.Bundle
}

// CSR is a certificate request for the key.
func CSR(t *testing.T, key ed25519.PrivateKey) string {
	t.Helper()
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	require.NoError(t, err)
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}))
}

// UseCertificate replaces the node's certificate.
func (n *Node) UseCertificate(text string) {
	block, _ := pem.Decode([]byte(text))
	n.Certificate = tls.Certificate{Certificate: [][]byte{block.Bytes}, PrivateKey: n.Key}
}

// Dial opens a connection with the node's certificate.
func (n *Node) Dial() (*link.Conn, error) {
	return link.Dial(n.Hub.T.Context(), n.Hub.Listener.Addr().String(), link.ClientTLS(
		func() (*tls.Certificate, error) { return &n.Certificate, nil },
		link.Peer{Roots: n.Bundle.HubCAs, TrustDomain: "gpuaas.test", Kind: protocol.KindHub, Now: time.Now},
	), nil)
}

// SendHello opens the control stream with a hello and gives the hub's first answer.
func (n *Node) SendHello(hello *protocol.Hello) (*link.Conn, *link.Stream, *protocol.HubMessage) {
	t := n.Hub.T
	t.Helper()
	conn, err := n.Dial()
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(link.CodeOK, "") })
	control, err := conn.Open(t.Context(), &protocol.StreamHeader{Kind: protocol.StreamHeader_KIND_CONTROL})
	require.NoError(t, err)
	require.NoError(t, control.Send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Hello{Hello: hello}}))
	answer := &protocol.HubMessage{}
	require.NoError(t, control.Receive(answer, protocol.MaxControlBytes))
	return conn, control, answer
}

// Hello is what a node of protocol.Version says first.
func Hello(incarnation string) *protocol.Hello {
	return &protocol.Hello{
		Features:        manifest.KnownFeatures(),
		ProtocolVersion: protocol.Version, AgentVersion: "test", Incarnation: incarnation, BundleVersion: 1,
		Facts: &protocol.NodeFacts{Hostname: "n1", CpuCores: 8, MemoryBytes: 16 << 30, VolumeBytes: 1 << 40},
	}
}

// Connect opens a session, which must be granted.
func (n *Node) Connect(h *protocol.Hello) *Session {
	t := n.Hub.T
	t.Helper()
	conn, control, answer := n.SendHello(h)
	require.NotNil(t, answer.GetWelcome(), "%v", answer)
	l := &Session{
		T: t, Node: n, Conn: conn, Control: control, Welcome: answer.GetWelcome(),
		Received: make(chan *protocol.HubMessage, 64),
	}
	go func() {
		defer close(l.Received)
		for {
			m := &protocol.HubMessage{}
			if control.Receive(m, protocol.MaxControlBytes) != nil {
				return
			}
			l.Received <- m
		}
	}()
	return l
}

// Seal seals runs of records into a chain, one segment each.
func (n *Node) Seal(incarnation string, runs ...[]*protocol.UsageRecord) []*protocol.Envelope {
	n.Hub.T.Helper()
	var sequence uint64
	for _, records := range runs {
		for _, r := range records {
			sequence++
			r.Sequence = sequence
		}
	}
	return n.SealNumbered(incarnation, runs...)
}

// SealNumbered is Seal for records that have their numbers.
func (n *Node) SealNumbered(incarnation string, runs ...[]*protocol.UsageRecord) []*protocol.Envelope {
	n.Hub.T.Helper()
	var (
		out      []*protocol.Envelope
		previous []byte
	)
	for i, records := range runs {
		env, err := protocol.SignMessage(protocol.PayloadSegment, &protocol.UsageSegment{
			NodeId: n.ID, Incarnation: incarnation, Number: uint64(i + 1), PreviousSha256: previous, SealedAt: timestamppb.Now(),
			Records: records,
		}, protocol.NewEd25519Signer(n.Key))
		require.NoError(n.Hub.T, err)
		sum := sha256.Sum256(env.GetPayload())
		previous = sum[:]
		out = append(out, env)
	}
	return out
}
