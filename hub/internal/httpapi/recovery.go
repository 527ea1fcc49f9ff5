package httpapi

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/query"
)

// GetRecovery says how the hub's last restore stands.
func (s *Server) GetRecovery(ctx context.Context, _ GetRecoveryRequestObject) (GetRecoveryResponseObject, error) {
	found, err := s.Queries.Recovery(ctx, principalOf(ctx))
	return GetRecovery200JSONResponse(recoveryView(found)), err
}

func recoveryView(r query.Recovery) Recovery {
	out := Recovery{
		BackupTakenAt: r.Backup.TakenAt,
		RestoredAt:    r.Restore.At,
		RestoredFrom:  r.Restore.TakenAt,
		Epoch:         int64(r.Restore.Epoch),
		Waiting:       []RecoveringNode{},
		Findings:      []RecoveryFinding{},
	}
	for _, n := range r.Resyncing {
		view := RecoveringNode{NodeID: n.ID, Hostname: n.Hostname, State: RecoveringNodeStateOwesUsage}
		if n.Resync.Status == fleet.AwaitingResync {
			view.State = RecoveringNodeStateWaiting
		}
		out.Waiting = append(out.Waiting, view)
	}
	for _, f := range r.Findings {
		out.Findings = append(out.Findings, RecoveryFinding{
			ID: f.ID, NodeID: f.NodeID, Kind: RecoveryFindingKind(f.Kind), ResourceType: f.ResourceType,
			ResourceID: f.ResourceID, Detail: f.Detail, FoundAt: f.At,
		})
	}
	return out
}
