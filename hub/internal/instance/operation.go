package instance

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
	"github.com/gpuaas/gpuaas/protocol"
)

// Operation is the latest action that was requested on an instance; later steps carry its correlation id.
type Operation struct {
	Kind          string
	By            principal.Actor
	CorrelationID string
	// Traceparent is the W3C trace context of the request; empty where there was none.
	Traceparent string
}

const (
	operationDeploy       = "deploy"
	operationUpgrade      = "upgrade"
	operationRollback     = "rollback"
	operationStop         = "stop"
	operationStart        = "start"
	operationDecommission = "decommission"
)

const (
	operationSucceeded = "succeeded"
	operationFailed    = "failed"
	// operationAbandoned: another action was requested before the end.
	operationAbandoned = "abandoned"
)

// operationOutcome returns how a step ends the running operation, if it does.
func operationOutcome(s lifecycle.Step) (outcome string, over bool) {
	switch {
	case s.To == lifecycle.Failed || s.IsRollbackByNode():
		return operationFailed, true
	case s.To == lifecycle.Running || s.To == lifecycle.Stopped || s.To == lifecycle.Decommissioned:
		return operationSucceeded, true
	default:
		return "", false
	}
}

func operationOf(ctx context.Context, kind string, r Request) Operation {
	return Operation{Kind: kind, By: r.By, CorrelationID: r.CorrelationID, Traceparent: telemetry.Traceparent(ctx)}
}

// insertOperation also marks the instance's earlier operations as superseded.
func insertOperation(ctx context.Context, tx db.Tx, i Instance, kind string, r Request, now time.Time) error {
	if err := tx.Queue(ctx,
		`UPDATE instance_operations SET superseded_at = $2 WHERE instance_id = $1 AND superseded_at IS NULL`,
		i.ID, now); err != nil {
		return err
	}
	return tx.Queue(ctx, `INSERT INTO instance_operations (id, instance_id, kind, revision, status, reason,
			requested_by_type, requested_by_id, correlation_id, traceparent, started_at)
		VALUES ($1, $2, $3, $4, 'running', '', $5, $6, $7, $8, $9)`,
		r.OperationID, i.ID, kind, i.Revision, r.By.Type, r.By.ID, r.CorrelationID, telemetry.Traceparent(ctx), now)
}

func endOperations(ctx context.Context, tx db.Tx, instanceID, outcome string, reason protocol.WorkloadStatus_Reason,
	now time.Time,
) error {
	return tx.Queue(ctx, `UPDATE instance_operations SET status = $2, reason = $3, ended_at = $4
		WHERE instance_id = $1 AND ended_at IS NULL`, instanceID, outcome, reason.Text(), now)
}
