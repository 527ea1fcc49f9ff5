package uplink_test

import (
	"context"
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/e2e/sim"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

// twinHub is the hub of one twin. What it answers depends on the seed, on how much it was told and on the node's store,
// so that the hubs of both twins answer the same while they are told the same.
type twinHub struct {
	t    testing.TB
	seed uint64
	now  func() time.Time
	node twinStore

	mu sync.Mutex
	// control and usage are what it was told.
	control, usage []told
	// lives are the incarnations that it knows, in their order.
	lives         []string
	hellos, acked int
	// line is the newest connection, welcomed whether its hello was answered with a welcome.
	line     line
	welcomed bool
	// usageDue and reportsDue wait for an acknowledgement; with autoUsage and autoReports they get it at once.
	usageDue               []dueUsage
	reportsDue             []uint64
	autoUsage, autoReports bool
	// progress is what it has posted of the newest life.
	progress spool.HubProgress
	seen     map[string]int
}

// told is a message of the node.
type told struct {
	at   time.Time
	what string
	// sealed is when a segment was.
	sealed time.Time
}

type dueUsage struct {
	no     int
	number uint64
	sum    [sha256.Size]byte
}

// line is the hub's end of a connection.
type line interface {
	welcome(w *protocol.Welcome)
	refuse()
	close(goAway, message bool)
	acknowledgeUsage(no int, a *protocol.UsageAck)
	acknowledgeReport(counter uint64)
}

// twinStore is what the hub's answers depend on of a node's store.
type twinStore interface {
	spool() (incarnation string, last uint64, marks spool.Marks)
	digest(number uint64) []byte
}

func (h *twinHub) life(incarnation string) int {
	for i, name := range h.lives {
		if name == incarnation {
			return i
		}
	}
	h.lives = append(h.lives, incarnation)
	return len(h.lives) - 1
}

func (h *twinHub) tell(log *[]told, format string, args ...any) {
	*log = append(*log, told{at: h.now(), what: fmt.Sprintf(format, args...)})
}

// hello answers with a welcome, a refusal, the end of the connection or silence.
func (h *twinHub) hello(l line, g sim.Hello) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.hellos++
	h.line, h.welcomed, h.usageDue, h.reportsDue = l, false, nil, nil
	h.tell(&h.control, "hello %d: life %d, state %d/%d %x, segment %d", h.hellos, h.life(g.Incarnation), g.Epoch,
		g.Generation, g.Digest[:4], g.LastSegment)
	dice := rand.New(rand.NewPCG(h.seed, 1000+uint64(h.hellos)))
	switch n := dice.IntN(20); {
	case n < 2:
		h.seen["silent"]++
	case n < 4:
		h.seen["hello unanswered"]++
		l.close(false, false)
	case n < 5:
		h.seen["hello refused"]++
		l.refuse()
	default:
		h.welcomed = true
		l.welcome(h.makeWelcome(dice))
	}
}

func (h *twinHub) makeWelcome(dice *rand.Rand) *protocol.Welcome {
	name, last, marks := h.node.spool()
	w := &protocol.Welcome{
		ProtocolVersion: protocol.Version, HubTime: timestamppb.New(h.now()), SessionNo: uint64(h.hellos),
		PostedSegment: marks.Posted, ArchivedSegment: marks.Archived, RequestStateUpload: dice.IntN(6) == 0,
	}
	switch n := dice.IntN(20); {
	case n < 2:
		h.seen["new incarnation"]++
		w.NewIncarnation = true
	case n < 6:
		w.PostedSegment = uint64(dice.Int64N(int64(marks.Posted) + 1))
	case n < 9:
		w.PostedSegment += uint64(dice.Int64N(int64(last-marks.Posted) + 1))
	case n < 10:
		h.seen["posted too much"]++
		w.PostedSegment = last + 1
	}
	if w.PostedSegment < marks.Posted {
		h.seen["restored"]++
	}
	if dice.IntN(4) == 0 {
		w.ArchivedSegment = uint64(dice.Int64N(int64(w.PostedSegment) + 1))
	}
	if w.PostedSha256 = h.node.digest(w.PostedSegment); w.PostedSha256 != nil && dice.IntN(15) == 0 {
		h.seen["other digest"]++
		w.PostedSha256 = make([]byte, sha256.Size)
	}
	h.progress = spool.HubProgress{
		Incarnation: name, Posted: w.PostedSegment, Archived: w.ArchivedSegment, PostedSHA256: w.PostedSha256,
	}
	return w
}

func (h *twinHub) stateUpload(generation uint64, parts int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.seen["state uploaded"]++
	h.tell(&h.control, "state upload of generation %d with %d documents", generation, parts)
}

func (h *twinHub) report(counter uint64, statuses []*protocol.WorkloadStatus) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var all []string
	for _, s := range statuses {
		all = append(all, fmt.Sprint(s.GetMemberId(), " ", s.GetStatus(), " ", s.GetRestarts(), " ", s.GetRemoval() != nil))
	}
	h.tell(&h.control, "report %d: %q", counter, all)
	h.reportsDue = append(h.reportsDue, counter)
	if h.autoReports {
		h.acknowledgeReport()
	}
}

// acknowledgeReport acknowledges the oldest report.
func (h *twinHub) acknowledgeReport() {
	if len(h.reportsDue) > 0 {
		h.line.acknowledgeReport(h.reportsDue[0])
		h.reportsDue = h.reportsDue[1:]
	}
}

func (h *twinHub) segment(no int, payload []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	seg := &protocol.UsageSegment{}
	require.NoError(h.t, proto.Unmarshal(payload, seg))
	h.tell(&h.usage, "session %d: segment %d of life %d: %s", h.hellos, seg.GetNumber(), h.life(seg.GetIncarnation()),
		seg.GetRecords())
	h.usage[len(h.usage)-1].sealed = seg.GetSealedAt().AsTime()
	h.usageDue = append(h.usageDue, dueUsage{no, seg.GetNumber(), sha256.Sum256(payload)})
	if h.autoUsage {
		h.acknowledgeUsage(false)
	}
}

// acknowledgeUsage answers the oldest segment. What ends the session is only said where nothing else is under way.
func (h *twinHub) acknowledgeUsage(quiet bool) {
	if len(h.usageDue) == 0 {
		return
	}
	s := h.usageDue[0]
	h.usageDue = h.usageDue[1:]
	h.acked++
	dice := rand.New(rand.NewPCG(h.seed, 1_000_000+uint64(h.acked)))
	next := h.progress
	next.Posted, next.PostedSHA256 = max(s.number, next.Posted), s.sum[:]
	if dice.IntN(4) == 0 {
		next.Archived = uint64(dice.Int64N(int64(next.Posted) + 1))
	}
	next.Archived = min(next.Archived, next.Posted)
	refused := protocol.Nack_REASON_UNSPECIFIED
	switch n := dice.IntN(24); {
	case n < 2:
		next, refused = h.progress, protocol.Nack_UNAVAILABLE
	case n < 3:
		next, refused = h.progress, protocol.Nack_OUT_OF_ORDER
	case n < 4:
		next.Incarnation = "another"
	case n < 6 && quiet:
		next, refused = h.progress, protocol.Nack_CHAIN_BROKEN
	case n < 7 && quiet:
		h.seen["acknowledged too much"]++
		next.Posted += 1000
	case n < 8 && quiet:
		h.seen["acknowledged another digest"]++
		next.PostedSHA256 = make([]byte, sha256.Size)
	default:
		h.progress = next
	}
	h.seen["acknowledged "+refused.String()]++
	h.line.acknowledgeUsage(s.no, &protocol.UsageAck{
		Incarnation: next.Incarnation, PostedSegment: next.Posted, ArchivedSegment: next.Archived,
		PostedSha256: next.PostedSHA256, NackReason: refused,
	})
}

// quicLine is a connection of the product.
type quicLine struct {
	conn    *link.Conn
	control *link.Stream
	usage   *link.Stream

	mu sync.Mutex
	// due are the acknowledgements of usage under way.
	due []*protocol.UsageAck
}

func (l *quicLine) send(m *protocol.HubMessage) { _ = l.control.Send(m) }

func (l *quicLine) welcome(w *protocol.Welcome) {
	l.send(&protocol.HubMessage{Message: &protocol.HubMessage_Welcome{Welcome: w}})
}

func (l *quicLine) refuse() {
	l.send(&protocol.HubMessage{Message: &protocol.HubMessage_GoAway{GoAway: &protocol.GoAway{Reason: "banned"}}})
}

func (l *quicLine) close(goAway, message bool) {
	switch {
	case goAway && message:
		l.refuse()
	case goAway:
		_ = l.conn.Close(link.CodeShutdown, "the hub restarts")
	default:
		_ = l.conn.Close(link.CodeUnavailable, "the database does not answer")
	}
}

func (l *quicLine) acknowledgeUsage(_ int, a *protocol.UsageAck) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.due = append(l.due, a)
	time.AfterFunc(sim.UsageAckTakes, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		_ = l.usage.Send(l.due[0])
		l.due = l.due[1:]
	})
}

func (l *quicLine) acknowledgeReport(counter uint64) {
	l.send(&protocol.HubMessage{Message: &protocol.HubMessage_ReportAck{ReportAck: &protocol.ReportAck{Counter: counter}}})
}

// serveQUIC is the hub of the product.
func (h *twinHub) serveQUIC(ctx context.Context, listener *link.Listener) {
	var serving sync.WaitGroup
	defer serving.Wait()
	for {
		conn, err := listener.Accept(ctx)
		if err != nil {
			return
		}
		serving.Go(func() {
			l := &quicLine{conn: conn}
			var streams sync.WaitGroup
			defer streams.Wait()
			defer func() { _ = conn.Close(link.CodeOK, "") }()
			for {
				stream, header, err := conn.Accept(ctx)
				if err != nil {
					return
				}
				switch header.GetKind() {
				case protocol.StreamHeader_KIND_CONTROL:
					l.control = stream
					streams.Go(func() { h.serveControl(l) })
				case protocol.StreamHeader_KIND_USAGE:
					l.usage = stream
					streams.Go(func() { h.serveUsage(l) })
				default:
					stream.Abort()
				}
			}
		})
	}
}

func (h *twinHub) serveControl(l *quicLine) {
	for {
		m := &protocol.NodeMessage{}
		if l.control.Receive(m, protocol.MaxControlBytes) != nil {
			return
		}
		switch x := m.GetMessage().(type) {
		case *protocol.NodeMessage_Hello:
			g := x.Hello
			said := sim.Hello{
				Incarnation: g.GetIncarnation(), Epoch: g.GetEpoch(), Generation: g.GetGeneration(),
				LastSegment: g.GetLastSegment(),
			}
			copy(said.Digest[:], g.GetStateSha256())
			h.hello(l, said)
		case *protocol.NodeMessage_StateUpload:
			state := &protocol.DesiredState{}
			require.NoError(h.t, proto.Unmarshal(x.StateUpload.GetState().GetPayload(), state))
			h.stateUpload(state.GetGeneration(), len(x.StateUpload.GetParts()))
		case *protocol.NodeMessage_Report:
			h.report(x.Report.GetCounter(), x.Report.GetWorkloads())
		}
	}
}

func (h *twinHub) serveUsage(l *quicLine) {
	for no := 1; ; no++ {
		m := &protocol.UsageUpload{}
		if l.usage.Receive(m, protocol.MaxSegmentBytes+protocol.MaxHeaderBytes) != nil {
			return
		}
		h.segment(no, m.GetSegment().GetPayload())
	}
}
