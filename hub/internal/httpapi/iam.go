package httpapi

import (
	"context"
	"math"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// MintServiceAccountToken exchanges a service account's key for a short-lived token.
func (s *Server) MintServiceAccountToken(ctx context.Context,
	r MintServiceAccountTokenRequestObject,
) (MintServiceAccountTokenResponseObject, error) {
	if r.FormdataBody != nil {
		return s.mintByForm(ctx, *r.FormdataBody)
	}
	return s.mint(ctx, iam.Proof{
		ServiceAccountID: r.JSONBody.ServiceAccountID, KeyID: r.JSONBody.KeyID, PrivateKeyPEM: r.JSONBody.PrivateKeyPem,
		Assertion: r.JSONBody.Assertion,
	})
}

func (s *Server) mint(ctx context.Context, proof iam.Proof) (MintServiceAccountTokenResponseObject, error) {
	m := metaFrom(ctx)
	token, err := s.Commands.MintToken(ctx, m, proof)
	if err != nil {
		return nil, err
	}
	return MintServiceAccountToken200JSONResponse{
		AccessToken: token.Text, TokenType: TokenTokenTypeBearer, ExpiresAt: token.ExpiresAt,
		ExpiresIn: int64(math.Ceil(token.ExpiresAt.Sub(m.Now).Seconds())),
	}, nil
}

// Whoami says who the token stands for.
func (s *Server) Whoami(ctx context.Context, _ WhoamiRequestObject) (WhoamiResponseObject, error) {
	p := principalOf(ctx)
	return Whoami200JSONResponse{
		Type: WhoamiType(p.Type), ID: p.ID, DisplayName: p.Name, OrgID: p.OrgID, ProjectID: p.ProjectID,
		PlatformAdmin: p.PlatformAdmin, Permissions: p.Permissions(),
	}, nil
}

// ListOrgs lists the orgs that the caller may see.
func (s *Server) ListOrgs(ctx context.Context, r ListOrgsRequestObject) (ListOrgsResponseObject, error) {
	items, next, err := pageByID(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]iam.Org, error) {
		return s.Queries.Orgs(ctx, principalOf(ctx), p)
	}, func(v iam.Org) string { return v.ID })
	return ListOrgs200JSONResponse{Items: views(items, orgView), NextCursor: next}, err
}

// CreateOrg makes an org.
func (s *Server) CreateOrg(ctx context.Context, r CreateOrgRequestObject) (CreateOrgResponseObject, error) {
	org, err := s.Commands.CreateOrg(ctx, metaFrom(ctx), iam.Org{
		Slug:        r.Body.Slug,
		DisplayName: r.Body.DisplayName,
	})
	return CreateOrg201JSONResponse(orgView(org)), err
}

// ListProjects lists the projects that the caller may see.
func (s *Server) ListProjects(ctx context.Context, r ListProjectsRequestObject) (ListProjectsResponseObject, error) {
	items, next, err := pageByID(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]iam.Project, error) {
		return s.Queries.Projects(ctx, principalOf(ctx), r.Params.OrgID, p)
	}, func(v iam.Project) string { return v.ID })
	return ListProjects200JSONResponse{Items: views(items, projectView), NextCursor: next}, err
}

// CreateProject makes a project.
func (s *Server) CreateProject(ctx context.Context, r CreateProjectRequestObject) (CreateProjectResponseObject, error) {
	project, err := s.Commands.CreateProject(ctx, metaFrom(ctx), iam.Project{
		OrgID:       r.Body.OrgID,
		Slug:        r.Body.Slug,
		DisplayName: r.Body.DisplayName,
		Platform:    r.Body.Platform,
	})
	return CreateProject201JSONResponse(projectView(project)), err
}

// GetProject gives one project.
func (s *Server) GetProject(ctx context.Context, r GetProjectRequestObject) (GetProjectResponseObject, error) {
	project, err := s.Queries.Project(ctx, principalOf(ctx), r.ProjectID)
	return GetProject200JSONResponse(projectView(project)), err
}

// ListUsers lists users.
func (s *Server) ListUsers(ctx context.Context, r ListUsersRequestObject) (ListUsersResponseObject, error) {
	items, next, err := pageByID(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]iam.User, error) {
		return s.Queries.Users(ctx, principalOf(ctx), r.Params.OrgID, p)
	}, func(v iam.User) string { return v.ID })
	return ListUsers200JSONResponse{Items: views(items, userView), NextCursor: next}, err
}

// CreateUser makes a user.
func (s *Server) CreateUser(ctx context.Context, r CreateUserRequestObject) (CreateUserResponseObject, error) {
	user, err := s.Commands.CreateUser(ctx, metaFrom(ctx), iam.User{
		OrgID:         r.Body.OrgID,
		Email:         r.Body.Email,
		DisplayName:   r.Body.DisplayName,
		PlatformAdmin: r.Body.PlatformAdmin,
		Roles:         append(rolesOf(r.Body.Roles), rolesOf(r.Body.CustomRoles)...),
	})
	return CreateUser201JSONResponse(userView(user)), err
}

// CreateUserToken makes a personal token.
func (s *Server) CreateUserToken(ctx context.Context,
	r CreateUserTokenRequestObject,
) (CreateUserTokenResponseObject, error) {
	made, err := s.Commands.CreateUserToken(ctx, metaFrom(ctx), command.CreateUserTokenInput{
		UserID: r.UserID, Description: r.Body.Description, Lifetime: time.Duration(r.Body.ExpiresInSeconds) * time.Second,
	})
	if err != nil {
		return nil, err
	}
	return CreateUserToken201JSONResponse{
		ID: made.Token.ID, UserID: made.Token.UserID, Token: made.Text, ExpiresAt: made.Token.ExpiresAt,
		CreatedAt: made.Token.CreatedAt,
	}, nil
}

// ListServiceAccounts lists a project's service accounts with their public keys.
func (s *Server) ListServiceAccounts(ctx context.Context,
	r ListServiceAccountsRequestObject,
) (ListServiceAccountsResponseObject, error) {
	items, next, err := pageByID(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]iam.ServiceAccount, error) {
		return s.Queries.ServiceAccounts(ctx, principalOf(ctx), r.ProjectID, metaFrom(ctx).Now, p)
	}, func(v iam.ServiceAccount) string { return v.ID })
	return ListServiceAccounts200JSONResponse{Items: views(items, serviceAccountView), NextCursor: next}, err
}

// CreateServiceAccount makes a service account; the answer holds its private key.
func (s *Server) CreateServiceAccount(ctx context.Context,
	r CreateServiceAccountRequestObject,
) (CreateServiceAccountResponseObject, error) {
	made, err := s.Commands.CreateServiceAccount(ctx, metaFrom(ctx), iam.ServiceAccount{
		ProjectID:   r.ProjectID,
		Name:        r.Body.Name,
		Slug:        r.Body.Slug,
		Description: r.Body.Description,
		Role:        iam.Role(r.Body.Role),
	}, r.Body.CustomRole)
	return CreateServiceAccount201JSONResponse(withKey(made)), err
}

// DisableServiceAccount stops a service account.
func (s *Server) DisableServiceAccount(ctx context.Context,
	r DisableServiceAccountRequestObject,
) (DisableServiceAccountResponseObject, error) {
	sa, err := s.Commands.DisableServiceAccount(ctx, metaFrom(ctx), r.ProjectID, r.ServiceAccountID)
	return DisableServiceAccount200JSONResponse(serviceAccountView(sa)), err
}

// RotateServiceAccountKey gives a service account a new key; the answer holds it.
func (s *Server) RotateServiceAccountKey(ctx context.Context,
	r RotateServiceAccountKeyRequestObject,
) (RotateServiceAccountKeyResponseObject, error) {
	var overlap time.Duration
	if r.Body != nil {
		overlap = time.Duration(r.Body.OverlapSeconds) * time.Second
	}
	made, err := s.Commands.RotateServiceAccountKey(ctx, metaFrom(ctx), r.ProjectID, r.ServiceAccountID, overlap)
	return RotateServiceAccountKey201JSONResponse(withKey(made)), err
}

// DeleteServiceAccount removes a service account.
func (s *Server) DeleteServiceAccount(ctx context.Context,
	r DeleteServiceAccountRequestObject,
) (DeleteServiceAccountResponseObject, error) {
	return DeleteServiceAccount204Response{}, s.Commands.DeleteServiceAccount(ctx, metaFrom(ctx), r.ProjectID,
		r.ServiceAccountID)
}

func orgView(o iam.Org) Org {
	return Org{ID: o.ID, Slug: o.Slug, DisplayName: o.DisplayName, CreatedAt: o.CreatedAt}
}

func projectView(p iam.Project) Project {
	return Project{
		ID: p.ID, OrgID: p.OrgID, Slug: p.Slug, DisplayName: p.DisplayName, Platform: p.Platform, CreatedAt: p.CreatedAt,
	}
}

func userView(u iam.User) User {
	out := User{
		ID: u.ID, OrgID: u.OrgID, Email: u.Email, DisplayName: u.DisplayName, PlatformAdmin: u.PlatformAdmin,
		Status: UserStatusActive, CreatedAt: u.CreatedAt,
	}
	out.Roles, out.CustomRoles = splitRoles[UserRole](u.Roles)
	if u.Disabled {
		out.Status = UserStatusDisabled
	}
	return out
}

func serviceAccountView(sa iam.ServiceAccount) ServiceAccount {
	out := ServiceAccount{
		ID: sa.ID, ProjectID: sa.ProjectID, Name: sa.Name, Slug: sa.Slug, Description: sa.Description,
		Status: ServiceAccountStatus(sa.Status), CreatedAt: sa.CreatedAt, Keys: []ServiceAccountPublicKey{},
	}
	if sa.Role.IsCustom() {
		out.CustomRole = string(sa.Role)
	} else {
		out.Role = ServiceAccountRole(sa.Role)
	}
	for _, k := range sa.Keys {
		out.Keys = append(out.Keys, ServiceAccountPublicKey{KeyID: k.ID, CreatedAt: k.CreatedAt, ExpiresAt: k.ExpiresAt})
	}
	return out
}

func withKey(made command.ServiceAccountWithKey) ServiceAccount {
	out := serviceAccountView(made.Account)
	out.Key = ServiceAccountKey{
		KeyID: made.Key.ID, PrivateKeyPem: made.Key.PrivateKeyPEM, Algorithm: iam.KeyAlgorithm,
		CreatedAt: made.Key.CreatedAt,
	}
	return out
}
