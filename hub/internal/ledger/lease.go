package ledger

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/rating"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// MinLease is the shortest lease that is worth its messages; a wallet that affords less gets none.
	MinLease = 15 * time.Minute
	// MaxLease bounds how long a node may spend without asking again.
	MaxLease = 7 * 24 * time.Hour
	// holdMargin is held beyond a lease's end: what the last beats and a slow stop may take.
	holdMargin = 10 * time.Minute

	endPolicyStop = "stop"
)

// LeaseRequest asks for a member's next lease.
type LeaseRequest struct {
	SubjectID string
	NodeID    string
	Now       time.Time
	// Duration is cut to MaxLease, and to what the wallet affords.
	Duration time.Duration
	AppSlug  string
}

// lease is the row.
type lease struct {
	subjectID string
	no        int64
	nodeID    string
	holdID    string
	currency  string
	cap       int64
	issuedAt  time.Time
	expiresAt time.Time
	endPolicy string
	prices    []frozen
}

func (l lease) window() rating.Interval { return rating.Interval{From: l.issuedAt, To: l.expiresAt} }

func (l lease) message() *protocol.Lease {
	out := &protocol.Lease{
		MemberId: l.subjectID, LeaseNo: uint64(l.no), HoldId: l.holdID, CapNanos: l.cap, Currency: l.currency,
		EndPolicy: l.endPolicy,
		ExpiresAt: timestamppb.New(l.expiresAt), DurationSeconds: uint64(l.expiresAt.Sub(l.issuedAt) / time.Second),
	}
	for _, p := range l.prices {
		out.Prices = append(out.Prices, &protocol.FrozenPrice{
			Meter: p.Meter, PriceId: p.PriceID, PriceNanos: p.Nanos,
			PerQuantity: p.PerQuantity,
		})
	}
	return out
}

// IssueLease gives a member its next lease: today's prices, frozen, and a hold in the wallet that covers the whole of
// it and what the member may have spent and not yet reported. A wallet that does not cover the wish gets a shorter
// lease; one that does not cover MinLease, or no longer than the lease that runs, gets insufficient_funds and changes
// nothing.
func IssueLease(ctx context.Context, tx db.Tx, r LeaseRequest) (*protocol.Lease, error) {
	s, err := lockSubject(ctx, tx, r.SubjectID)
	if err != nil {
		return nil, err
	}
	return nextLease(ctx, tx, s, r)
}

func nextLease(ctx context.Context, tx db.Tx, s subject, r LeaseRequest) (*protocol.Lease, error) {
	switch {
	case s.Kind != Member:
		return nil, fault.New(fault.Internal, "subject_kind", "Only a member has leases.", nil)
	case !s.closedAt.IsZero():
		return nil, fault.New(fault.Conflict, "subject_closed", "The member is gone; it gets no further lease.", nil)
	case s.NodeID != r.NodeID:
		return nil, fault.New(fault.Conflict, "wrong_node", "The member belongs to another node.", nil)
	}
	if s.AppSlug == "" {
		s.AppSlug = r.AppSlug
	}
	return issue(ctx, tx, s, r, r.Now.UTC().Truncate(time.Microsecond), false)
}

// OpenMember starts billing of a member and gives it its first lease: OpenSubject and IssueLease in fewer statements.
func OpenMember(ctx context.Context, tx db.Tx, s Subject, duration time.Duration) (*protocol.Lease, error) {
	s.Kind, s.OpenedAt = Member, s.OpenedAt.UTC().Truncate(time.Microsecond)
	r := LeaseRequest{SubjectID: s.ID, NodeID: s.NodeID, Now: s.OpenedAt, Duration: duration, AppSlug: s.AppSlug}
	made, err := insertSubject(ctx, tx, s)
	if err != nil {
		return nil, err
	}
	if !made {
		return IssueLease(ctx, tx, r)
	}
	return issue(ctx, tx, subject{Subject: s, accruedUntil: s.OpenedAt}, r, s.OpenedAt, true)
}

// issue gives an open member its next lease. One that was opened just now has no past to ask for.
func issue(ctx context.Context, tx db.Tx, s subject, r LeaseRequest, now time.Time,
	opened bool,
) (*protocol.Lease, error) {
	prices, err := freeze(ctx, tx, &s, now)
	if err != nil {
		return nil, err
	}
	var p past
	if !opened {
		if p, err = pastOf(ctx, tx, s, prices, now); err != nil {
			return nil, err
		}
	}
	available, err := walletBalance(ctx, tx, s.OrgID, s.currency)
	if err != nil {
		return nil, err
	}
	wish := min(max(r.Duration, MinLease), MaxLease).Truncate(time.Second)
	cost := func(micros int64) (int64, bool) { return costOf(s, prices, micros) }
	duration, topUp := rating.Affordable(cost, p.hold.balance(), available, p.unreported, wish, holdMargin)
	l := lease{
		subjectID: s.ID, no: s.leaseNo + 1, nodeID: s.NodeID, currency: s.currency, issuedAt: now,
		expiresAt: now.Add(duration),
		endPolicy: endPolicyStop, prices: prices,
	}
	if duration < MinLease || duration < wish && !l.expiresAt.After(p.leasedUntil) {
		return nil, insufficientFunds()
	}
	h, err := place(ctx, tx, s, p.hold, topUp, fmt.Sprintf("lease:%s:%d", s.ID, l.no), now)
	if err != nil {
		return nil, err
	}
	l.holdID, l.cap = h.id, rating.Cap(h.placed-h.released, p.suspended)
	if err := insertLease(ctx, tx, l); err != nil {
		return nil, err
	}
	s.leaseNo = l.no
	return l.message(), setLeased(ctx, tx, s, renewAt(l))
}

// past is what a member's next lease depends on.
type past struct {
	hold hold
	// unreported is the leased time of which usage may still come, in microseconds; leasedUntil is when the latest lease
	// ends.
	unreported  int64
	leasedUntil time.Time
	// suspended is what usage in suspense would cost.
	suspended int64
}

func pastOf(ctx context.Context, tx db.Tx, s subject, prices []frozen, now time.Time) (p past, err error) {
	if p.hold, _, err = holdOf(ctx, tx, s.ID); err != nil {
		return p, err
	}
	if p.unreported, p.leasedUntil, err = unreportedLength(ctx, tx, s, now); err != nil {
		return p, err
	}
	p.suspended, err = suspendedCost(ctx, tx, s, prices)
	return p, err
}

// LeasesFor are the latest leases of all open members of a node, in order of member id: the node's next batch.
func LeasesFor(ctx context.Context, tx db.Tx, nodeID string) ([]*protocol.Lease, error) {
	leases, err := LeasesOf(ctx, tx, []string{nodeID})
	return leases[nodeID], err
}

// LeasesOf are the next batches of nodes.
func LeasesOf(ctx context.Context, tx db.Tx, nodeIDs []string) (map[string][]*protocol.Lease, error) {
	rows, err := latestLeases(ctx, tx, nodeIDs)
	if err != nil {
		return nil, err
	}
	out := map[string][]*protocol.Lease{}
	for _, l := range rows {
		out[l.nodeID] = append(out[l.nodeID], l.message())
	}
	return out, nil
}

// LeasedUntil is when the member's latest lease ends; zero where it has none.
func LeasedUntil(ctx context.Context, tx db.Tx, subjectID string) (time.Time, error) {
	return lastLeaseEnd(ctx, tx, subjectID)
}

// DueForRenewal are the open members whose lease is past its half-life, give or take a fifth, and that are not set
// aside. One that has run out is due, too: with new credit its workload starts again. Those on the nodes except are
// not. Each org has its turn, with those of its members first that are due longest.
func DueForRenewal(ctx context.Context, tx db.Tx, except []string, now time.Time, limit int) ([]Row, error) {
	return dueSubjects(ctx, tx, except, now, limit)
}

// Renewal is what came of RenewLease.
type Renewal struct {
	// Issued is false where the wallet does not cover the next lease; the member is due again after a pause.
	Issued bool
	// WasAside: earlier attempts had failed.
	WasAside bool
}

// RenewLease gives a member its next lease where its org's wallet covers it. One that has been closed meanwhile gets
// none.
func RenewLease(ctx context.Context, tx db.Tx, r LeaseRequest) (out Renewal, err error) {
	s, err := lockSubject(ctx, tx, r.SubjectID)
	if err != nil || !s.closedAt.IsZero() {
		return out, err
	}
	out.WasAside = s.failures > 0
	_, err = nextLease(ctx, tx, s, r)
	if err == nil {
		out.Issued = true
		return out, nil
	}
	if fault.As(err).Code != codeInsufficientFunds {
		return out, err
	}
	leased, err := lastLeaseEnd(ctx, tx, s.ID)
	if err != nil {
		return out, err
	}
	// While the lease still runs it is worth asking often; a grant of credit makes the member due at once.
	most := lastRetry
	if leased.After(r.Now) {
		most = holdMargin
	}
	return out, setAside(ctx, tx, s.ID, s.failures+1, r.Now.Add(retryAfter(s.failures+1, most)))
}

// ReduceHold is for a member that is not to run: it gets no further lease, and once its last one has ended, what its
// hold has beyond the usage that may still come goes back to the wallet. It is due again until then.
func ReduceHold(ctx context.Context, tx db.Tx, subjectID string, now time.Time) error {
	s, err := lockSubject(ctx, tx, subjectID)
	if err != nil || !s.closedAt.IsZero() {
		return err
	}
	if s.leaseNo == 0 {
		return setRenewal(ctx, tx, s.ID, time.Time{})
	}
	latest, err := leaseOf(ctx, tx, s.ID, s.leaseNo)
	if err != nil {
		return err
	}
	if ended := latest.expiresAt.Add(holdMargin); now.Before(ended) {
		return setRenewal(ctx, tx, s.ID, ended)
	}
	p, err := pastOf(ctx, tx, s, latest.prices, now)
	if err != nil {
		return err
	}
	need, ok := costOf(s, latest.prices, p.unreported+holdMargin.Microseconds())
	if surplus := p.hold.balance() - need; ok && surplus > 0 {
		if err := release(ctx, tx, s, p.hold, surplus, HoldReduced, fmt.Sprintf("hold_reduced:%s:%d", p.hold.id,
			now.UnixMicro()), now); err != nil {
			return err
		}
	}
	if p.unreported > holdMargin.Microseconds() {
		// Its node has yet to say that nothing of the member runs, or to bring what ran.
		return setRenewal(ctx, tx, s.ID, now.Add(lastRetry))
	}
	return setRenewal(ctx, tx, s.ID, time.Time{})
}

// ResumeRenewals makes members due that are to run again.
func ResumeRenewals(ctx context.Context, tx db.Tx, subjectIDs []string, now time.Time) error {
	return resumeRenewals(ctx, tx, subjectIDs, now)
}

// NoteIdle takes over what a node says of its members at a moment: whether nothing of one runs. No usage is expected of
// that time.
func NoteIdle(ctx context.Context, tx db.Tx, nodeID string, idle map[string]bool, now time.Time) error {
	var ids []pgtype.UUID
	var flags []bool
	for _, member := range slices.Sorted(maps.Keys(idle)) {
		if db.IsID(member) {
			ids, flags = append(ids, id(member)), append(flags, idle[member])
		}
	}
	if len(ids) == 0 {
		return nil
	}
	return noteIdle(ctx, tx, nodeID, ids, flags, now, now.Add(-holdMargin/2))
}

func renewAt(l lease) time.Time {
	return l.issuedAt.Add(rating.RenewAfter(l.subjectID, uint64(l.no), l.expiresAt.Sub(l.issuedAt)))
}

// suspendedCost is what the member's usage in suspense would cost: its node counts it against the cap. What was billed
// before under another name is not among it: the node has counted that once.
func suspendedCost(ctx context.Context, tx db.Tx, s subject, prices []frozen) (int64, error) {
	quantities, err := suspendedOf(ctx, tx, s.ID)
	if err != nil {
		return 0, err
	}
	var sum int64
	for _, p := range prices {
		cost, err := rating.ChargeUp(p.Nanos, p.PerQuantity, quantities[p.Meter])
		if err != nil {
			return 0, nil //nolint:nilerr // a quantity that no node can have measured earns no cap
		}
		sum = rating.Cap(sum, cost)
	}
	return sum, nil
}

// freeze looks up what the member's meters cost now, and settles its currency.
func freeze(ctx context.Context, tx db.Tx, s *subject, now time.Time) ([]frozen, error) {
	rows, err := pricesOf(ctx, tx, append(nodeMeters(), MeterAllocationSeconds))
	if err != nil {
		return nil, err
	}
	if s.currency, err = currencyOf(ctx, tx, *s, nodeMeters(), rows, now); err != nil {
		return nil, err
	}
	// Where the allocation itself is paid for, its time, processor and memory are; only what an app asks for itself is
	// added.
	if p, ok := at(schedule(rows, MeterAllocationSeconds, "", s.SKU, s.currency), now); ok && p.Nanos > 0 {
		rows = slices.DeleteFunc(rows, func(p Price) bool { return p.AppSlug == "" })
	}
	var out []frozen
	for _, meter := range nodeMeters() {
		if p, ok := at(schedule(rows, meter, s.AppSlug, s.SKU, s.currency), now); ok {
			out = append(out, frozen{
				Meter: meter, PriceID: p.ID, Nanos: p.Nanos, PerQuantity: p.PerQuantity,
				HostBasisPoints: p.HostBasisPoints,
			})
		}
	}
	return out, nil
}

// unreportedLength is the leased time of which the node may still bring usage, in microseconds, and when the last lease
// ends. While the node says that nothing of the member runs there is none.
func unreportedLength(ctx context.Context, tx db.Tx, s subject, now time.Time) (int64, time.Time, error) {
	covered, err := coveredUntil(ctx, tx, s.ID, protocol.MeterSessionSeconds)
	if err != nil {
		return 0, time.Time{}, err
	}
	since := latest(s.OpenedAt, covered)
	before, err := leasesOf(ctx, tx, []string{s.ID}, []time.Time{since})
	if err != nil {
		return 0, time.Time{}, err
	}
	var windows []rating.Interval
	var last time.Time
	for _, l := range before {
		windows = append(windows, l.window())
		last = latest(last, l.expiresAt)
	}
	var unreported int64
	for _, running := range rating.Subtract(rating.Interval{From: since, To: now}, []rating.Interval{s.idle}) {
		unreported += rating.TotalLength(rating.Intersect(running, rating.Union(windows)))
	}
	return unreported, last, nil
}

// costOf is the most that so many microseconds of running can cost; ok is false when it is out of range.
func costOf(s subject, prices []frozen, micros int64) (nanos int64, ok bool) {
	for _, p := range prices {
		limit, ok := mostOf(s.Subject, p.Meter, micros)
		if !ok {
			return 0, false
		}
		cost, err := rating.ChargeUp(p.Nanos, p.PerQuantity, limit)
		if err != nil || nanos > math.MaxInt64-cost {
			return 0, false
		}
		nanos += cost
	}
	return nanos, true
}

// mostOf is the largest quantity of a meter that a member can use in so many microseconds. Zero where its limit is
// unknown.
func mostOf(s Subject, meter string, micros int64) (int64, bool) {
	switch meter {
	case protocol.MeterSessionSeconds:
		return micros, true
	case protocol.MeterCPUSeconds:
		q, err := rating.ChargeUp(s.CPUMillis, 1000, micros)
		return q, err == nil
	case protocol.MeterMemoryByteSeconds:
		q, err := rating.ChargeUp(s.MemoryBytes, 1_000_000, micros)
		return q, err == nil
	default:
		return 0, true
	}
}
