package fleet

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// change applies an admin's change to a node and saves it. apply returns false where there is nothing to change.
func change(ctx context.Context, tx db.Tx, nodeID string, now time.Time, apply func(*Node) bool,
) (n Node, changed bool, err error) {
	n, err = Get(ctx, tx, nodeID)
	if err != nil || !apply(&n) {
		return n, false, err
	}
	n.ResourceVersion++
	n.UpdatedAt = now
	_, err = tx.Exec(ctx, `UPDATE nodes SET resource_version = $2, updated_at = $3, draining = $4, banned_at = $5,
			ban_reason = $6, removed_at = $7, lost = $8, remove_reason = $9, quarantined_at = $10, quarantine_reason = $11,
			suspect_incarnations = $12
		WHERE id = $1`,
		nodeID, n.ResourceVersion, now, n.Draining, db.OrNull(n.BannedAt), n.BanReason, db.OrNull(n.RemovedAt), n.Lost,
		n.RemoveReason, db.OrNull(n.QuarantinedAt), n.QuarantineReason, append([]string{}, n.SuspectIncarnations...))
	return n, true, err
}

// A node's connection ends once one of these changes of it is committed. Each is the work queue of the nodes that it is
// due for, and the reason that they are told.
const (
	EndBanned      = string(CodeBanned)
	EndRemoved     = string(CodeNodeRemoved)
	EndQuarantined = "node_quarantined"
	EndReleased    = "quarantine_released"
)

// EndReasons lists them.
func EndReasons() []string { return []string{EndBanned, EndRemoved, EndQuarantined, EndReleased} }

// Drain stops new placements on the node; drained is false when it was draining already.
func Drain(ctx context.Context, tx db.Tx, nodeID string, now time.Time) (n Node, drained bool, err error) {
	return change(ctx, tx, nodeID, now, func(n *Node) bool { return n.setDraining(true) })
}

// Undrain allows new placements on the node again; undrained is false when it was not draining.
func Undrain(ctx context.Context, tx db.Tx, nodeID string, now time.Time) (n Node, undrained bool, err error) {
	return change(ctx, tx, nodeID, now, func(n *Node) bool { return n.setDraining(false) })
}

func (n *Node) setDraining(draining bool) (changed bool) {
	if n.Draining == draining || n.IsBanned() || n.IsRemoved() {
		return false
	}
	n.Draining = draining
	return true
}

// Ban shuts the node out for good; banned is false when it was banned already.
func Ban(ctx context.Context, tx db.Tx, nodeID, reason string, now time.Time) (n Node, banned bool, err error) {
	n, banned, err = change(ctx, tx, nodeID, now, func(n *Node) bool {
		if n.IsBanned() {
			return false
		}
		n.BannedAt, n.BanReason = now, truncate(reason)
		tx.Enqueue(EndBanned, nodeID)
		return true
	})
	if err != nil || !banned {
		return n, false, err
	}
	n, err = endResync(ctx, tx, n)
	return n, true, err
}

// Quarantine stops new documents for the node and ignores its reports until Release; quarantined is false when it was
// already, or is banned. The node's incarnation is suspect from then on.
func Quarantine(ctx context.Context, tx db.Tx, nodeID, reason string, now time.Time,
) (n Node, quarantined bool, err error) {
	n, quarantined, err = change(ctx, tx, nodeID, now, func(n *Node) bool {
		if n.IsQuarantined() || n.IsBanned() {
			return false
		}
		n.QuarantinedAt, n.QuarantineReason = now, truncate(reason)
		n.SuspectIncarnations = addSuspect(n.SuspectIncarnations, n.Incarnation)
		tx.Enqueue(EndQuarantined, nodeID)
		return true
	})
	if err != nil || !quarantined {
		return n, false, err
	}
	// Tenants see the node as unreachable, because its reports do not count.
	return n, true, setReachable(ctx, tx, []string{nodeID}, []bool{false})
}

// Release ends a quarantine; released is false when there was none. Earlier signs of a clone do not count any more: the
// process that connects next continues, under a new incarnation.
func Release(ctx context.Context, tx db.Tx, nodeID string, now time.Time) (n Node, released bool, err error) {
	n, released, err = change(ctx, tx, nodeID, now, func(n *Node) bool {
		was := n.IsQuarantined()
		n.QuarantinedAt, n.QuarantineReason = time.Time{}, ""
		return was
	})
	if err != nil || !released {
		return n, false, err
	}
	tx.Enqueue(EndReleased, nodeID)
	_, err = tx.Exec(ctx, `UPDATE node_sessions SET reported_session = 0 WHERE node_id = $1`, nodeID)
	return n, true, err
}

// CheckRemoval decides whether a node may be removed for good. A node in contact must be draining first, so that
// nothing new is placed on it. A node can be declared lost only while it is out of contact, or banned: workloads of a
// connected node can be decommissioned properly, with its proof.
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

// Remove removes the node for good; CheckRemoval must have agreed in this transaction. removed is false when the node
// was removed before: the first outcome stays.
func Remove(ctx context.Context, tx db.Tx, nodeID string, lost bool, reason string, now time.Time,
) (n Node, removed bool, err error) {
	n, removed, err = change(ctx, tx, nodeID, now, func(n *Node) bool {
		if n.IsRemoved() {
			return false
		}
		n.RemovedAt, n.Lost, n.RemoveReason = now, lost, truncate(reason)
		if !lost {
			tx.Enqueue(EndRemoved, nodeID)
		}
		return true
	})
	if err != nil || !removed {
		return n, false, err
	}
	n, err = endResync(ctx, tx, n)
	return n, true, err
}
