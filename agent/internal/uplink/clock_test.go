package uplink_test

import (
	"context"
	"io"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/agent/clock"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/internal/uplink"
	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// withClock gives the node a machine's clock that tells a wrong time.
func (n *testNode) withClock(rtc time.Time, built time.Time) {
	n.t.Helper()
	source, err := state.MachineTime()
	require.NoError(n.t, err)
	began := time.Now()
	source.RTC = func() time.Time { return rtc.Add(time.Since(began)) }
	n.clock = state.NewClock(n.store, source, built)
}

// A new machine whose battery is dead: the hub's certificates are younger than anything it knows, and it still joins,
// opens its session and learns the time.
func TestNodeWithAClockOf1970EnrollsAndLearnsTheTime(t *testing.T) {
	for name, built := range map[string]time.Time{
		"built a week ago":        time.Now().AddDate(0, 0, -7),
		"built nobody knows when": {},
	} {
		t.Run(name, func(t *testing.T) {
			h, n := newHub(t), openNode(t)
			n.withClock(time.Unix(100, 0), built)
			require.NoError(t, n.enroll(h))
			require.False(t, n.clock.Trusted())
			n.run(uplink.Config{})
			h.next()
			require.Eventually(t, n.clock.Trusted, 10*time.Second, 5*time.Millisecond, "the hub's welcome has the time")
			require.WithinDuration(t, time.Now(), n.clock.Now(), time.Minute)
		})
	}
}

// A node that was off for a month, with a dead battery: by its own clock its certificate is good, by the hub's it has
// expired.
func TestNodeWhoseClockIsBehindRenewsBeforeItAsks(t *testing.T) {
	h, n := newHub(t), openNode(t)
	h.mu.Lock()
	h.lifetime = -30 * 24 * time.Hour
	h.mu.Unlock()
	require.NoError(t, n.enroll(h))
	h.mu.Lock()
	h.lifetime = time.Hour
	h.mu.Unlock()
	off := time.Now().AddDate(0, 0, -30)
	require.NoError(t, n.store.SaveSample(meter.Observation{At: off}, clock.Stamp{
		At: off, RTC: off, BootID: "another boot",
		Synced: true,
	}))
	n.withClock(time.Unix(100, 0), time.Time{})
	n.run(uplink.Config{})
	h.next()
	require.Eventually(t, n.clock.Trusted, 10*time.Second, 5*time.Millisecond)
	h.mu.Lock()
	defer h.mu.Unlock()
	require.Equal(t, 1, h.renewals)
}

// A clock in the future is no floor's business: the certificate has expired by it, and the message points to the
// clock. Who does that has a node: it goes by the later time, for what it knows, until a hub that it now may trust
// tells the right one.
func TestNodeWithAClockInTheFutureSaysSoAndJoinsOnceItIsSet(t *testing.T) {
	h, n := newHub(t), openNode(t)
	source, err := state.MachineTime()
	require.NoError(t, err)
	var ahead atomic.Bool
	source.RTC = func() time.Time {
		if ahead.Load() {
			return time.Now().AddDate(1, 0, 0)
		}
		return time.Now()
	}
	ahead.Store(true)
	n.clock = state.NewClock(n.store, source, time.Time{})
	err = n.enroll(h)
	require.EqualValues(t, "hub_certificate_expired", fault.As(err).Code)
	require.Contains(t, fault.As(err).Public, "Set the clock")
	require.False(t, n.creds.Enrolled())
	require.NoFileExists(t, filepath.Join(n.dir, "identity.json"))

	ahead.Store(false)
	require.NoError(t, n.enroll(h))
	require.WithinDuration(t, time.Now().AddDate(1, 0, 0), n.clock.Now(), time.Minute)
	n.run(uplink.Config{})
	h.next()
	require.Eventually(t, func() bool { return time.Since(n.clock.Now()).Abs() < time.Minute }, 10*time.Second,
		5*time.Millisecond)
}

// A node that has once worked for a while with its clock a year ahead, and without a hub, is not kept away for that
// year.
func TestNodeThatSampledInTheFutureFindsBackToItsHub(t *testing.T) {
	h, n := newHub(t), openNode(t)
	require.NoError(t, n.enroll(h))
	year := time.Now().AddDate(1, 0, 0)
	require.NoError(t, n.store.SaveSample(meter.Observation{At: year}, clock.Stamp{
		At: year, RTC: year,
		BootID: "another boot",
	}))
	n.withClock(time.Now(), time.Time{})
	require.WithinDuration(t, year, n.clock.Now(), time.Minute)
	n.run(uplink.Config{})
	h.next()
	require.Eventually(t, n.clock.Trusted, 10*time.Second, 5*time.Millisecond)
	require.WithinDuration(t, time.Now(), n.clock.Now(), time.Minute)
}

// A log is written by the machine's clock, here a day behind, and a tenant asks by the right time.
func TestALogIsReadSinceATimeOfTheMachine(t *testing.T) {
	h, n := newHub(t), openNode(t)
	n.withClock(time.Now().Add(-24*time.Hour), time.Time{})
	require.NoError(t, n.enroll(h))
	asked := make(chan time.Time, 1)
	n.run(uplink.Config{Logs: func(_ context.Context, _ string, _ int, since time.Time, _ bool) (io.ReadCloser, error) {
		asked <- since
		return io.NopCloser(strings.NewReader("")), nil
	}})
	require.NoError(t, n.store.OpenRun(state.Run{ID: "m1.1", MemberID: "m1", Service: "main", OpenedAt: n.clock.Now()}))
	s := h.next()
	require.Eventually(t, n.clock.Trusted, 10*time.Second, 5*time.Millisecond)
	stream, err := s.conn.Open(t.Context(), &protocol.StreamHeader{Kind: protocol.StreamHeader_KIND_TUNNEL})
	require.NoError(t, err)
	since := time.Now().Add(-15 * time.Minute)
	require.NoError(t, stream.Send(&protocol.TunnelRequest{Request: &protocol.TunnelRequest_Logs{
		Logs: &protocol.LogsRequest{MemberId: "m1", Since: timestamppb.New(since)},
	}}))
	require.WithinDuration(t, since.Add(-24*time.Hour), <-asked, time.Minute)
}
