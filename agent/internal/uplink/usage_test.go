package uplink_test

import (
	"crypto/sha256"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/agent/internal/uplink"
	"github.com/gpuaas/gpuaas/protocol"
)

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
