package sim

import (
	"errors"
	"strconv"
	"time"

	"github.com/gpuaas/gpuaas/e2e/sim/books"
	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/rating"
	"github.com/gpuaas/gpuaas/protocol"
)

// waitForRecovery is the pause before a renewal is tried again while its node awaits resync.
const waitForRecovery = 10 * minute

// newBooks has one price for everybody: half a unit an hour of running, of which the host gets 70 %.
func newBooks(w *World) *books.Books {
	return books.New(books.Config{
		Currency: "EUR",
		Prices: []billing.FrozenPrice{{
			Meter: protocol.MeterSessionSeconds, PriceID: "price-1", Nanos: 500_000_000, PerQuantity: int64(hour),
			HostBasisPoints: 7000,
		}},
		Faults: books.Faults{
			NoClip: w.breaks(BreakClip), NoSuspendedCost: w.breaks(BreakCap), NoHostLeg: w.breaks(BreakBalance),
			LateHold: w.breaks(BreakHold),
		},
	})
}

// audit is what the checker has seen of a member's bill. It is backed up and restored with the rows.
type audit struct {
	// billed and suspended are running time in microseconds; seen is the time that is billed.
	billed, suspended int64
	seen              []rating.Interval
	// lostLeases are when a restored hub had forgotten leases of the member, from its backup on.
	lostLeases []window
}

// openMember starts billing of a member.
func (h *hub) openMember(m *memberRow, at time.Time) {
	h.rows.books.Open(strconv.Itoa(m.org), billing.Member{
		ID: m.id, NodeID: h.rows.nodes[m.node].id, CPUMillis: m.cpuMillis, MemoryBytes: m.memoryBytes, OpenedAt: at,
	})
}

// issueLease gives a member its next lease; false when the wallet does not cover it.
func (h *hub) issueLease(m *memberRow) bool {
	l, err := h.rows.books.IssueLease(m.id, h.w.now.time(), h.w.cfg.Lease)
	if errors.Is(err, books.ErrUnaffordable) {
		m.renewFailures++
		return false
	}
	h.booked(err)
	m.renewFailures = 0
	h.w.result.Leases++
	h.w.oracle.leased(m, l)
	h.planRenewal(m)
	return true
}

// booked fails law 6 where a posting is not balanced.
func (h *hub) booked(err error) {
	if err != nil {
		h.w.fail(6, "%v", err)
	}
}

// planRenewal schedules the next lease.
func (h *hub) planRenewal(m *memberRow) {
	l := h.rows.books.Lease(m.id)
	at := h.w.now + minute
	switch {
	case l.No > 0 && h.rows.books.RenewNow(m.id) && !h.w.breaks(BreakCap):
		at = h.w.now
	case l.No > 0:
		at = since(l.RenewAt())
	}
	h.renewAt(m.node, m.id, l.No, at)
}

func (h *hub) renewAt(node int, memberID string, no int64, at instant) {
	life := h.life
	h.w.after(at-h.w.now, -1, "renew", func() {
		row, b := &h.rows.nodes[node], h.rows.books
		m := row.member(memberID)
		if h.life != life || !h.up || m == nil || !b.IsOpen(memberID) || b.Lease(memberID).No != no {
			return
		}
		if row.awaitsResync {
			h.renewAt(node, memberID, no, h.w.now+waitForRecovery)
			return
		}
		if !h.issueLease(m) {
			pause := billing.RetryRenewal(m.renewFailures, b.Lease(memberID).ExpiresAt, h.w.now.time())
			h.renewAt(node, memberID, no, h.w.now+span(pause))
			return
		}
		h.sync(node, 0)
	})
}

// bill posts a segment and shows the checker what is billed.
func (h *hub) bill(row *nodeRow, seg *protocol.UsageSegment) {
	b := h.rows.books
	charged, err := b.Post(row.id, seg.GetIncarnation(), seg, h.w.now.time())
	if err != nil {
		h.booked(err)
		return
	}
	for _, a := range charged.Accepted {
		if a.Meter != protocol.MeterSessionSeconds {
			continue
		}
		m := row.member(a.MemberID)
		for _, p := range a.Pieces {
			if p.Reason == "" {
				h.w.oracle.billed(m, p.Span, p.Quantity)
			}
		}
	}
	var renew []string
	for _, s := range charged.Suspended {
		if s.Meter != protocol.MeterSessionSeconds || s.Piece.Reason == billing.SuspenseUnknownSubject {
			continue
		}
		m := row.member(s.MemberID)
		m.audit.suspended += s.Piece.Quantity
		h.w.oracle.suspended(h.w.nodes[row.i], m, s.Piece)
		if len(renew) == 0 || renew[len(renew)-1] != s.MemberID {
			renew = append(renew, s.MemberID)
		}
	}
	for _, id := range renew {
		if l := b.Lease(id); l.No > 0 && b.RenewNow(id) && !h.w.breaks(BreakCap) {
			h.renewAt(row.i, id, l.No, h.w.now)
		}
	}
}

// settle gives back the holds of the node's closed members whose final record is posted.
func (h *hub) settle(row *nodeRow) {
	for _, m := range row.members {
		if final := h.rows.books.Members[m.id].Final; !m.settled && final.Incarnation != "" {
			h.booked(h.rows.books.SettleFinal(m.id, int64(row.mark(final.Incarnation).LastRecord)))
			m.settled = h.rows.books.Members[m.id].Settled
		}
	}
}
