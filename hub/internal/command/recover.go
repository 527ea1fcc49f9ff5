package command

import (
	"context"
	"crypto/ed25519"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/recovery"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
)

const (
	resourceHub   = "hub"
	actionBackup  = "hub.backup"
	actionRestore = "hub.restore"
)

// RecordBackup notes a verified backup; archive says, in the same transaction, how far usage is in it.
func RecordBackup(ctx context.Context, d *db.DB, b recovery.Backup, archive func(ctx context.Context,
	tx db.Tx) error,
) error {
	_, err := db.RunTx(ctx, d, func(tx db.Tx) (struct{}, error) {
		if err := recovery.RecordBackup(ctx, tx, b); err != nil {
			return struct{}{}, err
		}
		if err := archive(ctx, tx); err != nil {
			return struct{}{}, err
		}
		return struct{}{}, recordHub(ctx, tx, "hub.backup.verified", actionBackup, b.ID, map[string]any{
			"taken_at":   b.TakenAt,
			"size_bytes": b.SizeBytes,
		}, b.At)
	})
	return err
}

// BeginRecovery notes that the hub was restored and lets it wait for its nodes. The places of events leap, so that none
// that a client has seen stands for another event.
func BeginRecovery(ctx context.Context, d *db.DB, r recovery.Restore) error {
	_, err := db.RunTx(ctx, d, func(tx db.Tx) (struct{}, error) {
		nodes, err := fleet.IDs(ctx, tx)
		if err != nil {
			return struct{}{}, err
		}
		if err := recovery.Begin(ctx, tx, r, nodes); err != nil {
			return struct{}{}, err
		}
		if err := event.Leap(ctx, tx); err != nil {
			return struct{}{}, err
		}
		// The process that is named there works on the database that was backed up.
		if err := db.ForgetLease(ctx, tx); err != nil {
			return struct{}{}, err
		}
		return struct{}{}, recordHub(ctx, tx, "hub.restored", actionRestore, r.ID, map[string]any{
			"backup_id": r.BackupID,
			"taken_at":  r.TakenAt, "epoch": r.Epoch, "nodes": len(nodes),
		}, r.At)
	})
	return err
}

func recordHub(ctx context.Context, tx db.Tx, typ, action, id string, data map[string]any, now time.Time) error {
	if err := event.Append(ctx, tx, event.Event{
		Type: typ, Subject: id, ResourceVersion: 1, CorrelationID: id, Data: data,
		At: now,
	}); err != nil {
		return err
	}
	return event.Audit(ctx, tx, event.AuditRow{
		ActorType: actorSystem, Action: action, ResourceType: resourceHub, ResourceID: id, CorrelationID: id, After: data,
		At: now,
	})
}

// AdmitUnknown writes a node down that a restored hub does not know, in the caller's transaction; false where the hub
// was never restored, or so long ago that every certificate of before has expired: then an unknown node is a stranger.
func AdmitUnknown(ctx context.Context, tx db.Tx, nodeID string, key ed25519.PublicKey, now time.Time) (bool, error) {
	last, restored, err := recovery.Last(ctx, tx)
	if err != nil || !restored || now.After(last.At.Add(trust.MaxNodeTTL)) {
		return false, err
	}
	if err := fleet.Adopt(ctx, tx, nodeID, key, db.NewID(), now); err != nil {
		return false, err
	}
	if err := recovery.Await(ctx, tx, nodeID); err != nil {
		return false, err
	}
	node, err := fleet.Get(ctx, tx, nodeID)
	if err != nil {
		return false, err
	}
	if err := find(ctx, tx, recovery.Finding{
		NodeID: nodeID, Kind: recovery.FindingNode, ResourceType: resourceNode,
		ResourceID: nodeID, Detail: "The node was enrolled after the backup; it is in the default site now.",
		At: now,
	}); err != nil {
		return false, err
	}
	return true, bySystem(nodeID, now).recordNode(ctx, tx, nodeChange{
		event: "fleet.node.adopted", action: actionAdopt,
		node: node,
	})
}

// find writes a finding down, with its event and audit row where it is news.
func find(ctx context.Context, tx db.Tx, f recovery.Finding) error {
	news, err := recovery.Find(ctx, tx, f)
	if err != nil || !news {
		return err
	}
	data := map[string]any{"node_id": f.NodeID, "kind": f.Kind, "resource_type": f.ResourceType, "detail": f.Detail}
	if err := event.Append(ctx, tx, event.Event{
		Type: "hub.recovery.finding", Subject: f.ResourceID, ResourceVersion: 1,
		CorrelationID: f.NodeID, Data: data, At: f.At,
	}); err != nil {
		return err
	}
	return event.Audit(ctx, tx, event.AuditRow{
		ActorType: actorSystem, Action: actionAdopt, ResourceType: f.ResourceType, ResourceID: f.ResourceID,
		CorrelationID: f.NodeID, Reason: f.Kind, After: data, At: f.At,
	})
}
