package httpapi

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/backup"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/recovery"
)

// GetRecovery says how the hub's last restore stands.
func (s *Server) GetRecovery(ctx context.Context, _ GetRecoveryRequestObject) (GetRecoveryResponseObject, error) {
	if err := iam.Authorize(principalOf(ctx), iam.NodeRead, "", ""); err != nil {
		return nil, err
	}
	view, err := db.ReadTx(ctx, s.Queries.DB, func(tx db.Tx) (Recovery, error) { return recoveryView(ctx, tx) })
	return GetRecovery200JSONResponse(view), err
}

func recoveryView(ctx context.Context, tx db.Tx) (Recovery, error) {
	out := Recovery{Waiting: []RecoveringNode{}, Findings: []RecoveryFinding{}}
	last, ok, err := backup.Last(ctx, tx)
	if err != nil {
		return out, err
	}
	if ok {
		out.BackupTakenAt = last.TakenAt
	}
	restore, ok, err := recovery.Last(ctx, tx)
	if err != nil {
		return out, err
	}
	if ok {
		out.RestoredAt, out.RestoredFrom, out.Epoch = restore.At, restore.TakenAt, int64(restore.Epoch)
	}
	nodes, err := fleet.Resyncing(ctx, tx)
	if err != nil {
		return out, err
	}
	for _, n := range nodes {
		if n.IsBanned() {
			continue
		}
		view := RecoveringNode{NodeID: n.ID, Hostname: n.Hostname, State: RecoveringNodeStateOwesUsage}
		if n.Resync.Status == fleet.AwaitingResync {
			view.State = RecoveringNodeStateWaiting
		}
		out.Waiting = append(out.Waiting, view)
	}
	findings, err := finding.List(ctx, tx)
	for _, f := range findings {
		out.Findings = append(out.Findings, RecoveryFinding{
			ID: f.ID, NodeID: f.NodeID, Kind: RecoveryFindingKind(f.Kind), ResourceType: f.ResourceType,
			ResourceID: f.ResourceID, Detail: f.Detail, FoundAt: f.At,
		})
	}
	return out, err
}
