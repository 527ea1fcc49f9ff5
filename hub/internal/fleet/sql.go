package fleet

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/protocol"
)

const nodeColumns = `n.id, n.site_id, n.hostname, n.public_key, n.resource_version, n.draining, n.banned_at,
	n.ban_reason, n.removed_at, n.lost, n.remove_reason,
	n.quarantined_at, n.quarantine_reason, n.suspect_incarnations, n.certificate_expires_at, n.incarnation,
	n.accepted_epoch, n.accepted_generation, n.bundle_version, n.agent_version,
	n.protocol_version, n.features, n.cpu_cores, n.memory_bytes, n.facts_sha256, n.conditions, n.created_at, n.updated_at,
	n.resync, n.owed_incarnation, n.owed_segment,
	COALESCE(s.session_no, 0), s.seen_at, s.disconnected_at, COALESCE(s.reachable, false)`

const nodeFrom = ` FROM nodes n LEFT JOIN node_sessions s ON s.node_id = n.id `

func scanNode(row pgx.Row) (Node, error) {
	var (
		n                                                        Node
		bannedAt, removedAt, quarantinedAt, seenAt, disconnected *time.Time
	)
	err := row.Scan(&n.ID, &n.SiteID, &n.Hostname, &n.PublicKey, &n.ResourceVersion, &n.Draining, &bannedAt, &n.BanReason,
		&removedAt, &n.Lost, &n.RemoveReason,
		&quarantinedAt, &n.QuarantineReason, &n.SuspectIncarnations, &n.CertificateExpiresAt, &n.Incarnation,
		&n.AcceptedEpoch,
		&n.AcceptedGeneration, &n.BundleVersion, &n.AgentVersion,
		&n.ProtocolVersion, &n.Features, &n.CPUCores, &n.MemoryBytes, &n.factsSHA256, &n.Conditions, &n.CreatedAt,
		&n.UpdatedAt,
		&n.Resync.Status, &n.Resync.OwedIncarnation, &n.Resync.OwedSegment,
		&n.SessionNo, &seenAt, &disconnected, &n.reachable)
	if err != nil {
		return Node{}, err
	}
	n.BannedAt, n.RemovedAt, n.QuarantinedAt, n.LastSeenAt, n.DisconnectedAt = orZero(bannedAt), orZero(removedAt),
		orZero(quarantinedAt), orZero(seenAt), orZero(disconnected)
	return n, nil
}

// LoadFacts fills in what the nodes say of themselves. Only those who show it ask: it may be large, and placement and
// lists of ids do not need it.
func LoadFacts(ctx context.Context, tx db.Tx, nodes ...*Node) error {
	ids := make([]string, 0, len(nodes))
	for _, n := range nodes {
		ids = append(ids, n.ID)
	}
	raw, err := db.CollectMap[string, []byte](tx.Query(ctx, `SELECT id, facts FROM nodes WHERE id = ANY($1::uuid[])`, ids))
	if err != nil {
		return err
	}
	for _, n := range nodes {
		n.Facts = &protocol.NodeFacts{}
		// Written by another release, perhaps: a field it does not know must not make the node unreadable.
		if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(raw[n.ID], n.Facts); err != nil {
			return err
		}
	}
	return nil
}

func orZero(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return *t
}

// Get returns a node, banned or not.
func Get(ctx context.Context, tx db.Tx, nodeID string) (Node, error) {
	if !db.IsID(nodeID) {
		return Node{}, notFound()
	}
	n, err := scanNode(tx.QueryRow(ctx, `SELECT `+nodeColumns+nodeFrom+`WHERE n.id = $1`, nodeID))
	if db.IsNoRows(err) {
		return Node{}, notFound()
	}
	return n, err
}

// GetAll returns those of the nodes that there are, banned or not, by their ids.
func GetAll(ctx context.Context, tx db.Tx, nodeIDs []string) (map[string]Node, error) {
	rows, err := tx.Query(ctx, `SELECT `+nodeColumns+nodeFrom+`WHERE n.id = ANY($1::uuid[])`, nodeIDs)
	if err != nil {
		return nil, err
	}
	nodes, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (Node, error) { return scanNode(row) })
	out := make(map[string]Node, len(nodes))
	for _, n := range nodes {
		out[n.ID] = n
	}
	return out, err
}

// List returns up to limit nodes with an id above after, in the order of their ids.
func List(ctx context.Context, tx db.Tx, after string, limit int) ([]Node, error) {
	if after == "" {
		after = nilID
	}
	rows, err := tx.Query(ctx, `SELECT `+nodeColumns+nodeFrom+`WHERE n.id > $1 ORDER BY n.id LIMIT $2`, after, limit)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (Node, error) { return scanNode(row) })
}

// nilID is below every id that is given out.
const nilID = "00000000-0000-0000-0000-000000000000"

// ForPlacement returns the nodes that may take something new at now, in the order of their ids.
func ForPlacement(ctx context.Context, tx db.Tx, now time.Time) ([]Node, error) {
	rows, err := tx.Query(ctx, `SELECT `+nodeColumns+nodeFrom+`
		WHERE n.banned_at IS NULL AND n.removed_at IS NULL AND n.quarantined_at IS NULL AND NOT n.draining AND n.resync `+
		`<> 'awaiting' AND `+
		`s.disconnected_at IS NULL AND s.seen_at > $1 ORDER BY n.id`, now.Add(-OnlineWindow))
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (Node, error) { return scanNode(row) })
}

// BumpIntent says that something wanted of the node has changed: its revision grows.
func BumpIntent(ctx context.Context, tx db.Tx, nodeID string) error {
	return tx.Queue(ctx, `INSERT INTO node_intents (node_id, rev) VALUES ($1, 1)
		ON CONFLICT (node_id) DO UPDATE SET rev = node_intents.rev + 1`, nodeID)
}

// IntentRevs returns Rev of many nodes, of those of which it is not 0.
func IntentRevs(ctx context.Context, tx db.Tx, nodeIDs []string) (map[string]int64, error) {
	return db.CollectMap[string, int64](tx.Query(ctx,
		`SELECT node_id, rev FROM node_intents WHERE node_id = ANY($1::uuid[])`,
		nodeIDs))
}

// IntentRev returns the revision of what is wanted of the node; 0 when nothing ever was.
func IntentRev(ctx context.Context, tx db.Tx, nodeID string) (rev int64, err error) {
	err = tx.QueryRow(ctx, `SELECT rev FROM node_intents WHERE node_id = $1`, nodeID).Scan(&rev)
	if db.IsNoRows(err) {
		return 0, nil
	}
	return rev, err
}

// Drain stops new placements on the node; drained is false when it was draining already.
func Drain(ctx context.Context, tx db.Tx, nodeID string, now time.Time) (n Node, drained bool, err error) {
	n, err = Get(ctx, tx, nodeID)
	if err != nil || n.Draining || n.IsBanned() || n.IsRemoved() {
		return n, false, err
	}
	n.Draining, n.UpdatedAt = true, now
	n.ResourceVersion++
	_, err = tx.Exec(ctx, `UPDATE nodes SET draining = true, resource_version = $2, updated_at = $3 WHERE id = $1`, nodeID,
		n.ResourceVersion, now)
	return n, true, err
}

// Ban shuts the node out for good; banned is false when it was banned already.
func Ban(ctx context.Context, tx db.Tx, nodeID, reason string, now time.Time) (n Node, banned bool, err error) {
	n, err = Get(ctx, tx, nodeID)
	if err != nil || n.IsBanned() {
		return n, false, err
	}
	n.BannedAt, n.BanReason, n.UpdatedAt = now, truncate(reason), now
	n.ResourceVersion++
	_, err = tx.Exec(ctx,
		`UPDATE nodes SET banned_at = $3, ban_reason = $4, resource_version = $2, updated_at = $3 WHERE id = $1`,
		nodeID, n.ResourceVersion, now, n.BanReason)
	return n, true, err
}

// Quarantine stops new documents for the node and ignores its reports until Release; quarantined is false when it was
// already, or is banned. The node's incarnation is suspect from then on.
func Quarantine(ctx context.Context, tx db.Tx, nodeID, reason string,
	now time.Time,
) (n Node, quarantined bool, err error) {
	n, err = Get(ctx, tx, nodeID)
	if err != nil || n.IsQuarantined() || n.IsBanned() {
		return n, false, err
	}
	n.QuarantinedAt, n.QuarantineReason, n.UpdatedAt = now, truncate(reason), now
	n.ResourceVersion++
	n.SuspectIncarnations = addSuspect(n.SuspectIncarnations, n.Incarnation)
	if _, err := tx.Exec(ctx,
		`UPDATE nodes SET quarantined_at = $3, quarantine_reason = $4, suspect_incarnations = $5, resource_version = $2,
			updated_at = $3 WHERE id = $1`,
		nodeID, n.ResourceVersion, now, n.QuarantineReason, n.SuspectIncarnations); err != nil {
		return Node{}, false, err
	}
	// Out of reach for everyone else: no word of it counts.
	_, err = tx.Exec(ctx, `UPDATE node_sessions SET reachable = false WHERE node_id = $1`, nodeID)
	return n, true, err
}

// Release ends a quarantine; released is false when there was none. What the node's processes did to each other before
// counts no more: whichever dials next goes on, under a new incarnation.
func Release(ctx context.Context, tx db.Tx, nodeID string, now time.Time) (n Node, released bool, err error) {
	n, err = Get(ctx, tx, nodeID)
	if err != nil || !n.IsQuarantined() {
		return n, false, err
	}
	n.QuarantinedAt, n.QuarantineReason, n.UpdatedAt = time.Time{}, "", now
	n.ResourceVersion++
	if _, err := tx.Exec(ctx,
		`UPDATE nodes SET quarantined_at = NULL, quarantine_reason = '', resource_version = $2, updated_at = $3
			WHERE id = $1`,
		nodeID, n.ResourceVersion, now); err != nil {
		return Node{}, false, err
	}
	_, err = tx.Exec(ctx, `UPDATE node_sessions SET reported_session = 0 WHERE node_id = $1`, nodeID)
	return n, true, err
}

// addSuspect adds an incarnation to those that must not go on.
func addSuspect(list []string, incarnation string) []string {
	list = slices.DeleteFunc(slices.Clone(list), func(s string) bool { return s == incarnation })
	list = append(list, incarnation)
	return list[max(len(list)-maxSuspects, 0):]
}

// NextVersion takes the number of the node's next event.
func NextVersion(ctx context.Context, tx db.Tx, nodeID string) (version int64, err error) {
	err = tx.QueryRow(ctx,
		`UPDATE nodes SET resource_version = resource_version + 1 WHERE id = $1 RETURNING resource_version`,
		nodeID).Scan(&version)
	return version, err
}

// CertificateIssued notes until when the node can connect.
func CertificateIssued(ctx context.Context, tx db.Tx, nodeID string, expiresAt, now time.Time) (n Node, err error) {
	if _, err := tx.Exec(ctx,
		`UPDATE nodes SET certificate_expires_at = $2, resource_version = resource_version + 1, updated_at = $3
			WHERE id = $1`, nodeID, expiresAt, now); err != nil {
		return Node{}, err
	}
	return Get(ctx, tx, nodeID)
}
