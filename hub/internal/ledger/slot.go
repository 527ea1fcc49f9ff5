package ledger

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// Raw usage and the segments it came in are written to a ring of tables, one slot after the other. A slot is emptied by
// TRUNCATE, which costs the same however many rows there are.
const (
	slotCount = 8
	// slotLength is how long a slot stays the current one. Where the next is not empty yet, it stays so for longer.
	slotLength = 4 * time.Hour
	// RawUsageRetention is how long raw usage and unpacked segments stay at least: slotCount slots hold them for
	// slotLength longer, and leave slotLength to empty a slot.
	RawUsageRetention = 24 * time.Hour
)

// Slot is a pair of tables of the ring, usage_records_N and usage_segments_N.
type Slot struct {
	No int64
	// From is when it became the current one.
	From time.Time
	// To is when the next one did; zero for the current one.
	To time.Time
}

func (s Slot) number() string { return strconv.FormatInt(s.No, 10) }

// Slots returns the slots that hold something, the oldest first. The last one is the current one.
func Slots(ctx context.Context, tx db.Tx) ([]Slot, error) {
	slots, err := db.Select(ctx, tx, func(row pgx.CollectableRow) (s Slot, err error) {
		err = row.Scan(&s.No, &s.From)
		s.From = s.From.UTC()
		return s, err
	}, `SELECT slot, from_at FROM usage_slots ORDER BY from_at, slot`)
	for i := range len(slots) - 1 {
		slots[i].To = slots[i+1].From
	}
	return slots, err
}

// nextSlot returns the slot to write to; isNew is true for one that has to be added to those that hold something.
func nextSlot(slots []Slot, now time.Time) (s Slot, isNew bool) {
	s = Slot{From: now.UTC().Truncate(slotLength)}
	if len(slots) == 0 {
		return s, true
	}
	current := slots[len(slots)-1]
	s.No = (current.No + 1) % slotCount
	if !s.From.After(current.From) {
		return current, false
	}
	for _, used := range slots {
		if used.No == s.No {
			return current, false // it is still to be emptied
		}
	}
	return s, true
}

// CurrentSlot returns the slot to write to now; the first call of a period begins the next one.
func CurrentSlot(ctx context.Context, tx db.Tx, now time.Time) (Slot, error) {
	slots, err := Slots(ctx, tx)
	if err != nil {
		return Slot{}, err
	}
	s, isNew := nextSlot(slots, now)
	if !isNew {
		return s, nil
	}
	return s,
		tx.Queue(ctx,
			`INSERT INTO usage_slots (slot, from_at) VALUES ($1, $2) ON CONFLICT (slot) DO UPDATE
				SET from_at = excluded.from_at`, s.No, s.From)
}

// EndedSlots returns the slots whose rows were all posted before a moment, the oldest first.
func EndedSlots(ctx context.Context, tx db.Tx, before time.Time) ([]Slot, error) {
	slots, err := Slots(ctx, tx)
	for i, s := range slots {
		if s.To.IsZero() || s.To.After(before) {
			return slots[:i], err
		}
	}
	return nil, err
}

// EmptySlot drops the rows of a slot, so that it can be written to again. It fails with db.IsLockTimeout while a backup
// reads them.
func EmptySlot(ctx context.Context, tx db.Tx, s Slot) error {
	if err := limitLockWait(ctx, tx); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, `TRUNCATE TABLE usage_records_`+s.number()+`, usage_segments_`+s.number()); err != nil {
		return err
	}
	return tx.Queue(ctx, `DELETE FROM usage_slots WHERE slot = $1`, s.No)
}

// limitLockWait bounds how long the TRUNCATE that follows waits for those who read the table: others who want to read
// it wait behind it.
func limitLockWait(ctx context.Context, tx db.Tx) error {
	return tx.Queue(ctx, `SET LOCAL lock_timeout = '1s'`)
}

// eachSlotTable joins a statement for each table of raw usage: those of the slots.
func eachSlotTable(statement func(table string) string) string {
	arms := make([]string, slotCount)
	for n := range arms {
		arms[n] = "(" + statement("usage_records_"+strconv.Itoa(n)) + ")"
	}
	return strings.Join(arms, " UNION ALL ")
}
