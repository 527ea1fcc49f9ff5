package nodes

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// maxSetAside bounds the segments of one node that are kept although they could not be posted; further ones leave one
// finding for each store.
const maxSetAside = 16

// isUnpostable reports whether the same segment would always fail: its node would repeat it, and later usage would wait
// until the node's spool is full and its workloads stop.
func isUnpostable(ctx context.Context, err error) bool {
	if err == nil || ctx.Err() != nil || fault.Is(err, fault.Unavailable) {
		return false
	}
	if _, refused := errors.AsType[*protocol.RefusalError](err); refused {
		return false // the node gets the refusal, and the chain is unchanged
	}
	return db.IsRejected(err) || !db.IsDatabase(err)
}

// setAsideUnpostable sets aside the segments of a batch that cannot be posted, each store's in one transaction, so that
// a node that sends only such segments costs the others little.
func (svc *Service) setAsideUnpostable(ctx context.Context, batch []*queuedSegment) {
	var stores []billing.Store
	unpostable := map[billing.Store][]*queuedSegment{}
	for _, d := range batch {
		if isUnpostable(ctx, d.err) {
			if unpostable[d.Store] == nil {
				stores = append(stores, d.Store)
			}
			unpostable[d.Store] = append(unpostable[d.Store], d)
		}
	}
	for _, s := range stores {
		svc.setAside(ctx, unpostable[s])
	}
}

// setAside keeps segments of one store that cannot be posted, as their node signed them, advances the watermark over
// them and leaves findings.
func (svc *Service) setAside(ctx context.Context, batch []*queuedSegment) {
	now := svc.Now().Truncate(time.Microsecond)
	var results []ledger.Posted
	err := change.SetAllAside(ctx, svc.DB, svc.Log, batch[0].err, now, func(ctx context.Context,
		tx db.Tx,
	) (out []finding.Finding, err error) {
		if results, err = ledger.SkipUsage(ctx, tx, now, segmentsOf(batch)...); err != nil {
			return nil, err
		}
		for n, d := range batch {
			if !results[n].New {
				continue
			}
			f, err := insertSetAside(ctx, tx, d, now)
			if err != nil {
				return nil, err
			}
			out = append(out, f)
		}
		return out, nil
	})
	setResults(batch, results, err)
}

// insertSetAside keeps a segment and returns its finding. Beyond maxSetAside the segment is not kept, and the finding
// is that of the store.
func insertSetAside(ctx context.Context, tx db.Tx, d *queuedSegment, now time.Time) (finding.Finding, error) {
	f := finding.Finding{
		NodeID: d.Store.NodeID, Kind: finding.Usage, ResourceType: "usage_segment",
		ResourceID: fmt.Sprintf("%s/%d", d.Store.Incarnation, d.Link.Number), Detail: d.err.Error(),
	}
	tag, err := tx.Exec(ctx, `INSERT INTO usage_set_aside (node_id, incarnation, number, envelope, cause, set_aside_at)
		SELECT $1::uuid, $2::text, $3::int8, $4::bytea, $5::text, $6::timestamptz WHERE (SELECT count(*) FROM usage_set_aside
		WHERE node_id = $1::uuid) < $7::int8
		ON CONFLICT (node_id, incarnation, number) DO NOTHING`,
		d.Store.NodeID, d.Store.Incarnation, int64(d.Link.Number), d.Envelope, d.err.Error(), now, maxSetAside)
	if err == nil && tag.RowsAffected() == 0 {
		f.ResourceID = d.Store.Incarnation
	}
	return f, err
}
