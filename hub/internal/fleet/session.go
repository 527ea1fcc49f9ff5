package fleet

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/nodeidentity"
	"github.com/gpuaas/gpuaas/protocol"
)

// Disconnect records the end of a connection; ended is false where a newer one has replaced it.
func Disconnect(ctx context.Context, tx db.Tx, nodeID string, sessionNo uint64, now time.Time) (ended bool, err error) {
	tag, err := tx.Exec(ctx,
		`UPDATE node_sessions SET disconnected_at = $3 WHERE node_id = $1 AND session_no = $2 AND disconnected_at IS NULL`,
		nodeID, sessionNo, now)
	return tag.RowsAffected() == 1, err
}

// DisconnectAll records the end of all connections of a hub process that stops.
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

// contact is what a report is compared with.
type contact struct {
	reachable   bool
	incarnation string
	quarantined bool
	// lastSession is the one that the current hello named, reported the newest session with an applied report.
	lastSession, reported uint64
	resync                Resync
	conditions            []string
}

// isUnchanged reports whether the report changes only the time of the last contact.
func (c contact) isUnchanged(r Report) bool {
	return c.reachable && !c.quarantined && c.resync.Status == InSync && !c.isCloned(r.SessionNo) &&
		slices.Equal(c.conditions, bounded(r.Conditions))
}

// isCloned reports whether a report of session no shows that two processes use the node's key.
func (c contact) isCloned(no uint64) bool {
	return !c.quarantined && c.reported != no && nodeidentity.CloneDetected(c.lastSession, c.reported)
}

// selectContacts returns the contacts of those of the nodes that ever connected.
func selectContacts(ctx context.Context, tx db.Tx, nodeIDs []string) (map[string]contact, error) {
	var (
		id string
		c  contact
	)
	contacts := map[string]contact{}
	return contacts, db.ForEach(ctx, tx, []any{
		&id, &c.reachable, &c.lastSession, &c.reported, &c.incarnation, &c.quarantined,
		&c.conditions, &c.resync.Status, &c.resync.OwedIncarnation, &c.resync.OwedSegment,
	}, func() {
		contacts[id] = c
		c.conditions = nil // so that the next row does not overwrite them
	}, `SELECT s.node_id, n.reachable, s.last_session, s.reported_session, n.incarnation, n.quarantined_at IS NOT NULL,
			n.conditions, n.resync, n.owed_incarnation, n.owed_segment
		FROM node_sessions s JOIN nodes n ON n.id = s.node_id WHERE s.node_id = ANY($1::uuid[])`, nodeIDs)
}

// ReportResult is what a report changed.
type ReportResult struct {
	// Fresh is false for a report of an older connection, or with a counter that is not higher: it changes nothing.
	Fresh bool
	// WasUnreachable: the node counted as unreachable until this report.
	WasUnreachable bool
	// Incarnation is the one of the node's hello.
	Incarnation string
	// Resync is what a restored hub still needs from the node.
	Resync Resync
	// Quarantined: the report does not count.
	Quarantined bool
	// CloneDetected: two processes use the node's key.
	CloneDetected bool
}

// ApplyReport records a report as the node's last contact, and its conditions.
func ApplyReport(ctx context.Context, tx db.Tx, r Report, now time.Time) (ReportResult, error) {
	contacts, err := selectContacts(ctx, tx, []string{r.NodeID})
	if err != nil {
		return ReportResult{}, err
	}
	before := contacts[r.NodeID]
	tag, err := tx.Exec(ctx,
		`UPDATE node_sessions SET report_counter = $3, seen_at = $4, reported_session = $5
		WHERE node_id = $1 AND session_no = $2 AND report_counter < $3`,
		r.NodeID, r.SessionNo, min(r.Counter, maxGeneration), now, before.reportedAfter(r.SessionNo))
	if err != nil || tag.RowsAffected() == 0 {
		return ReportResult{}, err
	}
	out := ReportResult{
		Fresh: true, WasUnreachable: !before.reachable && !before.quarantined, Incarnation: before.incarnation,
		Quarantined: before.quarantined,
		Resync:      before.resync, CloneDetected: before.isCloned(r.SessionNo),
	}
	// Unchanged conditions are not written: most reports write one small row.
	return out, errors.Join(
		tx.Queue(ctx, `UPDATE nodes SET conditions = $2, updated_at = $3 WHERE id = $1 AND conditions <> $2`, r.NodeID,
			bounded(r.Conditions), now),
		setReachable(ctx, tx, []string{r.NodeID}, []bool{!before.quarantined}))
}

// reportedAfter is the newest session with an applied report, after one of session no. In quarantine none is applied.
func (c contact) reportedAfter(no uint64) uint64 {
	if c.quarantined {
		return c.reported
	}
	return no
}

// Silent returns the nodes that count as reachable although their last message is OnlineWindow old, or their connection
// ended ReconnectGrace ago.
func Silent(ctx context.Context, tx db.Tx, now time.Time) ([]string, error) {
	return db.CollectColumn[string](tx.Query(ctx,
		`SELECT s.node_id FROM node_sessions s JOIN nodes n ON n.id = s.node_id
			WHERE n.reachable AND (s.seen_at <= $1 OR s.disconnected_at <= $2) ORDER BY s.node_id`,
		now.Add(-OnlineWindow), now.Add(-ReconnectGrace)))
}

// SetUnreachable marks a silent node as unreachable; false when it has sent a message meanwhile.
func SetUnreachable(ctx context.Context, tx db.Tx, nodeID string, now time.Time) (bool, error) {
	// Locked, because reports that change nothing else are not serializable.
	var id string
	err := tx.QueryRow(ctx,
		`SELECT node_id FROM node_sessions WHERE node_id = $1 AND (seen_at <= $2 OR disconnected_at <= $3) FOR UPDATE`,
		nodeID, now.Add(-OnlineWindow), now.Add(-ReconnectGrace)).Scan(&id)
	if db.IsNoRows(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	tag, err := tx.Exec(ctx, `UPDATE nodes SET reachable = false WHERE id = $1 AND reachable`, nodeID)
	return tag.RowsAffected() == 1, err
}

// setReachable writes what has changed.
func setReachable(ctx context.Context, tx db.Tx, nodeIDs []string, reachable []bool) error {
	return tx.Queue(ctx, `UPDATE nodes SET reachable = x.reachable FROM unnest($1::uuid[], $2::bool[]) AS x(id, reachable)
		WHERE nodes.id = x.id AND nodes.reachable <> x.reachable`, nodeIDs, reachable)
}

// RecordAck records that a node has a document on its disk. generation is the version of a bundle.
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

// refusalRepeatInterval is how long a repeated refusal of the same document for the same reason gets no new row.
const refusalRepeatInterval = time.Hour

// RecordRefusal stores a refusal. One of the same document for the same reason within refusalRepeatInterval updates the
// existing row, and news is false: a node that is offered a document again and again fills neither the table nor the
// event stream.
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

// Refusals returns the refusals of nodes that are kept, the newest first.
func Refusals(ctx context.Context, tx db.Tx, nodeIDs ...string) (map[string][]Refusal, error) {
	var (
		id string
		r  Refusal
	)
	out := map[string][]Refusal{}
	into := []any{&id, &r.Document, &r.Epoch, &r.Generation, &r.Reason, &r.Detail, &r.At}
	err := db.ForEach(ctx, tx, into, func() { out[id] = append(out[id], r) },
		`SELECT node_id, document, epoch, generation, reason, detail, at FROM node_refusals WHERE node_id = ANY($1::uuid[])
			ORDER BY at DESC, id DESC`, nodeIDs)
	return out, err
}
