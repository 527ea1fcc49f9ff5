package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// Failure is a request that was refused or went wrong; it changed nothing but the audit trail.
type Failure struct {
	// Operation is the operation id of the contract.
	Operation string
	// Code is the fault's.
	Code fault.Code
	// Denied tells a refusal of the caller from a request that failed.
	Denied bool
	// OrgID and UserID are of the account that a login was refused for; empty where there is none.
	OrgID, UserID string
	// Unrecorded counts the failures before this one that have no row, because a budget of rows was used up.
	Unrecorded int64
}

// AuditFailure adds the row in a transaction of its own: the one of the request is rolled back.
func (s *Service) AuditFailure(ctx context.Context, m Meta, f Failure) error {
	row := event.AuditRow{
		Actor: m.Principal.Actor(), Action: f.Operation, ResourceType: "operation",
		ResourceID: m.Route,
		OrgID:      m.Principal.OrgID, ProjectID: m.Principal.ProjectID, CorrelationID: m.CorrelationID,
		SourceAddress: m.SourceAddress, Outcome: event.Failed, Reason: string(f.Code), At: m.Now,
	}
	if f.UserID != "" {
		row.ResourceType, row.ResourceID, row.OrgID = resourceUser, f.UserID, f.OrgID
	}
	if f.Unrecorded > 0 {
		row.After = map[string]any{"unrecorded_before": f.Unrecorded}
	}
	if f.Denied {
		row.Outcome = event.Denied
	}
	if row.Actor.Type == "" {
		row.Actor.Type = principal.Anonymous
	}
	ctx = WithPrecondition(ctx, nil) // it was for the change that failed
	return do(ctx, s, access.Anyone, func(tx db.Tx, _ access.Nothing) error {
		return event.Audit(ctx, tx, row)
	})
}
