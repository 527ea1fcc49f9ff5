package query

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
)

// exportPage is how many segments that are not packed yet are read at once.
const exportPage = 256

// ExportSegments gives out a node's usage segments as the node signed them.
type ExportSegments struct {
	DB *db.DB
	// Emit gets each segment once.
	Emit func(ledger.SignedSegment) error
}

// storeNumber names a segment of a node.
type storeNumber struct {
	incarnation string
	number      uint64
}

// Do emits the segments that were posted in slots that overlap [from, to): first those of the archive, then those that
// are still to be packed. The hub may be packing meanwhile.
func (c *ExportSegments) Do(ctx context.Context, nodeID string, from, to time.Time) error {
	slots, err := db.Query(ctx, c.DB, func(tx db.Tx) ([]ledger.Slot, error) {
		// Nothing at all would read as no usage of the node.
		if _, err := fleet.Get(ctx, tx, nodeID); err != nil {
			return nil, err
		}
		return ledger.Slots(ctx, tx)
	})
	if err != nil {
		return err
	}
	emitted := map[storeNumber]bool{}
	last, err := c.archived(ctx, nodeID, from, to, ledger.ArchiveKey{}, emitted)
	if err != nil {
		return err
	}
	for _, s := range slots {
		if s.From.Before(to) && (s.To.IsZero() || s.To.After(from)) {
			if err := c.unpacked(ctx, s, nodeID, emitted); err != nil {
				return err
			}
		}
	}
	// What was packed, and dropped from its slot, since.
	_, err = c.archived(ctx, nodeID, from, to, last, emitted)
	return err
}

// archived emits what the archive has after a row of it, and returns the last row.
func (c *ExportSegments) archived(ctx context.Context, nodeID string, from, to time.Time, last ledger.ArchiveKey,
	emitted map[storeNumber]bool,
) (ledger.ArchiveKey, error) {
	for {
		var ok bool
		row, err := db.Query(ctx, c.DB, func(tx db.Tx) (a ledger.Archived, err error) {
			a, ok, err = ledger.ArchivedOf(ctx, tx, nodeID, from, to, last)
			return a, err
		})
		if err != nil || !ok {
			return last, err
		}
		last = row.ArchiveKey
		segments, err := row.UnpackSegments()
		if err != nil {
			return last, err
		}
		for _, s := range segments {
			if err := c.once(s, emitted); err != nil {
				return last, err
			}
		}
	}
}

// once emits a segment that was not emitted yet.
func (c *ExportSegments) once(s ledger.SignedSegment, emitted map[storeNumber]bool) error {
	n := storeNumber{s.Incarnation, s.Number}
	if emitted[n] {
		return nil
	}
	emitted[n] = true
	return c.Emit(s)
}

// unpacked emits a slot's segments.
func (c *ExportSegments) unpacked(ctx context.Context, s ledger.Slot, nodeID string,
	emitted map[storeNumber]bool,
) error {
	var last ledger.SignedSegment
	for {
		page, err := db.Query(ctx, c.DB, func(tx db.Tx) ([]ledger.SignedSegment, error) {
			return ledger.SegmentsOf(ctx, tx, s, nodeID, last, exportPage)
		})
		if err != nil {
			return err
		}
		for _, last = range page {
			if err := c.once(last, emitted); err != nil {
				return err
			}
		}
		if len(page) < exportPage {
			return nil
		}
	}
}
