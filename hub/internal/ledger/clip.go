package ledger

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
	// maxClockSkew is how far a node's clock may be ahead of the hub's before its time counts as not elapsed yet. The same
	// stretch arrives only once, so the allowance is not gained with each record.
	maxClockSkew = 2 * time.Minute
	// cpuSlack is one scheduling period by which a container may overrun its processor limit, per record.
	cpuSlack = 200 * time.Millisecond
)

// record is a usage record as the node sent it, in the ledger's types.
type record struct {
	store    store
	sequence int64
	memberID string
	meter    string
	quantity int64
	span     rating.Interval
	runID    string
	leaseNo  int64
	revision int64
	final    bool
	// billed is of the record's key, once the batch is loaded; nil where nothing of the record may be billed.
	billed *billedTime
}

// bounds are what a record is held against.
type bounds struct {
	now    time.Time
	claim  rating.Interval
	leased []rating.Interval
	// covered is what is billed of the record's key; nil where the record lies outside the claim.
	covered *billedTime
	// fragmented: the record is one too many.
	fragmented bool
}

// piece is a part of a record: accepted where reason is empty.
type piece struct {
	span     rating.Interval
	quantity int64
	reason   string
}

// clip divides a record into what is billed and what is not: claim ∩ lease ∩ elapsed time, and nothing twice. The
// pieces' quantities sum to the record's.
func clip(r *record, s Subject, b bounds) []piece {
	if reason := malformed(r); reason != "" {
		return []piece{{r.span, r.quantity, reason}}
	}
	if b.fragmented {
		return []piece{{r.span, r.quantity, SuspenseTooFragmented}}
	}
	var pieces []piece
	quantity := r.quantity
	if most, reason := ceiling(r, s); quantity > most {
		pieces = append(pieces, piece{r.span, quantity - most, reason})
		quantity = most
	}
	if b.admit(r.span) {
		return append(pieces, piece{span: r.span, quantity: quantity})
	}
	parts := []piece{{span: r.span}}
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
		return []piece{{r.span, r.quantity, SuspenseTooFragmented}}
	}
	slices.SortFunc(parts, func(a, b piece) int { return a.span.From.Compare(b.span.From) })
	spans := make([]rating.Interval, len(parts))
	for i, p := range parts {
		spans[i] = p.span
	}
	for i, q := range rating.Divide(quantity, spans) {
		parts[i].quantity = q
	}
	return append(pieces, parts...)
}

// admit says that all of a span may be billed, which is what nearly every record is: nothing of it need be divided.
func (b bounds) admit(span rating.Interval) bool {
	holds := func(outer rating.Interval) bool { return !span.From.Before(outer.From) && !span.To.After(outer.To) }
	return !span.To.After(b.now.Add(maxClockSkew)) && holds(b.claim) && slices.ContainsFunc(b.leased, holds) &&
		b.covered != nil && !b.covered.Before(span.From)
}

func malformed(r *record) string {
	switch {
	case r.quantity < 0, r.span.From.IsZero(), !r.span.To.After(r.span.From):
		return SuspenseMalformed
	case r.meter == "":
		return SuspenseMalformed
	}
	return ""
}

// ceiling is the largest quantity that the record's length and the subject's limits allow.
func ceiling(r *record, s Subject) (int64, string) {
	length := r.span.Length()
	switch {
	case r.meter == protocol.MeterSessionSeconds:
		return length, SuspenseBeyondElapsed
	case r.meter == protocol.MeterCPUSeconds && s.CPUMillis > 0:
		length += cpuSlack.Microseconds()
	case r.meter == protocol.MeterMemoryByteSeconds && s.MemoryBytes > 0:
	default:
		return r.quantity, ""
	}
	most, ok := mostOf(s, r.meter, length)
	if !ok {
		return r.quantity, ""
	}
	return most, SuspenseBeyondLimit
}

// hourMost is the most of a meter that may be accepted of one hour, over all runs; a record that begins in the hour may
// end beyond it.
func hourMost(r *record, s Subject) int64 {
	if r.meter == protocol.MeterSessionSeconds {
		return math.MaxInt64 // its time counts once
	}
	most, ok := mostOf(s, r.meter, (time.Hour+hourSlack).Microseconds()+r.span.Length())
	if !ok || most == 0 {
		return math.MaxInt64 // no limit is known
	}
	return most
}

func narrow(parts []piece, allowed []rating.Interval, reason string) []piece {
	var out []piece
	for _, p := range parts {
		if p.reason != "" {
			out = append(out, p)
			continue
		}
		inside := rating.Intersect(p.span, allowed)
		for _, i := range inside {
			out = append(out, piece{span: i})
		}
		for _, i := range rating.Subtract(p.span, inside) {
			out = append(out, piece{span: i, reason: reason})
		}
	}
	return out
}

// exclude takes out what is billed; ok is false where that cuts the record into too many pieces.
func exclude(parts []piece, covered *billedTime, reason string) (out []piece, ok bool) {
	for _, p := range parts {
		if p.reason != "" || covered == nil {
			out = append(out, p)
			continue
		}
		free, billed, ok := covered.Divide(p.span, maxPieces)
		if !ok {
			return nil, false
		}
		for _, i := range billed {
			out = append(out, piece{span: i, reason: reason})
		}
		for _, i := range free {
			out = append(out, piece{span: i})
		}
	}
	return out, true
}

// coverage is under what a record's time is kept: a member's running time counts once, over all its containers.
func (r *record) coverage() coverageKey {
	if r.meter == protocol.MeterSessionSeconds {
		return coverageKey{r.memberID, r.meter, ""}
	}
	return coverageKey{r.memberID, r.meter, r.runID}
}
