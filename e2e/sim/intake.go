package sim

import (
	"crypto/sha256"

	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/hub/nodeidentity"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/hub/usagechain"
	"github.com/gpuaas/gpuaas/protocol"
)

// mark is how far the chain of one store is posted without a gap, with the links that are posted beyond.
type mark struct {
	usagechain.Watermark
	archived uint64
	ahead    map[uint64]usagechain.Link
}

// usage takes a sealed segment: post it, then acknowledge. A restored hub reads none before the node has uploaded its
// state on that connection.
func (h *hub) usage(i, attempt, no int, sealed spool.Sealed) {
	if h.rows.nodes[i].awaitsResync {
		if s := h.sessions[i]; s != nil && s.attempt == attempt {
			s.unread = append(s.unread, func() { h.usage(i, attempt, no, sealed) })
		}
		return
	}
	ack := h.post(i, attempt, sealed)
	ack.no = no
	h.w.nodes[i].up.carry(false, "usage ack", func() { h.w.nodes[i].up.acked(ack) })
}

// post checks, posts and remembers a sealed segment in one transaction. The acknowledgement of a refused one names no
// progress.
func (h *hub) post(i, attempt int, sealed spool.Sealed) usageAck {
	row, seg := &h.rows.nodes[i], sealed.Segment
	ack := usageAck{attempt: attempt, incarnation: seg.GetIncarnation()}
	if s := h.sessions[i]; s != nil && s.attempt == attempt && s.incarnation != seg.GetIncarnation() {
		// A session carries the segments of one store.
		ack.refused = protocol.Nack_MALFORMED
		return ack
	}
	sum := sha256.Sum256(sealed.Payload)
	at := usagechain.Link{Number: seg.GetNumber(), SHA256: sum[:], Previous: seg.GetPreviousSha256()}
	if records := seg.GetRecords(); len(records) > 0 {
		at.First, at.Last = records[0].GetSequence(), records[len(records)-1].GetSequence()
	}
	m := row.mark(seg.GetIncarnation())
	known, err := m.Check(m.ahead, at)
	switch {
	case err != nil:
		ack.refused = protocol.RefusalOf(err)
		return ack
	case known:
		if h.w.breaks(BreakDedupe) {
			// The books forget what was billed.
			clear(h.rows.books.Book.Billed)
			h.bill(row, seg)
		}
	default:
		if at, err = m.CheckRecords(m.ahead, at); err != nil {
			h.w.fail(5, "a true segment of %s is set aside: %v", row.id, err)
		}
		h.w.result.Segments++
		h.bill(row, seg)
		m.ahead[at.Number] = at
		m.Watermark = m.Advance(m.ahead)
		h.settle(row)
	}
	ack.posted, ack.archived, ack.postedSHA256 = m.Number, m.archived, m.SHA256
	return ack
}

// hello opens a session: from here on this connection of the node counts.
func (h *hub) hello(i, attempt int, g helloMessage) {
	answer := h.openSession(i, attempt, g)
	u := &h.w.nodes[i].up
	u.carry(false, "welcome", func() { u.welcomed(answer) })
	h.sync(i, 0)
}

// openSession records a hello in one transaction.
func (h *hub) openSession(i, attempt int, g helloMessage) welcome {
	row := &h.rows.nodes[i]
	m := row.mark(g.incarnation)
	behind := nodeidentity.StoreBehind(nodeidentity.Store{
		Incarnation: g.incarnation, Epoch: g.epoch,
		Generation: g.generation,
	},
		nodeidentity.Store{Incarnation: row.incarnation, Epoch: row.acceptedEpoch, Generation: row.acceptedGeneration},
		g.lastSegment, m.Number, nil)
	row.sessionNo++
	row.newestReport = lifecycle.ReportNo{Session: row.sessionNo}
	if !behind || g.incarnation != row.incarnation {
		row.incarnation, row.acceptedEpoch, row.acceptedGeneration = g.incarnation, g.epoch, g.generation
	}
	if row.behind() && g.incarnation != row.usageOwedIn {
		// A store that takes a new incarnation seals again what it owes.
		row.usageOwed, row.usageOwedIn = g.lastSegment, g.incarnation
	}
	h.sessions[i] = &session{
		no: row.sessionNo, attempt: attempt, incarnation: g.incarnation, bundle: g.bundle, epoch: g.epoch,
		generation: g.generation, digest: g.digest,
	}
	return welcome{
		attempt: attempt, no: row.sessionNo, hubTime: h.w.now.time(), newIncarnation: behind, posted: m.Number,
		archived: m.archived, postedSHA256: m.SHA256, requestUpload: row.awaitsResync,
	}
}

// gone ends a session, unless a newer one has replaced it.
func (h *hub) gone(i int, no uint64) {
	if s := h.sessions[i]; s != nil && s.no == no {
		h.sessions[i] = nil
	}
}

func (h *hub) accepted(i, attempt int, epoch, generation uint64, digest [sha256.Size]byte) {
	row := &h.rows.nodes[i]
	before := plan.StateVersion{Epoch: row.acceptedEpoch, Generation: row.acceptedGeneration}
	if (plan.StateVersion{Epoch: epoch, Generation: generation}).After(before) {
		row.acceptedEpoch, row.acceptedGeneration = epoch, generation
	}
	if s := h.sessions[i]; s != nil && s.attempt == attempt {
		s.epoch, s.generation, s.digest = epoch, generation, digest
	}
}

func (h *hub) acceptedBundle(i, attempt int, version uint64) {
	if s := h.sessions[i]; s != nil && s.attempt == attempt {
		s.bundle = max(s.bundle, version)
	}
}

func (h *hub) refused(i, attempt int, reason protocol.Nack_Reason, generation uint64) {
	if s := h.sessions[i]; s == nil || s.attempt != attempt || !plan.ShowsNewerState(reason) {
		return
	}
	if least := h.rows.nodes[i].head.version().GenerationAfterRefusal(generation); least > 0 {
		h.sync(i, least)
	}
}

// report applies a node's report.
func (h *hub) report(i, attempt int, r statusReport) {
	row := &h.rows.nodes[i]
	if no := (lifecycle.ReportNo{Session: r.no, Counter: r.counter}); no.Follows(row.newestReport) {
		row.newestReport = no
		reported := map[string]*protocol.WorkloadStatus{}
		for _, s := range r.statuses {
			reported[s.GetMemberId()] = s
		}
		for _, m := range row.members {
			if !m.Gone {
				h.applyStatus(row, m, reported[m.id], r)
			}
		}
		h.sync(i, 0)
	}
	u := &h.w.nodes[i].up
	u.carry(false, "report ack", func() { u.reportAcked(attempt, r.counter) })
}

// applyStatus applies a report to a member and to its instance; s is nil where the report does not name the member.
func (h *hub) applyStatus(row *nodeRow, m *memberRow, s *protocol.WorkloadStatus, r statusReport) {
	before := m.Placed
	if h.w.breaks(BreakSilence) {
		before.ObservedIncarnation = ""
	}
	next, outcome := before.Apply(s, lifecycle.Report{
		Epoch:       r.epoch,
		Generation:  r.generation,
		Incarnation: row.incarnation,
		UsageOwed:   row.behind(),
	}, h.w.now.time())
	m.Member = next
	if outcome == lifecycle.Removed {
		at := h.w.now
		if s != nil {
			at = since(s.GetRemoval().GetAt().AsTime())
		}
		h.removed(row, m, at)
		if s == nil {
			h.booked(h.rows.books.Settle(m.id))
		}
		return
	}
	h.advance(row, m)
}

// advance moves the instance of a member on.
func (h *hub) advance(row *nodeRow, m *memberRow) {
	stopped := m.stopped()
	if m.versions != nil {
		h.advanceVersion(row, m)
	} else {
		m.life, _ = lifecycle.Advance(m.life, []lifecycle.MemberState{m.State(int64(m.revision))})
	}
	m.worked = m.worked || m.life.Status == lifecycle.Running
	if m.stopped() != stopped {
		row.rev++
		h.w.oracle.failed(m)
	}
}

// removed frees the room of a member of which nothing is left, and closes its bill.
func (h *hub) removed(row *nodeRow, m *memberRow, at instant) {
	m.Gone = true
	m.life, _ = lifecycle.Advance(m.life, []lifecycle.MemberState{m.State(int64(m.revision))})
	row.free(m)
	h.booked(h.rows.books.Close(m.id, at.time(), h.w.now.time()))
	h.settle(row)
	h.w.trace("removed", row.i, 0, m.id)
}
