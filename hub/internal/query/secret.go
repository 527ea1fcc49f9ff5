package query

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
)

// Secrets lists the secrets of a project.
func (s *Service) Secrets(ctx context.Context, p iam.Principal, projectID string, page db.Page,
) ([]secret.Secret, error) {
	return listIn(ctx, s, access.Project(p, iam.SecretRead, projectID), secret.List, projectID, page)
}

// Secret reads one secret, without its value.
func (s *Service) Secret(ctx context.Context, p iam.Principal, projectID, id string, w Watch) (secret.Secret, error) {
	return await(ctx, s, id, w, func() (secret.Secret, int64, error) {
		v, err := read(ctx, s, access.Project(p, iam.SecretRead, projectID),
			func(tx db.Tx, project iam.Project) (secret.Secret, error) { return secret.Get(ctx, tx, project.ID, id) })
		return v, v.ResourceVersion, err
	})
}
