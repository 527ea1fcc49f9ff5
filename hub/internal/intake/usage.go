package intake

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/session"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// maxAhead bounds how far beyond a gap segments are taken; the node sends those again when the gap is closed.
	maxAhead = 1024
	// documentUsage is the refused document of a node's last_refusal when the hub refused the node's usage.
	documentUsage = "usage"
)

// Reasons for which a segment is not taken, beside protocol's. Only RefusalUnavailable passes by itself.
const (
	// ReasonChainBroken: the segment is not the one that its neighbours in the chain were sealed with.
	ReasonChainBroken = "chain_broken"
	// ReasonOutOfOrder: the segment is over maxAhead beyond the first one that is missing.
	ReasonOutOfOrder = "out_of_order"
)

// Usage takes a sealed segment: check, post and remember in one transaction, then acknowledge. A segment that was posted
// before is acknowledged again and posts nothing.
func (i *Intake) Usage(ctx context.Context, peer session.Peer, upload *protocol.UsageUpload) *protocol.UsageAck {
	verified, err := protocol.VerifySegment(upload.GetSegment(), peer.Key)
	if err == nil {
		err = checkSegment(verified.Message(), peer.NodeID)
	}
	ack := &protocol.UsageAck{Incarnation: verified.Message().GetIncarnation()}
	var reached mark
	if err == nil {
		reached, err = i.post(ctx, peer.NodeID, verified)
	}
	if err == nil {
		failpoint.Hit("hub/usage/committed")
		ack.PostedSegment, ack.ArchivedSegment = reached.number, reached.number
		i.segments.Add(ctx, 1, metric.WithAttributes(attribute.String("outcome", "posted")))
		return ack
	}
	ack.Refused = reasonOf(err)
	i.segments.Add(ctx, 1, metric.WithAttributes(attribute.String("outcome", ack.GetRefused())))
	if ack.Refused == protocol.RefusalUnavailable {
		i.Log.WarnContext(ctx, "usage not posted", slog.String("node_id", peer.NodeID), slog.Any("error", err))
		return ack
	}
	// A contradiction is for an admin to look at.
	if err := i.refused(ctx, peer.NodeID, fleet.Refusal{
		Document: documentUsage, Generation: verified.Message().GetNumber(), Reason: ack.GetRefused(), Detail: protocol.RefusalDetail(err),
	}); err != nil {
		i.Log.WarnContext(ctx, "refusal not recorded", slog.String("node_id", peer.NodeID), slog.Any("error", err))
	}
	return ack
}

func reasonOf(err error) string {
	if r, ok := errors.AsType[*protocol.RefusalError](err); ok {
		return r.Reason
	}
	if fault.IsPermanent(err) {
		return protocol.RefusalMalformed
	}
	return protocol.RefusalUnavailable
}

func checkSegment(s *protocol.UsageSegment, nodeID string) error {
	switch {
	case s.GetNodeId() != nodeID:
		return protocol.Refuse(protocol.RefusalWrongNode, "the usage segment is of another node")
	case !validIncarnation(s.GetIncarnation()):
		return protocol.Refuse(protocol.RefusalMalformed, "the usage segment names no incarnation")
	case s.GetNumber() == 0 || s.GetNumber() > maxNumber:
		return protocol.Refuse(protocol.RefusalMalformed, "usage segments are numbered from 1")
	case s.GetNumber() == 1 && len(s.GetPreviousSha256()) != 0, s.GetNumber() > 1 && len(s.GetPreviousSha256()) != sha256.Size:
		return protocol.Refuse(protocol.RefusalMalformed, "the usage segment does not name the one before it")
	}
	return nil
}

// link is a segment's place in the chain.
type link struct {
	number   uint64
	sha256   []byte
	previous []byte
}

// mark is how far the chain of one store is posted without a gap.
type mark struct {
	number uint64
	sha256 []byte
}

func (i *Intake) post(ctx context.Context, nodeID string, v protocol.Verified[*protocol.UsageSegment]) (mark, error) {
	seg, digest := v.Message(), v.Digest()
	at := link{number: seg.GetNumber(), sha256: digest[:], previous: seg.GetPreviousSha256()}
	now := i.Now().Truncate(time.Microsecond)
	return db.RunTx(ctx, i.DB, func(tx db.Tx) (mark, error) {
		m, err := lockMark(ctx, tx, nodeID, seg.GetIncarnation(), now)
		if err != nil {
			return mark{}, err
		}
		ahead, err := aheadOf(ctx, tx, nodeID, seg.GetIncarnation())
		if err != nil {
			return mark{}, err
		}
		known, err := place(m, ahead, at)
		if err != nil || known {
			return m, err
		}
		if _, err := ledger.PostUsage(ctx, tx, nodeID, seg.GetIncarnation(), seg, now); err != nil {
			return mark{}, err
		}
		failpoint.Hit("hub/usage/posted")
		if at.number > m.number+1 {
			return m, insertAhead(ctx, tx, nodeID, seg.GetIncarnation(), at, now)
		}
		ahead[at.number] = at
		for next, ok := ahead[m.number+1]; ok; next, ok = ahead[m.number+1] {
			m = mark{next.number, next.sha256}
		}
		err = advance(ctx, tx, nodeID, seg.GetIncarnation(), m, now)
		failpoint.Hit("hub/usage/advanced")
		return m, err
	})
}

// place decides, purely, whether a segment may be taken at its place in the chain; known is true for one that was posted
// before. Every neighbour that is there must fit, whichever came first.
func place(m mark, ahead map[uint64]link, at link) (known bool, err error) {
	broken := func(format string) error {
		return protocol.Refuse(ReasonChainBroken, format, at.number)
	}
	if at.number < m.number {
		return true, nil
	}
	if at.number == m.number {
		if !bytes.Equal(at.sha256, m.sha256) {
			return false, broken("segment %d was posted with another content")
		}
		return true, nil
	}
	if there, ok := ahead[at.number]; ok {
		if !bytes.Equal(at.sha256, there.sha256) {
			return false, broken("segment %d was posted with another content")
		}
		return true, nil
	}
	if at.number-m.number > maxAhead {
		return false, protocol.Refuse(ReasonOutOfOrder, "segment %d is too far beyond segment %d, which is the last without a gap", at.number, m.number)
	}
	before, ok := ahead[at.number-1]
	if at.number == m.number+1 {
		before, ok = link{sha256: m.sha256}, true
	}
	if ok && !bytes.Equal(at.previous, before.sha256) {
		return false, broken("segment %d does not follow the one that was posted before it")
	}
	if after, ok := ahead[at.number+1]; ok && !bytes.Equal(after.previous, at.sha256) {
		return false, broken("segment %d is not the one that the next was sealed after")
	}
	return false, nil
}

func markOf(ctx context.Context, tx db.Tx, nodeID, incarnation string) (m mark, err error) {
	err = tx.QueryRow(ctx, `SELECT number, sha256 FROM usage_marks WHERE node_id = $1 AND incarnation = $2`, nodeID, incarnation).Scan(&m.number, &m.sha256)
	if db.IsNoRows(err) {
		return mark{}, nil
	}
	return m, err
}

// lockMark takes the row first, so that two uploads of one node wait for each other instead of starting over.
func lockMark(ctx context.Context, tx db.Tx, nodeID, incarnation string, now time.Time) (m mark, err error) {
	if _, err := tx.Exec(ctx, `INSERT INTO usage_marks (node_id, incarnation, number, sha256, updated_at) VALUES ($1, $2, 0, $3, $4) ON CONFLICT (node_id, incarnation) DO NOTHING`,
		nodeID, incarnation, []byte{}, now); err != nil {
		return mark{}, err
	}
	err = tx.QueryRow(ctx, `SELECT number, sha256 FROM usage_marks WHERE node_id = $1 AND incarnation = $2 FOR UPDATE`, nodeID, incarnation).Scan(&m.number, &m.sha256)
	return m, err
}

func aheadOf(ctx context.Context, tx db.Tx, nodeID, incarnation string) (map[uint64]link, error) {
	rows, err := tx.Query(ctx, `SELECT number, sha256, previous_sha256 FROM usage_ahead WHERE node_id = $1 AND incarnation = $2`, nodeID, incarnation)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	ahead := map[uint64]link{}
	for rows.Next() {
		var l link
		if err := rows.Scan(&l.number, &l.sha256, &l.previous); err != nil {
			return nil, err
		}
		ahead[l.number] = l
	}
	return ahead, rows.Err()
}

func insertAhead(ctx context.Context, tx db.Tx, nodeID, incarnation string, at link, now time.Time) error {
	_, err := tx.Exec(ctx, `INSERT INTO usage_ahead (node_id, incarnation, number, sha256, previous_sha256, posted_at) VALUES ($1, $2, $3, $4, $5, $6)`,
		nodeID, incarnation, at.number, at.sha256, at.previous, now)
	return err
}

func advance(ctx context.Context, tx db.Tx, nodeID, incarnation string, m mark, now time.Time) error {
	if _, err := tx.Exec(ctx, `UPDATE usage_marks SET number = $3, sha256 = $4, updated_at = $5 WHERE node_id = $1 AND incarnation = $2`,
		nodeID, incarnation, m.number, m.sha256, now); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, `DELETE FROM usage_ahead WHERE node_id = $1 AND incarnation = $2 AND number <= $3`, nodeID, incarnation, m.number); err != nil {
		return fmt.Errorf("forget what the mark has passed: %w", err)
	}
	return nil
}
