package change

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
)

// CompleteAttachment bills and records an attachment from now on: in the attached project, and in the instance's own.
func CompleteAttachment(ctx context.Context, tx db.Tx, by By, a instance.AttachedInstance) error {
	i := a.Instance
	if err := ledger.OpenSubject(ctx, tx, ledger.Subject{
		ID:                a.ID,
		Kind:              ledger.Attachment,
		OrgID:             a.OrgID,
		ProjectID:         a.ProjectID,
		AppInstanceID:     i.ID,
		AppSlug:           i.AppSlug,
		NodeID:            i.Node(),
		OperatingMode:     i.Modes.OperatingMode,
		ControlPlaneScope: i.Modes.ControlPlaneScope,
		RuntimeBackend:    i.Modes.RuntimeBackend,
		CorrelationID:     a.CorrelationID,
		OpenedAt:          by.Now,
	}); err != nil {
		return err
	}
	if err := recordOwner(ctx, tx, by, a, "apps.instance.attached"); err != nil {
		return err
	}
	return Record(ctx, tx, by, ofAttachment(a.Attachment, "apps.attachment.created", iam.AttachmentCreate, 1))
}

// CompleteDetachment ends the bill of an attachment that has ended, and records that in both projects.
func CompleteDetachment(ctx context.Context, tx db.Tx, by By, a instance.AttachedInstance) error {
	if err := recordOwner(ctx, tx, by, a, "apps.instance.detached"); err != nil {
		return err
	}
	return completeDetached(ctx, tx, by, a.Attachment)
}

// detachAll ends the attachments of an instance that ends by itself; the instance's own events tell its project.
func detachAll(ctx context.Context, tx db.Tx, by By, instanceID string) error {
	ended, err := instance.DetachAll(ctx, tx, instanceID)
	for _, a := range ended {
		if err := completeDetached(ctx, tx, by, a); err != nil {
			return err
		}
	}
	return err
}

func completeDetached(ctx context.Context, tx db.Tx, by By, a instance.Attachment) error {
	if err := ledger.CloseSubject(ctx, tx, a.ID, by.Now, by.Now); err != nil {
		return err
	}
	if err := resolveUnpaid(ctx, tx, a.ID, by.Now); err != nil {
		return err
	}
	return Record(ctx, tx, by, ofAttachment(a, "apps.attachment.deleted", iam.AttachmentDelete, 2))
}

func ofAttachment(a instance.Attachment, event, action string, version int64) Entry {
	data := map[string]any{"app_instance_id": a.InstanceID, "owner_project_id": a.OwnerProjectID}
	e := Entry{
		Event:        event,
		Action:       action,
		ResourceType: Attachment,
		ResourceID:   a.ID,
		Version:      version,
		OrgID:        a.OrgID,
		ProjectID:    a.ProjectID,
		Data:         data,
	}
	if version == 1 {
		e.After = data
	} else {
		e.Before = data
	}
	return e
}

// recordOwner writes the event that the project of the instance reads.
func recordOwner(ctx context.Context, tx db.Tx, by By, a instance.AttachedInstance, event string) error {
	return Append(ctx, tx, by, Entry{
		Event:        event,
		ResourceType: Instance,
		ResourceID:   a.InstanceID,
		Version:      a.Instance.ResourceVersion,
		OrgID:        a.OrgID,
		ProjectID:    a.OwnerProjectID,
		Data:         map[string]any{"attachment_id": a.ID, "attached_project_id": a.ProjectID},
	})
}
