package ledger

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/rating"
)

// batch is segments being billed together: the part of the books that their records reach, and how it is stored.
type batch struct {
	now time.Time
	// slot is where the raw usage goes.
	slot Slot

	book     *billing.Book
	subjects map[string]*subject
	// holds are by member, stored is the billed time as the database has it.
	holds   map[string]hold
	stored  map[billing.TimeKey][]rating.Interval
	pending map[pendingKey]*pendingPosting
}

// usageRow is a record with what of it was accepted, and the posting that charges it; not valid for nothing.
type usageRow struct {
	*billing.Record
	accepted int64
	subject  *subject
	posting  pgtype.UUID
}

func loadBatch(ctx context.Context, tx db.Tx, records []*billing.Record, now time.Time) (*batch, error) {
	b := &batch{now: now, book: billing.NewBook(), holds: map[string]hold{}}
	var err error
	if err = b.loadMembers(ctx, tx, records); err != nil {
		return nil, err
	}
	reach := b.book.Prepare(records)
	members, spans := make([]*subject, len(reach)), make([]rating.Interval, len(reach))
	for i, r := range reach {
		members[i], spans[i] = b.subjects[r.MemberID], r.Span
	}
	if err := b.loadLeases(ctx, tx, members, spans); err != nil {
		return nil, err
	}
	if b.holds, err = holdsOf(ctx, tx, members); err != nil {
		return nil, err
	}
	for id, h := range b.holds {
		b.book.Holds[id] = h.Hold
	}
	if err := loadHours(ctx, tx, members, spans, b.book); err != nil {
		return nil, err
	}
	if b.pending, err = pendingOf(ctx, tx, members); err != nil {
		return nil, err
	}
	b.stored, err = loadCoverage(ctx, tx, b.subjects, b.book.Billed)
	return b, err
}

// loadMembers locks the members that records of their own nodes name: their row guards all that is stored of them, so
// that nothing of it is read before. What another node's records name is only read, to give its reason for suspense.
func (b *batch) loadMembers(ctx context.Context, tx db.Tx, records []*billing.Record) (err error) {
	type naming struct{ nodeID, memberID string }
	named := map[naming]bool{}
	var last naming
	for _, r := range records {
		n := naming{r.Store.NodeID, r.MemberID}
		if n != last && db.IsID(n.memberID) {
			named[n] = true
		}
		last = n
	}
	var nodes, ids []string
	for n := range named {
		nodes, ids = append(nodes, n.nodeID), append(ids, n.memberID)
	}
	if b.subjects, err = lockMembers(ctx, tx, nodes, ids); err != nil {
		return err
	}
	ids = slices.DeleteFunc(ids, func(id string) bool { return b.subjects[id] != nil })
	others, err := subjectsByID(ctx, tx, ids)
	if err != nil {
		return err
	}
	for id, s := range others {
		// One of its own node that was not there to be locked has come since: it has no usage yet.
		if s.Kind == Member && !named[naming{s.NodeID, id}] {
			m := s.member()
			b.book.Members[id] = &m
		}
	}
	for id, s := range b.subjects {
		m := s.member()
		b.book.Members[id] = &m
	}
	return nil
}

func (b *batch) loadLeases(ctx context.Context, tx db.Tx, members []*subject, reach []rating.Interval) error {
	since := make([]time.Time, len(reach))
	for i, span := range reach {
		since[i] = span.From
	}
	all, err := leasesOf(ctx, tx, members, since)
	if err != nil {
		return err
	}
	byMember := map[string][]billing.Lease{}
	for _, l := range all {
		byMember[l.MemberID] = append(byMember[l.MemberID], l)
	}
	for id, leases := range byMember {
		b.book.Leases[id] = billing.NewLeases(leases)
	}
	return nil
}

// charge bills the records and writes what that changes, one statement a table.
func (b *batch) charge(ctx context.Context, tx db.Tx, records []*billing.Record) error {
	charged, err := b.book.Charge(b.now, records)
	if err != nil {
		return err
	}
	postings := map[*billing.Addition]pgtype.UUID{}
	for _, c := range charged.Charges {
		postings[c.Addition] = addPending(b.pending, c.Key, c.Price.Currency, c.Delta, b.now)
	}
	usage := make([]usageRow, len(charged.Accepted))
	for i, a := range charged.Accepted {
		usage[i] = usageRow{a.Record, a.Quantity, b.subjects[a.MemberID], postings[a.First]}
	}
	if err := insertUsage(ctx, tx, b.slot, usage); err != nil {
		return err
	}
	if err := insertSuspense(ctx, tx, charged.Suspended, b.now); err != nil {
		return err
	}
	if added := charged.SuspendedTotals(); len(added) > 0 {
		if err := addSuspended(ctx, tx, b.subjects, added); err != nil {
			return err
		}
		if err := hastenRenewals(ctx, tx, added, b.now); err != nil {
			return err
		}
	}
	return b.save(ctx, tx, charged)
}

func (b *batch) save(ctx context.Context, tx db.Tx, charged *billing.Batch) error {
	if err := saveCoverage(ctx, tx, b.subjects, b.stored, b.book.Billed); err != nil {
		return err
	}
	hours := make(map[billing.AccrualKey]hourRow, len(charged.Charges))
	for _, c := range charged.Charges {
		hours[c.Key] = hourRow{b.book.Hour(c.Key).Accrual, c.Records}
	}
	if err := upsertHours(ctx, tx, b.subjects, hours); err != nil {
		return err
	}
	if err := savePending(ctx, tx, b.subjects, b.pending); err != nil {
		return err
	}
	drawn := make(map[string]hold, len(charged.Drawn))
	for id := range charged.Drawn {
		h := b.holds[id]
		h.Hold = b.book.Holds[id]
		drawn[id] = h
	}
	if err := drawHolds(ctx, tx, drawn); err != nil {
		return err
	}
	return setFinals(ctx, tx, charged.Finals)
}
