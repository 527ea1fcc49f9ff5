package uplink_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/internal/uplink"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

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

// A hub closes a connection without a hello after three seconds: a node whose containerd does not answer, or whose
// disk takes seconds to load a program, says hello without what they would have told.
func TestAHelloDoesNotWaitForAMachineThatDoesNotAnswer(t *testing.T) {
	const hubWaits = 3 * time.Second
	h, n := newHub(t), openNode(t)
	require.NoError(t, n.enroll(h))
	left := make(chan time.Duration, 1)
	n.run(uplink.Config{Facts: func(ctx context.Context) *protocol.NodeFacts {
		deadline, _ := ctx.Deadline()
		select {
		case left <- time.Until(deadline):
		default:
		}
		<-ctx.Done()
		return &protocol.NodeFacts{Hostname: "node-one"}
	}})
	require.Equal(t, "node-one", h.next().hello.GetFacts().GetHostname())
	require.Less(t, <-left, hubWaits)
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
	first := s.report()
	require.Len(t, first.GetWorkloads(), 2)
	n.seen.set(agent.Report{Epoch: 1, Generation: 2, Workloads: []*protocol.WorkloadStatus{gone, other}})
	second := s.report()
	require.Len(t, second.GetWorkloads(), 2, "not acknowledged yet")
	require.Greater(t, second.GetCounter(), first.GetCounter())

	s.push(&protocol.HubMessage{Message: &protocol.HubMessage_ReportAck{ReportAck: &protocol.ReportAck{
		Counter: second.GetCounter(),
	}}})
	require.Eventually(t, func() bool { return n.store.Members()["m1"].Reported }, 20*time.Second, time.Millisecond)
	n.seen.set(agent.Report{Epoch: 1, Generation: 3, Workloads: []*protocol.WorkloadStatus{gone, other}})
	require.Len(t, s.report().GetWorkloads(), 1)

	require.NoError(t, s.conn.Close(0, "restored from a backup"))
	require.Len(t, h.next().report().GetWorkloads(), 2, "a hub that was restored hears of it again")
}

// report waits for the next report.
func (s *hubSession) report() (r *protocol.Report) {
	s.until(func(m *protocol.NodeMessage) bool { r = m.GetReport(); return r != nil })
	return r
}

// A session may last for months, and the machine's counter drifts.
func TestTheAnswerToTheNewestReportCorrectsTheClock(t *testing.T) {
	h, n, s := start(t)
	env, parts := h.desired(h.state, nil)
	s.pushState(env, parts...)
	s.accepted()
	acknowledge := func(counter uint64, hub time.Time) {
		s.push(&protocol.HubMessage{Message: &protocol.HubMessage_ReportAck{ReportAck: &protocol.ReportAck{
			Counter: counter, HubTime: timestamppb.New(hub),
		}}})
	}
	next := func(generation uint64) uint64 {
		n.seen.set(agent.Report{Epoch: 1, Generation: generation})
		return s.report().GetCounter()
	}
	began := time.Now()
	first := next(1)
	acknowledge(first, began.Add(time.Hour))
	require.Eventually(t, func() bool { return n.clock.Now().Sub(began) >= time.Hour }, 20*time.Second, time.Millisecond)
	second := next(2)
	acknowledge(first, began.Add(2*time.Hour)) // when it was asked for is forgotten
	acknowledge(second, began.Add(3*time.Hour))
	require.Eventually(t, func() bool { return n.clock.Now().Sub(began) >= 3*time.Hour }, 20*time.Second, time.Millisecond)
	n.seen.mu.Lock()
	defer n.seen.mu.Unlock()
	require.Len(t, n.seen.told, 3, "the welcome, and each newest report")
}

// A machine that sleeps while an answer is on its way reads it hours later. The time in it is as old: the clock,
// which counts the sleep, is right.
func TestAnAnswerThatTheMachineSleptThroughSetsNoClockBack(t *testing.T) {
	h, n := newHub(t), openNode(t)
	var slept atomic.Int64
	source, err := state.MachineTime()
	require.NoError(t, err)
	awake := source.SinceBoot
	source.SinceBoot = func() time.Duration { return awake() + time.Duration(slept.Load()) }
	n.clock = state.NewClock(n.store, source, time.Time{})
	require.NoError(t, n.enroll(h))
	n.run(uplink.Config{})
	s := h.next()
	env, parts := h.desired(h.state, nil)
	s.pushState(env, parts...)
	s.accepted()
	n.seen.set(agent.Report{Epoch: 1, Generation: 1})
	counter := s.report().GetCounter()
	sent := time.Now()
	slept.Store(int64(3 * time.Hour))
	s.push(&protocol.HubMessage{Message: &protocol.HubMessage_ReportAck{ReportAck: &protocol.ReportAck{
		Counter: counter, HubTime: timestamppb.New(sent),
	}}})
	s.pushState(env, parts...) // the node handles one message after the other
	s.accepted()
	n.seen.mu.Lock()
	require.Len(t, n.seen.told, 2, "the welcome, and the report")
	n.seen.mu.Unlock()
	require.GreaterOrEqual(t, n.clock.Now().Sub(sent), 3*time.Hour)
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
	require.False(t, fault.Is(err, fault.Unavailable))

	h.setFetches(func(*protocol.FetchRequest) *protocol.FetchResponse {
		return &protocol.FetchResponse{ErrorReason: protocol.Nack_UNAVAILABLE}
	})
	_, err = n.up.PullCredential(t.Context(), "org/acme/web/app")
	require.True(t, fault.Is(err, fault.Unavailable), "it counts as away: no revision fails for that")
}

func TestLogsComeThroughATunnelAndEndWithTheirReader(t *testing.T) {
	h, n := newHub(t), openNode(t)
	require.NoError(t, n.enroll(h))
	closed := make(chan struct{})
	logs := func(ctx context.Context, runID string, tail int, since time.Time, follow bool) (io.ReadCloser, error) {
		if !follow {
			return io.NopCloser(strings.NewReader(fmt.Sprint(runID, " ", tail, " ", since.Unix()))), nil
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

	stream, refused := tunnel(&protocol.LogsRequest{MemberId: "m1", TailLines: 5, Since: timestamppb.New(time.Unix(7, 0))})
	require.Empty(t, refused)
	all, err := io.ReadAll(stream)
	require.NoError(t, err)
	require.Equal(t, "m1.1 5 7", string(all))

	stream, _ = tunnel(&protocol.LogsRequest{MemberId: "m1", Follow: true})
	line := make([]byte, len("first line\n"))
	_, err = io.ReadFull(stream, line)
	require.NoError(t, err)
	require.NoError(t, stream.Close())
	<-closed
}

// portOf makes a member whose port leads to the listener.
func (n *testNode) portOf(member string, l *net.TCPListener) {
	n.t.Helper()
	require.NoError(n.t, n.store.UpdateMember(member, func(m *state.Member) {
		m.Services = map[string]agent.ServiceRecord{"": {NetworkReady: true}}
		m.Ports = []state.HostPort{{Name: "http", Protocol: "http", Host: uint16(l.Addr().(*net.TCPAddr).Port)}}
	}))
}

// hangs is how long a stream may take before a test fails.
const hangs = time.Minute

func accepted(t *testing.T, at *net.TCPListener) *net.TCPConn {
	t.Helper()
	require.NoError(t, at.SetDeadline(time.Now().Add(hangs)))
	conn, err := at.AcceptTCP()
	require.NoError(t, err)
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(hangs)))
	return conn
}

func TestAPortIsReachedThroughATunnelForAsLongAsItIsTheMembers(t *testing.T) {
	_, n, s := start(t)
	app, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(t, err)
	n.portOf("m1", app)
	connect := func(member, port string) (*link.Stream, protocol.Nack_Reason) {
		stream, err := s.conn.Open(t.Context(), &protocol.StreamHeader{Kind: protocol.StreamHeader_KIND_TUNNEL})
		require.NoError(t, err)
		require.NoError(t, stream.SetReadDeadline(time.Now().Add(hangs)))
		require.NoError(t, stream.Send(&protocol.TunnelRequest{Request: &protocol.TunnelRequest_Connect{
			Connect: &protocol.ConnectRequest{MemberId: member, Port: port},
		}}))
		answer := &protocol.TunnelResponse{}
		require.NoError(t, stream.Receive(answer, protocol.MaxHeaderBytes))
		return stream, answer.GetErrorReason()
	}
	for _, unknown := range [][2]string{{"m2", "http"}, {"m1", "ssh"}, {"", ""}} {
		_, refused := connect(unknown[0], unknown[1])
		require.Equal(t, protocol.Nack_NOT_ASSIGNED, refused)
	}

	stream, refused := connect("m1", "http")
	require.Empty(t, refused)
	conn := accepted(t, app)
	question := bytes.Repeat([]byte("question"), 100_000)
	go func() {
		_, _ = stream.Write(question)
		_ = stream.CloseWrite()
	}()
	got, err := io.ReadAll(conn)
	require.NoError(t, err)
	require.Equal(t, question, got)
	_, err = conn.Write([]byte("answer"))
	require.NoError(t, err, "the other direction is open still")
	require.NoError(t, conn.Close())
	got, err = io.ReadAll(stream)
	require.NoError(t, err)
	require.Equal(t, "answer", string(got))

	// The member's network goes while a stream is open.
	stream, refused = connect("m1", "http")
	require.Empty(t, refused)
	conn = accepted(t, app)
	require.NoError(t, n.store.UpdateMember("m1", func(m *state.Member) { m.Services = nil }))
	_, err = stream.Read(make([]byte, 1))
	require.Error(t, err)
	require.NotErrorIs(t, err, io.EOF)
	_, err = conn.Read(make([]byte, 1))
	require.ErrorContains(t, err, "reset")

	// The port is published at another one of the host while a stream is open: the old one may be the next member's.
	n.portOf("m1", app)
	stream, refused = connect("m1", "http")
	require.Empty(t, refused)
	conn = accepted(t, app)
	moved, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(t, err)
	defer func() { require.NoError(t, moved.Close()) }()
	n.portOf("m1", moved)
	_, err = stream.Read(make([]byte, 1))
	require.Error(t, err)
	require.NotErrorIs(t, err, io.EOF)
	_, err = conn.Read(make([]byte, 1))
	require.ErrorContains(t, err, "reset")

	// Nobody listens.
	n.portOf("m1", app)
	require.NoError(t, app.Close())
	_, refused = connect("m1", "http")
	require.Equal(t, protocol.Nack_UNAVAILABLE, refused)
}
