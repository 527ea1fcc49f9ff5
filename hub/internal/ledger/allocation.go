package ledger

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/rating"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// openAllocation places the first hold of an allocation, where its time has a price.
func openAllocation(ctx context.Context, tx db.Tx, s subject) error {
	prices, err := allocationPrices(ctx, tx, &s, s.OpenedAt)
	if err != nil && (s.Kind != Volume || !fault.Is(err, fault.Conflict)) {
		return err
	}
	need, err := s.reserved(prices, billing.Hold{}).Lacks(s.OpenedAt, billing.ReservedAhead)
	if err != nil {
		return err
	}
	if s.Kind == Volume {
		wallet, err := walletBalance(ctx, tx, s.OrgID, s.currency)
		if err != nil {
			return err
		}
		need = min(need, wallet)
	}
	if _, err := place(ctx, tx, s, hold{}, need, s.Kind+":"+s.ID+":opened", s.OpenedAt); err != nil {
		return err
	}
	return setAccrued(ctx, tx, s)
}

// Row is a subject that a periodic pass has to process.
type Row struct {
	ID     string
	OrgID  string
	NodeID string
}

// DueAllocations lists open allocations, volumes and attachments that are billed up to a moment before now and are not
// set aside, in order of their ids, from the one after a given id on.
func DueAllocations(ctx context.Context, tx db.Tx, after string, now time.Time, limit int) ([]Row, error) {
	return db.Select(ctx, tx, pgx.RowToStructByPos[Row],
		`SELECT id, org_id, node_id FROM subjects WHERE kind <> 'member' AND closed_at IS NULL AND accrued_until < $1
			AND (retry_at IS NULL OR retry_at <= $1) AND id > $2 ORDER BY id LIMIT $3`, now, orFirst(after), limit)
}

// Accrued is what AccrueAllocation found.
type Accrued struct {
	// Exhausted: the wallet no longer covers the next billing.ReservedNotice. The caller must release the allocation, or
	// end the attachment, because what it uses beyond its hold is written off. A volume is never exhausted: its data
	// stays.
	Exhausted bool
	// Kind is the subject's.
	Kind string
	// WasAside: earlier attempts had failed.
	WasAside bool
}

// AccrueAllocation measures and bills the time of an open allocation or volume up to now, and keeps its hold ahead.
func AccrueAllocation(ctx context.Context, tx db.Tx, id string, now time.Time) (out Accrued, err error) {
	now = now.UTC().Truncate(time.Microsecond)
	s, err := lockSubject(ctx, tx, id)
	if err != nil || !s.closedAt.IsZero() {
		return out, err
	}
	out.WasAside, out.Kind = s.failures > 0, s.Kind
	r, err := accrueAllocation(ctx, tx, &s, latest(now, s.accruedUntil), billing.ReservedAhead, now)
	if err != nil {
		return out, err
	}
	exhausted, err := r.Exhausted(now)
	out.Exhausted = exhausted && s.Kind != Volume
	return out, err
}

// ResizeVolume bills an open volume up to now, and from now on for so many bytes.
func ResizeVolume(ctx context.Context, tx db.Tx, id string, bytes int64, now time.Time) error {
	if _, err := AccrueAllocation(ctx, tx, id, now); err != nil {
		return err
	}
	return tx.Queue(ctx, `UPDATE subjects SET volume_bytes = $2 WHERE id = $1 AND closed_at IS NULL`, id, bytes)
}

// CheckFunds refuses a volume whose first hour the wallet does not cover.
func CheckFunds(ctx context.Context, tx db.Tx, s Subject) error {
	of := subject{Subject: s}
	prices, err := allocationPrices(ctx, tx, &of, s.OpenedAt)
	if err != nil {
		return err
	}
	of.accruedUntil = s.OpenedAt
	need, err := of.reserved(prices, billing.Hold{}).Lacks(s.OpenedAt, billing.ReservedAhead)
	if err != nil {
		return err
	}
	wallet, err := walletBalance(ctx, tx, s.OrgID, of.currency)
	if err == nil && wallet < need {
		err = insufficientFunds()
	}
	return err
}

// reservedMeter is the meter of what the hub itself measures.
func (s subject) reservedMeter() string {
	switch s.Kind {
	case Volume:
		return MeterVolumeByteSeconds
	case Attachment:
		return MeterAttachmentSeconds
	default:
		return MeterAllocationSeconds
	}
}

func (s subject) reserved(prices []rating.Price, h billing.Hold) billing.Reserved {
	return billing.Reserved{
		ID: s.ID, Meter: s.reservedMeter(), OfBytes: s.Kind == Volume, Bytes: s.VolumeBytes, Prices: prices,
		Until: s.accruedUntil, Hold: h,
	}
}

// accrueAllocation bills an allocation's time from where it was left to a moment, and has its hold reach so far ahead.
// The hold is extended first: after an absence of the hub it may cover less than is billed now.
func accrueAllocation(ctx context.Context, tx db.Tx, s *subject, until time.Time, ahead time.Duration,
	now time.Time,
) (r billing.Reserved, err error) {
	prices, err := allocationPrices(ctx, tx, s, now)
	if err != nil && !fault.Is(err, fault.Conflict) {
		return r, err
	}
	h, _, err := holdOf(ctx, tx, *s)
	if err != nil {
		return r, err
	}
	lacks, err := s.reserved(prices, h.Hold).Lacks(until, ahead)
	if err != nil {
		return r, err
	}
	if lacks > 0 {
		if h, err = extendHold(ctx, tx, *s, h, lacks, now); err != nil {
			return r, err
		}
	}
	r = s.reserved(prices, h.Hold)
	if until.After(s.accruedUntil) {
		if r, err = chargeAllocation(ctx, tx, *s, h, r, until, now); err != nil {
			return r, err
		}
		s.accruedUntil = until
	}
	return r, setAccrued(ctx, tx, *s)
}

// extendHold adds what the hold lacks, as far as the wallet has it.
func extendHold(ctx context.Context, tx db.Tx, s subject, h hold, lacks int64, now time.Time) (hold, error) {
	wallet, err := walletBalance(ctx, tx, s.OrgID, s.currency)
	if err != nil || wallet <= 0 {
		return h, err
	}
	// Another hub, whose clock is ahead, may have placed as much as the wallet had then, at this very time of accrual.
	key := fmt.Sprintf("%s:%s:%d", s.Kind, s.ID, h.Placed)
	return place(ctx, tx, s, h, min(lacks, wallet), key, now)
}

// chargeAllocation adds the time up to a moment to the allocation's hours and draws what it costs on the hold.
func chargeAllocation(ctx context.Context, tx db.Tx, s subject, h hold, r billing.Reserved, until, now time.Time,
) (billing.Reserved, error) {
	span := rating.Interval{From: r.Until, To: until}
	book := billing.NewBook()
	if err := loadHours(ctx, tx, []*subject{&s}, []rating.Interval{span}, book); err != nil {
		return r, err
	}
	toPost, err := pendingOf(ctx, tx, []*subject{&s})
	if err != nil {
		return r, err
	}
	r, charges, err := r.Accrue(book, until)
	if err != nil {
		return r, err
	}
	var rows []usageRow
	hours := map[billing.AccrualKey]hourRow{}
	for _, c := range charges {
		posting := addPending(toPost, c.Key, c.Price.Currency, c.Delta, now)
		if c.Records > 0 {
			from := rating.Interval{From: latest(span.From, c.Key.Hour)}
			rows = append(rows, usageRow{
				subject: &s,
				Record:  &billing.Record{Store: billing.Store{NodeID: s.NodeID}, Meter: r.Meter, Span: from},
				posting: posting,
			})
		}
		last := &rows[len(rows)-1]
		last.accepted += c.Quantity
		last.Span.To = earliest(until, c.Key.Hour.Add(time.Hour))
		hours[c.Key] = hourRow{book.Hour(c.Key).Accrual, hours[c.Key].records + c.Records}
	}
	if h.id != "" {
		h.Hold = r.Hold
		if err := updateHold(ctx, tx, h); err != nil {
			return r, err
		}
	}
	if err := upsertHours(ctx, tx, map[string]*subject{s.ID: &s}, hours); err != nil {
		return r, err
	}
	if err := savePending(ctx, tx, map[string]*subject{s.ID: &s}, toPost); err != nil {
		return r, err
	}
	slot, err := CurrentSlot(ctx, tx, now)
	if err != nil {
		return r, err
	}
	return r, insertUsage(ctx, tx, slot, rows)
}

// allocationPrices is the schedule of the allocation's time, in its currency, which is settled here. A conflict means
// that it has prices in other currencies only: a new allocation is refused then, one that is open goes on without a
// charge.
func allocationPrices(ctx context.Context, tx db.Tx, s *subject, now time.Time) ([]rating.Price, error) {
	meter := s.reservedMeter()
	rows, err := pricesOf(ctx, tx, []string{meter})
	if err != nil {
		return nil, err
	}
	if s.currency == "" {
		oldest, err := oldestWallet(ctx, tx, s.OrgID)
		if err != nil {
			return nil, err
		}
		if s.currency, err = currencyOf(*s, oldest, []string{meter}, rows, now); err != nil {
			return nil, err
		}
	}
	return schedule(rows, meter, s.AppSlug, s.SKU, s.currency), nil
}
