package nodes

import (
	"context"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/protocol"
)

// recordPulls writes the events of pulls that have entered a phase.
func recordPulls(ctx context.Context, tx db.Tx, nodeID string, pulls []*protocol.ImagePull, now time.Time) error {
	pulls = slices.DeleteFunc(slices.Clone(pulls), func(p *protocol.ImagePull) bool { return !db.IsID(p.GetMemberId()) })
	ids := make([]string, 0, len(pulls))
	for _, p := range pulls {
		ids = append(ids, p.GetMemberId())
	}
	instances, err := instance.OfMembers(ctx, tx, nodeID, ids)
	if err != nil {
		return err
	}
	for _, i := range instances {
		for _, m := range i.Members {
			at := slices.IndexFunc(pulls, func(p *protocol.ImagePull) bool { return p.GetMemberId() == m.ID })
			if at < 0 || m.NodeID != nodeID {
				continue
			}
			err := change.Append(ctx, tx, origin{nodeID: nodeID}.following(i.Operation, now), change.Entry{
				Event:        "apps.instance.image_pull",
				ResourceType: change.Instance,
				ResourceID:   i.ID,
				Version:      i.ResourceVersion,
				OrgID:        i.OrgID,
				ProjectID:    i.ProjectID,
				Data: map[string]any{
					"member_id":   m.ID,
					"phase":       instance.PullPhase(pulls[at]),
					"total_bytes": instance.PullBytes(pulls[at].GetTotalBytes()),
				},
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}
