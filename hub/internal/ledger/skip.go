package ledger

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// SkipUsage counts the records of one store's segments as posted without billing them, in the caller's transaction: the
// segments were set aside, and those behind them must not wait for them.
func SkipUsage(ctx context.Context, tx db.Tx, segments ...Segment) error {
	if len(segments) == 0 {
		return nil
	}
	stores := []store{segments[0].store}
	if err := takeTurns(ctx, tx, stores); err != nil {
		return err
	}
	before, err := sequencesOf(ctx, tx, stores)
	if err != nil {
		return err
	}
	_, after := unposted(segments, before)
	return saveSequences(ctx, tx, before, after)
}
