package change

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/pkg/manifest"
)

// CompleteTask does what a change of a task means for the other slices, and records it: the steps of its instance,
// then the task itself. A call that only renewed a lease or was repeated records nothing.
func CompleteTask(ctx context.Context, tx db.Tx, by By, action string, c instance.TaskChange) error {
	if c.Event == "" {
		return nil
	}
	if err := CompleteInstance(ctx, tx, by, action, c.Change); err != nil {
		return err
	}
	t := c.Task
	task := map[string]any{"id": t.ID, "kind": t.Kind, "state": t.State, "attempt": t.Attempt}
	if t.Phase != "" {
		task["phase"] = t.Phase
	}
	data := map[string]any{"task": task}
	for key, value := range map[string]string{"reason": t.Reason.Text(), "member_id": t.MemberID} {
		if value != "" {
			data[key] = value
		}
	}
	return Record(ctx, tx, by, Entry{
		Event:        c.Event,
		Action:       action,
		ResourceType: Instance,
		ResourceID:   c.Instance.ID,
		Version:      c.Instance.ResourceVersion,
		OrgID:        c.Instance.OrgID,
		ProjectID:    c.Instance.ProjectID,
		Reason:       t.Reason.Text(),
		RequestedBy:  t.RequestedBy,
		Data:         data,
		After:        data,
	})
}

// CompleteEnd completes the requested end of an instance. One that an external worker operates gets a task for that in
// place of all others; it ends at once where no worker has begun with it.
func CompleteEnd(ctx context.Context, tx db.Tx, by By, c instance.Change) (instance.Instance, error) {
	if c.Instance.External() {
		touched, err := instance.CancelTasks(ctx, tx, c.Instance.ID, by.Now)
		switch {
		case err != nil:
			return instance.Instance{}, err
		case touched:
			return addEnd(ctx, tx, by, c)
		}
		if c, err = instance.EndUntouched(ctx, tx, c, by.Now); err != nil {
			return instance.Instance{}, err
		}
	}
	return c.Instance, CompleteInstance(ctx, tx, by, iam.InstanceDelete, c)
}

func addEnd(ctx context.Context, tx db.Tx, by By, c instance.Change) (instance.Instance, error) {
	contract, err := WorkerContract(ctx, tx, c.Instance)
	if err != nil {
		return instance.Instance{}, err
	}
	return AddTask(ctx, tx, by, iam.InstanceDelete, c, contract.Task(manifest.TaskDecommission), "")
}

// AddTask adds a task for what has changed, and records both.
func AddTask(ctx context.Context, tx db.Tx, by By, action string, c instance.Change, kind *manifest.TaskKind,
	memberID string,
) (instance.Instance, error) {
	req := instance.Request{By: by.Actor, CorrelationID: by.CorrelationID}
	t, err := instance.AddTask(ctx, tx, c, kind, memberID, req, by.Now)
	if err != nil {
		return instance.Instance{}, err
	}
	return t.Instance, CompleteTask(ctx, tx, by, action, t)
}

// WorkerContract is what hub and external worker agree on for the version that the instance has.
func WorkerContract(ctx context.Context, tx db.Tx, i instance.Instance) (manifest.WorkerContract, error) {
	v, err := catalog.GetVersion(ctx, tx, i.AppSlug, i.Version)
	if err != nil || v.Manifest.Version.ExternalWorkerContract == nil {
		return manifest.WorkerContract{}, err
	}
	return *v.Manifest.Version.ExternalWorkerContract, nil
}

// CompleteMember does what another status of a member of an external worker means for the other slices, and records it:
// the steps of its instance, then the member itself.
func CompleteMember(ctx context.Context, tx db.Tx, by By, action string, c instance.Change, r instance.MemberReport,
) error {
	if err := CompleteInstance(ctx, tx, by, action, c); err != nil {
		return err
	}
	data := map[string]any{"member_id": r.MemberID}
	if r.Reason != 0 {
		data["reason"] = r.Reason.Text()
	}
	return Record(ctx, tx, by, Entry{
		Event:        "apps.instance.member_changed",
		Action:       action,
		ResourceType: Instance,
		ResourceID:   c.Instance.ID,
		Version:      c.Instance.ResourceVersion,
		OrgID:        c.Instance.OrgID,
		ProjectID:    c.Instance.ProjectID,
		Reason:       r.Reason.Text(),
		Data:         data,
		After: map[string]any{
			"member_id": r.MemberID, "status": r.Status.Text(), "health": c.Instance.Lifecycle.Health,
		},
	})
}
