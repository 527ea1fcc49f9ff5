package sim

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/rating"
	"github.com/gpuaas/gpuaas/protocol"
)

// The ledger's rules, as hub/internal/ledger has them over SQL.
const (
	minLease     = 15 * time.Minute
	maxLease     = 7 * 24 * time.Hour
	holdMargin   = 10 * time.Minute
	maxClockSkew = 2 * time.Minute
	currency     = "EUR"
)

// price is one price for everybody: half a unit an hour of running, of which the host gets 70 %.
func price() rating.Price {
	return rating.Price{
		ID: "price-1", Meter: protocol.MeterSessionSeconds, Currency: currency, Nanos: 500_000_000, PerQuantity: int64(hour),
		HostBasisPoints: 7000,
	}
}

// subject is what is billed of a member.
type subject struct {
	openedAt, closedAt, settledAt time.Time
	leases                        []leaseRow
	// lostLeases says that leases were issued that a restored hub knows nothing of any more.
	lostLeases               bool
	placed, posted, returned int64
	covered                  map[coverageKey][]rating.Interval
	accruals                 map[int64]rating.Accrual
	// finalIn and finalSequence name the member's last record.
	finalIn       string
	finalSequence uint64
	// billed is what the checker has seen accepted of running time, suspended what was not.
	billed    int64
	suspended int64
	seen      []rating.Interval
}

type coverageKey struct{ meter, run string }

type leaseRow struct {
	no                  uint64
	issuedAt, expiresAt time.Time
	cap                 int64
	// suspended is what the member had in suspense when the lease was issued.
	suspended int64
}

func (s *subject) balance() int64 { return s.placed - s.posted - s.returned }

func (s *subject) clone() subject {
	c := *s
	c.leases, c.seen = slices.Clone(s.leases), slices.Clone(s.seen)
	c.covered, c.accruals = maps.Clone(s.covered), maps.Clone(s.accruals)
	return c
}

func (s *subject) lease() leaseRow {
	if len(s.leases) == 0 {
		return leaseRow{}
	}
	return s.leases[len(s.leases)-1]
}

func (s *subject) windows() []rating.Interval {
	out := make([]rating.Interval, 0, len(s.leases))
	for _, l := range s.leases {
		out = append(out, rating.Interval{From: l.issuedAt, To: l.expiresAt})
	}
	return rating.Union(out)
}

func (l leaseRow) message(memberID string) *protocol.Lease {
	p := price()
	return &protocol.Lease{
		MemberId: memberID, LeaseNo: l.no, CapNanos: l.cap, Currency: currency, EndPolicy: "stop",
		ExpiresAt:       timestamppb.New(l.expiresAt),
		DurationSeconds: uint64(l.expiresAt.Sub(l.issuedAt) / time.Second),
		Prices: []*protocol.FrozenPrice{{
			Meter: p.Meter, PriceId: p.ID, PriceNanos: p.Nanos,
			PerQuantity: p.PerQuantity,
		}},
	}
}

// issueLease gives a member its next lease and holds what it may cost; false when the wallet does not cover it.
func (h *hub) issueLease(m *memberRow) bool {
	now := h.w.now.time()
	s := &m.subject
	since := s.openedAt
	if c := s.covered[coverageKey{meter: protocol.MeterSessionSeconds}]; len(c) > 0 {
		since = later(since, c[len(c)-1].To)
	}
	unreported := rating.TotalLength(rating.Intersect(rating.Interval{From: since, To: now}, s.windows()))
	last := s.lease().expiresAt
	cost := func(micros int64) (int64, bool) {
		nanos, err := rating.ChargeUp(price().Nanos, price().PerQuantity, micros)
		return nanos, err == nil
	}
	wish := min(max(h.w.cfg.Lease, minLease), maxLease)
	duration, lacks := rating.Affordable(cost, s.balance(), h.rows.wallets[m.org], unreported, wish, holdMargin)
	l := leaseRow{no: s.lease().no + 1, issuedAt: now, expiresAt: now.Add(duration), suspended: s.suspended}
	if duration < minLease || duration < wish && !l.expiresAt.After(last) {
		return false
	}
	h.place(m, lacks)
	l.cap = s.placed
	if !h.w.breaks(BreakCap) {
		// The node counts what it measured; what of that the hub put into suspense must not use up the lease.
		suspended, err := rating.ChargeUp(price().Nanos, price().PerQuantity, s.suspended)
		if err != nil {
			return false
		}
		l.cap = rating.Cap(s.placed, suspended)
	}
	s.leases = append(s.leases, l)
	h.w.result.Leases++
	h.w.truth.leased(m, l)
	h.planRenewal(m)
	return true
}

// place moves money from the wallet into the member's hold.
func (h *hub) place(m *memberRow, nanos int64) {
	if nanos == 0 {
		return
	}
	m.subject.placed += nanos
	h.post(leg{&h.rows.wallets[m.org], -nanos}, leg{&m.holdAccount, nanos})
}

// planRenewal spreads renewals by the member's name, as renewAt does.
func (h *hub) planRenewal(m *memberRow) {
	l := m.subject.lease()
	if l.no == 0 {
		h.renewAt(m.node, m.id, l.no, h.w.now+minute)
		return
	}
	h.renewAt(m.node, m.id, l.no, since(l.issuedAt)+span(rating.RenewAfter(m.id, l.no, l.expiresAt.Sub(l.issuedAt))))
}

func (h *hub) renewAt(node int, memberID string, no uint64, at instant) {
	life := h.life
	h.w.after(at-h.w.now, -1, "renew", func() {
		m := h.rows.nodes[node].member(memberID)
		if h.life != life || !h.up || m == nil || !m.subject.closedAt.IsZero() || m.subject.lease().no != no {
			return
		}
		if h.rows.nodes[node].behind() || !h.issueLease(m) {
			h.renewAt(node, memberID, no, h.w.now+10*minute)
			return
		}
		h.look(node, 0)
	})
}

// close ends the claim. What is left of the hold comes back with the node's final record.
func (h *hub) close(m *memberRow, at time.Time) {
	s := &m.subject
	if !s.closedAt.IsZero() {
		return
	}
	s.closedAt = later(s.openedAt, at)
	if len(s.leases) == 0 {
		h.settle(m)
	}
	h.settleFinal(m)
}

func (h *hub) settleFinal(m *memberRow) {
	s := &m.subject
	if s.closedAt.IsZero() || s.finalIn == "" {
		return
	}
	ranges := h.rows.nodes[m.node].sequences[s.finalIn]
	if len(ranges) > 0 && ranges[0].from == 1 && ranges[0].to >= s.finalSequence {
		h.settle(m)
	}
}

func (h *hub) settle(m *memberRow) {
	s := &m.subject
	if !s.settledAt.IsZero() {
		return
	}
	s.settledAt = h.w.now.time()
	if rest := s.balance(); rest != 0 {
		s.returned += rest
		h.post(leg{&m.holdAccount, -rest}, leg{&h.rows.wallets[m.org], rest})
	}
}

type leg struct {
	account *int64
	nanos   int64
}

// post is one balanced change of the accounts.
func (h *hub) post(legs ...leg) {
	var sum int64
	for _, l := range legs {
		sum += l.nanos
		*l.account += l.nanos
	}
	h.w.result.Postings++
	if sum != 0 {
		h.w.fail(6, "the legs of a posting sum to %d", sum)
	}
}

type sequenceRange struct{ from, to uint64 }

func joinSequences(ranges []sequenceRange, from, to uint64) []sequenceRange {
	all := append(slices.Clone(ranges), sequenceRange{from, to})
	slices.SortFunc(all, func(a, b sequenceRange) int { return cmp.Compare(a.from, b.from) })
	out := all[:1]
	for _, r := range all[1:] {
		if last := &out[len(out)-1]; r.from <= last.to+1 {
			last.to = max(last.to, r.to)
			continue
		}
		out = append(out, r)
	}
	return out
}

// postUsage bills a segment: what was posted before is skipped, what cannot be billed is suspended, nothing makes it
// fail.
func (h *hub) postUsage(row *nodeRow, seg *protocol.UsageSegment, again bool) {
	incarnation := seg.GetIncarnation()
	done := row.sequences[incarnation]
	touched := map[string]map[int64]int64{}
	var order []string
	for _, r := range seg.GetRecords() {
		if !again && slices.ContainsFunc(done, func(d sequenceRange) bool {
			return d.from <= r.GetSequence() && r.GetSequence() <= d.to
		}) {
			continue
		}
		m := row.member(r.GetMemberId())
		if m == nil {
			h.rows.strangers += r.GetQuantity()
			continue
		}
		if r.GetFinal() {
			m.subject.finalIn, m.subject.finalSequence = incarnation, r.GetSequence()
		}
		if touched[m.id] == nil {
			touched[m.id] = map[int64]int64{}
			order = append(order, m.id)
		}
		h.take(m, r, touched[m.id], again)
	}
	first, last := seg.GetRecords()[0].GetSequence(), seg.GetRecords()[len(seg.GetRecords())-1].GetSequence()
	row.sequences[incarnation] = joinSequences(done, first, last)
	for _, id := range order {
		m := row.member(id)
		h.rate(m, touched[id])
		if l := m.subject.lease(); l.no > 0 && m.subject.suspended-l.suspended > holdMargin.Microseconds() &&
			!h.w.breaks(BreakCap) {
			// The node has counted it against the lease: the next one is due now, not at half-life.
			h.renewAt(m.node, m.id, l.no, h.w.now)
		}
	}
	for _, m := range row.members {
		if m.subject.settledAt.IsZero() {
			h.settleFinal(m)
		}
	}
}

// take holds one record against claim, lease, elapsed time and what is covered already.
func (h *hub) take(m *memberRow, r *protocol.UsageRecord, added map[int64]int64, again bool) {
	s := &m.subject
	record := rating.Interval{From: r.GetStartedAt().AsTime(), To: r.GetEndedAt().AsTime()}
	if !record.To.After(record.From) {
		return
	}
	key := coverageKey{meter: r.GetMeter(), run: r.GetRunId()}
	session := r.GetMeter() == protocol.MeterSessionSeconds
	quantity := r.GetQuantity()
	if session {
		key.run = ""
		quantity = min(quantity, record.Length())
	}
	allowed := rating.Intersect(record, []rating.Interval{{To: h.w.now.time().Add(maxClockSkew)}})
	if !h.w.breaks(BreakClip) {
		allowed = intersectAll(allowed, []rating.Interval{rating.Span(s.openedAt, s.closedAt)})
		allowed = intersectAll(allowed, s.windows())
	}
	var accepted []rating.Interval
	for _, i := range allowed {
		if again {
			accepted = append(accepted, i)
			continue
		}
		accepted = append(accepted, rating.Subtract(i, s.covered[key])...)
	}
	parts := slices.Concat(accepted, outside(record, accepted))
	shares := rating.Divide(quantity, parts)
	for i, p := range parts {
		if i >= len(accepted) {
			if session {
				s.suspended += shares[i]
			}
			continue
		}
		h.w.truth.billed(m, r.GetMeter(), p, shares[i])
		if !session {
			continue
		}
		for _, piece := range rating.Split(p, shares[i], nil) {
			added[piece.Hour.Unix()] += piece.Quantity
		}
	}
	if len(accepted) > 0 {
		s.covered[key] = rating.Union(append(slices.Clone(s.covered[key]), accepted...))
	}
}

func intersectAll(in, within []rating.Interval) []rating.Interval {
	var out []rating.Interval
	for _, i := range in {
		out = append(out, rating.Intersect(i, within)...)
	}
	return out
}

func outside(i rating.Interval, of []rating.Interval) []rating.Interval {
	return rating.Subtract(i, rating.Union(of))
}

// rate turns what was added to a member's hours into postings, the earliest hour first.
func (h *hub) rate(m *memberRow, added map[int64]int64) {
	s, p := &m.subject, price()
	for _, at := range slices.Sorted(maps.Keys(added)) {
		next, d, err := rating.Accrue(s.accruals[at], p, added[at], s.balance())
		if err != nil {
			h.w.fail(6, "accrue %s: %v", m.id, err)
			return
		}
		s.accruals[at] = next
		if d.CollectedNanos > 0 {
			s.posted += d.CollectedNanos
			legs := []leg{{&m.holdAccount, -d.CollectedNanos}, {&h.rows.revenue, d.CollectedNanos - d.HostNanos}}
			if !h.w.breaks(BreakBalance) {
				legs = append(legs, leg{&h.rows.nodes[m.node].host, d.HostNanos})
			}
			h.post(legs...)
		}
		if d.WrittenOffNanos > 0 {
			h.post(leg{&h.rows.revenue, d.WrittenOffNanos}, leg{&h.rows.writeOff, -d.WrittenOffNanos})
		}
	}
}
