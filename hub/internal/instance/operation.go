package instance

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/protocol"
)

// Operation is the latest thing that was asked of an instance: what nodes report goes on under its correlation id.
type Operation struct {
	Kind          string
	By            Actor
	CorrelationID string
}

// An operation is one thing that was asked of an instance, from the asking to its outcome.
type operation struct {
	ID            string
	InstanceID    string
	Kind          string
	Revision      int64
	By            Actor
	CorrelationID string
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
	// operationAbandoned: something else was asked for before it was over.
	operationAbandoned = "abandoned"
)

// operationOutcome says how a step ends the operation that is under way, if it does.
func operationOutcome(s Step) (outcome string, over bool) {
	switch {
	case s.To == Failed || s.IsRollbackByNode():
		return operationFailed, true
	case s.To == Running || s.To == Stopped || s.To == Decommissioned:
		return operationSucceeded, true
	default:
		return "", false
	}
}

// insertOperation also notes that the instance's earlier operations are not the latest any more.
func insertOperation(ctx context.Context, tx db.Tx, op operation, now time.Time) error {
	if err := tx.Queue(ctx,
		`UPDATE instance_operations SET superseded_at = $2 WHERE instance_id = $1 AND superseded_at IS NULL`,
		op.InstanceID, now); err != nil {
		return err
	}
	return tx.Queue(ctx, `INSERT INTO instance_operations (id, instance_id, kind, revision, status, reason,
			requested_by_type, requested_by_id, correlation_id, started_at)
		VALUES ($1, $2, $3, $4, 'running', '', $5, $6, $7, $8)`,
		op.ID, op.InstanceID, op.Kind, op.Revision, op.By.Type, op.By.ID, op.CorrelationID, now)
}

func endOperations(ctx context.Context, tx db.Tx, instanceID, outcome string, reason protocol.WorkloadStatus_Reason,
	now time.Time,
) error {
	return tx.Queue(ctx, `UPDATE instance_operations SET status = $2, reason = $3, ended_at = $4
		WHERE instance_id = $1 AND ended_at IS NULL`, instanceID, outcome, reason.Text(), now)
}
