package nodelink_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

func helloMessage(h *protocol.Hello) *protocol.NodeMessage {
	return &protocol.NodeMessage{Message: &protocol.NodeMessage_Hello{Hello: h}}
}

func accelerators(n int, model string) []*protocol.Accelerator {
	list := make([]*protocol.Accelerator, n)
	for i := range list {
		list[i] = &protocol.Accelerator{Id: "GPU-" + db.NewID(), Model: model}
	}
	return list
}

func TestHelloWithManyAcceleratorsIsCutOrRefused(t *testing.T) {
	h := hubtest.New(t)
	n := h.Enroll()
	large := hubtest.Hello("i1")
	large.Facts.Accelerators = make([]*protocol.Accelerator, 100_000)
	for i := range large.Facts.Accelerators {
		large.Facts.Accelerators[i] = &protocol.Accelerator{}
	}
	n.ExpectEndAfter(helloMessage(large))
	require.Zero(t, hubtest.Count(h, `SELECT count(*) FROM node_sessions`), "more than 64 KiB are not read")

	many := hubtest.Hello("i1")
	many.Facts.Accelerators = accelerators(900, "")
	n.Connect(many)
	require.Equal(t, protocol.MaxAccelerators, hubtest.Count(h, `SELECT count(*) FROM accelerators`))
	require.Len(t, shown(h, n), protocol.MaxAccelerators)
}

// shown are the accelerators of a node in the read model.
func shown(h *hubtest.Hub, n *hubtest.Node) []*protocol.Accelerator {
	return hubtest.Tx(h, func(ctx context.Context, tx db.Tx) ([]*protocol.Accelerator, error) {
		of, err := capacity.Accelerators(ctx, tx, n.ID)
		return of[n.ID], err
	})
}

func TestAcceleratorsOfAReportAreShownAtOnce(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	report := func(list ...*protocol.Accelerator) {
		l.Counter++
		l.Send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Report{Report: &protocol.Report{
			Counter: l.Counter, Accelerators: list,
		}}})
		hubtest.Next(l, func(m *protocol.HubMessage) (bool, bool) {
			return true, m.GetReportAck().GetCounter() == l.Counter
		})
	}
	gpu := &protocol.Accelerator{Id: "GPU-1", Vendor: "nvidia", Model: "H100", Health: "ok", PciAddress: "0000:1b:00.0"}
	report(gpu)
	require.True(t, proto.Equal(gpu, shown(h, n)[0]))
	gpu.Health = "faulty"
	report(gpu)
	require.Equal(t, "faulty", shown(h, n)[0].GetHealth())
	report()
	require.Equal(t, "missing", shown(h, n)[0].GetHealth())
}

func TestTheAnswerToAReportTellsTheHubsTime(t *testing.T) {
	_, _, l := hubtest.NewWithNode(t)
	asked := time.Now()
	l.Counter++
	l.Send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Report{Report: &protocol.Report{Counter: l.Counter}}})
	ack := hubtest.Next(l, func(m *protocol.HubMessage) (*protocol.ReportAck, bool) {
		return m.GetReportAck(), m.GetReportAck().GetCounter() == l.Counter
	})
	require.WithinRange(t, ack.GetHubTime().AsTime(), asked, time.Now())
}

// A node whose every hello names other accelerators fills no table.
func TestNodeThatNamesEverNewAcceleratorsFillsNoTable(t *testing.T) {
	h := hubtest.New(t)
	n := h.Enroll()
	for range 6 {
		m := hubtest.Hello("i1")
		m.Facts.Accelerators = accelerators(protocol.MaxAccelerators, "m")
		_, _, answer := n.SendHello(m)
		require.NotNil(t, answer.GetWelcome())
	}
	require.Equal(t, 4*protocol.MaxAccelerators, hubtest.Count(h, `SELECT count(*) FROM accelerators`))
}

// One bad word must not fail the transaction that its hello shares with others.
func TestFactsThatTheDatabaseCannotStoreAreCleaned(t *testing.T) {
	h := hubtest.New(t)
	n := h.Enroll()
	m := hubtest.Hello("i1")
	m.Facts.Kernel, m.Facts.Hostname, m.Facts.MemoryBytes = "6.1\x00", strings.Repeat("h", 5000), 1<<63+1
	m.Features, m.Facts.Conditions = []string{"a\x00b"}, []string{"c\x00d"}
	m.Facts.Accelerators = []*protocol.Accelerator{{
		Id: "GPU\x00-1", Model: strings.Repeat("m", 5000),
		MemoryBytes: 1<<64 - 1,
	}}
	n.Connect(m)
	got := h.NodeRow(n.ID)
	hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (int, error) { return 0, fleet.LoadFacts(ctx, tx, &got) })
	require.Equal(t, "6.1", got.Facts.GetKernel())
	require.Equal(t, []string{"ab"}, got.Features)
	require.Equal(t, []string{"cd"}, got.Conditions)
	require.Len(t, got.Hostname, 128)
	require.Positive(t, got.MemoryBytes)
	require.Equal(t, 1,
		hubtest.Count(h, `SELECT count(*) FROM accelerators WHERE id = 'GPU-1' AND length(model) = 128 AND memory_bytes > 0`))
}

func TestReportBeyondTheMembersOfItsNodeEndsTheSession(t *testing.T) {
	h := hubtest.New(t)
	n := h.Enroll()
	l := n.Connect(hubtest.Hello("i1"))
	l.ExpectState(0)
	l.Report(1, &protocol.WorkloadStatus{MemberId: "unknown", Detail: strings.Repeat("d", protocol.MaxReportBaseBytes/2)})
	_ = l.Control.Send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Report{Report: &protocol.Report{
		Counter: 2, Conditions: []string{string(bytes.Repeat([]byte{'c'}, protocol.MaxReportBaseBytes))},
	}}})
	<-l.Conn.Done()
	n.Connect(hubtest.Hello("i1")) // and the node may come again
}

func TestBannedNodeIsRefusedInTheHandshake(t *testing.T) {
	h := hubtest.New(t)
	n, other := h.Enroll(), h.Enroll()
	h.RefuseTLS(n.ID)
	conn, err := n.Dial()
	if err == nil { // the client ends its part of the handshake before the hub does
		<-conn.Done()
		err = conn.Err()
	}
	require.ErrorContains(t, err, "bad certificate")
	other.Connect(hubtest.Hello("i1"))
}

// Two connections that say nothing hold neither a place nor the node out for long.
func TestNodeThatSaysNothingLosesItsConnections(t *testing.T) {
	h := hubtest.New(t)
	n, other := h.Enroll(), h.Enroll()
	var silent []*link.Conn
	for range link.MaxPendingConns + 1 {
		conn, err := n.Dial()
		if code, closed := link.CloseCode(err); closed {
			require.Equal(t, link.CodeUnavailable, code) // one too many, closed before its dial returned
			continue
		}
		require.NoError(t, err)
		silent = append(silent, conn)
	}
	other.Connect(hubtest.Hello("i1"))
	began := time.Now()
	for _, conn := range silent {
		<-conn.Done()
	}
	require.Less(t, time.Since(began), hubtest.Bound)
	n.Connect(hubtest.Hello("i1"))
}

// A node that gives its store ever new names is not let in for a while; the name that it has counts, and so does every
// other node.
func TestANodeThatRenamesItsStoreAgainAndAgainIsKeptOut(t *testing.T) {
	h := hubtest.New(t)
	n, neighbour := h.Enroll(), h.Enroll()
	say := func(n *hubtest.Node, incarnation string) error {
		pub, _ := n.Key.Public().(ed25519.PublicKey)
		_, err := h.Nodes.OpenSession(t.Context(), nodelink.Peer{NodeID: n.ID, Key: pub}, hubtest.Hello(incarnation))
		return err
	}
	const names = 60
	for k := range names {
		require.NoError(t, say(n, fmt.Sprint("i", k)))
	}
	require.EqualValues(t, "incarnations_too_many", fault.As(say(n, "another")).Code)
	require.NoError(t, say(n, fmt.Sprint("i", names-1)))
	require.NoError(t, say(neighbour, "another"))
	h.Advance(time.Hour)
	require.NoError(t, say(n, "another"))
}

// Whatever a node says of a member, again and again, it writes no event and no audit row beyond the steps of what its
// tenant asked for.
func TestANodeThatFlapsWritesNoEvents(t *testing.T) {
	const rounds = 20
	h, n, l := hubtest.NewWithNode(t)
	h.Launch()
	state, _ := l.ExpectState(1)
	status := &protocol.WorkloadStatus{Revision: 1}
	hubtest.Tx(h, func(ctx context.Context, tx db.Tx) (int, error) {
		return 0, tx.QueryRow(ctx, `SELECT id, instance_id FROM instance_members`).Scan(&status.MemberId, &status.InstanceId)
	})
	counter := uint64(0)
	report := func(word protocol.WorkloadStatus_Status, reason protocol.WorkloadStatus_Reason) {
		counter++
		status.Status, status.Reason, status.Detail, status.Restarts = word, reason, fmt.Sprint(counter), uint32(counter)
		require.NoError(t, h.Nodes.Report(t.Context(), nodelink.Peer{NodeID: n.ID}, l.Welcome.GetSessionNo(),
			&protocol.Report{
				Counter: counter, Epoch: 1, Generation: state.GetGeneration(), Workloads: []*protocol.WorkloadStatus{
					proto.CloneOf(status),
				},
			}))
	}
	written := func() int {
		return hubtest.Count(h, `SELECT (SELECT count(*) FROM events) + (SELECT count(*) FROM audit_rows)`)
	}
	report(protocol.WorkloadStatus_PENDING, 0)
	report(protocol.WorkloadStatus_READY, 0)
	require.Equal(t, 1, hubtest.Count(h, `SELECT count(*) FROM app_instances WHERE status = 'running'`))
	before := written()
	for range rounds {
		for word := range protocol.WorkloadStatus_REMOVED + 2 { // the last is of a newer node
			report(word, 0)
			report(word, protocol.WorkloadStatus_CRASH_LOOP)
			h.Advance(time.Minute)
		}
	}
	require.Equal(t, before, written())
	require.Equal(t, 1, hubtest.Count(h, `SELECT count(*) FROM instance_members WHERE restarts = $1`, counter),
		"each report was taken")
}

// Law 13: a caller who leaves before the node has the stream takes no tunnel of its org along.
func TestLaw13ATunnelThatWasNotOpenedGivesItsPlaceBack(t *testing.T) {
	h := hubtest.New(t)
	n := h.Enroll()
	l := n.Connect(hubtest.Hello("i1"))
	l.ExpectState(0)
	go func() {
		for {
			s, _, err := l.Conn.Accept(context.Background())
			if err != nil {
				return
			}
			_ = s.Send(&protocol.TunnelResponse{ErrorReason: protocol.Nack_NOT_ASSIGNED})
			_ = s.Close()
		}
	}()
	left, leave := context.WithCancel(t.Context())
	leave()
	for range 40 {
		_, err := h.Link.Logs(left, n.ID, "org", &protocol.LogsRequest{MemberId: "m1"})
		require.EqualValues(t, "node_unreachable", fault.As(err).Code)
	}
	_, err := h.Link.Logs(t.Context(), n.ID, "org", &protocol.LogsRequest{MemberId: "m1"})
	require.EqualValues(t, "node_refused", fault.As(err).Code, "the node answers: the stream was opened")
}
