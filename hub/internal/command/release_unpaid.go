package command

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/protocol"
)

// ReleaseUnpaid ends an allocation whose wallet does not cover it any more: its instances are decommissioned, and it
// is released when the node has proved that. What it used beyond its hold would be written off, for nobody's benefit.
// One that is ending already stays as it is.
func (s *Service) ReleaseUnpaid(ctx context.Context, allocationID, correlationID string, now time.Time) error {
	nodes, err := db.RunTx(ctx, s.DB, func(tx db.Tx) ([]string, error) {
		return s.releaseUnpaid(ctx, tx, allocationID, correlationID, now)
	})
	if err != nil {
		return err
	}
	for _, id := range nodes {
		s.EnqueueNode(id)
	}
	return nil
}

func (s *Service) releaseUnpaid(ctx context.Context, tx db.Tx, allocationID, correlationID string,
	now time.Time,
) ([]string, error) {
	m := Meta{Principal: iam.Principal{Type: principal.System}, CorrelationID: correlationID, Now: now}
	a, err := capacity.GetAny(ctx, tx, allocationID)
	if err != nil || a.Status != capacity.Active {
		return nil, err
	}
	live, err := instance.LiveInAllocation(ctx, tx, a.ID)
	if err != nil {
		return nil, err
	}
	var touched []string
	for _, i := range live {
		ask := instance.Request{
			OperationID: db.NewID(), By: principal.Actor{Type: principal.System}, CorrelationID: correlationID,
			Reason: protocol.WorkloadStatus_LEASE_ENDED,
		}
		change, err := instance.RequestDecommission(ctx, tx, i, ask, now)
		if err != nil {
			return nil, err
		}
		nodes, err := bumpIntents(ctx, tx, change, m.Now)
		if err != nil {
			return nil, err
		}
		touched = append(touched, nodes...)
		if err := m.RecordInstance(ctx, tx, iam.InstanceDelete, change); err != nil {
			return nil, err
		}
	}
	if _, err = m.ReleaseAllocation(ctx, tx, a, 0); err != nil {
		return nil, err
	}
	return touched, Resolve(ctx, tx, finding.Finding{
		NodeID: a.NodeID, Kind: finding.Release,
		ResourceType: resourceAllocation, ResourceID: a.ID, At: now,
	})
}
