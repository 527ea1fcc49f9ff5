package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// AttachInstance attaches a project to an app instance that another project of its org shares.
func (s *Service) AttachInstance(ctx context.Context, m Meta, projectID, instanceID string,
) (instance.AttachedInstance, error) {
	check := access.Project(m.Principal, iam.AttachmentCreate, projectID)
	return once(ctx, s, m, check, func(tx db.Tx, project iam.Project) (instance.AttachedInstance, error) {
		i, err := instance.OfOrg(ctx, tx, project.OrgID, instanceID)
		if err != nil {
			return instance.AttachedInstance{}, err
		}
		attached, err := instance.Attach(ctx, tx, i, instance.Attachment{
			ID: db.NewID(), ProjectID: project.ID, RequestedBy: m.Principal.Actor(), CorrelationID: m.CorrelationID,
			CreatedAt: m.Now,
		})
		if fault.Is(err, fault.Conflict) && i.Modes.TenantBoundaryMode != instance.TenantShared {
			// What is not shared is known to those alone who may read it.
			if denied := iam.Authorize(m.Principal, iam.InstanceRead, i.OrgID, i.ProjectID); denied != nil {
				err = iam.ErrNotFound()
			}
		}
		if err != nil {
			return instance.AttachedInstance{}, err
		}
		return attached, change.CompleteAttachment(ctx, tx, m.by(), attached)
	})
}

// DetachInstance ends an attachment, for the attached project or for the one that owns the instance.
func (s *Service) DetachInstance(ctx context.Context, m Meta, projectID, instanceID, id string) error {
	check := access.Project(m.Principal, iam.AttachmentDelete, projectID)
	return do(ctx, s, check, func(tx db.Tx, project iam.Project) error {
		a, err := instance.GetAttachment(ctx, tx, project.ID, instanceID, id)
		if err != nil {
			return err
		}
		if a, err = instance.Detach(ctx, tx, a, m.Now); err != nil {
			return err
		}
		return change.CompleteDetachment(ctx, tx, m.by(), a)
	})
}
