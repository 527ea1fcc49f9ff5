package fleet

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// ResyncStatus is what a restored hub still needs from a node. It changes awaiting → usage_owed → in sync, and ends
// with a ban or a removal.
type ResyncStatus string

// The resync statuses of a node.
const (
	InSync ResyncStatus = ""
	// AwaitingResync: the node has not uploaded its accepted state and leases since the restore. Nothing is compiled for
	// it, its leases are not renewed, and its capacity stays reserved.
	AwaitingResync ResyncStatus = "awaiting"
	// UsageOwed: usage up to OwedSegment is not posted yet. Until then the node's silence about a member proves nothing.
	UsageOwed ResyncStatus = "usage_owed"
)

// Resync is a node's resync status with the usage that it owes.
type Resync struct {
	Status          ResyncStatus
	OwedIncarnation string
	OwedSegment     uint64
}

// Syncable reports whether the node may get documents: a quarantined node gets nothing new, and a state compiled before
// a resync might stop newer workloads.
func (n Node) Syncable() bool { return !n.IsQuarantined() && n.Resync.Status != AwaitingResync }

// AwaitResyncOfAll starts the resync of all nodes that are neither banned nor removed, and returns how many they are.
func AwaitResyncOfAll(ctx context.Context, tx db.Tx) (nodes int64, err error) {
	if _, err := tx.Exec(ctx, `UPDATE nodes SET resync = '', owed_incarnation = '', owed_segment = 0
		WHERE resync <> '' OR owed_incarnation <> ''`); err != nil {
		return 0, err
	}
	tag, err := tx.Exec(ctx, `UPDATE nodes SET resync = $1 WHERE banned_at IS NULL AND removed_at IS NULL`, AwaitingResync)
	return tag.RowsAffected(), err
}

// AwaitResync starts the resync of a node.
func AwaitResync(ctx context.Context, tx db.Tx, nodeID string) error {
	_, err := tx.Exec(ctx, `UPDATE nodes SET resync = $2 WHERE id = $1`, nodeID, AwaitingResync)
	return err
}

// SetUsageOwed records how much usage the store that says hello has sealed. A store that takes a new incarnation seals
// again what it owes.
func SetUsageOwed(ctx context.Context, tx db.Tx, nodeID, incarnation string, segment uint64) error {
	_, err := tx.Exec(ctx, `UPDATE nodes SET owed_incarnation = $2, owed_segment = $3
		WHERE id = $1 AND resync <> '' AND owed_incarnation <> $2`, nodeID, incarnation, int64(segment))
	return err
}

// StateUploaded records that the node uploaded its state; it may still owe usage.
func StateUploaded(ctx context.Context, tx db.Tx, nodeID string, now time.Time) error {
	_, err := tx.Exec(ctx, `UPDATE nodes SET resync = $2, updated_at = $3 WHERE id = $1 AND resync = $4`, nodeID,
		UsageOwed, now, AwaitingResync)
	return err
}

// UsageComplete ends the resync of a node.
func UsageComplete(ctx context.Context, tx db.Tx, nodeID string) error {
	_, err := tx.Exec(ctx, `UPDATE nodes SET resync = '', owed_incarnation = '', owed_segment = 0 WHERE id = $1`, nodeID)
	return err
}

// endResync ends the resync of a node that is banned or removed: nothing that a restored hub waits for comes of it.
func endResync(ctx context.Context, tx db.Tx, n Node) (Node, error) {
	n.Resync = Resync{}
	return n, UsageComplete(ctx, tx, n.ID)
}

// Resyncing lists the nodes that are not in sync, in the order of their ids.
func Resyncing(ctx context.Context, tx db.Tx) ([]Node, error) {
	return selectNodes(ctx, tx, `WHERE n.resync <> '' ORDER BY n.id`)
}

// WithoutRenewal returns the nodes whose members get no lease: a banned node's leases must end, a quarantined node gets
// nothing new, and a node that awaits resync first uploads the leases that it has.
func WithoutRenewal(ctx context.Context, tx db.Tx) ([]string, error) {
	return db.CollectColumn[string](tx.Query(ctx, `SELECT id FROM nodes WHERE banned_at IS NOT NULL
		OR quarantined_at IS NOT NULL OR resync = $1 ORDER BY id`, AwaitingResync))
}
