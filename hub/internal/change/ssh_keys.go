package change

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
)

// CompleteSSHKeys records that a set of SSH keys was replaced, and that the allocation's node is to serve other keys.
func CompleteSSHKeys(ctx context.Context, tx db.Tx, by By, action string, a capacity.Allocation,
	before, after capacity.SSHKeySet,
) error {
	if err := fleet.BumpIntent(ctx, tx, a.NodeID); err != nil {
		return err
	}
	return Record(ctx, tx, by, Entry{
		Event:        "capacity.ssh_keys.updated",
		Action:       action,
		ResourceType: "ssh_keys",
		ResourceID:   a.ID + "/" + after.ManagedBy,
		Version:      after.ResourceVersion,
		OrgID:        a.OrgID,
		ProjectID:    a.ProjectID,
		Data:         map[string]any{"allocation_id": a.ID, "managed_by": after.ManagedBy, "keys": len(after.Keys)},
		Before:       sshKeys(before),
		After:        sshKeys(after),
	})
}

func sshKeys(s capacity.SSHKeySet) map[string]any {
	keys := []map[string]any{}
	for _, k := range s.Keys {
		key := map[string]any{"user": k.User, "fingerprint": k.Fingerprint()}
		if !k.ExpiresAt.IsZero() {
			key["expires_at"] = k.ExpiresAt
		}
		keys = append(keys, key)
	}
	return map[string]any{"keys": keys}
}
