package nodelink_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
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
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

func TestANewNodeGetsAnEmptyStateAndCountsAsOnline(t *testing.T) {
	h := hubtest.New(t)
	n := h.Enroll()
	l := n.Connect(hubtest.Hello("i1"))
	require.Equal(t, uint64(1), l.Welcome.GetSessionNo())
	require.False(t, l.Welcome.GetNewIncarnation())
	state, _ := l.ExpectState(0)
	require.Equal(t, uint64(1), state.GetGeneration())
	l.Report(1)
	got := h.NodeRow(n.ID)
	require.Equal(t, fleet.Online, got.Status(h.Now()))
	require.Equal(t, uint64(1), got.AcceptedGeneration)
	require.EqualValues(t, 8, got.CPUCores)
}

func TestLaunchReachesTheNodeWithItsLease(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	l.LastLeases = nil
	i := h.Launch()
	state, push := l.ExpectState(1)
	require.Len(t, push.GetParts(), 1)
	require.Equal(t, i.Members[0].ID, state.GetParts()[0].GetId())
	leases := l.ExpectLeases()
	require.Equal(t, "i1", leases.GetIncarnation())
	require.Len(t, leases.GetLeases(), 1)
	require.Equal(t, i.Members[0].ID, leases.GetLeases()[0].GetMemberId())

	part := l.Fetch(&protocol.FetchRequest{Request: &protocol.FetchRequest_PartSha256{
		PartSha256: state.GetParts()[0].GetSha256(),
	}})
	require.Empty(t, part.GetErrorReason())
	require.Equal(t, push.GetParts()[0], part.GetPart())

	credential := l.Fetch(&protocol.FetchRequest{Request: &protocol.FetchRequest_PullCredential{
		PullCredential: &protocol.PullCredentialRequest{Repository: hubtest.DemoRepo},
	}})
	require.Equal(t, n.ID, credential.GetPullCredential().GetUsername())
	other := l.Fetch(&protocol.FetchRequest{Request: &protocol.FetchRequest_PullCredential{
		PullCredential: &protocol.PullCredentialRequest{Repository: "org/other/app/x"},
	}})
	require.Equal(t, protocol.Nack_NOT_ASSIGNED, other.GetErrorReason(), "a node gets credentials only for what it is "+
		"to run")
	bundle := l.Fetch(&protocol.FetchRequest{Request: &protocol.FetchRequest_Bundle{Bundle: true}})
	require.True(t, proto.Equal(h.Keys.Bundle().Envelope(), bundle.GetBundle()))
}

func TestANodeFetchesOnlyItsOwnParts(t *testing.T) {
	h, _, l := hubtest.NewWithNode(t)
	h.Launch()
	state, _ := l.ExpectState(1)
	other := h.Enroll().Connect(hubtest.Hello("i1"))
	other.ExpectState(0)
	digest := state.GetParts()[0].GetSha256()
	require.Equal(t, protocol.Nack_UNKNOWN_PART,
		other.Fetch(&protocol.FetchRequest{Request: &protocol.FetchRequest_PartSha256{PartSha256: digest}}).GetErrorReason())
	require.Equal(t, protocol.Nack_MALFORMED,
		other.Fetch(&protocol.FetchRequest{Request: &protocol.FetchRequest_PartSha256{PartSha256: []byte("x")}}).
			GetErrorReason())
	require.Equal(t, protocol.Nack_MALFORMED, other.Fetch(&protocol.FetchRequest{}).GetErrorReason())
}

func TestANewerConnectionReplacesTheOlder(t *testing.T) {
	h := hubtest.New(t)
	n := h.Enroll()
	older := n.Connect(hubtest.Hello("i1"))
	older.ExpectState(0)
	newer := n.Connect(hubtest.Hello("i1"))
	require.Equal(t, uint64(2), newer.Welcome.GetSessionNo())
	<-older.Conn.Done()
	newer.Report(1)
	require.Equal(t, fleet.Online, h.NodeRow(n.ID).Status(h.Now()), "the end of the older connection does not make the "+
		"node offline")
}

func TestBannedNodeIsCutOffAndRefused(t *testing.T) {
	h := hubtest.New(t)
	n := h.Enroll()
	l := n.Connect(hubtest.Hello("i1"))
	l.ExpectState(0)
	ban := &command.Service{DB: h.DB}
	require.NoError(t, ban.BanNode(t.Context(), h.Admin("ban"), n.ID, "stolen"))
	<-l.Conn.Done()

	_, _, answer := n.SendHello(hubtest.Hello("i1"))
	require.Equal(t, "node_banned", answer.GetGoAway().GetReason())
	text := hubtest.CSR(t, n.Key)
	_, err := (&command.Service{DB: h.DB, Keys: h.Keys, CertificateTTL: time.Hour}).RenewNode(t.Context(), h.Admin(""),
		command.RenewNodeInput{
			NodeID: n.ID, CSRPEM: text, IssuedAt: "now", Signature: ed25519.Sign(n.Key, fleet.RenewalMessage(n.ID, text, "now")),
		})
	require.True(t, fault.Is(err, fault.Forbidden))
	require.Equal(t, 1, hubtest.Count(h, `SELECT count(*) FROM events WHERE type = 'fleet.node.banned'`))
	require.Equal(t, 1, hubtest.Count(h, `SELECT count(*) FROM audit_rows WHERE resource_id = $1 AND reason = 'stolen'`,
		n.ID))
}

func TestRenewedCertificateConnectsAfterExpiry(t *testing.T) {
	h := hubtest.New(t)
	n := h.Enroll()
	request := hubtest.CSR(t, n.Key)
	parsed, _, err := trust.ParseNodeCSR(request)
	require.NoError(t, err)
	expired, err := h.Keys.IssueNodeCertificate(parsed, n.ID, time.Minute, time.Now().Add(-time.Hour))
	require.NoError(t, err)
	n.UseCertificate(expired.CertificatePEM)
	conn, err := n.Dial()
	if err == nil {
		// The node's side of the handshake ends first; the hub's refusal follows.
		<-conn.Done()
	}

	issuedAt := "1970-01-01T00:00:00Z"
	hub := &command.Service{DB: h.DB, Keys: h.Keys, CertificateTTL: time.Hour}
	renew := func(at time.Time) (command.NodeCredentials, error) {
		m := h.Admin("")
		m.Now = at
		return hub.RenewNode(t.Context(), m, command.RenewNodeInput{
			NodeID: n.ID, CSRPEM: request, IssuedAt: issuedAt, Signature: ed25519.Sign(n.Key, fleet.RenewalMessage(n.ID, request,
				issuedAt)),
		})
	}
	// A stolen key could have the hub write events and audit rows at the rate of requests.
	at := h.Admin("").Now
	hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (fleet.Node, error) {
		return fleet.CertificateIssued(ctx, tx, n.ID, at.Add(-time.Hour), at)
	})
	renewed, err := renew(at)
	require.NoError(t, err)
	_, err = renew(at.Add(59 * time.Second))
	require.True(t, fault.Is(err, fault.RateLimited), "%v", err)
	require.Equal(t, time.Second, fault.As(err).RetryDelay)
	_, err = renew(at.Add(time.Minute))
	require.NoError(t, err)
	_, err = renew(at)
	require.NoError(t, err, "the hub's clock was ahead")
	hub.CertificateTTL = 2 * time.Hour
	_, err = renew(at)
	require.NoError(t, err, "another lifetime")
	n.UseCertificate(renewed.Certificate.CertificatePEM)
	n.Connect(hubtest.Hello("i1")).ExpectState(0)
}

func TestACertificateForAnotherKeyOfTheNodeIsRefused(t *testing.T) {
	h := hubtest.New(t)
	n := h.Enroll()
	_, stolen, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	parsed, _, err := trust.ParseNodeCSR(hubtest.CSR(t, stolen))
	require.NoError(t, err)
	issued, err := h.Keys.IssueNodeCertificate(parsed, n.ID, time.Hour, time.Now())
	require.NoError(t, err)
	n.Key = stolen
	n.UseCertificate(issued.CertificatePEM)
	_, _, answer := n.SendHello(hubtest.Hello("i1"))
	require.Equal(t, "node_key_unknown", answer.GetGoAway().GetReason())
}

func TestTheFirstMessageMustBeAHello(t *testing.T) {
	h := hubtest.New(t)
	n := h.Enroll()
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
			conn, err := n.Dial()
			require.NoError(t, err)
			open(conn)
			<-conn.Done()
			code, ok := link.CloseCode(conn.Err())
			require.True(t, ok)
			require.Equal(t, link.CodeProtocol, code)
		})
	}
	_, _, answer := n.SendHello(hubtest.Hello("with spaces and\nlines"))
	require.Equal(t, "incarnation_invalid", answer.GetGoAway().GetReason())
	require.Empty(t, h.Link.Nodes())
}

func TestASlowStreamDelaysNoOther(t *testing.T) {
	h := hubtest.New(t)
	n := h.Enroll()
	l := n.Connect(hubtest.Hello("i1"))
	l.ExpectState(0)
	// Streams that never get on: a usage stream in the middle of a message, and fetches that never ask.
	for _, kind := range []protocol.StreamHeader_Kind{
		protocol.StreamHeader_KIND_USAGE, protocol.StreamHeader_KIND_FETCH,
		protocol.StreamHeader_KIND_FETCH,
	} {
		s, err := l.Conn.Open(t.Context(), &protocol.StreamHeader{Kind: kind})
		require.NoError(t, err)
		_, err = s.Write([]byte{0xff})
		require.NoError(t, err)
	}
	l.Report(1)
	require.NotNil(t, l.Fetch(&protocol.FetchRequest{Request: &protocol.FetchRequest_Bundle{Bundle: true}}).GetBundle())
	ack := hubtest.Upload(t, l.OpenUsage(), n.Seal("i1", nil)[0])
	require.Empty(t, ack.GetNackReason())
}

func TestLogsComeThroughTheNodesOwnConnection(t *testing.T) {
	h := hubtest.New(t)
	n := h.Enroll()
	_, err := h.Link.Logs(t.Context(), n.ID, "org", &protocol.LogsRequest{})
	require.EqualValues(t, "node_unreachable", fault.As(err).Code)

	l := n.Connect(hubtest.Hello("i1"))
	l.ExpectState(0)
	go func() {
		for {
			s, header, err := l.Conn.Accept(context.Background())
			if err != nil {
				return
			}
			request := &protocol.TunnelRequest{}
			if header.GetKind() != protocol.StreamHeader_KIND_TUNNEL || s.Receive(request, protocol.MaxHeaderBytes) != nil {
				s.Abort()
				continue
			}
			if request.GetLogs().GetMemberId() == "" {
				_ = s.Send(&protocol.TunnelResponse{ErrorReason: protocol.Nack_NOT_ASSIGNED})
				_ = s.Close()
				continue
			}
			_ = s.Send(&protocol.TunnelResponse{})
			_, _ = s.Write([]byte("line of " + request.GetLogs().GetMemberId()))
			_ = s.CloseWrite()
		}
	}()
	logs, err := h.Link.Logs(t.Context(), n.ID, "org", &protocol.LogsRequest{MemberId: "m1"})
	require.NoError(t, err)
	buf := make([]byte, 100)
	read, _ := logs.Read(buf)
	require.Equal(t, "line of m1", string(buf[:read]))
	require.NoError(t, logs.Close())
	require.NoError(t, logs.Close(), "closing twice is harmless")

	for range 40 {
		_, err = h.Link.Logs(t.Context(), n.ID, "org", &protocol.LogsRequest{})
		require.EqualValues(t, "node_refused", fault.As(err).Code)
	}
	// One org's followed logs leave room for another's.
	var followed []io.Closer
	for range 24 {
		logs, err := h.Link.Logs(t.Context(), n.ID, "greedy", &protocol.LogsRequest{MemberId: "m1", Follow: true})
		if len(followed) == 20 {
			require.EqualValues(t, "tunnels_busy", fault.As(err).Code)
			continue
		}
		require.NoError(t, err)
		followed = append(followed, logs)
	}
	// Each refused or closed tunnel gave its place back.
	for range 20 {
		logs, err := h.Link.Logs(t.Context(), n.ID, "org", &protocol.LogsRequest{MemberId: "m1"})
		require.NoError(t, err)
		require.NoError(t, logs.Close())
	}
	for _, logs := range followed {
		require.NoError(t, logs.Close())
	}
}

func TestRefusalIsVisibleOnTheNodeAndAsEventAndAudit(t *testing.T) {
	h := hubtest.New(t)
	n := h.Enroll()
	l := n.Connect(hubtest.Hello("i1"))
	state, _ := l.ExpectState(0)
	refuse := func() {
		l.Send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Nack{Nack: &protocol.Nack{
			Document: protocol.Envelope_STATE, Epoch: 1, Generation: state.GetGeneration() - 1,
			Reason: protocol.Nack_GENERATION_OLDER,
			Detail: "generation 0 is older than 1",
		}}})
	}
	refuse()
	refuse()
	l.Report(state.GetGeneration())
	refusals := hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (map[string][]fleet.Refusal, error) {
		return fleet.Refusals(ctx, tx, n.ID)
	})[n.ID]
	require.Len(t, refusals, 1, "the same again is no news")
	require.Equal(t, protocol.Nack_GENERATION_OLDER.Text(), refusals[0].Reason)
	require.Equal(t, 1,
		hubtest.Count(h, `SELECT count(*) FROM events WHERE type = 'fleet.node.document_refused' AND subject = $1`,
			n.ID))
	require.Equal(t, 1, hubtest.Count(h, `SELECT count(*) FROM audit_rows WHERE resource_id = $1 AND reason = $2
		AND source_address LIKE '127.%'`, n.ID, protocol.Nack_GENERATION_OLDER.Text()))
	require.Equal(t, state.GetGeneration(), hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (uint64, error) {
		return dispatch.NewestGeneration(ctx, tx, n.ID)
	}), "an old document is no reason for a new state")
}

func TestSilenceMakesANodeOffline(t *testing.T) {
	h := hubtest.New(t)
	n := h.Enroll()
	l := n.Connect(hubtest.Hello("i1"))
	l.ExpectState(0)
	require.Equal(t, 1, hubtest.Count(h, `SELECT count(*) FROM events WHERE type = 'fleet.node.online'`))
	h.Advance(fleet.OnlineWindow)
	require.NoError(t, h.Nodes.Sweep(t.Context()))
	require.NoError(t, h.Nodes.Sweep(t.Context()))
	require.Equal(t, 1, hubtest.Count(h, `SELECT count(*) FROM events WHERE type = 'fleet.node.offline'`))
	require.Equal(t, fleet.Offline, h.NodeRow(n.ID).Status(h.Now()))
	l.Report(1)
	require.Equal(t, 2, hubtest.Count(h, `SELECT count(*) FROM events WHERE type = 'fleet.node.online'`))
	require.Equal(t, fleet.Online, h.NodeRow(n.ID).Status(h.Now()))
}

func TestUnauthorisedCallersChangeNoNode(t *testing.T) {
	h := hubtest.New(t)
	n := h.Enroll()
	m := h.Admin("k")
	m.Principal = iam.Principal{
		Type: principal.User, ID: db.NewID(), OrgID: db.NewID(),
		Bindings: []iam.Binding{{Role: iam.OrgAdmin}},
	}
	before := hubtest.Count(h, `SELECT count(*) FROM events`) + hubtest.Count(h, `SELECT count(*) FROM audit_rows`) +
		hubtest.Count(h, `SELECT count(*) FROM join_tokens`)
	require.True(t, fault.Is((&command.Service{DB: h.DB}).DrainNode(t.Context(), m, n.ID), fault.Forbidden))
	require.True(t, fault.Is((&command.Service{DB: h.DB}).BanNode(t.Context(), m, n.ID, "x"),
		fault.Forbidden))
	_, err := (&command.Service{DB: h.DB, Sealer: hubtest.PlainSealer{}}).CreateJoinToken(t.Context(), m,
		fleet.NewToken{})
	require.True(t, fault.Is(err, fault.Forbidden))
	require.Equal(t, before, hubtest.Count(h, `SELECT count(*) FROM events`)+hubtest.Count(h,
		`SELECT count(*) FROM audit_rows`)+
		hubtest.Count(h, `SELECT count(*) FROM join_tokens`))
	require.Equal(t, fleet.Offline, h.NodeRow(n.ID).Status(h.Now()))
}

func revoke(t *testing.T, h *hubtest.Hub, keyID string) {
	t.Helper()
	_, err := trust.Revoke(trust.RevokeOptions{
		DataDir: h.TrustInit.DataDir, Root: trust.RootKey(filepath.Join(h.TrustInit.OfflineDir, trust.RootKeyFile),
			hubtest.Passphrase), KeyID: keyID, Now: time.Now(),
	})
	require.NoError(t, err)
	h.Dispatcher.EnqueueAll()
}

func TestRevocationReachesTheNodeAndEveryStateIsSignedAnew(t *testing.T) {
	h := hubtest.New(t)
	n := h.Enroll()
	l := n.Connect(hubtest.Hello("i1"))
	first, firstPush := l.ExpectState(0)
	// The acceptance must be known before the pass that compares.
	l.Report(first.GetGeneration())
	revoke(t, h, h.Keys.State().KeyID())
	env := hubtest.Next(l, func(m *protocol.HubMessage) (*protocol.Envelope, bool) {
		return m.GetPushBundle().GetEnvelope(), m.GetPushBundle() != nil
	})
	bundle, err := n.Bundle.Succeed(env)
	require.NoError(t, err)
	_, err = protocol.VerifyState(firstPush.GetEnvelope(), bundle, n.Identity)
	require.Equal(t, protocol.Nack_KEY_REVOKED, protocol.RefusalOf(err))
	n.Bundle = bundle
	second, _ := l.ExpectState(0)
	require.Equal(t, first.GetGeneration()+1, second.GetGeneration())
	require.Equal(t, uint64(2), second.GetMinBundleVersion())
}

// The root changes twice while a node is away: the hub leads it from one bundle to the next.
func TestANodeThatMissedTwoRotationsOfTheRootIsLedThroughBoth(t *testing.T) {
	h := hubtest.New(t)
	n := h.Enroll()
	root := trust.RootKey(filepath.Join(h.TrustInit.OfflineDir, trust.RootKeyFile), hubtest.Passphrase)
	for _, file := range []string{"second.age", "third.age"} {
		next := filepath.Join(h.TrustInit.OfflineDir, file)
		_, err := h.Keys.Reload()
		require.NoError(t, err)
		_, err = trust.SignNext(trust.NextBundle{
			DataDir: h.TrustInit.DataDir, Root: root, Add: []trust.NewRootKey{{File: next, Passphrase: hubtest.Passphrase}},
			Retire: strings.TrimPrefix(h.Keys.RootFingerprint(), protocol.FingerprintPrefix), Now: time.Now(),
			ScryptWorkFactor: 8,
		})
		require.NoError(t, err)
		root = trust.RootKey(next, hubtest.Passphrase)
	}
	_, err := h.Keys.Reload()
	require.NoError(t, err)
	l := n.Connect(hubtest.Hello("i1"))
	for version := uint64(2); version <= 3; version++ {
		env := hubtest.Next(l, func(m *protocol.HubMessage) (*protocol.Envelope, bool) {
			return m.GetPushBundle().GetEnvelope(), m.GetPushBundle() != nil
		})
		n.Bundle, err = n.Bundle.Succeed(env)
		require.NoError(t, err)
		require.Equal(t, version, n.Bundle.Version())
		require.NoError(t, l.Control.Send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Ack{
			Ack: &protocol.Ack{Document: protocol.Envelope_BUNDLE, Epoch: 1, Generation: version},
		}}))
	}
	fetched := l.Fetch(&protocol.FetchRequest{Request: &protocol.FetchRequest_Bundle{Bundle: true}, BundleVersion: 1}).
		GetBundle()
	require.True(t, proto.Equal(h.Keys.BundleAfter(1).Envelope(), fetched), "the step after the one that the node holds")
	fetched = l.Fetch(&protocol.FetchRequest{Request: &protocol.FetchRequest_Bundle{Bundle: true}}).GetBundle()
	require.True(t, proto.Equal(h.Keys.Bundle().Envelope(), fetched), "an older agent asks for the newest")
}
