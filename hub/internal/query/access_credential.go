package query

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
)

// AccessCredentials lists the access credentials of a project.
func (s *Service) AccessCredentials(ctx context.Context, p iam.Principal, projectID string, page db.Page,
) ([]secret.Credential, error) {
	return listIn(ctx, s, access.Project(p, iam.AccessCredentialRead, projectID), secret.ListCredentials, projectID, page)
}

// AccessCredential reads one access credential.
func (s *Service) AccessCredential(ctx context.Context, p iam.Principal, projectID, id string, w Watch,
) (secret.Credential, error) {
	return await(ctx, s, id, w, func() (secret.Credential, int64, error) {
		c, err := read(ctx, s, access.Project(p, iam.AccessCredentialRead, projectID),
			func(tx db.Tx, project iam.Project) (secret.Credential, error) {
				return secret.GetCredential(ctx, tx, project.ID, id)
			})
		return c, c.ResourceVersion, err
	})
}
