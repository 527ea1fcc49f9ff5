package intake

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/recovery"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// maxSetAside bounds the segments of one node that are kept although they could not be posted; further ones leave only their finding.
const maxSetAside = 16

// isUnpostable reports whether the same segment would fail again for ever: its node would repeat it, and its usage behind it would wait,
// until the node's spool is full and its workloads stop.
func isUnpostable(ctx context.Context, err error) bool {
	if err == nil || ctx.Err() != nil || fault.Is(err, fault.Unavailable) {
		return false
	}
	if _, refused := errors.AsType[*protocol.RefusalError](err); refused {
		return false // the node has been told, and the chain stands
	}
	return db.IsRejected(err) || !db.IsDatabase(err)
}

// setAside keeps a segment that cannot be posted, as its node signed it, moves the mark over it and leaves a finding.
func (i *Intake) setAside(ctx context.Context, d *delivery, cause error) (reached mark, err error) {
	now := i.Now().Truncate(time.Microsecond)
	var verdict error
	err = command.SetAside(ctx, i.DB, i.Log, cause, now, func(ctx context.Context, tx db.Tx) (recovery.Finding, error) {
		stores := []store{d.store}
		chains, err := lockMarks(ctx, tx, stores, now)
		if err != nil {
			return recovery.Finding{}, err
		}
		if err := loadAhead(ctx, tx, stores, chains); err != nil {
			return recovery.Finding{}, err
		}
		c := chains[d.store]
		var isNew bool
		if isNew, verdict = c.take(d.at); isNew {
			if err := keepAside(ctx, tx, d, cause, now); err != nil {
				return recovery.Finding{}, err
			}
			if err := ledger.SkipUsage(ctx, tx, d.usage); err != nil {
				return recovery.Finding{}, err
			}
		}
		reached = c.mark
		return recovery.Finding{
			NodeID: d.store.nodeID, Kind: recovery.FindingUsage, ResourceType: "usage_segment", ResourceID: fmt.Sprintf("%s/%d", d.store.incarnation, d.at.Number),
		}, saveChains(ctx, tx, stores, chains, now)
	})
	return reached, orFirst(err, verdict)
}

func keepAside(ctx context.Context, tx db.Tx, d *delivery, cause error, now time.Time) error {
	raw, err := proto.Marshal(d.signed)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `INSERT INTO usage_set_aside (node_id, incarnation, number, envelope, cause, set_aside_at)
		SELECT $1::uuid, $2::text, $3::int8, $4::bytea, $5::text, $6::timestamptz WHERE (SELECT count(*) FROM usage_set_aside WHERE node_id = $1::uuid) < $7::int8
		ON CONFLICT (node_id, incarnation, number) DO NOTHING`,
		d.store.nodeID, d.store.incarnation, int64(d.at.Number), raw, cause.Error(), now, maxSetAside)
	return err
}
