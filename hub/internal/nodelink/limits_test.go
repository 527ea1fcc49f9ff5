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

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

// endsAfter sends a first message and waits for the hub to end the connection.
func (n *node) endsAfter(first *protocol.NodeMessage) {
	t := n.h.t
	t.Helper()
	conn, err := n.dial()
	require.NoError(t, err)
	control, err := conn.Open(t.Context(), &protocol.StreamHeader{Kind: protocol.StreamHeader_KIND_CONTROL})
	require.NoError(t, err)
	_ = control.Send(first) // the hub need not read all of it
	<-conn.Done()
}

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
	h := newHub(t)
	n := h.enrol()
	large := hello("i1")
	large.Facts.Accelerators = make([]*protocol.Accelerator, 100_000)
	for i := range large.Facts.Accelerators {
		large.Facts.Accelerators[i] = &protocol.Accelerator{}
	}
	n.endsAfter(helloMessage(large))
	require.Zero(t, count(h, `SELECT count(*) FROM node_sessions`), "more than 64 KiB are not read")

	many := hello("i1")
	many.Facts.Accelerators = accelerators(900, "")
	n.connect(many)
	require.Equal(t, protocol.MaxAccelerators, count(h, `SELECT count(*) FROM accelerators`))
	got := h.node(n.id)
	tx(h, func(ctx context.Context, tx db.Tx) (int, error) { return 0, fleet.LoadFacts(ctx, tx, &got) })
	require.Len(t, got.Facts.GetAccelerators(), protocol.MaxAccelerators)
}

// A node whose every hello names other accelerators fills no table.
func TestNodeThatNamesEverNewAcceleratorsFillsNoTable(t *testing.T) {
	h := newHub(t)
	n := h.enrol()
	for range 6 {
		m := hello("i1")
		m.Facts.Accelerators = accelerators(protocol.MaxAccelerators, "m")
		_, _, answer := n.say(m)
		require.NotNil(t, answer.GetWelcome())
	}
	require.Equal(t, 4*protocol.MaxAccelerators, count(h, `SELECT count(*) FROM accelerators`))
}

// One bad word must not fail the transaction that its hello shares with others.
func TestFactsThatTheDatabaseCannotStoreAreCleaned(t *testing.T) {
	h := newHub(t)
	n := h.enrol()
	m := hello("i1")
	m.Facts.Kernel, m.Facts.Hostname, m.Facts.MemoryBytes = "6.1\x00", strings.Repeat("h", 5000), 1<<63+1
	m.Features, m.Facts.Conditions = []string{"a\x00b"}, []string{"c\x00d"}
	m.Facts.Accelerators = []*protocol.Accelerator{{
		Id: "GPU\x00-1", Model: strings.Repeat("m", 5000),
		MemoryBytes: 1<<64 - 1,
	}}
	n.connect(m)
	got := h.node(n.id)
	tx(h, func(ctx context.Context, tx db.Tx) (int, error) { return 0, fleet.LoadFacts(ctx, tx, &got) })
	require.Equal(t, "6.1", got.Facts.GetKernel())
	require.Equal(t, []string{"ab"}, got.Features)
	require.Equal(t, []string{"cd"}, got.Conditions)
	require.Len(t, got.Hostname, 128)
	require.Positive(t, got.MemoryBytes)
	require.Equal(t, 1,
		count(h, `SELECT count(*) FROM accelerators WHERE id = 'GPU-1' AND length(model) = 128 AND memory_bytes > 0`))
}

func TestReportBeyondTheMembersOfItsNodeEndsTheSession(t *testing.T) {
	h := newHub(t)
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	l.report(1, &protocol.WorkloadStatus{MemberId: "unknown", Detail: strings.Repeat("d", protocol.MaxReportBaseBytes/2)})
	_ = l.control.Send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Report{Report: &protocol.Report{
		Counter: 2, Conditions: []string{string(bytes.Repeat([]byte{'c'}, protocol.MaxReportBaseBytes))},
	}}})
	<-l.conn.Done()
	n.connect(hello("i1")) // and the node may come again
}

func TestBannedNodeIsRefusedInTheHandshake(t *testing.T) {
	h := newHub(t)
	n, other := h.enrol(), h.enrol()
	h.mu.Lock()
	h.shutOut = n.id
	h.mu.Unlock()
	conn, err := n.dial()
	if err == nil { // the client is done with its part of the handshake before the hub has looked
		<-conn.Done()
		err = conn.Err()
	}
	require.ErrorContains(t, err, "bad certificate")
	other.connect(hello("i1"))
}

// Two connections that say nothing hold neither a place nor the node out for long.
func TestNodeThatSaysNothingLosesItsConnections(t *testing.T) {
	h := newHub(t)
	n, other := h.enrol(), h.enrol()
	var silent []*link.Conn
	for range link.MaxUnsettled + 1 {
		conn, err := n.dial()
		require.NoError(t, err)
		silent = append(silent, conn)
	}
	other.connect(hello("i1"))
	began := time.Now()
	for _, conn := range silent {
		<-conn.Done()
	}
	require.Less(t, time.Since(began), bound)
	n.connect(hello("i1"))
}

// A node that gives its store ever new names is not let in for a while; the name that it has counts, and so does every
// other node.
func TestANodeThatRenamesItsStoreAgainAndAgainIsKeptOut(t *testing.T) {
	h := newHub(t)
	n, neighbour := h.enrol(), h.enrol()
	say := func(n *node, incarnation string) error {
		pub, _ := n.key.Public().(ed25519.PublicKey)
		_, err := h.nodes.OpenSession(t.Context(), nodelink.Peer{NodeID: n.id, Key: pub}, hello(incarnation))
		return err
	}
	const names = 60
	for k := range names {
		require.NoError(t, say(n, fmt.Sprint("i", k)))
	}
	require.Equal(t, "incarnations_too_many", fault.As(say(n, "another")).Code)
	require.NoError(t, say(n, fmt.Sprint("i", names-1)))
	require.NoError(t, say(neighbour, "another"))
	h.forward(time.Hour)
	require.NoError(t, say(n, "another"))
}

// Whatever a node says of a member, again and again, it writes no event and no audit row beyond the steps of what its
// tenant asked for.
func TestANodeThatFlapsWritesNoEvents(t *testing.T) {
	const rounds = 20
	h := newHub(t)
	h.publish()
	n := h.enrol()
	l := n.connect(hello("i1"))
	l.state(0)
	h.launch()
	state, _ := l.state(1)
	status := &protocol.WorkloadStatus{Revision: 1}
	tx(h, func(ctx context.Context, tx db.Tx) (int, error) {
		return 0, tx.QueryRow(ctx, `SELECT id, instance_id FROM instance_members`).Scan(&status.MemberId, &status.InstanceId)
	})
	counter := uint64(0)
	report := func(word, reason string) {
		counter++
		status.Status, status.Reason, status.Detail, status.Restarts = word, reason, fmt.Sprint(counter), uint32(counter)
		require.NoError(t, h.nodes.Report(t.Context(), nodelink.Peer{NodeID: n.id}, l.welcome.GetSessionNo(),
			&protocol.Report{
				Counter: counter, Epoch: 1, Generation: state.GetGeneration(), Workloads: []*protocol.WorkloadStatus{
					proto.CloneOf(status),
				},
			}))
	}
	written := func() int {
		return count(h, `SELECT (SELECT count(*) FROM events) + (SELECT count(*) FROM audit_rows)`)
	}
	report("pending", "")
	report("ready", "")
	require.Equal(t, 1, count(h, `SELECT count(*) FROM app_instances WHERE status = 'running'`))
	before := written()
	for range rounds {
		for _, word := range []string{
			"pending", "starting", "ready", "degraded", "failed", "stopping", "stopped", "removed",
			"unheard-of",
		} {
			report(word, "")
			report(word, "crash_loop")
			h.forward(time.Minute)
		}
	}
	require.Equal(t, before, written())
	require.Equal(t, 1, count(h, `SELECT count(*) FROM instance_members WHERE restarts = $1`, counter),
		"each report was taken")
}
