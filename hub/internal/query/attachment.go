package query

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
)

// Attachments lists those of a project to instances of others.
func (s *Service) Attachments(ctx context.Context, p iam.Principal, f instance.AttachmentFilter,
) ([]instance.AttachedInstance, error) {
	return list(ctx, s, access.Project(p, iam.AttachmentRead, f.ProjectID), instance.ListAttachments, f)
}

// AttachmentsOf lists those of one instance: all for its own project, its own for an attached one.
func (s *Service) AttachmentsOf(ctx context.Context, p iam.Principal, f instance.AttachmentFilter,
) ([]instance.AttachedInstance, error) {
	return list(ctx, s, instanceIn(p, iam.AttachmentRead, f.ProjectID, f.InstanceID), instance.ListAttachments, f)
}

// Attachment reads one attachment.
func (s *Service) Attachment(ctx context.Context, p iam.Principal, projectID, instanceID, id string, w Watch,
) (instance.AttachedInstance, error) {
	return await(ctx, s, instanceID, w, func() (instance.AttachedInstance, int64, error) {
		a, err := read(ctx, s, access.Project(p, iam.AttachmentRead, projectID),
			func(tx db.Tx, project iam.Project) (instance.AttachedInstance, error) {
				return instance.GetAttachment(ctx, tx, project.ID, instanceID, id)
			})
		return a, a.Instance.ResourceVersion, err
	})
}
