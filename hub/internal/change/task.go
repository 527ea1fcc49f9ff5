package change

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
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
