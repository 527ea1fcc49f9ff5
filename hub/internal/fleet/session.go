package fleet

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/nodeidentity"
	"github.com/gpuaas/gpuaas/protocol"
)

// Disconnect notes the end of a connection, unless a newer one has replaced it.
func Disconnect(ctx context.Context, tx db.Tx, nodeID string, sessionNo uint64, now time.Time) (ended bool, err error) {
	tag, err := tx.Exec(ctx,
		`UPDATE node_sessions SET disconnected_at = $3 WHERE node_id = $1 AND session_no = $2 AND disconnected_at IS NULL`,
		nodeID, sessionNo, now)
	return tag.RowsAffected() == 1, err
}

// DisconnectAll notes the end of all connections of a replica: it has stopped.
func DisconnectAll(ctx context.Context, tx db.Tx, replicaID string, now time.Time) (ended int64, err error) {
	tag, err := tx.Exec(ctx,
		`UPDATE node_sessions SET disconnected_at = $2 WHERE replica_id = $1 AND disconnected_at IS NULL`, replicaID, now)
	return tag.RowsAffected(), err
}

// Report is the part of a node's report that is about the node.
type Report struct {
	NodeID     string
	SessionNo  uint64
	Counter    uint64
	Epoch      uint64
	Generation uint64
	Conditions []string
}

// contact is what is known of a node's connection when it speaks.
type contact struct {
	reachable   bool
	incarnation string
	quarantined bool
	// lastSession is what the present hello named, reported the newest session in which a report was taken.
	lastSession, reported uint64
	resync                Resync
	conditions            []string
}

// isUnchanged reports whether nothing but the time of the node's last word changes by the report.
func (c contact) isUnchanged(r Report) bool {
	return c.reachable && !c.quarantined && c.resync.Status == InSync && !c.isCloned(r.SessionNo) &&
		slices.Equal(c.conditions, bounded(r.Conditions))
}

// isCloned reports whether another process speaks with the node's key at the same time, by a report of session no.
func (c contact) isCloned(no uint64) bool {
	return !c.quarantined && c.reported != no && nodeidentity.CloneDetected(c.lastSession, c.reported)
}

func contactOf(ctx context.Context, tx db.Tx, nodeID string) (c contact, err error) {
	err = tx.QueryRow(ctx,
		`SELECT s.reachable, s.last_session, s.reported_session, n.incarnation, n.quarantined_at IS NOT NULL,
			n.resync, n.owed_incarnation, n.owed_segment
		FROM node_sessions s JOIN nodes n ON n.id = s.node_id WHERE s.node_id = $1`, nodeID).
		Scan(&c.reachable, &c.lastSession, &c.reported, &c.incarnation, &c.quarantined,
			&c.resync.Status, &c.resync.OwedIncarnation, &c.resync.OwedSegment)
	if db.IsNoRows(err) {
		return contact{}, nil
	}
	return c, err
}

// ReportResult says what a report was.
type ReportResult struct {
	// Fresh is false for a report that lost: of an older connection, or with a counter that is not higher.
	Fresh bool
	// WasUnreachable is set when the node counted as unreachable until now.
	WasUnreachable bool
	// Incarnation is of the store that the node reports with.
	Incarnation string
	// Resync says what a restored hub still misses of the node.
	Resync Resync
	// Quarantined is set when nothing of the report may count.
	Quarantined bool
	// CloneDetected is set when another process speaks with the node's key at the same time.
	CloneDetected bool
}

// ApplyReport stores a report's facts and keeps the node online.
func ApplyReport(ctx context.Context, tx db.Tx, r Report, now time.Time) (ReportResult, error) {
	before, err := contactOf(ctx, tx, r.NodeID)
	if err != nil {
		return ReportResult{}, err
	}
	tag, err := tx.Exec(ctx,
		`UPDATE node_sessions SET report_counter = $3, seen_at = $4, reachable = $5, reported_session = $6
		WHERE node_id = $1 AND session_no = $2 AND report_counter < $3`,
		r.NodeID, r.SessionNo, min(r.Counter, maxGeneration), now, !before.quarantined, before.reportedAfter(r.SessionNo))
	if err != nil || tag.RowsAffected() == 0 {
		return ReportResult{}, err
	}
	out := ReportResult{
		Fresh: true, WasUnreachable: !before.reachable && !before.quarantined, Incarnation: before.incarnation,
		Quarantined: before.quarantined,
		Resync:      before.resync, CloneDetected: before.isCloned(r.SessionNo),
	}
	// Only what changed: a quiet fleet writes one small row a report and nothing else.
	return out, tx.Queue(ctx, `UPDATE nodes SET conditions = $2, updated_at = $3 WHERE id = $1 AND conditions <> $2`,
		r.NodeID, bounded(r.Conditions), now)
}

// reportedAfter is the newest session in which a report was taken, after one in session no. In quarantine none is.
func (c contact) reportedAfter(no uint64) uint64 {
	if c.quarantined {
		return c.reported
	}
	return no
}

// Silent returns the nodes that count as reachable although nothing was heard of them for OnlineWindow, or their
// connection ended ReconnectGrace ago.
func Silent(ctx context.Context, tx db.Tx, now time.Time) ([]string, error) {
	rows, err := tx.Query(ctx,
		`SELECT node_id FROM node_sessions WHERE reachable AND (seen_at <= $1 OR disconnected_at <= $2) ORDER BY node_id`,
		now.Add(-OnlineWindow), now.Add(-ReconnectGrace))
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// SetUnreachable notes that others are told of a node's silence; false when it has spoken meanwhile.
func SetUnreachable(ctx context.Context, tx db.Tx, nodeID string, now time.Time) (bool, error) {
	tag, err := tx.Exec(ctx,
		`UPDATE node_sessions SET reachable = false WHERE node_id = $1 AND reachable AND (seen_at <= $2
			OR disconnected_at <= $3)`,
		nodeID, now.Add(-OnlineWindow), now.Add(-ReconnectGrace))
	return tag.RowsAffected() == 1, err
}

// RecordAck notes that a node has a document on its disk. generation is the version for a bundle.
func RecordAck(ctx context.Context, tx db.Tx, nodeID string, document protocol.Envelope_Kind,
	epoch, generation uint64,
) error {
	epoch, generation = min(epoch, maxGeneration), min(generation, maxGeneration)
	switch document { //nolint:exhaustive // leases leave no mark
	case protocol.Envelope_STATE:
		return tx.Queue(ctx, `UPDATE nodes SET accepted_epoch = $2, accepted_generation = $3 WHERE id = $1
			AND (accepted_epoch < $2 OR (accepted_epoch = $2 AND accepted_generation < $3))`, nodeID, epoch, generation)
	case protocol.Envelope_BUNDLE:
		return tx.Queue(ctx, `UPDATE nodes SET bundle_version = $2 WHERE id = $1 AND bundle_version < $2`, nodeID, generation)
	}
	return nil
}

// refusalRepeatInterval is how long a refusal of the same document for the same reason is no news.
const refusalRepeatInterval = time.Hour

// RecordRefusal stores a refusal. When the same document was refused for the same reason within refusalRepeatInterval
// that row moves on, and news is false: a node that is offered the same document again and again, or two by turns, must
// fill neither the table nor the event stream.
func RecordRefusal(ctx context.Context, tx db.Tx, nodeID, newID string, r Refusal) (news bool, err error) {
	r.Epoch, r.Generation = min(r.Epoch, maxGeneration), min(r.Generation, maxGeneration)
	r.Document, r.Reason, r.Detail = truncate(r.Document), truncate(r.Reason), truncate(r.Detail)
	tag, err := tx.Exec(ctx, `UPDATE node_refusals SET at = $4, epoch = $5, generation = $6, detail = $7 WHERE node_id = $1
		AND id = (SELECT id FROM node_refusals WHERE node_id = $1 AND document = $2 AND reason = $3 AND at > $8
		ORDER BY at DESC, id DESC LIMIT 1)`,
		nodeID, r.Document, r.Reason, r.At, r.Epoch, r.Generation, r.Detail, r.At.Add(-refusalRepeatInterval))
	if err != nil || tag.RowsAffected() > 0 {
		return false, err
	}
	if _, err := tx.Exec(ctx,
		`INSERT INTO node_refusals (node_id, id, document, epoch, generation, reason, detail, at)
			VALUES ($1, $2, $3, $4, $5, $6, $7, $8)`,
		nodeID, newID, r.Document, r.Epoch, r.Generation, r.Reason, r.Detail, r.At); err != nil {
		return false, err
	}
	_, err = tx.Exec(ctx, `DELETE FROM node_refusals WHERE node_id = $1 AND id NOT IN
		(SELECT id FROM node_refusals WHERE node_id = $1 ORDER BY at DESC, id DESC LIMIT $2)`, nodeID, MaxRefusals)
	return true, err
}

// Refusals returns the newest refusals of a node, newest first.
func Refusals(ctx context.Context, tx db.Tx, nodeID string, limit int) ([]Refusal, error) {
	rows, err := tx.Query(ctx,
		`SELECT document, epoch, generation, reason, detail, at FROM node_refusals WHERE node_id = $1
			ORDER BY at DESC, id DESC LIMIT $2`, nodeID, limit)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (Refusal, error) {
		var r Refusal
		err := row.Scan(&r.Document, &r.Epoch, &r.Generation, &r.Reason, &r.Detail, &r.At)
		return r, err
	})
}
