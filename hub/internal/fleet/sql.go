package fleet

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
	"github.com/gpuaas/gpuaas/protocol"
)

const nodeColumns = `n.id, n.site_id, n.hostname, n.public_key, n.resource_version, n.draining, n.banned_at,
	n.ban_reason, n.removed_at, n.lost, n.remove_reason,
	n.quarantined_at, n.quarantine_reason, n.suspect_incarnations, n.certificate_expires_at, n.incarnation,
	n.accepted_epoch, n.accepted_generation, n.bundle_version, n.agent_version,
	n.protocol_version, n.features, n.cpu_cores, n.memory_bytes, n.facts_sha256, n.conditions, n.created_at, n.updated_at,
	n.resync, n.owed_incarnation, n.owed_segment,
	n.reachable, `

// The rest of a select of nodes, with their sessions or without.
const (
	withSessions = `COALESCE(s.session_no, 0), s.seen_at, s.disconnected_at
		FROM nodes n LEFT JOIN node_sessions s ON s.node_id = n.id `
	withoutSessions = `0, NULL::TIMESTAMPTZ, NULL::TIMESTAMPTZ FROM nodes n `
)

func scanNode(row pgx.CollectableRow) (n Node, err error) {
	err = row.Scan(&n.ID, &n.SiteID, &n.Hostname, &n.PublicKey, &n.ResourceVersion, &n.Draining,
		(*zeronull.Timestamptz)(&n.BannedAt), &n.BanReason, (*zeronull.Timestamptz)(&n.RemovedAt), &n.Lost, &n.RemoveReason,
		(*zeronull.Timestamptz)(&n.QuarantinedAt), &n.QuarantineReason, &n.SuspectIncarnations, &n.CertificateExpiresAt,
		&n.Incarnation,
		&n.AcceptedEpoch, &n.AcceptedGeneration, &n.BundleVersion, &n.AgentVersion, &n.ProtocolVersion, &n.Features,
		&n.CPUCores, &n.MemoryBytes, &n.factsSHA256, &n.Conditions, &n.CreatedAt,
		&n.UpdatedAt, &n.Resync.Status, &n.Resync.OwedIncarnation, &n.Resync.OwedSegment, &n.Reachable, &n.SessionNo,
		(*zeronull.Timestamptz)(&n.LastSeenAt), (*zeronull.Timestamptz)(&n.DisconnectedAt))
	return n, err
}

// LoadFacts reads the nodes' facts. They may be large, and only what shows them needs them.
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
		// Another release may have written a field that this one does not know.
		if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(raw[n.ID], n.Facts); err != nil {
			return err
		}
	}
	return nil
}

// HostPorts returns the ports of nodes that their owners let tenants choose, by node; where they let them choose none
// there is none.
func HostPorts(ctx context.Context, tx db.Tx, nodes map[string]Node) (map[string]*protocol.PortRange, error) {
	var list []*Node
	for _, n := range nodes {
		list = append(list, &n)
	}
	out := make(map[string]*protocol.PortRange, len(nodes))
	if err := LoadFacts(ctx, tx, list...); err != nil {
		return nil, err
	}
	for _, n := range list {
		out[n.ID] = n.Facts.GetHostPorts()
	}
	return out, nil
}

// VolumeBytes returns what volumes may take of the node's disk.
func VolumeBytes(ctx context.Context, tx db.Tx, n Node) (int64, error) {
	err := LoadFacts(ctx, tx, &n)
	return int64(n.Facts.GetVolumeBytes()), err
}

// Get returns a node, banned or not.
func Get(ctx context.Context, tx db.Tx, nodeID string) (Node, error) {
	if !db.IsID(nodeID) {
		return Node{}, notFound()
	}
	n, err := db.SelectOne(ctx, tx, scanNode, `SELECT `+nodeColumns+withSessions+`WHERE n.id = $1`, nodeID)
	if db.IsNoRows(err) {
		return Node{}, notFound()
	}
	return n, err
}

// selectNodes returns the nodes of a condition.
func selectNodes(ctx context.Context, tx db.Tx, where string, args ...any) ([]Node, error) {
	return db.Select(ctx, tx, scanNode, `SELECT `+nodeColumns+withSessions+where, args...)
}

// insertNode also sets a first intent, so that the node gets a first generation, even if it is empty.
func insertNode(ctx context.Context, tx db.Tx, n Node, now time.Time) error {
	if _, err := tx.Exec(ctx,
		`INSERT INTO nodes (id, site_id, hostname, public_key, resource_version, certificate_expires_at, features, facts,
			conditions, created_at, updated_at)
		VALUES ($1, $2, $3, $4, 1, $5, '[]', '{}', '[]', $6, $6)`,
		n.ID, n.SiteID, n.Hostname, []byte(n.PublicKey), n.CertificateExpiresAt, now); err != nil {
		return err
	}
	return BumpIntent(ctx, tx, n.ID)
}

// GetAll returns the existing ones of the nodes by id, banned or not.
func GetAll(ctx context.Context, tx db.Tx, nodeIDs []string) (map[string]Node, error) {
	nodes, err := selectNodes(ctx, tx, `WHERE n.id = ANY($1::uuid[])`, nodeIDs)
	return byID(nodes), err
}

// GetAllWithoutSessions is GetAll for those who must not conflict with the nodes' reports: SessionNo, LastSeenAt and
// DisconnectedAt are zero.
func GetAllWithoutSessions(ctx context.Context, tx db.Tx, nodeIDs []string) (map[string]Node, error) {
	nodes, err := db.Select(ctx, tx, scanNode,
		`SELECT `+nodeColumns+withoutSessions+`WHERE n.id = ANY($1::uuid[])`, nodeIDs)
	return byID(nodes), err
}

func byID(nodes []Node) map[string]Node {
	out := make(map[string]Node, len(nodes))
	for _, n := range nodes {
		out[n.ID] = n
	}
	return out
}

// Hostnames returns the names that the nodes give themselves, by node id.
func Hostnames(ctx context.Context, tx db.Tx, nodeIDs []string) (map[string]string, error) {
	type named struct{ id, hostname string }
	rows, err := db.Select(ctx, tx, func(row pgx.CollectableRow) (n named, err error) {
		return n, row.Scan(&n.id, &n.hostname)
	}, `SELECT id::text, hostname FROM nodes WHERE id = ANY($1::uuid[])`, nodeIDs)
	out := make(map[string]string, len(rows))
	for _, n := range rows {
		out[n.id] = n.hostname
	}
	return out, err
}

// List returns up to limit nodes with an id above after, in the order of their ids.
func List(ctx context.Context, tx db.Tx, after string, limit int) ([]Node, error) {
	return selectNodes(ctx, tx, `WHERE n.id > $1 ORDER BY n.id LIMIT $2`, cmp.Or(after, nilID), limit)
}

// nilID is below every id in use.
const nilID = "00000000-0000-0000-0000-000000000000"

// ForPlacement returns the nodes that may take new workloads at now, in the order of their ids.
func ForPlacement(ctx context.Context, tx db.Tx, now time.Time) ([]Node, error) {
	return selectNodes(ctx, tx, `
		WHERE n.banned_at IS NULL AND n.removed_at IS NULL AND n.quarantined_at IS NULL AND NOT n.draining
		AND n.resync <> 'awaiting' AND s.disconnected_at IS NULL AND s.seen_at > $1 ORDER BY n.id`, now.Add(-OnlineWindow))
}

// IntentQueue is the work queue of nodes whose intent has changed: the dispatcher processes it.
const IntentQueue = "node_intents"

// BumpIntent records that the desired state of the node has changed: its intent gets the next revision, and the node is
// enqueued after the commit.
func BumpIntent(ctx context.Context, tx db.Tx, nodeID string) error {
	tx.Enqueue(IntentQueue, nodeID)
	return tx.Queue(ctx, `INSERT INTO node_intents (node_id, rev, traceparent) VALUES ($1, 1, $2)
		ON CONFLICT (node_id) DO UPDATE SET rev = node_intents.rev + 1, traceparent = excluded.traceparent`, nodeID,
		telemetry.Traceparent(ctx))
}

// IntentRevs returns the revisions of the nodes' intents; a node without one is left out.
func IntentRevs(ctx context.Context, tx db.Tx, nodeIDs []string) (map[string]int64, error) {
	return db.CollectMap[string, int64](tx.Query(ctx,
		`SELECT node_id, rev FROM node_intents WHERE node_id = ANY($1::uuid[])`, nodeIDs))
}

// LockIntent locks the node's intent until the end of the transaction and returns its revision; 0 before the first,
// which there is nothing to lock of.
func LockIntent(ctx context.Context, tx db.Tx, nodeID string) (int64, error) {
	rev, err := db.Value[int64](ctx, tx, `SELECT rev FROM node_intents WHERE node_id = $1 FOR UPDATE`, nodeID)
	if db.IsNoRows(err) {
		return 0, nil
	}
	return rev, err
}

// Intent is the revision of a node's intent, 0 before the first, and the W3C trace context of its last change.
type Intent struct {
	Rev         int64
	Traceparent string
}

// GetIntent returns the node's intent.
func GetIntent(ctx context.Context, tx db.Tx, nodeID string) (Intent, error) {
	i, err := db.SelectOne(ctx, tx, pgx.RowToStructByPos[Intent],
		`SELECT rev, traceparent FROM node_intents WHERE node_id = $1`, nodeID)
	if db.IsNoRows(err) {
		return Intent{}, nil
	}
	return i, err
}

// addSuspect adds an incarnation to those that must not continue; beyond maxSuspects the oldest is dropped.
func addSuspect(list []string, incarnation string) []string {
	list = slices.DeleteFunc(slices.Clone(list), func(s string) bool { return s == incarnation })
	list = append(list, incarnation)
	return list[max(len(list)-maxSuspects, 0):]
}

// NextVersion increments the node's resource version, for its next event.
func NextVersion(ctx context.Context, tx db.Tx, nodeID string) (version int64, err error) {
	return db.Value[int64](ctx, tx,
		`UPDATE nodes SET resource_version = resource_version + 1 WHERE id = $1 RETURNING resource_version`, nodeID)
}

// CertificateIssued records when the node's certificate expires.
func CertificateIssued(ctx context.Context, tx db.Tx, nodeID string, expiresAt, now time.Time) (n Node, err error) {
	if _, err := tx.Exec(ctx,
		`UPDATE nodes SET certificate_expires_at = $2, resource_version = resource_version + 1, updated_at = $3
			WHERE id = $1`, nodeID, expiresAt, now); err != nil {
		return Node{}, err
	}
	return Get(ctx, tx, nodeID)
}
