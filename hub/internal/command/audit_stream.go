package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
)

// AuditStream records that a stream to a running app has begun or ended. It changes no resource, so there is no event.
// The caller's right is checked where the stream is opened; at its end the right may be gone.
func (s *Service) AuditStream(ctx context.Context, m Meta, action string, i instance.Instance,
	detail map[string]any,
) error {
	return do(ctx, s, access.Anyone, func(tx db.Tx, _ access.Nothing) error {
		return change.Audit(ctx, tx, m.by(), change.Entry{
			Action:       action,
			ResourceType: change.Instance,
			ResourceID:   i.ID,
			OrgID:        i.OrgID,
			ProjectID:    i.ProjectID,
			After:        detail,
		})
	})
}
