package sim

import (
	"crypto/sha256"
	"errors"
	"time"

	"github.com/gpuaas/gpuaas/agent/hubsession"
	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/e2e/sim/nodestore"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

// uplink is a node's side of the session, as agent/internal/uplink holds it.
type uplink struct {
	n *node
	// attempt counts dials: what belongs to an older one is dead.
	attempt int
	// no is the session's number; 0 without one.
	no         uint64
	since      instant
	asked      instant
	dialPaused bool

	backoff hubsession.Backoff
	reports hubsession.Reports
	upload  hubsession.Upload
	// sentNo counts the segments sent in this session; answered are those that are acknowledged: a rough network repeats
	// messages, which a stream of QUIC does not.
	sentNo   int
	answered map[int]bool
	progress instant
	paused   instant
	// changed asks for a report, also across sessions; held is one that waits for the acknowledgement of the report
	// before it, helds counts those.
	changed, held bool
	helds         int

	// cutUp and cutDown are a network that carries nothing that way; rough one that delays, repeats and reorders.
	cutUp, cutDown, rough bool
	watched               bool
}

// peer is what a node's session says to its hub.
type peer interface {
	hello(i, attempt int, g helloMessage)
	uploaded(i, attempt int, up stateUpload)
	usage(i, attempt, no int, sealed spool.Sealed)
	report(i, attempt int, r statusReport)
	accepted(i, attempt int, epoch, generation uint64, digest [sha256.Size]byte)
	acceptedBundle(i, attempt int, version uint64)
	refused(i, attempt int, reason protocol.Nack_Reason, generation uint64)
	gone(i int, no uint64)
}

// errLost ends a session whose connection is dead.
var errLost = errors.New("the connection is lost")

// carry delivers a message to the hub (up) or to the node: late, twice or never. A connection ends with the hub's
// process, and what was under way on it is lost.
func (u *uplink) carry(up bool, kind string, deliver func()) {
	w, life := u.n.w, u.n.w.hub.life
	copies := 1
	if u.rough && !w.healing && w.chance(0.1) {
		copies = 2
	}
	for i := range copies {
		takes := w.takes("carry", kind, second/1000, second/25)
		if u.rough && !w.healing && (i > 0 || w.chance(0.3)) {
			takes = w.upTo([]instant{second, 20 * second, 10 * minute}[w.rng.IntN(3)])
		}
		at := u.n.i
		if up {
			at = -1
		}
		w.after(takes, at, kind, func() {
			switch {
			case life != w.hub.life, up && u.cutUp, !up && (u.cutDown || !u.n.agentUp):
			default:
				deliver()
			}
		})
	}
}

func (u *uplink) reachable() bool { return !u.cutUp && !u.cutDown && u.n.w.hub.up }

func (u *uplink) start(n *node) {
	u.n, u.backoff, u.changed = n, hubsession.Backoff{}, false
	u.dial(0)
}

// drop ends the session or the dial on this side.
func (u *uplink) drop() {
	u.attempt++
	u.no, u.dialPaused = 0, false
}

// redial ends the session for a reason and dials again after the pause that follows it.
func (u *uplink) redial(why error) {
	lasted := time.Duration(0)
	if u.no != 0 {
		lasted = (u.n.w.now - u.since).dur()
	}
	u.drop()
	if u.n.w.breaks(BreakRedial) {
		return
	}
	u.dial(span(u.backoff.Pause(lasted, why, u.n.w.rng.Float64())))
}

func (u *uplink) dial(wait instant) {
	u.attempt++
	mine := u.attempt
	u.n.w.after(wait, u.n.i, "dial", func() {
		if u.attempt != mine || !u.n.agentUp {
			return
		}
		if !u.reachable() {
			// It would dial at least every half minute, in vain; resumeDial dials again.
			u.dialPaused = true
			return
		}
		u.hello(mine)
		u.n.w.after(span(hubsession.HelloTimeout), u.n.i, "hello timeout", func() {
			if u.attempt == mine && u.no == 0 && u.n.agentUp {
				u.redial(errLost)
			}
		})
	})
}

// smooth ends a rough network: what is still under way on the old connection is sent anew on the next one.
func (u *uplink) smooth() {
	if u.rough && u.n.agentUp {
		u.redial(errLost)
	}
	u.rough = false
}

// resumeDial dials after the network or the hub has come back, spread as the backoff would have it.
func (u *uplink) resumeDial() {
	if u.dialPaused && u.reachable() {
		u.dialPaused = false
		u.dial(u.n.w.upTo(span(hubsession.DefaultDialRetryMax)))
	}
}

// lose is what a cut or a dead hub does: both sides notice, sooner or later.
func (u *uplink) lose() {
	mine, no := u.attempt, u.no
	u.n.w.after(u.n.w.upTo(span(link.IdleTimeout)), u.n.i, "idle", func() {
		u.n.w.peer.gone(u.n.i, no)
		if u.attempt == mine && u.no != 0 && u.n.agentUp {
			u.redial(errLost)
		}
	})
}

// helloMessage begins a session.
type helloMessage struct {
	incarnation       string
	bundle            uint64
	epoch, generation uint64
	digest            [sha256.Size]byte
	lastSegment       uint64
}

// stateUpload is what a node uploads when the welcome of a restored hub asks for it.
type stateUpload struct {
	digest   [sha256.Size]byte
	envelope *protocol.Envelope
	state    *protocol.DesiredState
	parts    []*protocol.Workload
	leases   []*protocol.Lease
}

func (u *uplink) hello(attempt int) {
	s := u.n.store
	u.asked = u.n.w.now
	g := helloMessage{
		incarnation: s.Incarnation(), bundle: s.Bundle.Version(), epoch: s.State.GetEpoch(),
		generation: s.State.GetGeneration(), digest: s.Digest, lastSegment: s.Chain.Number,
	}
	u.carry(true, "hello", func() {
		// A hello belongs to its connection; one whose connection has gone reaches nobody.
		if u.attempt == attempt && u.no == 0 && u.n.agentUp {
			u.n.w.peer.hello(u.n.i, attempt, g)
		}
	})
}

// uploadState sends what the node has accepted to a restored hub.
func (u *uplink) uploadState() {
	s, attempt := u.n.store, u.attempt
	up := stateUpload{digest: s.Digest, envelope: s.Envelope, state: s.State}
	for _, ref := range s.State.GetParts() {
		if p, there := s.Parts[nodestore.Sum(ref.GetSha256())]; there {
			up.parts = append(up.parts, p.Document)
		}
		if l := s.Leases[ref.GetId()]; l != nil {
			up.leases = append(up.leases, l)
		}
	}
	u.carry(true, "state upload", func() { u.n.w.peer.uploaded(u.n.i, attempt, up) })
}

// welcome is the hub's answer.
type welcome struct {
	attempt          int
	no               uint64
	hubTime          time.Time
	newIncarnation   bool
	posted, archived uint64
	// postedSHA256 tells a store that has gone on without the hub that it is not the one the hub knows.
	postedSHA256 []byte
	// requestUpload asks the node for its accepted state: the hub was restored.
	requestUpload bool
}

func (u *uplink) welcomed(m welcome) {
	n := u.n
	if m.attempt != u.attempt || u.no != 0 {
		return
	}
	n.syncClock(m.hubTime, n.w.now-u.asked)
	err := hubsession.Open(sessionStore{u}, hubsession.Welcome{
		NewIncarnation: m.newIncarnation,
		HubProgress: spool.HubProgress{
			Incarnation: n.store.Incarnation(), Posted: m.posted, Archived: m.archived,
			PostedSHA256: u.digestOf(m.postedSHA256),
		},
	})
	if err != nil {
		u.redial(err)
		return
	}
	u.no, u.since, u.paused = m.no, n.w.now, 0
	u.reports, u.upload = hubsession.Reports{}, hubsession.NewUpload(n.store.Marks.Posted)
	u.sentNo, u.answered, u.held = 0, map[int]bool{}, false
	if m.requestUpload {
		u.uploadState()
	}
	n.activate()
	u.sendReport()
	u.reportChange()
	u.send()
}

// sessionStore is the node's store as a welcome changes it, less the rules that are left out.
type sessionStore struct{ *uplink }

func (s sessionStore) PostedSegment() uint64 {
	if s.n.w.breaks(BreakRewind) {
		return 0
	}
	return s.n.store.Marks.Posted
}

func (s sessionStore) AcknowledgeUsage(hub spool.HubProgress) error {
	err := s.n.store.AcknowledgeUsage(hub)
	if s.n.w.breaks(BreakIncarnation) {
		return nil
	}
	return err
}

func (s sessionStore) RewindUsage(posted uint64) error { return s.n.store.RewindUsage(posted) }

func (s sessionStore) TakeNewIncarnation(error) error {
	n := s.n
	if n.w.breaks(BreakIncarnation) {
		return nil
	}
	if err := n.store.TakeNewIncarnation(n.newName(), n.now()); err != nil {
		n.w.fail(5, "new incarnation of %s: %v", n.id, err)
	}
	n.w.trace("incarnation", n.i, int64(n.lives), "")
	return nil
}

// digestOf is what a node makes of the digest that the hub names.
func (u *uplink) digestOf(sha256 []byte) []byte {
	if u.n.w.breaks(BreakFork) {
		return nil
	}
	return sha256
}

// sealed uploads new segments. Where acknowledgements are due, the next one sends them.
func (u *uplink) sealed() {
	if !u.upload.Waiting() {
		u.send()
	}
}

// send uploads what the hub has not posted.
func (u *uplink) send() {
	n := u.n
	if u.no == 0 || n.w.now < u.paused {
		return
	}
	for number, ok := u.upload.Next(); ok && number <= n.store.Chain.Number; number, ok = u.upload.Next() {
		sealed, there := n.store.Segments[number]
		if !there {
			n.w.fail(5, "segment %d of %s is gone and was never archived", number, n.store.Incarnation())
			return
		}
		if !u.upload.Waiting() {
			u.progress = n.w.now
		}
		u.upload.Sent()
		u.sentNo++
		u.watch(span(hubsession.AckTimeout))
		attempt, no := u.attempt, u.sentNo
		u.carry(true, "usage", func() { n.w.peer.usage(n.i, attempt, no, sealed) })
	}
}

type usageAck struct {
	// no is that of the segment among those sent in the attempt's session.
	attempt, no      int
	incarnation      string
	posted, archived uint64
	postedSHA256     []byte
	refused          protocol.Nack_Reason
}

func (u *uplink) acked(a usageAck) {
	if a.attempt != u.attempt || u.no == 0 || u.answered[a.no] {
		return
	}
	u.answered[a.no], u.progress = true, u.n.w.now
	if err := u.n.store.AcknowledgeUsage(spool.HubProgress{
		Incarnation: a.incarnation, Posted: a.posted, Archived: a.archived, PostedSHA256: u.digestOf(a.postedSHA256),
	}); err != nil {
		u.redial(err)
		return
	}
	switch stopped := u.upload.Acknowledged(a.refused); {
	case stopped == 0:
		u.send()
	case hubsession.Broken(stopped) && !u.n.w.breaks(BreakFork):
		if err := hubsession.Renew(sessionStore{u}, spool.ErrOtherStore); err != nil {
			u.redial(errLost)
		}
	default:
		wait := span(hubsession.UsageRetry(stopped, hubsession.DefaultUsageRetry))
		u.paused = u.n.w.now + wait
		attempt := u.attempt
		u.n.w.after(wait, u.n.i, "usage again", func() {
			if attempt == u.attempt && u.no != 0 {
				u.upload.Restart(u.n.store.Marks.Posted)
				u.send()
			}
		})
	}
}

// watch ends a session in which no acknowledgement comes any more. It checks after the wait.
func (u *uplink) watch(wait instant) {
	if u.watched {
		return
	}
	u.watched = true
	u.n.w.after(wait, -1, "ack timeout", func() {
		u.watched = false
		if u.no == 0 || !u.upload.Waiting() {
			return
		}
		if left := u.progress + span(hubsession.AckTimeout) - u.n.w.now; left > 0 {
			u.watch(left)
			return
		}
		u.redial(errLost)
	})
}

// tick is what happens every report interval.
func (u *uplink) tick() {
	if u.no == 0 {
		return
	}
	u.sendReport()
	u.sealed()
}

// reportSoon asks for a report of a change.
func (u *uplink) reportSoon() {
	u.changed = true
	u.reportChange()
}

// reportChange reports a change, if there is one, once the report before it is acknowledged or has waited for long.
func (u *uplink) reportChange() {
	if u.no == 0 || !u.changed || u.held {
		return
	}
	u.changed = false
	if !u.reports.Waiting() {
		u.sendReport()
		return
	}
	u.held = true
	u.helds++
	mine, no := u.attempt, u.helds
	u.n.w.after(span(hubsession.ReportAckTimeout), u.n.i, "report", func() {
		if mine == u.attempt && u.no != 0 && u.held && no == u.helds {
			u.release()
		}
	})
}

// release sends the report that waited.
func (u *uplink) release() {
	u.held = false
	u.sendReport()
	u.reportChange()
}

// statusReport is the whole observed state.
type statusReport struct {
	no, counter       uint64
	epoch, generation uint64
	statuses          []*protocol.WorkloadStatus
}

func (u *uplink) sendReport() {
	n := u.n
	if n.report == nil {
		return
	}
	r := statusReport{no: u.no}
	r.epoch, r.generation = n.store.State.GetEpoch(), n.store.State.GetGeneration()
	r.counter, r.statuses = u.reports.Next(n.report, n.now(), func(id string) bool { return n.store.Members[id].Reported })
	attempt := u.attempt
	u.carry(true, "report", func() { n.w.peer.report(n.i, attempt, r) })
}

func (u *uplink) reportAcked(attempt int, counter uint64) {
	if attempt != u.attempt {
		return
	}
	u.n.store.AcknowledgeRemovals(u.reports.Acknowledge(counter))
	if u.held && !u.reports.Waiting() {
		u.release()
	}
}

// pushedState accepts a desired state, in order or not.
func (u *uplink) pushedState(attempt int, env *protocol.Envelope, parts [][]byte) {
	n := u.n
	v, err := protocol.VerifyState(env, n.store.Bundle, n.self)
	if err == nil {
		err = n.store.AcceptState(v, parts)
	}
	if err != nil {
		reason, generation := protocol.RefusalOf(err), v.Message().GetGeneration()
		n.w.oracle.refused(n, env)
		if attempt == u.attempt {
			u.carry(true, "refused", func() { n.w.peer.refused(n.i, attempt, reason, generation) })
		}
		return
	}
	n.w.oracle.applied(n)
	n.diskRestored = false
	n.doubt.end(&n.doubt.state, n.w.now)
	epoch, generation, digest := n.store.State.GetEpoch(), n.store.State.GetGeneration(), n.store.Digest
	if attempt == u.attempt {
		u.carry(true, "accepted", func() { n.w.peer.accepted(n.i, attempt, epoch, generation, digest) })
	}
	n.activate()
}

// part gets a document that did not come with its state.
func (u *uplink) part(sum [sha256.Size]byte) ([]byte, error) {
	n := u.n
	if n.w.script != nil {
		return n.w.script.Part(sum)
	}
	if !u.reachable() {
		return nil, errHubAway()
	}
	raw := n.w.hub.rows.nodes[n.i].part(sum)
	if raw == nil {
		return nil, errors.New("the hub has no such document")
	}
	return raw, nil
}
