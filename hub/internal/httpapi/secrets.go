package httpapi

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
)

// ListSecrets lists a project's secrets, without values.
func (s *Server) ListSecrets(ctx context.Context, r ListSecretsRequestObject) (ListSecretsResponseObject, error) {
	items, next, err := pageByID(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]secret.Secret, error) {
		return s.Queries.Secrets(ctx, principalOf(ctx), r.ProjectID, p)
	}, func(v secret.Secret) string { return v.ID })
	return ListSecrets200JSONResponse{Items: views(items, secretView), NextCursor: next}, err
}

// GetSecret gives one secret without its value, on request once it has changed.
func (s *Server) GetSecret(ctx context.Context, r GetSecretRequestObject) (GetSecretResponseObject, error) {
	v, err := s.Queries.Secret(ctx, principalOf(ctx), r.ProjectID, r.SecretID, watchOf(r.Params.After, r.Params.Wait))
	return GetSecret200JSONResponse(secretView(v)), err
}

// CreateSecret stores a secret.
func (s *Server) CreateSecret(ctx context.Context, r CreateSecretRequestObject) (CreateSecretResponseObject, error) {
	v, err := s.Commands.CreateSecret(ctx, metaFrom(ctx), r.ProjectID, r.Body.Name, r.Body.Value)
	return CreateSecret201JSONResponse(secretView(v)), err
}

// RotateSecret gives a secret another value.
func (s *Server) RotateSecret(ctx context.Context, r RotateSecretRequestObject) (RotateSecretResponseObject, error) {
	v, err := s.Commands.RotateSecret(ctx, metaFrom(ctx), r.ProjectID, r.SecretID, r.Body.Value)
	return RotateSecret200JSONResponse(secretView(v)), err
}

// RevokeSecret destroys the value of a secret.
func (s *Server) RevokeSecret(ctx context.Context, r RevokeSecretRequestObject) (RevokeSecretResponseObject, error) {
	v, err := s.Commands.RevokeSecret(ctx, metaFrom(ctx), r.ProjectID, r.SecretID)
	return RevokeSecret200JSONResponse(secretView(v)), err
}

func secretView(v secret.Secret) Secret {
	return Secret{
		ID:                   v.ID,
		ResourceVersion:      v.ResourceVersion,
		OrgID:                v.OrgID,
		ProjectID:            v.ProjectID,
		Name:                 v.Name,
		Version:              v.Version,
		Status:               SecretStatus(v.Status),
		UsedByAppInstanceIds: append([]string{}, v.UsedBy...),
		CreatedAt:            v.CreatedAt,
		UpdatedAt:            v.UpdatedAt,
	}
}
