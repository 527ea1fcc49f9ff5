// Package recovery reconciles a hub that was restored from a backup with its nodes: it begins the recovery, receives
// the states that nodes upload, and adopts them into the restored rows. It owns the restores and the uploaded
// documents. Which node still awaits its resync is a status of package fleet, contradictions are findings (package
// finding), and the file is package backup's.
//
// A node awaits resync from the restore until it has uploaded its accepted state and its leases. Meanwhile nothing is
// compiled for it, its leases are not renewed and its capacity stays reserved. It then owes usage until all segments
// that it had sealed are posted: so long its silence about a member proves nothing.
package recovery

import (
	"context"
	"crypto/ed25519"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/backuprecord"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
)

const (
	actionBackup  = "hub.backup"
	actionRestore = "hub.restore"
	actionAdopt   = change.ActionAdopt

	resourceHub        = "hub"
	resourceNode       = "node"
	resourceOrg        = "org"
	resourceProject    = "project"
	resourceInstance   = "app_instance"
	resourceSecret     = "secret"
	resourceAllocation = "allocation"
	resourceVolume     = change.Volume
)

// Restore is the hub coming back from a backup.
type Restore struct {
	ID string
	// BackupID and TakenAt are of the backup.
	BackupID string
	TakenAt  time.Time
	// Epoch is the new one.
	Epoch uint64
	At    time.Time
}

// RecordBackup records a verified backup; archive says, in the same transaction, how far usage is in it.
func RecordBackup(ctx context.Context, d *db.DB, b backuprecord.Record, archive func(ctx context.Context,
	tx db.Tx) error,
) error {
	return db.WriteTx(ctx, d, func(tx db.Tx) error {
		if err := backuprecord.Verified(ctx, tx, b); err != nil {
			return err
		}
		if err := archive(ctx, tx); err != nil {
			return err
		}
		return recordHub(ctx, tx, "hub.backup.verified", actionBackup, b.ID, map[string]any{
			"taken_at":   b.TakenAt,
			"size_bytes": b.SizeBytes,
		}, b.At)
	})
}

// Begin records that the hub was restored: every node must upload its accepted state. Event positions jump ahead, so
// that none that a client has seen names another event.
func Begin(ctx context.Context, d *db.DB, r Restore) error {
	return db.WriteTx(ctx, d, func(tx db.Tx) error {
		nodes, err := fleet.AwaitResyncOfAll(ctx, tx)
		if err != nil {
			return err
		}
		if err := insertRestore(ctx, tx, r); err != nil {
			return err
		}
		if err := event.Leap(ctx, tx); err != nil {
			return err
		}
		if err := secret.RenewIdentities(ctx, tx, r.At); err != nil {
			return err
		}
		// The lease in the backup belongs to a process on the old database.
		if err := db.ForgetLease(ctx, tx); err != nil {
			return err
		}
		return recordHub(ctx, tx, "hub.restored", actionRestore, r.ID, map[string]any{
			"backup_id": r.BackupID,
			"taken_at":  r.TakenAt,
			"epoch":     r.Epoch,
			"nodes":     nodes,
		}, r.At)
	})
}

// insertRestore also deletes the uploads and findings of an earlier restore; the audit trail has the findings.
func insertRestore(ctx context.Context, tx db.Tx, r Restore) error {
	if _, err := tx.Exec(ctx,
		`INSERT INTO restores (id, backup_id, taken_at, epoch, restored_at) VALUES ($1, $2, $3, $4, $5)`,
		r.ID, r.BackupID, r.TakenAt, int64(r.Epoch), r.At); err != nil {
		return err
	}
	for _, table := range []string{"recovery_parts", "recovery_findings"} {
		if _, err := tx.Exec(ctx, `DELETE FROM `+table); err != nil {
			return err
		}
	}
	return nil
}

// Last gives the newest restore; ok is false for a hub that was never restored.
func Last(ctx context.Context, tx db.Tx) (r Restore, ok bool, err error) {
	r, err = db.SelectOne(ctx, tx, pgx.RowToStructByPos[Restore],
		`SELECT id, backup_id, taken_at, epoch, restored_at FROM restores ORDER BY restored_at DESC, id DESC LIMIT 1`)
	if db.IsNoRows(err) {
		return Restore{}, false, nil
	}
	return r, err == nil, err
}

func recordHub(ctx context.Context, tx db.Tx, typ, action, id string, data map[string]any, now time.Time) error {
	return change.Record(ctx, tx, change.BySystem(id, now), change.Entry{
		Event: typ, Action: action, ResourceType: resourceHub, ResourceID: id, Data: data, After: data,
	})
}

// AdoptUnknown adds a node that a restored hub does not know and whose certificate proves its enrollment. It returns
// false where the hub was never restored, or so long ago that every certificate from before has expired.
func AdoptUnknown(ctx context.Context, tx db.Tx, nodeID string, key ed25519.PublicKey, now time.Time) (bool, error) {
	last, restored, err := Last(ctx, tx)
	if err != nil || !restored || now.After(last.At.Add(trust.MaxNodeTTL)) {
		return false, err
	}
	if err := fleet.Adopt(ctx, tx, nodeID, key, db.NewID(), now); err != nil {
		return false, err
	}
	if err := fleet.AwaitResync(ctx, tx, nodeID); err != nil {
		return false, err
	}
	if err := change.AddFinding(ctx, tx, finding.Finding{
		NodeID:       nodeID,
		Kind:         finding.Node,
		ResourceType: resourceNode,
		ResourceID:   nodeID,
		Detail:       "The node was enrolled after the backup; it is in the default site now.",
		At:           now,
	}); err != nil {
		return false, err
	}
	node, err := fleet.Get(ctx, tx, nodeID)
	if err != nil {
		return false, err
	}
	return true, change.RecordNode(ctx, tx, change.By{CorrelationID: node.ID, Now: now}, "fleet.node.adopted", actionAdopt,
		"", node, "")
}

// keepPart keeps a document until the last of its state has come. The caller has checked that the state names it.
func keepPart(ctx context.Context, tx db.Tx, nodeID string, sha256, data []byte) error {
	_, err := tx.Exec(ctx,
		`INSERT INTO recovery_parts (node_id, sha256, data) VALUES ($1, $2, $3) ON CONFLICT (node_id, sha256) DO NOTHING`,
		nodeID, sha256, data)
	return err
}

// uploadedParts returns the documents that came.
func uploadedParts(ctx context.Context, tx db.Tx, nodeID string) ([][]byte, error) {
	return db.CollectColumn[[]byte](tx.Query(ctx,
		`SELECT data FROM recovery_parts WHERE node_id = $1 ORDER BY sha256`, nodeID))
}

// endUpload deletes the uploaded documents, and makes the node syncable.
func endUpload(ctx context.Context, tx db.Tx, nodeID string, now time.Time) error {
	if _, err := tx.Exec(ctx, `DELETE FROM recovery_parts WHERE node_id = $1`, nodeID); err != nil {
		return err
	}
	return fleet.StateUploaded(ctx, tx, nodeID, now)
}
