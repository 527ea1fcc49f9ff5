package sim

import (
	"crypto/sha256"
	"time"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/protocol"
)

// uplink is a node's side of the session, as agent/internal/uplink holds it.
type uplink struct {
	n *node
	// attempt counts dials: what belongs to an older one is dead.
	attempt int
	// no is the session's number; 0 without one.
	no     uint64
	since  instant
	asked  instant
	retry  instant
	parked bool

	counter  uint64
	sent     map[uint64][]string
	first    bool
	sentTo   uint64
	progress instant
	paused   instant

	// cutUp and cutDown are a network that carries nothing that way; rough one that delays, repeats and reorders.
	cutUp, cutDown, rough bool
	watched               bool
}

const (
	dialRetryMin      = second / 2
	dialRetryMax      = 30 * second
	helloTimeout      = 15 * second
	idleTimeout       = 45 * second
	ackTimeout        = minute
	usageWindow       = 8
	usageRefusedRetry = 5 * minute
	tombstoneReports  = 24 * time.Hour
)

// carry brings a message to the hub (up) or to the node, late, twice or never.
func (u *uplink) carry(up bool, kind string, deliver func()) {
	w := u.n.w
	copies := 1
	if u.rough && !w.healing && w.chance(0.1) {
		copies = 2
	}
	for i := range copies {
		takes := w.between(second/1000, second/25)
		if u.rough && !w.healing && (i > 0 || w.chance(0.3)) {
			takes = w.upTo([]instant{second, 20 * second, 10 * minute}[w.rng.IntN(3)])
		}
		at := u.n.i
		if up {
			at = -1
		}
		w.after(takes, at, kind, func() {
			switch {
			case up && (u.cutUp || !w.hub.up), !up && (u.cutDown || !u.n.agentUp):
			default:
				deliver()
			}
		})
	}
}

func (u *uplink) reachable() bool { return !u.cutUp && !u.cutDown && u.n.w.hub.up }

func (u *uplink) start(n *node) {
	u.n, u.retry = n, dialRetryMin
	u.dial(0)
}

// drop ends the session or the dial on this side.
func (u *uplink) drop() {
	u.attempt++
	u.no, u.parked, u.sent = 0, false, map[uint64][]string{}
}

// redial begins again after the session was lost.
func (u *uplink) redial() {
	if u.no != 0 && u.n.w.now-u.since > minute {
		u.retry = dialRetryMin
	}
	u.drop()
	if u.n.w.breaks(BreakRedial) {
		return
	}
	u.dial(u.retry/2 + u.n.w.upTo(u.retry/2+1))
	u.retry = min(2*u.retry, dialRetryMax)
}

func (u *uplink) dial(wait instant) {
	u.attempt++
	mine := u.attempt
	u.n.w.after(wait, u.n.i, "dial", func() {
		if u.attempt != mine || !u.n.agentUp {
			return
		}
		if !u.reachable() {
			// It would dial at least every half minute, in vain. unpark goes on from there.
			u.parked = true
			return
		}
		u.hello(mine)
		u.n.w.after(helloTimeout, u.n.i, "hello timeout", func() {
			if u.attempt == mine && u.no == 0 && u.n.agentUp {
				u.redial()
			}
		})
	})
}

// smooth ends a rough network: what is still under way on the old connection is sent anew on the next one.
func (u *uplink) smooth() {
	if u.rough && u.n.agentUp {
		u.redial()
	}
	u.rough = false
}

// unpark dials after the network or the hub has come back, spread as the backoff would have it.
func (u *uplink) unpark() {
	if u.parked && u.reachable() {
		u.parked = false
		u.dial(u.n.w.upTo(dialRetryMax))
	}
}

// lose is what a cut or a dead hub does: both sides notice, sooner or later.
func (u *uplink) lose() {
	mine, no := u.attempt, u.no
	u.n.w.after(u.n.w.upTo(idleTimeout), u.n.i, "idle", func() {
		u.n.w.hub.gone(u.n.i, no)
		if u.attempt == mine && u.no != 0 && u.n.agentUp {
			u.redial()
		}
	})
}

// greeting is the hello, and what a node uploads to a hub that was restored.
type greeting struct {
	incarnation       string
	epoch, generation uint64
	digest            [sha256.Size]byte
	lastSegment       uint64
	envelope          *protocol.Envelope
	state             *protocol.DesiredState
	parts             []*protocol.Workload
	leases            []*protocol.Lease
}

func (u *uplink) hello(attempt int) {
	s := u.n.store
	u.asked = u.n.w.now
	g := greeting{
		incarnation: s.incarnation, digest: s.digest, lastSegment: s.chain.Number, envelope: s.envelope,
		state: s.state,
	}
	g.epoch, g.generation = s.accepted()
	for _, ref := range s.state.GetParts() {
		if w := s.parts[[sha256.Size]byte(ref.GetSha256())]; w != nil {
			g.parts = append(g.parts, w)
		}
		if l := s.leases[ref.GetId()]; l != nil {
			g.leases = append(g.leases, l)
		}
	}
	u.carry(true, "hello", func() {
		// A hello belongs to its connection; one whose connection has gone reaches nobody.
		if u.attempt == attempt && u.no == 0 && u.n.agentUp {
			u.n.w.hub.hello(u.n.i, attempt, g)
		}
	})
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
}

func (u *uplink) welcomed(m welcome) {
	n := u.n
	if m.attempt != u.attempt || u.no != 0 {
		return
	}
	n.syncClock(m.hubTime, n.w.now-u.asked)
	said := spool.HubProgress{
		Incarnation: n.store.incarnation, Posted: m.posted, Archived: m.archived,
		PostedSHA256: u.digestOf(m.postedSHA256),
	}
	behind := m.newIncarnation || n.store.acknowledge(said) != nil
	if behind && !n.w.breaks(BreakIncarnation) {
		u.retry = dialRetryMin
		u.reincarnate()
		return
	}
	if m.posted < n.store.marks.Posted && !n.w.breaks(BreakRewind) {
		if err := n.store.rewind(m.posted); err != nil {
			u.reincarnate()
			return
		}
	}
	u.no, u.since, u.counter, u.first, u.sent = m.no, n.w.now, 0, true, map[uint64][]string{}
	u.sentTo, u.paused = 0, 0
	n.stir()
	u.sendReport()
	u.send()
}

// reincarnate takes a new incarnation and dials again.
func (u *uplink) reincarnate() {
	n := u.n
	if err := n.store.reincarnate(n.newName(), n.now()); err != nil {
		n.w.fail(5, "new incarnation of %s: %v", n.id, err)
	}
	n.w.trace("incarnation", n.i, int64(n.lives), "")
	u.redial()
}

// digestOf is what a node makes of the digest that the hub names.
func (u *uplink) digestOf(sha256 []byte) []byte {
	if u.n.w.breaks(BreakFork) {
		return nil
	}
	return sha256
}

// send uploads what the hub has not posted.
func (u *uplink) send() {
	n := u.n
	if u.no == 0 || n.w.now < u.paused {
		return
	}
	for {
		s := n.store
		if u.sentTo <= s.marks.Posted {
			u.sentTo, u.progress = s.marks.Posted, n.w.now
		}
		number, ok := spool.Next(s.marks, s.chain, u.sentTo-s.marks.Posted, usageWindow)
		if !ok {
			return
		}
		sealed, there := s.segments[number]
		if !there {
			n.w.fail(5, "segment %d of %s is gone and was never archived", number, s.incarnation)
			return
		}
		u.sentTo = number
		u.watch()
		attempt := u.attempt
		u.carry(true, "usage", func() { n.w.hub.usage(n.i, attempt, sealed.Payload) })
	}
}

type usageAck struct {
	attempt          int
	incarnation      string
	posted, archived uint64
	postedSHA256     []byte
	refused          string
}

func (u *uplink) acked(a usageAck) {
	if a.attempt != u.attempt || u.no == 0 {
		return
	}
	before := u.n.store.marks.Posted
	said := spool.HubProgress{
		Incarnation: a.incarnation, Posted: a.posted, Archived: a.archived,
		PostedSHA256: u.digestOf(a.postedSHA256),
	}
	if u.n.store.acknowledge(said) != nil {
		u.redial()
		return
	}
	if u.n.store.marks.Posted > before {
		u.progress = u.n.w.now
	}
	switch a.refused {
	case "":
		u.send()
	case protocol.RefusalChainBroken:
		if !u.n.w.breaks(BreakFork) {
			u.reincarnate()
			return
		}
		fallthrough
	default:
		u.paused, u.sentTo = u.n.w.now+usageRefusedRetry, 0
		u.n.w.after(usageRefusedRetry, u.n.i, "usage again", u.send)
	}
}

// watch ends a session in which no acknowledgement comes any more.
func (u *uplink) watch() {
	if u.watched {
		return
	}
	u.watched = true
	u.n.w.after(ackTimeout, -1, "ack timeout", func() {
		u.watched = false
		switch waits := u.no != 0 && u.sentTo > u.n.store.marks.Posted; {
		case waits && u.n.w.now-u.progress >= ackTimeout:
			u.redial()
		case waits:
			u.watch()
		}
	})
}

// tick is what happens every report interval.
func (u *uplink) tick() {
	if u.no == 0 {
		return
	}
	u.sendReport()
	u.send()
}

func (u *uplink) reportSoon() {
	if u.no == 0 {
		return
	}
	mine := u.attempt
	u.n.w.after(second/50, u.n.i, "report", func() {
		if mine == u.attempt && u.no != 0 {
			u.sendReport()
		}
	})
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
	u.counter++
	r := statusReport{no: u.no, counter: u.counter}
	r.epoch, r.generation = n.store.accepted()
	now := n.now()
	var removed []string
	for _, s := range n.report {
		if s.GetRemoval() != nil {
			old := now.Sub(s.GetRemoval().GetAt().AsTime()) > tombstoneReports
			if n.store.members[s.GetMemberId()].reported && (!u.first || old) {
				continue
			}
			removed = append(removed, s.GetMemberId())
		}
		r.statuses = append(r.statuses, s)
	}
	u.first = false
	if len(removed) > 0 {
		u.sent[u.counter] = removed
	}
	attempt := u.attempt
	u.carry(true, "report", func() { n.w.hub.report(n.i, attempt, r) })
}

func (u *uplink) reportAcked(attempt int, counter uint64) {
	if attempt != u.attempt {
		return
	}
	for _, id := range u.sent[counter] {
		u.n.store.updateMember(id, func(m *storedMember) { m.reported = m.Removal != nil })
	}
	delete(u.sent, counter)
}

// pushedState takes a desired state, whichever way and whenever it comes.
func (u *uplink) pushedState(attempt int, env *protocol.Envelope, parts [][]byte) {
	n := u.n
	v, err := protocol.VerifyState(env, n.w.bundle, n.self)
	if err == nil {
		err = n.store.acceptState(v, parts, n.w.breaks(BreakOrder))
	}
	if err != nil {
		reason, generation := protocol.RefusalOf(err), v.Message().GetGeneration()
		if attempt == u.attempt {
			u.carry(true, "refused", func() { n.w.hub.refused(n.i, attempt, reason, generation) })
		}
		return
	}
	n.w.truth.applied(n)
	n.excused = false
	epoch, generation, digest := n.store.state.GetEpoch(), n.store.state.GetGeneration(), n.store.digest
	if attempt == u.attempt {
		u.carry(true, "accepted", func() { n.w.hub.accepted(n.i, attempt, epoch, generation, digest) })
	}
	n.stir()
}

func (u *uplink) pushedLeases(env *protocol.Envelope) {
	n := u.n
	v, err := protocol.VerifyLeases(env, n.w.bundle, n.self)
	if err == nil {
		err = n.store.acceptLeases(v.Message())
	}
	if err == nil {
		n.wake()
	}
}

// fetch gets a document that did not come with its state.
func (u *uplink) fetch(a agent.FetchPart) {
	n := u.n
	if u.no == 0 || !u.reachable() {
		n.hold[a.MemberID] = n.now().Add(releaseHold)
		return
	}
	if raw := n.w.hub.rows.nodes[n.i].part(a.SHA256); raw == nil || !n.store.acceptPart(raw) {
		n.hold[a.MemberID] = n.now().Add(releaseHold)
	}
}
