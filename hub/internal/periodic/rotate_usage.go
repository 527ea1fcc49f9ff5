package periodic

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
)

// RotateUsage begins the slots of raw usage in time, and empties those that ended a day ago: it packs the signed
// segments of a slot into the archive, a row a transaction, and empties the slot once all of them are there. It can be
// cut short at any time. A slot that fails delays no other one; one that a backup reads is emptied by a later pass.
func (p Passes) RotateUsage(ctx context.Context, now time.Time) error {
	ended, err := db.RunTx(ctx, p.DB, func(tx db.Tx) ([]ledger.Slot, error) {
		// Where nothing is posted, no usage begins the next slot.
		if _, err := ledger.CurrentSlot(ctx, tx, now); err != nil {
			return nil, err
		}
		return ledger.EndedSlots(ctx, tx, now.Add(-ledger.RawUsageRetention))
	})
	if err != nil {
		return err
	}
	var failed []error
	for _, s := range ended {
		err := p.archive(ctx, s)
		if err == nil {
			err = p.empty(ctx, s)
		}
		if err != nil {
			failed = append(failed, fmt.Errorf("slot %d of raw usage: %w", s.No, err))
		}
	}
	return errors.Join(failed...)
}

func (p Passes) archive(ctx context.Context, s ledger.Slot) error {
	for {
		done, err := db.RunTx(ctx, p.DB, func(tx db.Tx) (bool, error) { return ledger.ArchiveNext(ctx, tx, s) })
		if err != nil || done {
			return err
		}
	}
}

// empty drops a slot's rows where the archive has all of its segments.
func (p Passes) empty(ctx context.Context, s ledger.Slot) error {
	emptied, err := db.RunTx(ctx, p.DB, func(tx db.Tx) (bool, error) {
		complete, err := ledger.DropIncompleteArchive(ctx, tx, s)
		if err != nil || !complete {
			return false, err
		}
		return true, ledger.EmptySlot(ctx, tx, s)
	})
	switch {
	case db.IsLockTimeout(err):
		p.Log.InfoContext(ctx, "raw usage is not emptied while a backup reads it")
		return nil
	case err != nil:
		return err
	case !emptied:
		return errors.New("the archive lacks segments: it is packed again by the next pass")
	}
	p.Log.InfoContext(ctx, "a slot of raw usage was archived and emptied",
		slog.Int64("slot", s.No), slog.Time("from", s.From), slog.Time("to", s.To))
	return nil
}
