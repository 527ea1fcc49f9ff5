package billing

import (
	"math"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/hub/rating"
	"github.com/gpuaas/gpuaas/protocol"
)

// Why usage is in suspense and not on a bill.
const (
	SuspenseUnknownSubject = "unknown_subject"
	SuspenseWrongNode      = "wrong_node"
	SuspenseMalformed      = "malformed"
	SuspenseBeyondElapsed  = "beyond_elapsed"
	SuspenseBeyondLimit    = "beyond_limit"
	SuspenseOutsideClaim   = "outside_claim"
	SuspenseOutsideLease   = "outside_lease"
	SuspenseAlreadyBilled  = "already_billed"
	SuspenseOutOfRange     = "out_of_range"
	// SuspenseTooFragmented: no honest meter makes so many, or so small, records.
	SuspenseTooFragmented = "too_fragmented"
)

const (
	// cpuSlack is one scheduling period by which a container may overrun its processor limit, per record.
	cpuSlack = 200 * time.Millisecond
	// startCPU is the processor time that a start may take beyond the limit, per record: runc sets up namespaces and
	// mounts within the container's cgroup before it sets the limit, which takes 20 to 50 ms.
	startCPU = 250 * time.Millisecond
	// hourSlack is what the records of one hour may be longer than it: each may overrun its limit a little.
	hourSlack = 3 * time.Minute
	// maxPieces bounds the pieces that billed time cuts one record into.
	maxPieces = 32
)

// Store is one incarnation of a node's store; record numbers count within it.
type Store struct{ NodeID, Incarnation string }

// Record is a usage record as its node sent it.
type Record struct {
	Store    Store
	Sequence int64
	MemberID string
	Meter    string
	Quantity int64
	Span     rating.Interval
	RunID    string
	LeaseNo  int64
	Final    bool
	// billed is the billed time of the record's key; Prepare sets it, nil where nothing of the record may be billed.
	billed *BilledTime
}

// TimeKey names what a stretch of time is billed once for.
type TimeKey struct{ MemberID, Meter, RunID string }

// key: a member's running time counts once, over all its containers, and so does that of its accelerators: a container
// has them to itself.
func (r *Record) key() TimeKey {
	if r.Meter == protocol.MeterSessionSeconds || r.Meter == protocol.MeterAcceleratorSeconds {
		return TimeKey{r.MemberID, r.Meter, ""}
	}
	return TimeKey{r.MemberID, r.Meter, r.RunID}
}

// Piece is a part of a record: billed where Reason is empty.
type Piece struct {
	Span     rating.Interval
	Quantity int64
	Reason   string
}

// bounds limit what of a record is billed.
type bounds struct {
	now    time.Time
	claim  rating.Interval
	leased []rating.Interval
	// covered is what is billed of the record's key; nil where the record lies outside the claim.
	covered *BilledTime
}

// clip divides a record into what is billed and what is not: claim ∩ lease ∩ elapsed time, and nothing twice. The
// pieces' quantities sum to the record's.
func clip(r *Record, m *Member, b bounds) []Piece {
	if reason := r.malformed(); reason != "" {
		return []Piece{{r.Span, r.Quantity, reason}}
	}
	if b.covered.fragmented() {
		return []Piece{{r.Span, r.Quantity, SuspenseTooFragmented}}
	}
	var pieces []Piece
	quantity := r.Quantity
	if most, reason := ceiling(r, m); quantity > most {
		pieces = append(pieces, Piece{r.Span, quantity - most, reason})
		quantity = most
	}
	if b.admit(r.Span) {
		return append(pieces, Piece{Span: r.Span, Quantity: quantity})
	}
	parts := []Piece{{Span: r.Span}}
	for _, step := range []struct {
		allowed []rating.Interval
		reason  string
	}{
		{[]rating.Interval{{To: b.now.Add(maxClockSkew)}}, SuspenseBeyondElapsed},
		{[]rating.Interval{b.claim}, SuspenseOutsideClaim},
		{b.leased, SuspenseOutsideLease},
	} {
		parts = narrow(parts, step.allowed, step.reason)
	}
	parts, ok := exclude(parts, b.covered, SuspenseAlreadyBilled)
	if !ok {
		return []Piece{{r.Span, r.Quantity, SuspenseTooFragmented}}
	}
	slices.SortFunc(parts, func(a, b Piece) int { return a.Span.From.Compare(b.Span.From) })
	spans := make([]rating.Interval, len(parts))
	for i, p := range parts {
		spans[i] = p.Span
	}
	for i, q := range rating.Divide(quantity, spans) {
		parts[i].Quantity = q
	}
	return append(pieces, parts...)
}

// admit reports whether all of a span may be billed, as nearly every record's may: nothing of it need be divided.
func (b bounds) admit(span rating.Interval) bool {
	holds := func(outer rating.Interval) bool { return !span.From.Before(outer.From) && !span.To.After(outer.To) }
	return !span.To.After(b.now.Add(maxClockSkew)) && holds(b.claim) && slices.ContainsFunc(b.leased, holds) &&
		b.covered != nil && !b.covered.Before(span.From)
}

func (r *Record) malformed() string {
	switch {
	case r.Quantity < 0, r.Span.From.IsZero(), !r.Span.To.After(r.Span.From):
		return SuspenseMalformed
	case r.Meter == "":
		return SuspenseMalformed
	}
	return ""
}

// ceiling is the largest quantity that the record's length and the member's limits allow.
func ceiling(r *Record, m *Member) (int64, string) {
	length, start := r.Span.Length(), int64(0)
	switch {
	case r.Meter == protocol.MeterSessionSeconds:
		return length, SuspenseBeyondElapsed
	case r.Meter == protocol.MeterAcceleratorSeconds:
	case r.Meter == protocol.MeterCPUSeconds && m.CPUMillis > 0:
		length, start = length+cpuSlack.Microseconds(), startCPU.Microseconds()
	case r.Meter == protocol.MeterMemoryByteSeconds && m.MemoryBytes > 0:
	default:
		return r.Quantity, ""
	}
	most, ok := m.MaxUse(r.Meter, length)
	if !ok || most > math.MaxInt64-start {
		return r.Quantity, ""
	}
	return most + start, SuspenseBeyondLimit
}

// maxPerHour is the most of a meter that is accepted of one hour, over all runs; a record that begins in the hour may
// end beyond it.
func maxPerHour(r *Record, m *Member) int64 {
	if r.Meter == protocol.MeterSessionSeconds || r.Meter == protocol.MeterAcceleratorSeconds {
		return math.MaxInt64 // its time counts once
	}
	most, ok := m.MaxUse(r.Meter, (time.Hour+hourSlack).Microseconds()+r.Span.Length())
	if !ok || most == 0 {
		return math.MaxInt64 // no limit is known
	}
	return most
}

func narrow(parts []Piece, allowed []rating.Interval, reason string) []Piece {
	var out []Piece
	for _, p := range parts {
		if p.Reason != "" {
			out = append(out, p)
			continue
		}
		inside := rating.Intersect(p.Span, allowed)
		for _, i := range inside {
			out = append(out, Piece{Span: i})
		}
		for _, i := range rating.Subtract(p.Span, inside) {
			out = append(out, Piece{Span: i, Reason: reason})
		}
	}
	return out
}

// exclude takes out what is billed; ok is false where that cuts the record into too many pieces.
func exclude(parts []Piece, covered *BilledTime, reason string) (out []Piece, ok bool) {
	for _, p := range parts {
		if p.Reason != "" || covered == nil {
			out = append(out, p)
			continue
		}
		free, billed, ok := covered.Divide(p.Span, maxPieces)
		if !ok {
			return nil, false
		}
		for _, i := range billed {
			out = append(out, Piece{Span: i, Reason: reason})
		}
		for _, i := range free {
			out = append(out, Piece{Span: i})
		}
	}
	return out, true
}
