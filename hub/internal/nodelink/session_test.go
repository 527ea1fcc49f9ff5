package nodelink_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"io"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/dispatch"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

func TestANewNodeGetsAnEmptyStateAndCountsAsOnline(t *testing.T) {
	h := newHub(t)
	n := h.enrol()
	l := n.connect(hello("i1"))
	require.Equal(t, uint64(1), l.welcome.GetSessionNo())
	require.False(t, l.welcome.GetNewIncarnation())
	state, _ := l.state(0)
	require.Equal(t, uint64(1), state.GetGeneration())
	l.report(1)
	got := h.node(n.id)
	require.Equal(t, fleet.Online, got.Status(h.now()))
	require.Equal(t, uint64(1), got.AcceptedGeneration)
	require.EqualValues(t, 8, got.CPUCores)
}

func TestLaunchReachesTheNodeWithItsLease(t *testing.T) {
	h := newHub(t)
	h.publish()
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	l.leases = nil
	i := h.launch()
	state, push := l.state(1)
	require.Len(t, push.GetParts(), 1)
	require.Equal(t, i.Members[0].ID, state.GetParts()[0].GetId())
	leases := l.pushedLeases()
	require.Equal(t, "i1", leases.GetIncarnation())
	require.Len(t, leases.GetLeases(), 1)
	require.Equal(t, i.Members[0].ID, leases.GetLeases()[0].GetMemberId())

	part := l.fetch(&protocol.FetchRequest{Request: &protocol.FetchRequest_PartSha256{
		PartSha256: state.GetParts()[0].GetSha256(),
	}})
	require.Empty(t, part.GetErrorReason())
	require.Equal(t, push.GetParts()[0], part.GetPart())

	credential := l.fetch(&protocol.FetchRequest{Request: &protocol.FetchRequest_PullCredential{
		PullCredential: &protocol.PullCredentialRequest{Repository: demoRepo},
	}})
	require.Equal(t, n.id, credential.GetPullCredential().GetUsername())
	other := l.fetch(&protocol.FetchRequest{Request: &protocol.FetchRequest_PullCredential{
		PullCredential: &protocol.PullCredentialRequest{Repository: "org/other/app/x"},
	}})
	require.Equal(t, protocol.RefusalNotAssigned, other.GetErrorReason(), "a node gets credentials only for what it is "+
		"to run")
	bundle := l.fetch(&protocol.FetchRequest{Request: &protocol.FetchRequest_Bundle{Bundle: true}})
	require.True(t, proto.Equal(h.keys.Bundle().Envelope(), bundle.GetBundle()))
}

func TestANodeFetchesOnlyItsOwnParts(t *testing.T) {
	h := newHub(t)
	h.publish()
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	h.launch()
	state, _ := l.state(1)
	other := h.enrol().connect(hello("i1"))
	other.state(0)
	digest := state.GetParts()[0].GetSha256()
	require.Equal(t, protocol.RefusalUnknownPart,
		other.fetch(&protocol.FetchRequest{Request: &protocol.FetchRequest_PartSha256{PartSha256: digest}}).GetErrorReason())
	require.Equal(t, protocol.RefusalMalformed,
		other.fetch(&protocol.FetchRequest{Request: &protocol.FetchRequest_PartSha256{PartSha256: []byte("x")}}).
			GetErrorReason())
	require.Equal(t, protocol.RefusalMalformed, other.fetch(&protocol.FetchRequest{}).GetErrorReason())
}

func TestANewerConnectionReplacesTheOlder(t *testing.T) {
	h := newHub(t)
	n := h.enrol()
	older := n.connect(hello("i1"))
	older.state(0)
	newer := n.connect(hello("i1"))
	require.Equal(t, uint64(2), newer.welcome.GetSessionNo())
	<-older.conn.Done()
	newer.report(1)
	require.Equal(t, fleet.Online, h.node(n.id).Status(h.now()), "the end of the older connection does not make the "+
		"node offline")
}

func TestBannedNodeIsCutOffAndRefused(t *testing.T) {
	h := newHub(t)
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	ban := &command.Service{DB: h.d, ShutOut: h.server.Disconnect}
	require.NoError(t, ban.BanNode(t.Context(), h.admin("ban"), n.id, "stolen"))
	<-l.conn.Done()

	_, _, answer := n.say(hello("i1"))
	require.Equal(t, "node_banned", answer.GetGoAway().GetReason())
	text := csr(t, n.key)
	_, err := (&command.Service{DB: h.d, Keys: h.keys, CertificateTTL: time.Hour}).RenewNode(t.Context(), h.admin(""),
		command.RenewNodeInput{
			NodeID: n.id, CSRPEM: text, IssuedAt: "now", Signature: ed25519.Sign(n.key, fleet.RenewalMessage(n.id, text, "now")),
		})
	require.True(t, fault.Is(err, fault.Forbidden))
	require.Equal(t, 1, count(h, `SELECT count(*) FROM events WHERE type = 'fleet.node.banned'`))
	require.Equal(t, 1, count(h, `SELECT count(*) FROM audit_rows WHERE resource_id = $1 AND reason = 'stolen'`, n.id))
}

func TestRenewedCertificateConnectsAfterExpiry(t *testing.T) {
	h := newHub(t)
	n := h.enrol()
	request := csr(t, n.key)
	parsed, _, err := trust.ParseNodeCSR(request)
	require.NoError(t, err)
	expired, err := h.keys.IssueNodeCertificate(parsed, n.id, time.Minute, time.Now().Add(-time.Hour))
	require.NoError(t, err)
	n.takeCertificate(expired.CertificatePEM)
	conn, err := n.dial()
	if err == nil {
		// The node's side of the handshake ends first; the hub's refusal follows.
		<-conn.Done()
	}

	issuedAt := "1970-01-01T00:00:00Z"
	renewed, err := (&command.Service{DB: h.d, Keys: h.keys, CertificateTTL: time.Hour}).RenewNode(t.Context(),
		h.admin(""),
		command.RenewNodeInput{
			NodeID: n.id, CSRPEM: request, IssuedAt: issuedAt, Signature: ed25519.Sign(n.key, fleet.RenewalMessage(n.id, request,
				issuedAt)),
		})
	require.NoError(t, err)
	n.takeCertificate(renewed.Certificate.CertificatePEM)
	n.connect(hello("i1")).state(0)
}

func TestACertificateForAnotherKeyOfTheNodeIsRefused(t *testing.T) {
	h := newHub(t)
	n := h.enrol()
	_, stolen, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	parsed, _, err := trust.ParseNodeCSR(csr(t, stolen))
	require.NoError(t, err)
	issued, err := h.keys.IssueNodeCertificate(parsed, n.id, time.Hour, time.Now())
	require.NoError(t, err)
	n.key = stolen
	n.takeCertificate(issued.CertificatePEM)
	_, _, answer := n.say(hello("i1"))
	require.Equal(t, "node_key_unknown", answer.GetGoAway().GetReason())
}

func TestTheFirstMessageMustBeAHello(t *testing.T) {
	h := newHub(t)
	n := h.enrol()
	for name, open := range map[string]func(conn *link.Conn){
		"another stream": func(conn *link.Conn) {
			_, err := conn.Open(t.Context(), &protocol.StreamHeader{Kind: protocol.StreamHeader_KIND_FETCH})
			require.NoError(t, err)
		},
		"another message": func(conn *link.Conn) {
			s, err := conn.Open(t.Context(), &protocol.StreamHeader{Kind: protocol.StreamHeader_KIND_CONTROL})
			require.NoError(t, err)
			require.NoError(t, s.Send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Report{Report: &protocol.Report{}}}))
		},
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := n.dial()
			require.NoError(t, err)
			open(conn)
			<-conn.Done()
			code, ok := link.CloseCode(conn.Err())
			require.True(t, ok)
			require.Equal(t, link.CodeProtocol, code)
		})
	}
	_, _, answer := n.say(hello("with spaces and\nlines"))
	require.Equal(t, "incarnation_invalid", answer.GetGoAway().GetReason())
	require.Empty(t, h.server.Nodes())
}

func TestASlowStreamDelaysNoOther(t *testing.T) {
	h := newHub(t)
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	// Streams that never get on: a usage stream in the middle of a message, and fetches that never ask.
	for _, kind := range []protocol.StreamHeader_Kind{
		protocol.StreamHeader_KIND_USAGE, protocol.StreamHeader_KIND_FETCH,
		protocol.StreamHeader_KIND_FETCH,
	} {
		s, err := l.conn.Open(t.Context(), &protocol.StreamHeader{Kind: kind})
		require.NoError(t, err)
		_, err = s.Write([]byte{0xff})
		require.NoError(t, err)
	}
	l.report(1)
	require.NotNil(t, l.fetch(&protocol.FetchRequest{Request: &protocol.FetchRequest_Bundle{Bundle: true}}).GetBundle())
	ack := upload(t, l.usage(), n.segments("i1", nil)[0])
	require.Empty(t, ack.GetNackReason())
}

func TestLogsComeThroughTheNodesOwnConnection(t *testing.T) {
	h := newHub(t)
	n := h.enrol()
	_, err := h.server.Logs(t.Context(), n.id, "org", &protocol.LogsRequest{})
	require.Equal(t, "node_unreachable", fault.As(err).Code)

	l := n.connect(hello("i1"))
	l.state(0)
	go func() {
		for {
			s, header, err := l.conn.Accept(context.Background())
			if err != nil {
				return
			}
			request := &protocol.TunnelRequest{}
			if header.GetKind() != protocol.StreamHeader_KIND_TUNNEL || s.Receive(request, protocol.MaxHeaderBytes) != nil {
				s.Abort()
				continue
			}
			if request.GetLogs().GetMemberId() == "" {
				_ = s.Send(&protocol.TunnelResponse{ErrorReason: "unknown_member"})
				_ = s.Close()
				continue
			}
			_ = s.Send(&protocol.TunnelResponse{})
			_, _ = s.Write([]byte("line of " + request.GetLogs().GetMemberId()))
			_ = s.CloseWrite()
		}
	}()
	logs, err := h.server.Logs(t.Context(), n.id, "org", &protocol.LogsRequest{MemberId: "m1"})
	require.NoError(t, err)
	buf := make([]byte, 100)
	read, _ := logs.Read(buf)
	require.Equal(t, "line of m1", string(buf[:read]))
	require.NoError(t, logs.Close())
	require.NoError(t, logs.Close(), "closing twice is harmless")

	_, err = h.server.Logs(t.Context(), n.id, "org", &protocol.LogsRequest{})
	require.Equal(t, "node_refused", fault.As(err).Code)
	// One org's followed logs leave room for another's.
	var followed []io.Closer
	for range 8 {
		logs, err := h.server.Logs(t.Context(), n.id, "greedy", &protocol.LogsRequest{MemberId: "m1", Follow: true})
		if len(followed) == 4 {
			require.Equal(t, "tunnels_busy", fault.As(err).Code)
			continue
		}
		require.NoError(t, err)
		followed = append(followed, logs)
	}
	// Each refused or closed tunnel gave its place back.
	for range 20 {
		logs, err := h.server.Logs(t.Context(), n.id, "org", &protocol.LogsRequest{MemberId: "m1"})
		require.NoError(t, err)
		require.NoError(t, logs.Close())
	}
	for _, logs := range followed {
		require.NoError(t, logs.Close())
	}
}

func TestRefusalIsVisibleOnTheNodeAndAsEventAndAudit(t *testing.T) {
	h := newHub(t)
	n := h.enrol()
	l := n.connect(hello("i1"))
	state, _ := l.state(0)
	refuse := func() {
		l.send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Nack{Nack: &protocol.Nack{
			Document: "state", Epoch: 1, Generation: state.GetGeneration() - 1, Reason: protocol.RefusalOlder,
			Detail: "generation 0 is older than 1",
		}}})
	}
	refuse()
	refuse()
	l.report(state.GetGeneration())
	refusals := tx(h, func(ctx context.Context, tx db.Tx) ([]fleet.Refusal, error) {
		return fleet.Refusals(ctx, tx, n.id, 10)
	})
	require.Len(t, refusals, 1, "the same again is no news")
	require.Equal(t, protocol.RefusalOlder, refusals[0].Reason)
	require.Equal(t, 1, count(h, `SELECT count(*) FROM events WHERE type = 'fleet.node.document_refused' AND subject = $1`,
		n.id))
	require.Equal(t, 1, count(h, `SELECT count(*) FROM audit_rows WHERE resource_id = $1 AND reason = $2`, n.id,
		protocol.RefusalOlder))
	require.Equal(t, state.GetGeneration(), tx(h, func(ctx context.Context, tx db.Tx) (uint64, error) {
		return dispatch.NewestGeneration(ctx, tx, n.id)
	}), "an old document is no reason for a new state")
}

func TestSilenceMakesANodeOffline(t *testing.T) {
	h := newHub(t)
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	require.Equal(t, 1, count(h, `SELECT count(*) FROM events WHERE type = 'fleet.node.online'`))
	h.forward(fleet.OnlineWindow)
	require.NoError(t, h.nodes.Sweep(t.Context()))
	require.NoError(t, h.nodes.Sweep(t.Context()))
	require.Equal(t, 1, count(h, `SELECT count(*) FROM events WHERE type = 'fleet.node.offline'`))
	require.Equal(t, fleet.Offline, h.node(n.id).Status(h.now()))
	l.report(1)
	require.Equal(t, 2, count(h, `SELECT count(*) FROM events WHERE type = 'fleet.node.online'`))
	require.Equal(t, fleet.Online, h.node(n.id).Status(h.now()))
}

func TestUnauthorisedCallersChangeNoNode(t *testing.T) {
	h := newHub(t)
	n := h.enrol()
	m := h.admin("k")
	m.Principal = iam.Principal{
		Type: iam.TypeUser, ID: db.NewID(), OrgID: db.NewID(),
		Bindings: []iam.Binding{{Role: iam.OrgAdmin}},
	}
	before := count(h, `SELECT count(*) FROM events`) + count(h, `SELECT count(*) FROM audit_rows`) +
		count(h, `SELECT count(*) FROM join_tokens`)
	require.True(t, fault.Is((&command.Service{DB: h.d}).DrainNode(t.Context(), m, n.id), fault.Forbidden))
	require.True(t, fault.Is((&command.Service{DB: h.d, ShutOut: h.server.Disconnect}).BanNode(t.Context(), m, n.id, "x"),
		fault.Forbidden))
	_, err := (&command.Service{DB: h.d, Sealer: plainSealer{}}).CreateJoinToken(t.Context(), m,
		command.CreateJoinTokenInput{})
	require.True(t, fault.Is(err, fault.Forbidden))
	require.Equal(t, before, count(h, `SELECT count(*) FROM events`)+count(h, `SELECT count(*) FROM audit_rows`)+
		count(h, `SELECT count(*) FROM join_tokens`))
	require.Equal(t, fleet.Offline, h.node(n.id).Status(h.now()))
}

func revoke(t *testing.T, h *hub, keyID string) {
	t.Helper()
	_, err := trust.Revoke(trust.RevokeOptions{
		DataDir: h.trustInit.DataDir, Root: trust.RootKey(filepath.Join(h.trustInit.OfflineDir, trust.RootKeyFile),
			passphrase), KeyID: keyID, Now: time.Now(),
	})
	require.NoError(t, err)
	h.dispatcher.EnqueueAll()
}

func TestRevocationReachesTheNodeAndEveryStateIsSignedAnew(t *testing.T) {
	h := newHub(t)
	n := h.enrol()
	l := n.connect(hello("i1"))
	first, firstPush := l.state(0)
	// The acceptance must be known before the pass that compares.
	l.report(first.GetGeneration())
	revoke(t, h, h.keys.State().KeyID())
	env := next(l, func(m *protocol.HubMessage) (*protocol.Envelope, bool) {
		return m.GetPushBundle().GetEnvelope(), m.GetPushBundle() != nil
	})
	bundle, err := n.bundle.Succeed(env)
	require.NoError(t, err)
	_, err = protocol.VerifyState(firstPush.GetEnvelope(), bundle, n.me)
	require.Equal(t, protocol.RefusalKeyRevoked, protocol.RefusalOf(err))
	n.bundle = bundle
	second, _ := l.state(0)
	require.Equal(t, first.GetGeneration()+1, second.GetGeneration())
	require.Equal(t, uint64(2), second.GetMinBundleVersion())
}

// The root changes twice while a node is away: the hub leads it from one bundle to the next.
func TestANodeThatMissedTwoRotationsOfTheRootIsLedThroughBoth(t *testing.T) {
	h := newHub(t)
	n := h.enrol()
	root := trust.RootKey(filepath.Join(h.trustInit.OfflineDir, trust.RootKeyFile), passphrase)
	for _, file := range []string{"second.age", "third.age"} {
		next := filepath.Join(h.trustInit.OfflineDir, file)
		_, err := h.keys.Reload()
		require.NoError(t, err)
		_, err = trust.ChangeRoot(trust.ChangeRootOptions{
			DataDir: h.trustInit.DataDir, Root: root, Add: []trust.NewRootKey{{File: next, Passphrase: passphrase}},
			Retire: strings.TrimPrefix(h.keys.RootFingerprint(), protocol.FingerprintPrefix), Now: time.Now(),
			ScryptWorkFactor: 8,
		})
		require.NoError(t, err)
		root = trust.RootKey(next, passphrase)
	}
	_, err := h.keys.Reload()
	require.NoError(t, err)
	l := n.connect(hello("i1"))
	for version := uint64(2); version <= 3; version++ {
		env := next(l, func(m *protocol.HubMessage) (*protocol.Envelope, bool) {
			return m.GetPushBundle().GetEnvelope(), m.GetPushBundle() != nil
		})
		n.bundle, err = n.bundle.Succeed(env)
		require.NoError(t, err)
		require.Equal(t, version, n.bundle.Version())
		require.NoError(t, l.control.Send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Ack{
			Ack: &protocol.Ack{Document: "bundle", Epoch: 1, Generation: version},
		}}))
	}
	fetched := l.fetch(&protocol.FetchRequest{Request: &protocol.FetchRequest_Bundle{Bundle: true}, BundleVersion: 1}).
		GetBundle()
	require.True(t, proto.Equal(h.keys.BundleAfter(1).Envelope(), fetched), "the step after the one that the node holds")
	fetched = l.fetch(&protocol.FetchRequest{Request: &protocol.FetchRequest_Bundle{Bundle: true}}).GetBundle()
	require.True(t, proto.Equal(h.keys.Bundle().Envelope(), fetched), "an older agent asks for the newest")
}

func sha(data []byte) []byte {
	sum := sha256.Sum256(data)
	return sum[:]
}
