package httpapi

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
)

// ListAccessCredentials lists a project's access credentials.
func (s *Server) ListAccessCredentials(ctx context.Context,
	r ListAccessCredentialsRequestObject,
) (ListAccessCredentialsResponseObject, error) {
	items, next, err := pageByID(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]secret.Credential, error) {
		return s.Queries.AccessCredentials(ctx, principalOf(ctx), r.ProjectID, p)
	}, func(c secret.Credential) string { return c.ID })
	return ListAccessCredentials200JSONResponse{Items: views(items, credentialView), NextCursor: next}, err
}

// GetAccessCredential gives one access credential, on request once it has changed.
func (s *Server) GetAccessCredential(ctx context.Context,
	r GetAccessCredentialRequestObject,
) (GetAccessCredentialResponseObject, error) {
	c, err := s.Queries.AccessCredential(ctx, principalOf(ctx), r.ProjectID, r.AccessCredentialID,
		watchOf(r.Params.After, r.Params.Wait))
	return GetAccessCredential200JSONResponse(credentialView(c)), err
}

// CreateAccessCredential makes a key pair; the answer has the wrapping token of its private key.
func (s *Server) CreateAccessCredential(ctx context.Context,
	r CreateAccessCredentialRequestObject,
) (CreateAccessCredentialResponseObject, error) {
	made, err := s.Commands.CreateAccessCredential(ctx, metaFrom(ctx), r.ProjectID, r.Body.Name)
	return CreateAccessCredential201JSONResponse(wrappedView(made)), err
}

// RotateAccessCredential replaces a key pair; the answer has the wrapping token of the new private key.
func (s *Server) RotateAccessCredential(ctx context.Context,
	r RotateAccessCredentialRequestObject,
) (RotateAccessCredentialResponseObject, error) {
	made, err := s.Commands.RotateAccessCredential(ctx, metaFrom(ctx), r.ProjectID, r.AccessCredentialID)
	return RotateAccessCredential200JSONResponse(wrappedView(made)), err
}

// RevokeAccessCredential ends an access credential.
func (s *Server) RevokeAccessCredential(ctx context.Context,
	r RevokeAccessCredentialRequestObject,
) (RevokeAccessCredentialResponseObject, error) {
	c, err := s.Commands.RevokeAccessCredential(ctx, metaFrom(ctx), r.ProjectID, r.AccessCredentialID)
	return RevokeAccessCredential200JSONResponse(credentialView(c)), err
}

// Unwrap gives out, once, what a wrapping token wraps.
func (s *Server) Unwrap(ctx context.Context, r UnwrapRequestObject) (UnwrapResponseObject, error) {
	out, err := s.Commands.Unwrap(ctx, metaFrom(ctx), r.Body.Token)
	return Unwrap200JSONResponse{
		AccessCredentialID: out.Credential.ID, Kind: UnwrappedKindSSHKey, PrivateKeyPem: out.PrivateKeyPEM,
		PublicKey: out.Credential.PublicKey, Version: out.Credential.Version,
	}, err
}

func wrappedView(made command.WrappedCredential) AccessCredential {
	v := credentialView(made.Credential)
	v.WrappingToken = WrappingToken{Token: made.Token, ExpiresAt: made.ExpiresAt}
	return v
}

func credentialView(c secret.Credential) AccessCredential {
	return AccessCredential{
		ID:              c.ID,
		ResourceVersion: c.ResourceVersion,
		OrgID:           c.OrgID,
		ProjectID:       c.ProjectID,
		Name:            c.Name,
		Kind:            AccessCredentialKindSSHKey,
		PublicKey:       c.PublicKey,
		Version:         c.Version,
		Status:          AccessCredentialStatus(c.Status),
		CreatedAt:       c.CreatedAt,
		UpdatedAt:       c.UpdatedAt,
	}
}
