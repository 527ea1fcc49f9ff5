package uplink_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/clock"
	"github.com/gpuaas/gpuaas/agent/internal/accept"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/internal/uplink"
	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

// testNode is the side under test, with real disk and real time.
type testNode struct {
	t     testing.TB
	dir   string
	creds *uplink.Credentials
	store *state.Store
	clock *state.Clock
	up    *uplink.Uplink
	seen  *observer
	stop  func()
}

// observer stands for the reconciler: it reports what the test sets.
type observer struct {
	mu      sync.Mutex
	report  agent.Report
	changed chan struct{}
	clock   func() *state.Clock
}

func (o *observer) Report() agent.Report {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.report
}

func (o *observer) Subscribe() <-chan struct{} { return o.changed }

func (o *observer) SyncClock(_ context.Context, hub time.Time, took time.Duration) {
	next, _ := o.clock().Told(hub, took)
	o.clock().Set(next)
}

func (o *observer) set(r agent.Report) {
	o.mu.Lock()
	r.Passes = 1
	o.report = r
	o.mu.Unlock()
	select {
	case o.changed <- struct{}{}:
	default:
	}
}

func openNode(t testing.TB) *testNode {
	t.Helper()
	n := &testNode{t: t, dir: t.TempDir(), seen: &observer{changed: make(chan struct{}, 1)}, stop: func() {}}
	n.seen.clock = func() *state.Clock { return n.clock }
	var err error
	n.creds, err = uplink.OpenCredentials(n.dir)
	require.NoError(t, err)
	n.store, err = state.Open(filepath.Join(n.dir, "state"), state.Options{MinFreeBytes: 1})
	require.NoError(t, err)
	require.NoError(t, accept.Resume(n.store, n.creds.Identity().RootFingerprint, "", n.creds.Node()))
	t.Cleanup(func() {
		n.stop()
		require.NoError(t, n.store.Close())
	})
	source, err := state.MachineTime()
	require.NoError(t, err)
	n.clock = state.NewClock(n.store, source, time.Time{})
	return n
}

func (n *testNode) enroll(h *testHub) error {
	return uplink.Enroll(n.t.Context(), uplink.Enrollment{
		APIURL: h.api.URL, RootFingerprint: h.fingerprint(), JoinToken: joinToken, Hostname: "node-one",
	}, n.creds, n.store, n.clock)
}

// newAcceptor fetches bundles through the uplink that is made next, as the agent does.
func (n *testNode) newAcceptor() *accept.Acceptor {
	return accept.New(accept.Config{
		Store: n.store,
		Node:  n.creds.Node,
		FetchBundle: func(ctx context.Context, version uint64) (*protocol.Envelope, error) {
			return n.up.FetchBundle(ctx, version)
		},
	})
}

func (n *testNode) run(cfg uplink.Config) {
	n.t.Helper()
	require.NoError(n.t, n.store.Identify(n.creds.Identity().NodeID, n.creds.Signer()))
	n.up = uplink.New(cfg, n.creds, n.store, n.clock, n.newAcceptor())
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.up.Run(ctx, n.seen) }()
	n.stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(n.t, <-done)
	})
}

// start is a node with an open session.
func start(t testing.TB) (*testHub, *testNode, *hubSession) {
	t.Helper()
	h, n := newHub(t), openNode(t)
	require.NoError(t, n.enroll(h))
	n.run(uplink.Config{AgentVersion: "test"})
	return h, n, h.next()
}

func TestEnrollmentMakesAKeyThatStaysOnTheNode(t *testing.T) {
	h, n := newHub(t), openNode(t)
	require.False(t, n.creds.Enrolled())
	require.NoError(t, n.enroll(h))
	require.True(t, n.creds.Enrolled())
	for _, name := range []string{"node.key", "node.crt", "identity.json"} {
		info, err := os.Stat(filepath.Join(n.dir, name))
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o600), info.Mode().Perm(), name)
	}
	again, err := uplink.OpenCredentials(n.dir)
	require.NoError(t, err)
	require.Equal(t, n.creds.Identity(), again.Identity())
	require.Equal(t, n.creds.Node(), again.Node())
	require.Equal(t, nodeID, again.Identity().NodeID)
	require.NoError(t, n.enroll(h), "an answer that was lost costs nothing: the same key gets the same id")
}

func TestEnrollmentSaysWhatIsWrong(t *testing.T) {
	h := newHub(t)
	good := uplink.Enrollment{APIURL: h.api.URL, RootFingerprint: h.fingerprint(), JoinToken: joinToken, Hostname: "n"}
	taken := openNode(t)
	require.NoError(t, taken.enroll(h))
	for name, c := range map[string]struct {
		change func(*uplink.Enrollment)
		code   string
		says   string
		lasts  bool
	}{
		"wrong fingerprint": {
			func(e *uplink.Enrollment) { e.RootFingerprint = "sha256:" + strings.Repeat("0", 64) },
			"root_fingerprint_mismatch", "Compare the fingerprint", true,
		},
		"pin of no form": {
			func(e *uplink.Enrollment) { e.RootFingerprint = "sha256:00" }, "root_fingerprint_invalid",
			"gpuaas-hub trust show", true,
		},
		"used token": {func(*uplink.Enrollment) {}, "join_token_invalid", "Make a new one", true},
		"nobody there": {
			func(e *uplink.Enrollment) { e.APIURL = "https://127.0.0.1:1" }, "hub_unreachable",
			"Check the address", false,
		},
		"no token": {
			func(e *uplink.Enrollment) { e.JoinToken = "" }, "enrolment_incomplete", "--join-token-file",
			true,
		},
		"plain http": {func(e *uplink.Enrollment) { e.APIURL = "http://hub" }, "api_url_invalid", "https://", true},
	} {
		t.Run(name, func(t *testing.T) {
			n, e := openNode(t), good
			c.change(&e)
			err := uplink.Enroll(t.Context(), e, n.creds, n.store, n.clock)
			require.EqualValues(t, c.code, fault.As(err).Code)
			require.Contains(t, fault.As(err).Public, c.says)
			require.Equal(t, c.lasts, fault.IsPermanent(err))
			require.False(t, n.creds.Enrolled())
		})
	}
}

func TestAnEnrollingNodeShowsItsTokenOnlyToAHubThatThePinnedRootSigned(t *testing.T) {
	h, n := newHub(t), openNode(t)
	// Another hub: it lists the true root's public key beside its own, and signs with its own only.
	honest, thief := h.bundle, newKey(t)
	m := honest.Message()
	m.Roles[0].Keys = append(m.Roles[0].Keys, &protocol.PublicKey{KeyId: protocol.KeyID(pub(thief)), Ed25519: pub(thief)})
	forged, err := protocol.SignMessage(protocol.PayloadBundle, m, protocol.NewEd25519Signer(thief))
	require.NoError(t, err)
	h.bundle, err = protocol.VerifyBundle(forged, protocol.RootRoleDigest(m.Roles[0]))
	require.NoError(t, err)

	require.EqualValues(t, "root_fingerprint_mismatch", fault.As(n.enroll(h)).Code)
	require.False(t, n.store.Bundle().Valid())
	require.False(t, h.used, "the join token was shown")

	h.bundle = honest
	e := uplink.Enrollment{
		APIURL:          h.api.URL,
		RootFingerprint: protocol.RootRoleDigest(honest.Message().GetRoles()[0]),
		JoinToken:       joinToken,
		Hostname:        "n",
	}
	require.NoError(t, uplink.Enroll(t.Context(), e, n.creds, n.store, n.clock), "the digest of the root role is a pin, "+
		"too")
}

func TestHelloTellsWhereTheNodeStands(t *testing.T) {
	h, n, s := start(t)
	require.Equal(t, n.store.Incarnation(), s.hello.GetIncarnation())
	require.Equal(t, "test", s.hello.GetAgentVersion())
	require.EqualValues(t, 1, s.hello.GetBundleVersion())
	require.Zero(t, s.hello.GetGeneration())
	env, parts := h.desired(h.state, nil, &protocol.Workload{Id: "m1"})
	s.pushState(env, parts...)
	require.EqualValues(t, 1, s.accepted().GetGeneration())

	require.NoError(t, s.conn.Close(0, "the hub restarts"))
	s = h.next()
	require.EqualValues(t, 1, s.hello.GetGeneration())
	require.Equal(t, n.store.Accepted().SHA256, s.hello.GetStateSha256())
}

func TestLaw01OnlyWhatIsSignedForThisNodeIsAccepted(t *testing.T) {
	h, n, s := start(t)
	env, parts := h.desired(h.state, func(d *protocol.DesiredState) { d.Generation = 5 }, &protocol.Workload{Id: "m1"})
	s.pushState(env, parts...)
	require.EqualValues(t, 5, s.accepted().GetGeneration())

	next := func(change func(*protocol.DesiredState)) *protocol.Envelope {
		env, _ := h.desired(h.state, func(d *protocol.DesiredState) {
			d.Generation = 6
			if change != nil {
				change(d)
			}
		})
		return env
	}
	forged, _ := h.desired(newKey(t), func(d *protocol.DesiredState) { d.Generation = 6 })
	tampered := next(nil)
	tampered.Payload = append([]byte{}, tampered.GetPayload()...)
	tampered.Payload[len(tampered.GetPayload())-1] ^= 1
	huge := next(nil)
	huge.Payload = make([]byte, protocol.MaxEnvelopeBytes+1)
	stranger := sha256.Sum256([]byte("another key"))
	for _, c := range []struct {
		name   string
		reason protocol.Nack_Reason
		env    *protocol.Envelope
	}{
		{"forged", protocol.Nack_SIGNATURE_INVALID, forged},
		{"tampered", protocol.Nack_SIGNATURE_INVALID, tampered},
		{"signed by the wrong role", protocol.Nack_SIGNATURE_INVALID, func() *protocol.Envelope {
			e, _ := h.desired(h.lease, nil)
			return e
		}()},
		{"for another node", protocol.Nack_WRONG_NODE, next(func(d *protocol.DesiredState) { d.NodeId = "other" })},
		{"for an earlier key of this node", protocol.Nack_WRONG_NODE, next(func(d *protocol.DesiredState) {
			d.NodeKeySha256 = stranger[:]
		})},
		{"older", protocol.Nack_GENERATION_OLDER, next(func(d *protocol.DesiredState) { d.Generation = 4 })},
		{"same generation, other content", protocol.Nack_GENERATION_CONFLICT, next(func(d *protocol.DesiredState) {
			d.Generation = 5
		})},
		{"of an unknown epoch", protocol.Nack_EPOCH_UNKNOWN, next(func(d *protocol.DesiredState) { d.Epoch = 9 })},
		{"oversized", protocol.Nack_TOO_LARGE, huge},
		{"needs a newer trust bundle", protocol.Nack_BUNDLE_TOO_OLD, next(func(d *protocol.DesiredState) {
			d.MinBundleVersion = 7
		})},
		{"empty", protocol.Nack_MALFORMED, nil},
	} {
		h.setFetches(func(*protocol.FetchRequest) *protocol.FetchResponse {
			return &protocol.FetchResponse{ErrorReason: protocol.Nack_UNAVAILABLE}
		})
		s.pushState(c.env)
		require.Equal(t, c.reason, s.refused().GetReason(), c.name)
		require.EqualValues(t, 5, n.store.Accepted().Generation, c.name)
	}
	require.Contains(t, n.up.Status().LastRefusal, protocol.Nack_MALFORMED.Text())

	// A revoked key signs in vain, and the next bundle comes first.
	h.version, h.revoked = 2, []string{protocol.KeyID(pub(h.state))}
	s.push(&protocol.HubMessage{Message: &protocol.HubMessage_PushBundle{PushBundle: &protocol.PushBundle{
		Envelope: h.bundleEnvelope(),
	}}})
	require.Equal(t, protocol.Envelope_BUNDLE, s.accepted().GetDocument())
	s.pushState(next(nil))
	require.Equal(t, protocol.Nack_KEY_REVOKED, s.refused().GetReason())
}

func TestStateThatNeedsANewerBundleFetchesIt(t *testing.T) {
	h, n, s := start(t)
	h.version = 2
	newer := h.bundleEnvelope()
	h.setFetches(func(r *protocol.FetchRequest) *protocol.FetchResponse {
		if !r.GetBundle() {
			return &protocol.FetchResponse{ErrorReason: protocol.Nack_UNKNOWN_PART}
		}
		return &protocol.FetchResponse{Bundle: newer}
	})
	env, _ := h.desired(h.state, func(d *protocol.DesiredState) { d.MinBundleVersion = 2 })
	s.pushState(env)
	require.EqualValues(t, 1, s.accepted().GetGeneration())
	require.EqualValues(t, 2, n.store.Bundle().Version())
}

func TestStateThatNeedsABundleBehindARotatedRootFetchesEachStep(t *testing.T) {
	h, n, s := start(t)
	second := newKey(t)
	old := h.root
	step := func(version uint64, signers ...protocol.Signer) *protocol.Envelope {
		m := h.bundle.Message()
		m.Version = version
		m.Roles[0].Keys = []*protocol.PublicKey{{KeyId: protocol.KeyID(pub(second)), Ed25519: pub(second)}}
		env, err := protocol.SignMessage(protocol.PayloadBundle, m, signers...)
		require.NoError(t, err)
		return env
	}
	steps := map[uint64]*protocol.Envelope{
		1: step(2, protocol.NewEd25519Signer(old), protocol.NewEd25519Signer(second)),
		2: step(3, protocol.NewEd25519Signer(second)),
	}
	h.setFetches(func(r *protocol.FetchRequest) *protocol.FetchResponse {
		return &protocol.FetchResponse{Bundle: steps[r.GetBundleVersion()]}
	})
	env, _ := h.desired(h.state, func(d *protocol.DesiredState) { d.MinBundleVersion = 3 })
	s.pushState(env)
	require.EqualValues(t, 1, s.accepted().GetGeneration())
	require.EqualValues(t, 3, n.store.Bundle().Version())
}

func TestStateThatNeedsABundleThatNobodyHasIsRefused(t *testing.T) {
	h, _, s := start(t)
	same := h.bundle.Envelope()
	h.setFetches(func(*protocol.FetchRequest) *protocol.FetchResponse { return &protocol.FetchResponse{Bundle: same} })
	env, _ := h.desired(h.state, func(d *protocol.DesiredState) { d.MinBundleVersion = 9 })
	s.pushState(env)
	require.Equal(t, protocol.Nack_BUNDLE_TOO_OLD, s.refused().GetReason())
}

func TestMessageAboveItsLimitIsRefusedAndTheNextSessionIsThere(t *testing.T) {
	h, n, s := start(t)
	env, _ := h.desired(h.state, nil)
	s.sendTooLarge()
	require.Equal(t, protocol.Nack_TOO_LARGE, s.refused().GetReason())
	s = h.next()
	s.pushState(env)
	require.EqualValues(t, 1, s.accepted().GetGeneration())
	require.EqualValues(t, 1, n.store.Accepted().Generation)
}

// A report that comes while the hub still reads the refusal would find the stream closed and end the session at once.
func TestReportDoesNotCutOffTheLastRefusal(t *testing.T) {
	h, n := newHub(t), openNode(t)
	require.NoError(t, n.enroll(h))
	var log bytes.Buffer
	n.run(uplink.Config{AgentVersion: "test", Log: slog.New(slog.NewTextHandler(&log, nil))})
	s := h.next()
	s.sendTooLarge()
	require.Equal(t, protocol.Nack_TOO_LARGE, s.refused().GetReason())
	require.ErrorIs(t, s.control.Receive(&protocol.NodeMessage{}, protocol.MaxControlBytes), io.EOF)
	n.seen.set(agent.Report{Epoch: 1, Generation: 1})
	h.next()
	n.stop()
	require.Contains(t, log.String(), link.ErrTooLarge.Error(), "what ended the session")
	require.NotContains(t, log.String(), "link: send")
}

func TestRemovalIsReportedUntilTheHubHasIt(t *testing.T) {
	h, n, s := start(t)
	env, parts := h.desired(h.state, nil, &protocol.Workload{Id: "m1"})
	s.pushState(env, parts...)
	s.accepted()
	env, _ = h.desired(h.state, func(d *protocol.DesiredState) { d.Generation = 2 })
	s.pushState(env)
	s.accepted()
	require.NoError(t, n.store.Retire("m1", protocol.RemovalKinds(), n.clock.Now()))
	gone := &protocol.WorkloadStatus{
		MemberId: "m1", Status: protocol.WorkloadStatus_REMOVED,
		Removal: n.store.Members()["m1"].Removal,
	}
	other := &protocol.WorkloadStatus{MemberId: "m2", Status: protocol.WorkloadStatus_READY}
	n.seen.set(agent.Report{Epoch: 1, Generation: 1, Workloads: []*protocol.WorkloadStatus{gone, other}})
	report := func(s *hubSession) *protocol.Report {
		var r *protocol.Report
		s.until(func(m *protocol.NodeMessage) bool { r = m.GetReport(); return r != nil })
		return r
	}
	first := report(s)
	require.Len(t, first.GetWorkloads(), 2)
	n.seen.set(agent.Report{Epoch: 1, Generation: 2, Workloads: []*protocol.WorkloadStatus{gone, other}})
	second := report(s)
	require.Len(t, second.GetWorkloads(), 2, "not acknowledged yet")
	require.Greater(t, second.GetCounter(), first.GetCounter())

	s.push(&protocol.HubMessage{Message: &protocol.HubMessage_ReportAck{ReportAck: &protocol.ReportAck{
		Counter: second.GetCounter(),
	}}})
	require.Eventually(t, func() bool { return n.store.Members()["m1"].Reported }, 20*time.Second, time.Millisecond)
	n.seen.set(agent.Report{Epoch: 1, Generation: 3, Workloads: []*protocol.WorkloadStatus{gone, other}})
	require.Len(t, report(s).GetWorkloads(), 1)

	require.NoError(t, s.conn.Close(0, "restored from a backup"))
	require.Len(t, report(h.next()).GetWorkloads(), 2, "a hub that was restored hears of it again")
}

// use seals so many segments.
func (n *testNode) use(segments int) {
	n.t.Helper()
	at := n.clock.Now()
	require.NoError(n.t, n.store.OpenRun(state.Run{ID: fmt.Sprintf("m1.%d", at.UnixNano()), MemberID: "m1", OpenedAt: at}))
	var run string
	for id := range n.store.Runs() {
		run = id
	}
	for range segments + 1 {
		r := meter.Run{RunID: run, MemberID: "m1", StartedAt: n.clock.Now(), Up: true}
		require.NoError(n.t, n.store.SaveSample(meter.Observation{At: at, Runs: []meter.Run{r}, CutEvery: time.Second},
			clock.Stamp{}))
		at = at.Add(10 * time.Second)
	}
	at = at.Add(time.Second)
	require.NoError(n.t, n.store.SaveSample(meter.Observation{At: at}, clock.Stamp{}))
	require.NoError(n.t, n.store.CloseRun(run))
}

// takeUsage takes one segment a call and answers as decide says; nil takes all.
func takeUsage(t testing.TB,
	s *hubSession,
) func(decide func(number uint64) (refuse protocol.Nack_Reason, posted uint64)) uint64 {
	t.Helper()
	stream := <-s.usage
	return func(decide func(uint64) (protocol.Nack_Reason, uint64)) uint64 {
		t.Helper()
		m := &protocol.UsageUpload{}
		require.NoError(t, stream.SetDeadline(time.Now().Add(30*time.Second)))
		require.NoError(t, stream.Receive(m, protocol.MaxSegmentBytes+protocol.MaxHeaderBytes))
		number := segmentNumber(t, m.GetSegment())
		ack := &protocol.UsageAck{Incarnation: s.hello.GetIncarnation(), PostedSegment: number}
		if decide != nil {
			ack.NackReason, ack.PostedSegment = decide(number)
		}
		require.NoError(t, stream.Send(ack))
		return number
	}
}

func segmentNumber(t testing.TB, env *protocol.Envelope) uint64 {
	t.Helper()
	seg := &protocol.UsageSegment{}
	require.NoError(t, proto.Unmarshal(env.GetPayload(), seg))
	return seg.GetNumber()
}

func TestUsageGoesUpInOrderAndOnceAcrossSessions(t *testing.T) {
	h, n, s := start(t)
	take := takeUsage(t, s)
	n.use(20)
	last := n.store.Spool().LastSegment
	require.Greater(t, last, uint64(12))
	for want := uint64(1); want <= 10; want++ {
		require.Equal(t, want, take(nil))
	}
	require.Eventually(t, func() bool { return n.store.Spool().Marks.Posted == 10 }, 20*time.Second, time.Millisecond)
	h.setWelcome(func(*protocol.Hello) *protocol.HubMessage {
		return &protocol.HubMessage{Message: &protocol.HubMessage_Welcome{Welcome: &protocol.Welcome{
			HubTime: timestamppb.Now(), PostedSegment: 10,
		}}}
	})
	require.NoError(t, s.conn.Close(0, "the hub restarts"))
	s = h.next()
	take = takeUsage(t, s)
	for want := uint64(11); want <= last; want++ {
		require.Equal(t, want, take(nil))
	}
	require.Eventually(t, func() bool { return n.store.Spool().UnsentBytes == 0 }, 20*time.Second, time.Millisecond)
	n.use(1)
	require.Equal(t, last+1, take(nil), "new usage goes up as it is sealed")
}

func TestUsageThatTheHubCannotTakeNowIsSentAgain(t *testing.T) {
	h, n := newHub(t), openNode(t)
	require.NoError(t, n.enroll(h))
	n.run(uplink.Config{UsageRetry: time.Millisecond})
	take := takeUsage(t, h.next())
	n.use(5)
	last := n.store.Spool().LastSegment
	posted, refusals := uint64(0), 0
	for posted < last {
		take(func(number uint64) (protocol.Nack_Reason, uint64) {
			if number != posted+1 || refusals < 3 && number == 2 {
				refusals++
				return protocol.Nack_UNAVAILABLE, posted
			}
			posted = number
			return 0, posted
		})
	}
	require.GreaterOrEqual(t, refusals, 3)
	require.Eventually(t, func() bool { return n.store.Spool().Marks.Posted == last }, 20*time.Second, time.Millisecond)
}

func TestStoreThatIsBehindTakesANewIncarnationAndDialsAgain(t *testing.T) {
	h, n := newHub(t), openNode(t)
	require.NoError(t, n.enroll(h))
	old := n.store.Incarnation()
	h.setWelcome(func(hello *protocol.Hello) *protocol.HubMessage {
		return &protocol.HubMessage{Message: &protocol.HubMessage_Welcome{Welcome: &protocol.Welcome{
			HubTime: timestamppb.Now(), NewIncarnation: hello.GetIncarnation() == old,
		}}}
	})
	n.run(uplink.Config{})
	require.Equal(t, old, h.next().hello.GetIncarnation())
	s := h.next()
	require.NotEqual(t, old, s.hello.GetIncarnation())
	require.Equal(t, n.store.Incarnation(), s.hello.GetIncarnation())
}

func TestHubThatHasPostedMoreThanWasSealedMakesANewIncarnation(t *testing.T) {
	h, n := newHub(t), openNode(t)
	require.NoError(t, n.enroll(h))
	old := n.store.Incarnation()
	h.setWelcome(func(hello *protocol.Hello) *protocol.HubMessage {
		w := &protocol.Welcome{HubTime: timestamppb.Now()}
		if hello.GetIncarnation() == old {
			w.PostedSegment = 7
		}
		return &protocol.HubMessage{Message: &protocol.HubMessage_Welcome{Welcome: w}}
	})
	n.run(uplink.Config{})
	h.next()
	require.NotEqual(t, old, h.next().hello.GetIncarnation())
}

// The hub has other segments under this incarnation's numbers: no retry helps, so the usage goes up under a new name.
func TestLaw05UsageThatContradictsTheHubIsSealedAgain(t *testing.T) {
	h, n, s := start(t)
	old := n.store.Incarnation()
	take := takeUsage(t, s)
	n.use(3)
	last := n.store.Spool().LastSegment
	take(func(uint64) (protocol.Nack_Reason, uint64) { return 0, 1 })
	take(func(uint64) (protocol.Nack_Reason, uint64) { return protocol.Nack_CHAIN_BROKEN, 0 })
	for range last - 2 {
		take(func(uint64) (protocol.Nack_Reason, uint64) { return protocol.Nack_CHAIN_BROKEN, 0 })
	}
	s = h.next()
	require.NotEqual(t, old, s.hello.GetIncarnation())
	take = takeUsage(t, s)
	for want := uint64(1); want <= n.store.Spool().LastSegment; want++ {
		require.Equal(t, want, take(nil))
	}
	require.Eventually(t, func() bool { return n.store.Spool().UnsentBytes == 0 }, 20*time.Second, time.Millisecond)
	require.Positive(t, n.store.Spool().LastSegment)
}

// The digest in a welcome, or in an acknowledgement, tells a store from a copy of it that went another way.
func TestLaw05AnotherStoresDigestMakesANewIncarnation(t *testing.T) {
	h, n := newHub(t), openNode(t)
	require.NoError(t, n.enroll(h))
	require.NoError(t, n.store.Identify(n.creds.Identity().NodeID, n.creds.Signer()))
	n.use(3)
	old, last := n.store.Incarnation(), n.store.Spool().LastSegment
	h.setWelcome(func(hello *protocol.Hello) *protocol.HubMessage {
		w := &protocol.Welcome{HubTime: timestamppb.Now(), SessionNo: 7}
		if hello.GetIncarnation() == old {
			w.PostedSegment, w.PostedSha256 = last, make([]byte, sha256.Size)
		}
		return &protocol.HubMessage{Message: &protocol.HubMessage_Welcome{Welcome: w}}
	})
	n.run(uplink.Config{})
	require.Zero(t, h.next().hello.GetLastSession())
	s := h.next()
	require.NotEqual(t, old, s.hello.GetIncarnation())
	require.EqualValues(t, 7, s.hello.GetLastSession())
	require.Positive(t, n.store.Spool().UnsentBytes, "nothing of it counts as posted")
}

func TestQuarantineIsShownToTheOwnerUntilItEnds(t *testing.T) {
	h, n := newHub(t), openNode(t)
	require.NoError(t, n.enroll(h))
	reason := "identity_used_twice"
	h.setWelcome(func(*protocol.Hello) *protocol.HubMessage {
		return &protocol.HubMessage{Message: &protocol.HubMessage_Welcome{Welcome: &protocol.Welcome{
			HubTime: timestamppb.Now(), QuarantineReason: reason,
		}}}
	})
	n.run(uplink.Config{})
	s := h.next()
	require.Eventually(t, func() bool { st := n.up.Status(); return st.Connected && st.Quarantined == reason },
		20*time.Second, time.Millisecond)
	h.mu.Lock()
	reason = ""
	h.mu.Unlock()
	s.push(&protocol.HubMessage{Message: &protocol.HubMessage_GoAway{GoAway: &protocol.GoAway{
		Reason: "quarantine_released",
	}}})
	h.next()
	require.Eventually(t, func() bool { st := n.up.Status(); return st.Connected && st.Quarantined == "" }, 20*time.Second,
		time.Millisecond)
}

func TestFetchesUseTheSessionAndFailAtOnceWithoutOne(t *testing.T) {
	h, n := newHub(t), openNode(t)
	require.NoError(t, n.enroll(h))
	n.up = uplink.New(uplink.Config{}, n.creds, n.store, n.clock, n.newAcceptor())
	_, err := n.up.PullCredential(t.Context(), "org/acme/web/app")
	require.True(t, fault.Is(err, fault.Unavailable))

	h.setFetches(func(r *protocol.FetchRequest) *protocol.FetchResponse {
		if p := r.GetPullCredential(); p != nil {
			return &protocol.FetchResponse{PullCredential: &protocol.PullCredential{
				RegistryHost: "registry.example",
				Username:     p.GetRepository(),
			}}
		}
		return &protocol.FetchResponse{ErrorReason: protocol.Nack_UNKNOWN_PART}
	})
	n.run(uplink.Config{})
	h.next()
	require.Eventually(t, func() bool { return n.up.Status().Connected }, 20*time.Second, time.Millisecond)
	c, err := n.up.PullCredential(t.Context(), "org/acme/web/app")
	require.NoError(t, err)
	require.Equal(t, "org/acme/web/app", c.GetUsername())
	_, err = n.up.Part(t.Context(), [32]byte{})
	require.EqualValues(t, protocol.Nack_UNKNOWN_PART.Text(), fault.As(err).Code)
}

func TestLogsComeThroughATunnelAndEndWithTheirReader(t *testing.T) {
	h, n := newHub(t), openNode(t)
	require.NoError(t, n.enroll(h))
	closed := make(chan struct{})
	logs := func(ctx context.Context, runID string, tail int, follow bool) (io.ReadCloser, error) {
		if !follow {
			return io.NopCloser(strings.NewReader(fmt.Sprintf("%s %d", runID, tail))), nil
		}
		pr, pw := io.Pipe()
		context.AfterFunc(ctx, func() {
			_ = pw.CloseWithError(errors.New("no reader"))
			close(closed)
		})
		go func() { _, _ = io.WriteString(pw, "first line\n") }()
		return pr, nil
	}
	n.run(uplink.Config{Logs: logs})
	require.NoError(t, n.store.OpenRun(state.Run{ID: "m1.1", MemberID: "m1", Service: "main", OpenedAt: n.clock.Now()}))
	s := h.next()
	tunnel := func(r *protocol.LogsRequest) (io.ReadCloser, protocol.Nack_Reason) {
		stream, err := s.conn.Open(t.Context(), &protocol.StreamHeader{Kind: protocol.StreamHeader_KIND_TUNNEL})
		require.NoError(t, err)
		require.NoError(t, stream.Send(&protocol.TunnelRequest{Request: &protocol.TunnelRequest_Logs{Logs: r}}))
		answer := &protocol.TunnelResponse{}
		require.NoError(t, stream.Receive(answer, protocol.MaxHeaderBytes))
		return stream, answer.GetErrorReason()
	}
	_, refused := tunnel(&protocol.LogsRequest{MemberId: "someone-else"})
	require.Equal(t, protocol.Nack_NOT_ASSIGNED, refused)

	stream, refused := tunnel(&protocol.LogsRequest{MemberId: "m1", TailLines: 5})
	require.Empty(t, refused)
	all, err := io.ReadAll(stream)
	require.NoError(t, err)
	require.Equal(t, "m1.1 5", string(all))

	stream, _ = tunnel(&protocol.LogsRequest{MemberId: "m1", Follow: true})
	line := make([]byte, len("first line\n"))
	_, err = io.ReadFull(stream, line)
	require.NoError(t, err)
	require.NoError(t, stream.Close())
	<-closed
}

func TestCertificateThatIsOverWhenItIsIssuedIsNotRenewedWithoutEnd(t *testing.T) {
	h, n := newHub(t), openNode(t)
	h.mu.Lock()
	h.lifetime = -time.Hour
	h.mu.Unlock()
	require.NoError(t, n.enroll(h))
	renewals := func() int {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.renewals
	}
	n.run(uplink.Config{})
	require.Eventually(t, func() bool { return renewals() > 0 }, 20*time.Second, time.Millisecond)
	require.Never(t, func() bool { return renewals() > 1 }, 500*time.Millisecond, 10*time.Millisecond)
}

func TestRenewalShowsTheCertificateWhileItCounts(t *testing.T) {
	h, n := newHub(t), openNode(t)
	h.mu.Lock()
	h.lifetime, h.age = time.Hour, 50*time.Minute
	h.mu.Unlock()
	require.NoError(t, n.enroll(h))
	h.mu.Lock()
	h.age = 0
	h.mu.Unlock()
	n.run(uplink.Config{})
	require.Eventually(t, func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.renewals > 0
	}, 20*time.Second, time.Millisecond)
	h.mu.Lock()
	defer h.mu.Unlock()
	require.Equal(t, h.renewals, h.shown)
}

func TestCertificateIsRenewedAlsoAfterItHasExpired(t *testing.T) {
	h, n := newHub(t), openNode(t)
	h.mu.Lock()
	h.lifetime = -time.Hour
	h.mu.Unlock()
	require.NoError(t, n.enroll(h))
	h.mu.Lock()
	h.lifetime = time.Hour
	h.mu.Unlock()
	n.run(uplink.Config{})
	h.next()
	h.mu.Lock()
	defer h.mu.Unlock()
	require.Equal(t, 1, h.renewals)
	again, err := uplink.OpenCredentials(n.dir)
	require.NoError(t, err)
	cert, err := again.Certificate()
	require.NoError(t, err)
	require.True(t, cert.Leaf.NotAfter.After(time.Now()))
}

func TestANodeWhoseTrustBundleIsGoneGetsItAgainByItsPin(t *testing.T) {
	h, n := newHub(t), openNode(t)
	require.NoError(t, n.enroll(h))
	require.NoError(t, n.store.Close())
	require.NoError(t, os.RemoveAll(filepath.Join(n.dir, "state")))
	var err error
	n.store, err = state.Open(filepath.Join(n.dir, "state"), state.Options{MinFreeBytes: 1})
	require.NoError(t, err)
	require.NoError(t, accept.Resume(n.store, n.creds.Identity().RootFingerprint, "", n.creds.Node()))
	source, err := state.MachineTime()
	require.NoError(t, err)
	n.clock = state.NewClock(n.store, source, time.Time{})
	require.False(t, n.store.Bundle().Valid())
	n.run(uplink.Config{AgentVersion: "test"})
	require.EqualValues(t, 1, h.next().hello.GetBundleVersion())
}
