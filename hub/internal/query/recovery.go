package query

import (
	"context"
	"slices"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/backuprecord"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/recovery"
)

// Recovery is how the hub's last restore stands. Backup and Restore are zero where there was none.
type Recovery struct {
	Backup  backuprecord.Record
	Restore recovery.Restore
	// Resyncing are the nodes that a restored hub waits for; banned ones are left out.
	Resyncing []fleet.Node
	Findings  []finding.Finding
}

// Recovery reads the state of the hub's last restore.
func (s *Service) Recovery(ctx context.Context, p iam.Principal) (Recovery, error) {
	return read(ctx, s, access.Platform(p, iam.NodeRead), func(tx db.Tx, _ access.Nothing) (out Recovery, err error) {
		if out.Backup, _, err = backuprecord.Last(ctx, tx); err != nil {
			return Recovery{}, err
		}
		if out.Restore, _, err = recovery.Last(ctx, tx); err != nil {
			return Recovery{}, err
		}
		if out.Resyncing, err = fleet.Resyncing(ctx, tx); err != nil {
			return Recovery{}, err
		}
		out.Resyncing = slices.DeleteFunc(out.Resyncing, fleet.Node.IsBanned)
		out.Findings, err = finding.List(ctx, tx)
		return out, err
	})
}
