package dispatch

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/plan"
)

// reportLeftOut makes the findings about a node name the members that its newest state is without, in the transaction
// that saves the state.
func reportLeftOut(ctx context.Context, tx db.Tx, nodeID string, left []plan.LeftOut, now time.Time) error {
	members := make([]string, 0, len(left))
	for _, l := range left {
		members = append(members, l.MemberID)
		detail := "The node has nothing of it: "
		if l.Kept {
			detail = "The node goes on with its last document: "
		}
		if err := change.AddFinding(ctx, tx, finding.Finding{
			NodeID:       nodeID,
			Kind:         finding.Member,
			ResourceType: change.Member,
			ResourceID:   l.MemberID,
			Detail:       detail + l.Cause.Error(),
			At:           now,
		}); err != nil {
			return err
		}
	}
	return change.ResolveOtherFindings(ctx, tx, nodeID, finding.Member, members, now)
}
