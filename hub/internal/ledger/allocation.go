package ledger

import (
	"context"
	"fmt"
	"math/big"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/rating"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	// allocationHold is how far ahead an allocation's hold reaches.
	allocationHold = time.Hour
	// AllocationNotice is how much paid time an allocation has left, at most, when it is called exhausted.
	AllocationNotice = 10 * time.Minute
)

// openAllocation places the first hold of an allocation, where its time has a price.
func openAllocation(ctx context.Context, tx db.Tx, s subject) error {
	prices, err := allocationPrices(ctx, tx, &s, s.OpenedAt)
	if err != nil && (s.Kind != Volume || !fault.Is(err, fault.Conflict)) {
		return err
	}
	need, err := s.aheadCost(prices, s.OpenedAt, allocationHold)
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
	// Exhausted: the wallet no longer covers the next AllocationNotice. The caller must release the allocation, or end
	// the attachment, because what it uses beyond its hold is written off. A volume is never exhausted: its data stays.
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
	s, h, prices, err := accrueAllocation(ctx, tx, s, latest(now, s.accruedUntil), now)
	if err != nil {
		return out, err
	}
	need, err := s.aheadCost(prices, now, allocationHold)
	if err != nil {
		return out, err
	}
	wallet, err := walletBalance(ctx, tx, s.OrgID, s.currency)
	if err != nil {
		return out, err
	}
	if lack := min(need-h.Balance(), wallet); lack > 0 {
		// Another hub, whose clock is ahead, may have placed as much as the wallet had then, at this very time of accrual.
		key := fmt.Sprintf("%s:%s:%d", s.Kind, s.ID, h.Placed)
		if h, err = place(ctx, tx, s, h, lack, key, now); err != nil {
			return out, err
		}
	}
	notice, err := s.aheadCost(prices, now, AllocationNotice)
	out.Exhausted = s.Kind != Volume && h.Balance() < notice
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
	need, err := of.aheadCost(prices, s.OpenedAt, allocationHold)
	if err != nil {
		return err
	}
	wallet, err := walletBalance(ctx, tx, s.OrgID, of.currency)
	if err == nil && wallet < need {
		err = insufficientFunds()
	}
	return err
}

// heldMeter is the meter of what the hub itself measures.
func (s subject) heldMeter() string {
	switch s.Kind {
	case Volume:
		return MeterVolumeByteSeconds
	case Attachment:
		return MeterAttachmentSeconds
	default:
		return MeterAllocationSeconds
	}
}

// held is the quantity of a stretch of the subject's time; less than one unit is not billed.
func (s subject) held(micros int64) (int64, error) {
	if s.Kind != Volume {
		return micros, nil
	}
	product := new(big.Int).Mul(big.NewInt(s.VolumeBytes), big.NewInt(micros))
	product.Div(product, big.NewInt(time.Second.Microseconds()))
	if !product.IsInt64() {
		return 0, rating.ErrOverflow
	}
	return product.Int64(), nil
}

// accrueAllocation bills an allocation's time from where it was left to a moment.
func accrueAllocation(ctx context.Context, tx db.Tx, s subject, until,
	now time.Time,
) (subject, hold, []rating.Price, error) {
	prices, err := allocationPrices(ctx, tx, &s, now)
	if err != nil && !fault.Is(err, fault.Conflict) {
		return s, hold{}, nil, err
	}
	h, _, err := holdOf(ctx, tx, s)
	if err != nil {
		return s, h, nil, err
	}
	if span := (rating.Interval{From: s.accruedUntil, To: until}); span.Length() > 0 {
		if h, err = chargeAllocation(ctx, tx, s, h, prices, span, now); err != nil {
			return s, h, nil, err
		}
		s.accruedUntil = until
	}
	return s, h, prices, setAccrued(ctx, tx, s)
}

// chargeAllocation adds a stretch of an allocation's time to its hours and draws what it costs on the hold.
func chargeAllocation(ctx context.Context, tx db.Tx, s subject, h hold, prices []rating.Price, span rating.Interval,
	now time.Time,
) (hold, error) {
	byID := map[string]rating.Price{}
	for _, p := range prices {
		byID[p.ID] = p
	}
	book := billing.NewBook()
	if err := loadHours(ctx, tx, []*subject{&s}, []rating.Interval{span}, book); err != nil {
		return h, err
	}
	toPost, err := pendingOf(ctx, tx, []*subject{&s})
	if err != nil {
		return h, err
	}
	quantity, err := s.held(span.Length())
	if err != nil {
		return h, err
	}
	row := usageRow{
		subject: &s, accepted: quantity,
		Record: &billing.Record{
			Store: billing.Store{NodeID: s.NodeID}, Meter: s.heldMeter(), Quantity: quantity, Span: span,
		},
	}
	hours := map[billing.AccrualKey]hourRow{}
	for _, part := range rating.Split(span, quantity, prices) {
		k := billing.AccrualKey{MemberID: s.ID, Meter: s.heldMeter(), PriceID: part.PriceID, Hour: part.Hour}
		a := billing.Addition{Quantity: part.Quantity, Price: byID[part.PriceID]}
		next, d, err := billing.Rate(book.Hour(k).Accrual, a, h.Balance())
		if err != nil {
			return h, err
		}
		h.Posted += d.CollectedNanos
		book.Hour(k).Accrual = next
		posting := addPending(toPost, k, a.Price.Currency, d, now)
		if len(hours) == 0 {
			row.posting, a.Records = posting, 1
		}
		hours[k] = hourRow{next, hours[k].records + a.Records}
	}
	if h.id != "" {
		if err := updateHold(ctx, tx, h); err != nil {
			return h, err
		}
	}
	if err := upsertHours(ctx, tx, map[string]*subject{s.ID: &s}, hours); err != nil {
		return h, err
	}
	if err := savePending(ctx, tx, map[string]*subject{s.ID: &s}, toPost); err != nil {
		return h, err
	}
	slot, err := CurrentSlot(ctx, tx, now)
	if err != nil {
		return h, err
	}
	return h, insertUsage(ctx, tx, slot, []usageRow{row})
}

// allocationPrices is the schedule of the allocation's time, in its currency, which is settled here. A conflict means
// that it has prices in other currencies only: a new allocation is refused then, one that is open goes on without a
// charge.
func allocationPrices(ctx context.Context, tx db.Tx, s *subject, now time.Time) ([]rating.Price, error) {
	meter := s.heldMeter()
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

// aheadCost is what a stretch of the subject's time from now on costs at most.
func (s subject) aheadCost(prices []rating.Price, now time.Time, ahead time.Duration) (int64, error) {
	var sum int64
	span := rating.Interval{From: now, To: now.Add(ahead)}
	quantity, err := s.held(span.Length())
	if err != nil {
		return 0, err
	}
	for _, part := range rating.Split(span, quantity, prices) {
		if p, ok := at(prices, part.From); ok {
			cost, err := rating.ChargeUp(p.Nanos, p.PerQuantity, part.Quantity)
			if err != nil {
				return 0, err
			}
			sum += cost
		}
	}
	return sum, nil
}
