package ledger

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// SkipUsage counts the records of a segment as posted without billing them, in the caller's transaction: the segment was set aside, and
// those behind it must not wait for it.
func SkipUsage(ctx context.Context, tx db.Tx, s Segment) error {
	stores := []store{s.store}
	if err := takeTurns(ctx, tx, stores); err != nil {
		return err
	}
	before, err := sequencesOf(ctx, tx, stores)
	if err != nil {
		return err
	}
	_, after := unposted([]Segment{s}, before)
	return saveSequences(ctx, tx, before, after)
}
