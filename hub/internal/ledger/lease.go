package ledger

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
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
		return nil, fault.New(fault.Internal, codeSubjectKind, "Only a member has leases.", nil)
	case !s.closedAt.IsZero():
		return nil, fault.New(fault.Conflict, codeSubjectClosed, "The member is gone; it gets no further lease.", nil)
	case s.NodeID != r.NodeID:
		return nil, fault.New(fault.Conflict, codeWrongNode, "The member belongs to another node.", nil)
	}
	if s.AppSlug == "" {
		s.AppSlug = r.AppSlug
	}
	return issue(ctx, tx, s, r, r.Now.UTC().Truncate(time.Microsecond))
}

// RaiseLimits lets a member use more from now on: where a limit grows, it gets a lease whose hold covers that. A limit
// never shrinks: usage of the time before may still come. For the same reason the part of a GPU that it has is the one
// that it had first: an hour has one price.
func RaiseLimits(ctx context.Context, tx db.Tx, r LeaseRequest, cpuMillis, memoryBytes int64,
	acceleratorIDs []string,
) error {
	s, err := lockSubject(ctx, tx, r.SubjectID)
	if err != nil {
		return err
	}
	var next Subject
	next.SetAccelerators(acceleratorIDs)
	if s.Accelerators > 0 && next.Accelerators > 0 && s.AcceleratorSlices != next.AcceleratorSlices {
		return fault.New(fault.Unprocessable, codeAcceleratorPartFixed, "The app instance is billed for another part of a "+
			"GPU; deploy it anew.", nil).
			WithField("/resources/accelerator_sharing", "gives it another part of a GPU").Permanent()
	}
	if grown, err := s.grow(ctx, tx, cpuMillis, memoryBytes, next); err != nil || !grown {
		return err
	}
	_, err = nextLease(ctx, tx, s, r)
	return err
}

// AdoptLimits lets a member use what a newer revision of it uses that a restored hub does not know. Its leases are
// adopted after that.
func AdoptLimits(ctx context.Context, tx db.Tx, subjectID string, cpuMillis, memoryBytes int64,
	acceleratorIDs []string,
) error {
	s, err := lockSubject(ctx, tx, subjectID)
	if err != nil {
		return err
	}
	var next Subject
	next.SetAccelerators(acceleratorIDs)
	_, err = s.grow(ctx, tx, cpuMillis, memoryBytes, next)
	return err
}

// grow raises limits; grown is false where none is higher than before.
func (s *subject) grow(ctx context.Context, tx db.Tx, cpuMillis, memoryBytes int64, next Subject,
) (grown bool, err error) {
	if cpuMillis <= s.CPUMillis && memoryBytes <= s.MemoryBytes && next.Accelerators <= s.Accelerators {
		return false, nil
	}
	s.CPUMillis, s.MemoryBytes = max(s.CPUMillis, cpuMillis), max(s.MemoryBytes, memoryBytes)
	if next.Accelerators > s.Accelerators {
		s.Accelerators, s.AcceleratorSlices = next.Accelerators, next.AcceleratorSlices
	}
	return true, tx.Queue(ctx, `UPDATE subjects SET cpu_millis = $2, memory_bytes = $3, accelerators = $4,
		accelerator_slices = $5 WHERE id = $1`,
		s.ID, s.CPUMillis, s.MemoryBytes, s.Accelerators, s.AcceleratorSlices)
}

// OpenMember starts billing of a member and gives it its first lease: OpenSubject and IssueLease in fewer statements.
func OpenMember(ctx context.Context, tx db.Tx, s Subject, duration time.Duration) (*protocol.Lease, error) {
	s.Kind, s.OpenedAt = Member, s.OpenedAt.UTC().Truncate(time.Microsecond)
	r := LeaseRequest{SubjectID: s.ID, NodeID: s.NodeID, Now: s.OpenedAt, Duration: duration, AppSlug: s.AppSlug}
	var (
		made   bool
		prices []billing.FrozenPrice
	)
	opened := subject{Subject: s, accruedUntil: s.OpenedAt}
	if err := db.Together(ctx, tx, func(tx db.Tx) (err error) {
		made, err = insertSubject(ctx, tx, s)
		return err
	}, func(tx db.Tx) (err error) {
		prices, err = freeze(ctx, tx, &opened, s.OpenedAt)
		return err
	}); err != nil {
		return nil, err
	}
	if !made {
		return IssueLease(ctx, tx, r)
	}
	return issueAt(ctx, tx, opened, r, s.OpenedAt, prices, past{})
}

// issue gives an open member its next lease.
func issue(ctx context.Context, tx db.Tx, s subject, r LeaseRequest, now time.Time) (*protocol.Lease, error) {
	prices, err := freeze(ctx, tx, &s, now)
	if err != nil {
		return nil, err
	}
	p, err := pastOf(ctx, tx, s, prices, now)
	if err != nil {
		return nil, err
	}
	return issueAt(ctx, tx, s, r, now, prices, p)
}

// issueAt gives an open member its next lease at these prices; one that was opened just now has no past.
func issueAt(ctx context.Context, tx db.Tx, s subject, r LeaseRequest, now time.Time, prices []billing.FrozenPrice,
	p past,
) (*protocol.Lease, error) {
	available, err := walletBalance(ctx, tx, s.OrgID, s.currency)
	if err != nil {
		return nil, err
	}
	l, lacks, ok := billing.NextLease(s.member(), p.Past, billing.Wish{
		Now: now, Duration: r.Duration, Currency: s.currency, Prices: prices, WalletNanos: available,
	})
	if !ok {
		return nil, insufficientFunds()
	}
	h, err := place(ctx, tx, s, p.hold, lacks, fmt.Sprintf("lease:%s:%d", s.ID, l.No), now)
	if err != nil {
		return nil, err
	}
	l.HoldID = h.id
	if err := insertLease(ctx, tx, l); err != nil {
		return nil, err
	}
	s.leaseNo = l.No
	return l.Message(), setLeased(ctx, tx, s, l.RenewAt())
}

// past is what a member's next lease depends on, with the hold as it is stored.
type past struct {
	billing.Past
	hold hold
}

func pastOf(ctx context.Context, tx db.Tx, s subject, prices []billing.FrozenPrice, now time.Time) (p past, err error) {
	if p.hold, _, err = holdOf(ctx, tx, s); err != nil {
		return p, err
	}
	p.Hold, p.LastLease = p.hold.Hold, s.leaseNo
	covered, err := coveredUntil(ctx, tx, s, protocol.MeterSessionSeconds)
	if err != nil {
		return p, err
	}
	since := latest(s.OpenedAt, covered)
	leases, err := leasesOf(ctx, tx, []*subject{&s}, []time.Time{since})
	if err != nil {
		return p, err
	}
	for _, l := range leases {
		if l.No == p.LastLease {
			p.CoveredSince = l.CoveredSince
		}
	}
	p.SetUnreported(s.member(), since, now, leases)
	suspended, err := suspendedOf(ctx, tx, s)
	p.SuspendedNanos = billing.SuspendedCost(prices, suspended)
	return p, err
}

// LeasesFor are the latest leases of all open members of a node, in order of member id: the node's next batch.
func LeasesFor(ctx context.Context, tx db.Tx, nodeID string) ([]*protocol.Lease, error) {
	batches, err := LeasesOf(ctx, tx, []string{nodeID})
	return batches[nodeID].Leases, cmp.Or(err, batches[nodeID].Err)
}

// LeaseBatch is what LeasesFor returns.
type LeaseBatch struct {
	Leases []*protocol.Lease
	Err    error
}

// LeasesOf are the next batches of nodes. One with a lease that cannot be read has an error; the others are whole.
func LeasesOf(ctx context.Context, tx db.Tx, nodeIDs []string) (map[string]LeaseBatch, error) {
	out := map[string]LeaseBatch{}
	_, err := db.Select(ctx, tx, func(row pgx.CollectableRow) (struct{}, error) {
		l, err := scanLease(row)
		if l.NodeID == "" {
			return struct{}{}, err
		}
		batch := out[l.NodeID]
		out[l.NodeID] = LeaseBatch{append(batch.Leases, l.Message()), cmp.Or(batch.Err, err)}
		return struct{}{}, nil
	},
		`SELECT l.subject_id, l.lease_no, s.node_id, l.hold_id, l.currency, l.cap_nanos, l.issued_at, l.expires_at,
			l.covered_since, l.end_policy, l.prices
		FROM subjects s
		JOIN leases l ON l.node_id = s.node_id AND l.subject_id = s.id AND l.lease_no = s.lease_no
		WHERE s.node_id = ANY($1::uuid[]) AND s.settled_at IS NULL AND s.closed_at IS NULL AND s.kind = 'member'
		ORDER BY l.subject_id`, nodeIDs)
	return out, err
}

// LeasedUntil is when the member's latest lease ends; zero where it has none.
func LeasedUntil(ctx context.Context, tx db.Tx, subjectID string) (end time.Time, err error) {
	err = tx.QueryRow(ctx,
		`SELECT l.expires_at FROM subjects s JOIN leases l ON l.node_id = s.node_id
			AND l.subject_id = s.id AND l.lease_no = s.lease_no WHERE s.id = $1`, subjectID).Scan(&end)
	if db.IsNoRows(err) {
		return time.Time{}, nil
	}
	return end, err
}

// DueForRenewal are the open members whose lease is past its half-life, give or take a fifth, and that are not set
// aside. One that has run out is due, too: with new credit its workload starts again. Those on the nodes except are
// not. Each org has its turn, with those of its members first that are due longest.
func DueForRenewal(ctx context.Context, tx db.Tx, except []string, now time.Time, limit int) ([]Row, error) {
	return db.Select(ctx, tx, pgx.RowToStructByPos[Row], `SELECT id, org_id, node_id FROM (
			SELECT id, org_id, node_id, renew_at, row_number() OVER (PARTITION BY org_id ORDER BY renew_at, id) AS turn
			FROM subjects WHERE closed_at IS NULL AND renew_at <= $1 AND node_id <> ALL($3::uuid[])) AS due
		ORDER BY turn, renew_at, id LIMIT $2`, now, limit, append([]string{}, except...))
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
	leased, err := LeasedUntil(ctx, tx, s.ID)
	if err != nil {
		return out, err
	}
	pause := billing.RetryRenewal(s.failures+1, leased, r.Now)
	return out, setAside(ctx, tx, s.ID, s.failures+1, r.Now.Add(pause))
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
	newest, err := leaseOf(ctx, tx, s, s.leaseNo)
	if err != nil {
		return err
	}
	if ended := newest.ExpiresAt.Add(billing.HoldMargin); now.Before(ended) {
		return setRenewal(ctx, tx, s.ID, ended)
	}
	p, err := pastOf(ctx, tx, s, newest.Prices, now)
	if err != nil {
		return err
	}
	if surplus := billing.Surplus(s.member(), p.Past, newest.Prices); surplus > 0 {
		if err := release(ctx, tx, s, p.hold, surplus, HoldReduced, fmt.Sprintf("hold_reduced:%s:%d", p.hold.id,
			now.UnixMicro()), now); err != nil {
			return err
		}
	}
	if p.UnreportedMicros > billing.HoldMargin.Microseconds() {
		// Its node has yet to say that nothing of the member runs, or to report what ran.
		return setRenewal(ctx, tx, s.ID, now.Add(billing.LastRetry))
	}
	return setRenewal(ctx, tx, s.ID, time.Time{})
}

// ResumeRenewals makes members due that are to run again, also those whose turn ReduceHold has put behind the end of
// their lease.
func ResumeRenewals(ctx context.Context, tx db.Tx, subjectIDs []string, now time.Time) error {
	return tx.Queue(ctx, `UPDATE subjects SET renew_at = $2 WHERE id = ANY($1) AND closed_at IS NULL AND kind = 'member'
		AND (renew_at IS NULL OR failures > 0 OR renew_at > (SELECT l.expires_at FROM leases l
			WHERE l.node_id = subjects.node_id AND l.subject_id = subjects.id AND l.lease_no = subjects.lease_no))`,
		uuids(subjectIDs), now)
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
	return noteIdle(ctx, tx, nodeID, ids, flags, now, now.Add(-billing.HoldMargin/2))
}

// freeze reads what the member's meters cost now, and settles its currency. A member without a lease is refused where a
// meter would cost it something in other currencies only. One that has a lease goes on: an admin who writes the first
// price in another currency stops nobody.
func freeze(ctx context.Context, tx db.Tx, s *subject, now time.Time) ([]billing.FrozenPrice, error) {
	var rows []Price
	currency := s.currency
	err := db.Together(ctx, tx, func(tx db.Tx) (err error) {
		rows, err = pricesOf(ctx, tx, append(nodeMeters(), MeterAllocationSeconds))
		return err
	}, func(tx db.Tx) (err error) {
		if currency == "" {
			currency, err = oldestWallet(ctx, tx, s.OrgID)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	chosen, err := currencyOf(*s, currency, nodeMeters(), rows, now)
	if err != nil && s.leaseNo == 0 {
		return nil, err
	}
	s.currency = cmp.Or(chosen, currency)
	// Where the member's org pays for the allocation itself, its time, processor and memory are paid for; only what an app
	// asks for itself is added. The allocation of what the platform manages is the platform's.
	p, ok := at(schedule(rows, MeterAllocationSeconds, "", s.SKU, s.currency), now)
	if ok && p.Nanos > 0 && s.OperatingMode != manifest.PlatformManaged {
		rows = slices.DeleteFunc(rows, func(p Price) bool { return p.AppSlug == "" })
	}
	rows = s.ofSlice(rows)
	var out []billing.FrozenPrice
	for _, meter := range nodeMeters() {
		if p, ok := s.frozen(rows, meter, s.currency, now); ok {
			out = append(out, p)
		} else if s.leaseNo == 0 && s.costsElsewhere(rows, meter, now) {
			return nil, currencyMissing("price of "+meter, s.currency)
		}
	}
	return out, nil
}

// frozen is what a meter costs the member now in a currency.
func (s subject) frozen(rows []Price, meter, currency string, now time.Time) (billing.FrozenPrice, bool) {
	p, ok := at(schedule(rows, meter, s.AppSlug, s.SKU, currency), now)
	return billing.FrozenPrice{
		Meter: meter, PriceID: p.ID, Nanos: p.Nanos, PerQuantity: p.PerQuantity, HostBasisPoints: p.HostBasisPoints,
	}, ok
}

// costsElsewhere reports whether a meter would cost the member something in a currency other than its own.
func (s subject) costsElsewhere(rows []Price, meter string, now time.Time) bool {
	return slices.ContainsFunc(rows, func(r Price) bool {
		if r.Meter != meter || r.Currency == s.currency {
			return false
		}
		p, ok := s.frozen(rows, meter, r.Currency, now)
		list, _ := rates(s.Subject, []billing.FrozenPrice{p})
		return ok && len(list) > 0
	})
}

// ofSlice makes the prices of an accelerator's time those of the member's slice of 1/n: a n-th, paid for n times the
// quantity, so that nothing is rounded. The price of its SKU is that of the slice.
func (s subject) ofSlice(rows []Price) []Price {
	if s.AcceleratorSlices == 0 {
		return rows
	}
	rows = slices.Clone(rows)
	for i, p := range rows {
		if p.Meter == protocol.MeterAcceleratorSeconds && p.SKU == "" {
			rows[i].PerQuantity *= s.AcceleratorSlices
		}
	}
	return rows
}
