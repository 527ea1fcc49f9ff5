package fleet

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// CheckRemoval decides whether a node may be taken out of the mesh for good. A node that is still there leaves drained:
// nothing new can be placed on it meanwhile. One that is lost must really be out of reach, or banned: what a node in
// contact runs can be ended properly, with its proof.
func CheckRemoval(n Node, lost bool, now time.Time) error {
	switch {
	case lost && n.Connected(now) && !n.IsBanned():
		return fault.New(fault.Conflict, codeNodeConnected,
			"The node is in contact, so it is not lost: drain it, end what runs there and remove it, or ban it first.", nil)
	case !lost && !n.Draining && !n.IsBanned():
		return fault.New(fault.Conflict, codeNodeNotDraining, "Drain the node first, so that nothing new is placed on it.",
			nil)
	}
	return nil
}

// Remove takes the node out of the mesh for good; CheckRemoval must have agreed in this transaction. removed is false
// when that had happened before: the first outcome stays.
func Remove(ctx context.Context, tx db.Tx, nodeID string, lost bool, reason string,
	now time.Time,
) (n Node, removed bool, err error) {
	n, err = Get(ctx, tx, nodeID)
	if err != nil || n.IsRemoved() {
		return n, false, err
	}
	n.RemovedAt, n.Lost, n.RemoveReason, n.UpdatedAt = now, lost, truncate(reason), now
	n.ResourceVersion++
	_, err = tx.Exec(ctx,
		`UPDATE nodes SET removed_at = $3, lost = $4, remove_reason = $5, resource_version = $2, updated_at = $3
			WHERE id = $1`,
		nodeID, n.ResourceVersion, now, lost, n.RemoveReason)
	return n, true, err
}

// Undrain lets new things be placed on the node again; undrained is false when it was not draining.
func Undrain(ctx context.Context, tx db.Tx, nodeID string, now time.Time) (n Node, undrained bool, err error) {
	n, err = Get(ctx, tx, nodeID)
	if err != nil || !n.Draining || n.IsBanned() || n.IsRemoved() {
		return n, false, err
	}
	n.Draining, n.UpdatedAt = false, now
	n.ResourceVersion++
	_, err = tx.Exec(ctx, `UPDATE nodes SET draining = false, resource_version = $2, updated_at = $3 WHERE id = $1`,
		nodeID, n.ResourceVersion, now)
	return n, true, err
}
