package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// DrainNode stops new placements on a node; what runs there goes on. Draining a draining node changes nothing.
func (s *Service) DrainNode(ctx context.Context, m Meta, nodeID string) error {
	return s.changeNode(ctx, m, nodeID, func(tx db.Tx) (fleet.Node, bool, error) {
		n, drained, err := fleet.Drain(ctx, tx, nodeID, m.Now)
		return n, drained, outOfUse(n, err)
	}, "fleet.node.draining", "")
}

// UndrainNode lets new things be placed on a node again. A node that was not draining stays as it is.
func (s *Service) UndrainNode(ctx context.Context, m Meta, nodeID string) error {
	return s.changeNode(ctx, m, nodeID, func(tx db.Tx) (fleet.Node, bool, error) {
		n, undrained, err := fleet.Undrain(ctx, tx, nodeID, m.Now)
		return n, undrained, outOfUse(n, err)
	}, "fleet.node.undrained", "")
}

// BanNode shuts out a compromised node for good. Banning a banned node changes nothing; its first reason stays.
func (s *Service) BanNode(ctx context.Context, m Meta, nodeID, reason string) error {
	return s.changeNode(ctx, m, nodeID, func(tx db.Tx) (fleet.Node, bool, error) {
		n, banned, err := fleet.Ban(ctx, tx, nodeID, reason, m.Now)
		if err == nil && banned {
			// A state that was compiled before the ban must not be saved after it.
			err = fleet.BumpIntent(ctx, tx, nodeID)
		}
		if err == nil && banned {
			// Who has the node's key can open the keys that were sealed to it.
			err = change.EndIdentitiesOn(ctx, tx, m.by(), nodeID)
		}
		return n, banned, err
	}, "fleet.node.banned", reason)
}

// ReleaseNode ends the quarantine of a node, once an admin has made sure that one machine has its key. The store that
// dials next gets a new incarnation; should there be two again, they are noticed again. Releasing a node that is not
// quarantined changes nothing.
func (s *Service) ReleaseNode(ctx context.Context, m Meta, nodeID string) error {
	return s.changeNode(ctx, m, nodeID, func(tx db.Tx) (fleet.Node, bool, error) {
		return fleet.Release(ctx, tx, nodeID, m.Now)
	}, "fleet.node.released", "")
}

// changeNode changes a node for an admin and records that where something has changed.
func (s *Service) changeNode(ctx context.Context, m Meta, nodeID string, apply func(db.Tx) (fleet.Node, bool, error),
	eventType, reason string,
) error {
	_, err := once(ctx, s, m, access.Platform(m.Principal, iam.NodeWrite), func(tx db.Tx, _ access.Nothing) (bool, error) {
		before, err := fleet.Get(ctx, tx, nodeID)
		if err != nil {
			return false, err
		}
		node, changed, err := apply(tx)
		if err != nil || !changed {
			return false, err
		}
		status := string(before.Status(m.Now))
		return true, change.RecordNode(ctx, tx, m.by(), eventType, iam.NodeWrite, status, node, reason)
	})
	return err
}

// outOfUse refuses to change what a node takes once it takes nothing for good.
func outOfUse(n fleet.Node, err error) error {
	switch {
	case err != nil:
		return err
	case n.IsBanned():
		return fault.New(fault.Conflict, fleet.CodeBanned, "The node is banned for good; nothing is placed on it.", nil)
	case n.IsRemoved():
		return fault.New(fault.Conflict, fleet.CodeNodeRemoved, "The node was removed for good; nothing is placed on it.",
			nil)
	}
	return nil
}
