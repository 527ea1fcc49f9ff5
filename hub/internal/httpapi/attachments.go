package httpapi

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
)

// ListAttachments lists what the project is attached to.
func (s *Server) ListAttachments(ctx context.Context, r ListAttachmentsRequestObject) (ListAttachmentsResponseObject,
	error,
) {
	items, next, err := pageByID(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]instance.AttachedInstance, error) {
		return s.Queries.Attachments(ctx, principalOf(ctx), instance.AttachmentFilter{ProjectID: r.ProjectID, Page: p})
	}, attachmentID)
	return ListAttachments200JSONResponse{Items: views(items, attachmentView), NextCursor: next}, err
}

// ListAppInstanceAttachments lists the projects that use an instance.
func (s *Server) ListAppInstanceAttachments(ctx context.Context,
	r ListAppInstanceAttachmentsRequestObject,
) (ListAppInstanceAttachmentsResponseObject, error) {
	items, next, err := pageByID(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]instance.AttachedInstance, error) {
		return s.Queries.AttachmentsOf(ctx, principalOf(ctx), instance.AttachmentFilter{
			ProjectID: r.ProjectID, InstanceID: r.AppInstanceID, Page: p,
		})
	}, attachmentID)
	return ListAppInstanceAttachments200JSONResponse{Items: views(items, attachmentView), NextCursor: next}, err
}

// GetAppInstanceAttachment gives one attachment, on request once its instance has changed.
func (s *Server) GetAppInstanceAttachment(ctx context.Context,
	r GetAppInstanceAttachmentRequestObject,
) (GetAppInstanceAttachmentResponseObject, error) {
	a, err := s.Queries.Attachment(ctx, principalOf(ctx), r.ProjectID, r.AppInstanceID, r.AttachmentID,
		watchOf(r.Params.After, r.Params.Wait))
	return GetAppInstanceAttachment200JSONResponse(attachmentView(a)), err
}

// AttachAppInstance attaches the project to an instance of another one.
func (s *Server) AttachAppInstance(ctx context.Context, r AttachAppInstanceRequestObject,
) (AttachAppInstanceResponseObject, error) {
	a, err := s.Commands.AttachInstance(ctx, metaFrom(ctx), r.ProjectID, r.AppInstanceID)
	return AttachAppInstance201JSONResponse(attachmentView(a)), err
}

// DetachAppInstance ends an attachment.
func (s *Server) DetachAppInstance(ctx context.Context, r DetachAppInstanceRequestObject,
) (DetachAppInstanceResponseObject, error) {
	return DetachAppInstance204Response{}, s.Commands.DetachInstance(ctx, metaFrom(ctx), r.ProjectID, r.AppInstanceID,
		r.AttachmentID)
}

func attachmentID(a instance.AttachedInstance) string { return a.ID }

func attachmentView(a instance.AttachedInstance) Attachment {
	i := a.Instance
	return Attachment{
		ID:              a.ID,
		ResourceVersion: i.ResourceVersion,
		OrgID:           a.OrgID,
		ProjectID:       a.ProjectID,
		OwnerProjectID:  a.OwnerProjectID,
		AppInstanceID:   a.InstanceID,
		AppSlug:         i.AppSlug,
		Version:         i.Version,
		DisplayName:     i.DisplayName,
		Status:          AppInstanceStatus(i.Lifecycle.Status),
		Health:          AppInstanceHealth(i.Lifecycle.Health),
		Endpoints:       endpointViews(i),
		RequestedBy:     RequestedBy{Type: RequestedByType(a.RequestedBy.Type), ID: a.RequestedBy.ID},
		CreatedAt:       a.CreatedAt,
	}
}
