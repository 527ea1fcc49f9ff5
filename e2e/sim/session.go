package sim

import (
	"crypto/sha256"
	"math"
	"math/rand/v2"
	"time"

	"github.com/gpuaas/gpuaas/agent/hubsession"
	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/e2e/sim/nodestore"
	"github.com/gpuaas/gpuaas/protocol"
)

// Peer is the hub of a Session.
type Peer interface {
	// Hello begins a session; attempt names its connection.
	Hello(attempt int, h Hello)
	// StateUpload says of which generation a state was uploaded, and with how many documents.
	StateUpload(generation uint64, parts int)
	// Usage is the segment of that number among those sent in the session.
	Usage(no int, s spool.Sealed)
	Report(counter uint64, statuses []*protocol.WorkloadStatus)
}

// Session is one node's session with its hub, without a world: agent/internal/uplink's tests run it beside the
// product's. The node runs no pass and takes no sample. Messages take no time, except for UsageAckTakes.
type Session struct{ n *node }

// UsageAckTakes is how long an acknowledgement of usage is under way. A connection needs some time to send all that may
// be sent before the first acknowledgement.
const UsageAckTakes = 100 * time.Millisecond

// sessionPeer is a Peer as an uplink knows it.
type sessionPeer struct {
	peer // of the methods that no session calls
	to   Peer
}

func (p sessionPeer) hello(_, attempt int, g helloMessage) {
	p.to.Hello(attempt, Hello{
		Incarnation: g.incarnation, Epoch: g.epoch, Generation: g.generation, Digest: g.digest, LastSegment: g.lastSegment,
	})
}

func (p sessionPeer) uploaded(_, _ int, up stateUpload) {
	p.to.StateUpload(up.state.GetGeneration(), len(up.parts))
}

func (p sessionPeer) usage(_, _, no int, sealed spool.Sealed) { p.to.Usage(no, sealed) }

func (p sessionPeer) report(_, _ int, r statusReport) { p.to.Report(r.counter, r.statuses) }

// NewSession starts a node that dials its hub at once. Only the pauses before dials draw from rng.
func NewSession(id string, rng *rand.Rand, to Peer) *Session {
	x := NewNode(id, noEffects{})
	n := x.n
	n.w.rng, n.w.hub, n.w.peer = rng, &hub{up: true}, sessionPeer{to: to}
	n.waking, n.up.cutUp = true, false
	n.powerOn()
	n.lastSample = math.MaxInt64 / 2
	return &Session{n}
}

// SetIncarnation names the store's life. Call it before Advance.
func (s *Session) SetIncarnation(name string) { (&Node{s.n}).SetIncarnation(name) }

// Time is the true time.
func (s *Session) Time() time.Time { return s.n.w.now.time() }

// Advance lets everything happen that is due until then.
func (s *Session) Advance(to time.Time) { (&Node{s.n}).Advance(to) }

// Store is the node's store.
func (s *Session) Store() *nodestore.Store { return s.n.store.Store }

// Sealed says that the store has a new segment.
func (s *Session) Sealed() { s.n.up.sealed() }

// Observe sets what is reported.
func (s *Session) Observe(statuses []*protocol.WorkloadStatus) {
	s.n.report = statuses
	s.n.up.reportSoon()
}

// Welcome answers the hello of a connection.
func (s *Session) Welcome(attempt int, w *protocol.Welcome) {
	s.n.up.carry(false, "welcome", func() {
		s.n.up.welcomed(welcome{
			attempt: attempt, no: max(w.GetSessionNo(), 1), hubTime: w.GetHubTime().AsTime(),
			newIncarnation: w.GetNewIncarnation(), posted: w.GetPostedSegment(), archived: w.GetArchivedSegment(),
			postedSHA256: w.GetPostedSha256(), requestUpload: w.GetRequestStateUpload(),
		})
	})
}

// AcknowledgeUsage answers segment no of a connection.
func (s *Session) AcknowledgeUsage(attempt, no int, a *protocol.UsageAck) {
	s.n.up.carry(false, "usage ack", func() {
		s.n.up.acked(usageAck{
			attempt: attempt, no: no, incarnation: a.GetIncarnation(), posted: a.GetPostedSegment(),
			archived: a.GetArchivedSegment(), postedSHA256: a.GetPostedSha256(), refused: a.GetNackReason(),
		})
	})
}

// AcknowledgeReport answers a report of a connection.
func (s *Session) AcknowledgeReport(attempt int, counter uint64) {
	s.n.up.carry(false, "report ack", func() { s.n.up.reportAcked(attempt, counter) })
}

// Close ends a connection from the hub's side, with a go-away or without.
func (s *Session) Close(attempt int, goAway bool) {
	s.n.up.carry(false, "close", func() {
		switch {
		case attempt != s.n.up.attempt:
		case goAway:
			s.n.up.redial(hubsession.ErrGoAway)
		default:
			s.n.up.redial(errLost)
		}
	})
}

// Broken is the first law that the node broke.
func (s *Session) Broken() error { return (&Node{s.n}).Broken() }

// noEffects is a machine on which nothing takes time.
type noEffects struct{}

func (noEffects) Takes(kind, what string) time.Duration {
	if kind == "carry" && what == "usage ack" {
		return UsageAckTakes
	}
	return 0
}

func (noEffects) Fails(string) error { return nil }

func (noEffects) HubAway() bool { return false }

func (noEffects) Part([sha256.Size]byte) ([]byte, error) { return nil, errHubAway() }
