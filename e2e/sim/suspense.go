package sim

import (
	"slices"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/rating"
)

// edge is by how much usage may overrun what explains it: a metering interval before a disk's image was taken, the
// stop of a container after its lease or a fault has ended, or a second by which a node's clock may be off.
const edge = 10 * second

// setAside is when faults explain, beside a doubt, that usage of a node's members is in suspense.
type setAside struct {
	// unattended is when no agent could stop what its lease no longer covered.
	unattended []window
	// sealedAgain is usage on a disk that was put back: under a new incarnation the node sends it again.
	sealedAgain []window
}

// attended notes, before the first sample of an agent, since when there was none.
func (n *node) attended() { n.unattended = append(n.unattended, window{n.lastSample, n.w.now}) }

// sealsAgain notes what a disk that was put back will send under its next incarnation: what no backup has, and what is
// measured and not sealed.
func (n *node) sealsAgain() {
	s := n.store
	oldest := n.w.now
	for number := s.Marks.Archived + 1; number <= s.Chain.Number; number++ {
		for _, r := range s.Segments[number].Segment.GetRecords() {
			oldest = min(oldest, since(r.GetStartedAt().AsTime()))
		}
	}
	for _, interval := range s.Meter.Intervals {
		if !interval.StartedAt.IsZero() {
			oldest = min(oldest, since(interval.CutAt))
		}
	}
	n.sealedAgain = append(n.sealedAgain, window{oldest, n.w.now})
}

// suspended checks law 5's upper bound of suspense: of a member's running time the hub suspends only what faults
// explain. The lower bound (memberTime) cannot tell suspended time from billed time.
func (o *oracle) suspended(n *node, m *memberRow, p billing.Piece) {
	if p.Quantity != p.Span.Length() {
		o.w.fail(5, "%s has %d in suspense for %d µs", m.id, p.Quantity, p.Span.Length())
	}
	book := o.w.hub.rows.books.Book
	reasons := slices.Concat(n.doubt.closed, m.audit.lostLeases, o.forgotten)
	if n.doubt.isOpen() {
		reasons = append(reasons, window{n.doubt.from, o.w.now})
	}
	switch p.Reason {
	case billing.SuspenseAlreadyBilled:
		reasons = append(reasons, n.sealedAgain...)
	case billing.SuspenseOutsideClaim:
		reasons = append(reasons, edgesOf(book.Members[m.id].Claim())...)
	case billing.SuspenseOutsideLease:
		reasons = append(reasons, n.unattended...)
		for _, l := range book.Leases[m.id].All() {
			reasons = append(reasons, edgesOf(l.Window())...)
		}
	}
	for i := range reasons {
		reasons[i] = window{reasons[i].from - edge, reasons[i].to + edge}
	}
	span := window{since(p.Span.From), since(p.Span.To)}
	o.w.result.Suspensions++
	if rest := span.to - span.from - covered(span, reasons); rest > 0 {
		o.w.fail(5, "%s ran from %s to %s, which is in suspense (%s), and no fault explains %s of that", m.id, p.Span.From,
			p.Span.To, p.Reason, rest.dur())
	}
}

// edgesOf are the beginning and the end of an interval, without what lies between.
func edgesOf(i rating.Interval) []window {
	return []window{{since(i.From), since(i.From)}, {since(i.To), since(i.To)}}
}
