package command

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	resourceInstance   = "app_instance"
	resourceAllocation = "allocation"
)

// RecordInstance writes an event for each step of a change and an audit row for all of it; a change without a step
// writes none.
func (m Meta) RecordInstance(ctx context.Context, tx db.Tx, action string, c instance.Change) error {
	i := c.Instance
	for n, step := range c.Steps {
		data := map[string]any{"to": string(step.To), "requested_by": i.Operation.By}
		if step.From != "" {
			data["from"] = string(step.From)
		}
		if step.Reason != 0 {
			data["reason"] = step.Reason.Text()
		}
		if err := event.Append(ctx, tx, event.Event{
			Type: step.EventType(), Subject: i.ID, ResourceVersion: c.FirstVersion + int64(n), OrgID: i.OrgID,
			ProjectID:     i.ProjectID,
			CorrelationID: m.CorrelationID, TraceID: m.TraceID, Data: data, At: m.Now,
		}); err != nil {
			return err
		}
	}
	if len(c.Steps) == 0 {
		return nil
	}
	row := event.AuditRow{
		Actor: m.Principal.Actor(), Action: action, ResourceType: resourceInstance,
		ResourceID: i.ID,
		OrgID:      i.OrgID, ProjectID: i.ProjectID, CorrelationID: m.CorrelationID, Reason: i.Lifecycle.Reason.Text(),
		After: map[string]any{"status": i.Lifecycle.Status, "revision": i.Revision, "version": i.Version}, At: m.Now,
	}
	if from := c.Steps[0].From; from != "" {
		row.Before = map[string]any{"status": from}
	}
	return event.Audit(ctx, tx, row)
}

// instanceAction is one change that a caller asks of an app instance, and the permission that it needs.
type instanceAction struct {
	permission iam.Permission
	change     func(ctx context.Context, tx db.Tx, i instance.Instance, ask instance.Request) (instance.Change, error)
}

// act runs an action under its project's lock and enqueues the instance's nodes after the commit.
func (s *Service) act(ctx context.Context, m Meta, projectID, instanceID string,
	a instanceAction,
) (instance.Instance, error) {
	out, err := s.withProjectLock(ctx, projectID, func(tx db.Tx) (instanceResult, error) {
		return m.act(ctx, tx, projectID, instanceID, a)
	})
	if err != nil {
		return instance.Instance{}, err
	}
	return s.enqueueNodes(out), nil
}

// act checks the caller, acts at most once for each key, and writes events and the audit row in the same transaction.
func (m Meta) act(ctx context.Context, tx db.Tx, projectID, instanceID string,
	a instanceAction,
) (instanceResult, error) {
	project, err := iam.InProject(ctx, tx, m.Principal, a.permission, projectID)
	if err != nil {
		return instanceResult{}, err
	}
	return Idempotent(ctx, tx, m, func() (instanceResult, error) {
		i, err := instance.Get(ctx, tx, project.ID, instanceID)
		if err != nil {
			return instanceResult{}, err
		}
		if err := recovered(ctx, tx, a.permission, i); err != nil {
			return instanceResult{}, err
		}
		c, err := a.change(ctx, tx, i, instance.Request{
			OperationID:   db.NewID(),
			By:            m.Principal.Actor(),
			CorrelationID: m.CorrelationID,
		})
		if err != nil {
			return instanceResult{}, err
		}
		if err := checkMembers(ctx, tx, c, fieldOf(a.permission)); err != nil {
			return instanceResult{}, err
		}
		nodes, err := bumpIntents(ctx, tx, c, m.Now)
		if err != nil {
			return instanceResult{}, err
		}
		return instanceResult{c.Instance, nodes}, m.RecordInstance(ctx, tx, string(a.permission), c)
	})
}

// recovered refuses a change that would reuse a revision number that the hub may have given out before its restore. The
// end can be requested at any time.
func recovered(ctx context.Context, tx db.Tx, permission iam.Permission, i instance.Instance) error {
	if permission == iam.InstanceDelete {
		return nil
	}
	for _, m := range i.Members {
		node, err := fleet.Get(ctx, tx, m.NodeID)
		if err != nil {
			return err
		}
		if node.Resync.Status == fleet.AwaitingResync {
			return fault.New(fault.Unavailable, codeNodeRecovering, "The hub was restored from a backup and waits for the node "+
				"of this app instance; try again when it is back.", nil).RetryAfter(30 * time.Second)
		}
	}
	return nil
}

// targetVersion points the fields of a fault at what the request calls the version.
func targetVersion(err error) error {
	f, is := errors.AsType[*fault.Error](err)
	if !is {
		return err
	}
	for n := range f.Fields {
		if f.Fields[n].Pointer == "/version" {
			f.Fields[n].Pointer = "/target_version"
		}
	}
	return f
}

// RecordAllocation writes the event and the audit row of an allocation's latest status.
func (m Meta) RecordAllocation(ctx context.Context, tx db.Tx, action string, before capacity.Status,
	a capacity.Allocation,
) error {
	data := map[string]any{
		"to": string(a.Status), "requested_by": a.RequestedBy,
		"node_id": a.NodeID, "capacity_shape": string(a.Shape), "accelerator_count": a.AcceleratorCount,
	}
	row := event.AuditRow{
		Actor: m.Principal.Actor(), Action: action, ResourceType: resourceAllocation,
		ResourceID: a.ID,
		OrgID:      a.OrgID, ProjectID: a.ProjectID, CorrelationID: m.CorrelationID, After: map[string]any{
			"status":  a.Status,
			"node_id": a.NodeID,
		}, At: m.Now,
	}
	if before != "" {
		data["from"] = string(before)
		row.Before = map[string]any{"status": before}
	}
	if err := event.Append(ctx, tx, event.Event{
		Type: a.EventType(), Subject: a.ID, ResourceVersion: a.ResourceVersion, OrgID: a.OrgID, ProjectID: a.ProjectID,
		CorrelationID: m.CorrelationID, TraceID: m.TraceID, Data: data, At: m.Now,
	}); err != nil {
		return err
	}
	return event.Audit(ctx, tx, row)
}

// bumpIntents records that the desired state of the instance's nodes has changed, and returns the nodes. Members that
// are to run again become due for a lease.
func bumpIntents(ctx context.Context, tx db.Tx, c instance.Change, now time.Time) ([]string, error) {
	if c.Resumed() {
		var ids []string
		for _, m := range c.Instance.Members {
			ids = append(ids, m.ID)
		}
		if err := ledger.ResumeRenewals(ctx, tx, ids, now); err != nil {
			return nil, err
		}
	}
	if !c.DesiredChanged {
		return nil, nil
	}
	var nodes []string
	for _, m := range c.Instance.Members {
		if !m.Gone {
			nodes = append(nodes, m.NodeID)
		}
	}
	slices.Sort(nodes)
	nodes = slices.Compact(nodes)
	for _, id := range nodes {
		if err := fleet.BumpIntent(ctx, tx, id); err != nil {
			return nil, fmt.Errorf("touch node %s: %w", id, err)
		}
	}
	return nodes, nil
}

// instanceResult is what the transaction of a command on an instance gives: the answer, and whom to wake after the
// commit.
type instanceResult struct {
	Instance instance.Instance
	Nodes    []string
}

// enqueueNodes is called after the commit.
func (s *Service) enqueueNodes(r instanceResult) instance.Instance {
	failpoint.Hit("hub/command/committed")
	for _, id := range r.Nodes {
		s.EnqueueNode(id)
	}
	failpoint.Hit("hub/command/enqueued")
	return r.Instance
}
