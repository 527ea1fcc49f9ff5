package httpapi

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// MintServiceAccountToken exchanges a service account's key for a short-lived token.
func (s *Server) MintServiceAccountToken(ctx context.Context,
	r MintServiceAccountTokenRequestObject,
) (MintServiceAccountTokenResponseObject, error) {
	m := metaFrom(ctx)
	token, err := s.Commands.MintToken(ctx, m, iam.Proof{
		ServiceAccountID: r.Body.ServiceAccountID, KeyID: r.Body.KeyID, PrivateKeyPEM: r.Body.PrivateKeyPem,
		Assertion: r.Body.Assertion,
	})
	if err != nil {
		return nil, err
	}
	return MintServiceAccountToken200JSONResponse{
		AccessToken: token.Text, TokenType: TokenTokenTypeBearer, ExpiresAt: token.ExpiresAt,
		ExpiresIn: int64(iam.AccessTokenLifetime / time.Second),
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
	items, next, err := list(r.Params.Cursor, r.Params.Limit, func(page iam.Page) ([]iam.Org, error) {
		return s.Queries.Orgs(ctx, principalOf(ctx), page)
	}, orgView, func(v Org) string { return v.ID })
	if err != nil {
		return nil, err
	}
	return ListOrgs200JSONResponse{Items: items, NextCursor: next}, nil
}

// CreateOrg makes an org.
func (s *Server) CreateOrg(ctx context.Context, r CreateOrgRequestObject) (CreateOrgResponseObject, error) {
	org, err := s.Commands.CreateOrg(ctx, metaFrom(ctx), command.CreateOrgInput{
		Slug:        r.Body.Slug,
		DisplayName: r.Body.DisplayName,
	})
	if err != nil {
		return nil, err
	}
	return CreateOrg201JSONResponse(orgView(org)), nil
}

// ListProjects lists the projects that the caller may see.
func (s *Server) ListProjects(ctx context.Context, r ListProjectsRequestObject) (ListProjectsResponseObject, error) {
	items, next, err := list(r.Params.Cursor, r.Params.Limit, func(page iam.Page) ([]iam.Project, error) {
		return s.Queries.Projects(ctx, principalOf(ctx), r.Params.OrgID, page)
	}, projectView, func(v Project) string { return v.ID })
	if err != nil {
		return nil, err
	}
	return ListProjects200JSONResponse{Items: items, NextCursor: next}, nil
}

// CreateProject makes a project.
func (s *Server) CreateProject(ctx context.Context, r CreateProjectRequestObject) (CreateProjectResponseObject, error) {
	project, err := s.Commands.CreateProject(ctx, metaFrom(ctx), command.CreateProjectInput{
		OrgID: r.Body.OrgID,
		Slug:  r.Body.Slug, DisplayName: r.Body.DisplayName,
	})
	if err != nil {
		return nil, err
	}
	return CreateProject201JSONResponse(projectView(project)), nil
}

// GetProject gives one project.
func (s *Server) GetProject(ctx context.Context, r GetProjectRequestObject) (GetProjectResponseObject, error) {
	project, err := s.Queries.Project(ctx, principalOf(ctx), r.ProjectID)
	if err != nil {
		return nil, err
	}
	return GetProject200JSONResponse(projectView(project)), nil
}

// ListUsers lists users.
func (s *Server) ListUsers(ctx context.Context, r ListUsersRequestObject) (ListUsersResponseObject, error) {
	items, next, err := list(r.Params.Cursor, r.Params.Limit, func(page iam.Page) ([]iam.User, error) {
		return s.Queries.Users(ctx, principalOf(ctx), r.Params.OrgID, page)
	}, userView, func(v User) string { return v.ID })
	if err != nil {
		return nil, err
	}
	return ListUsers200JSONResponse{Items: items, NextCursor: next}, nil
}

// CreateUser makes a user.
func (s *Server) CreateUser(ctx context.Context, r CreateUserRequestObject) (CreateUserResponseObject, error) {
	in := command.CreateUserInput{
		OrgID: r.Body.OrgID, Email: r.Body.Email, DisplayName: r.Body.DisplayName, PlatformAdmin: r.Body.PlatformAdmin,
		Roles: rolesOf(r.Body.Roles),
	}
	user, err := s.Commands.CreateUser(ctx, metaFrom(ctx), in)
	if err != nil {
		return nil, err
	}
	return CreateUser201JSONResponse(userView(user)), nil
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

// ListServiceAccounts lists a project's service accounts, without keys.
func (s *Server) ListServiceAccounts(ctx context.Context,
	r ListServiceAccountsRequestObject,
) (ListServiceAccountsResponseObject, error) {
	items, next, err := list(r.Params.Cursor, r.Params.Limit, func(page iam.Page) ([]iam.ServiceAccount, error) {
		return s.Queries.ServiceAccounts(ctx, principalOf(ctx), r.ProjectID, page)
	}, serviceAccountView, func(v ServiceAccount) string { return v.ID })
	if err != nil {
		return nil, err
	}
	return ListServiceAccounts200JSONResponse{Items: items, NextCursor: next}, nil
}

// CreateServiceAccount makes a service account; the answer holds its private key.
func (s *Server) CreateServiceAccount(ctx context.Context,
	r CreateServiceAccountRequestObject,
) (CreateServiceAccountResponseObject, error) {
	made, err := s.Commands.CreateServiceAccount(ctx, metaFrom(ctx), command.CreateServiceAccountInput{
		ProjectID: r.ProjectID, Name: r.Body.Name, Slug: r.Body.Slug, Description: r.Body.Description,
		Role: iam.Role(r.Body.Role),
	})
	if err != nil {
		return nil, err
	}
	return CreateServiceAccount201JSONResponse(withKey(made)), nil
}

// DisableServiceAccount stops a service account.
func (s *Server) DisableServiceAccount(ctx context.Context,
	r DisableServiceAccountRequestObject,
) (DisableServiceAccountResponseObject, error) {
	sa, err := s.Commands.DisableServiceAccount(ctx, metaFrom(ctx), r.ProjectID, r.ServiceAccountID)
	if err != nil {
		return nil, err
	}
	return DisableServiceAccount200JSONResponse(serviceAccountView(sa)), nil
}

// RotateServiceAccountKey gives a service account a new key; the answer holds it.
func (s *Server) RotateServiceAccountKey(ctx context.Context,
	r RotateServiceAccountKeyRequestObject,
) (RotateServiceAccountKeyResponseObject, error) {
	made, err := s.Commands.RotateServiceAccountKey(ctx, metaFrom(ctx), r.ProjectID, r.ServiceAccountID)
	if err != nil {
		return nil, err
	}
	return RotateServiceAccountKey201JSONResponse(withKey(made)), nil
}

// DeleteServiceAccount removes a service account.
func (s *Server) DeleteServiceAccount(ctx context.Context,
	r DeleteServiceAccountRequestObject,
) (DeleteServiceAccountResponseObject, error) {
	if err := s.Commands.DeleteServiceAccount(ctx, metaFrom(ctx), r.ProjectID, r.ServiceAccountID); err != nil {
		return nil, err
	}
	return DeleteServiceAccount204Response{}, nil
}

// list reads one page: one item more than asked for tells whether there is a next.
func list[T, V any](cursor Cursor, limit Limit, read func(iam.Page) ([]T, error), view func(T) V,
	id func(V) string,
) ([]V, string, error) {
	after, err := cursorID(cursor)
	if err != nil {
		return nil, "", err
	}
	n := limitOf(limit)
	found, err := read(iam.Page{After: after, Limit: n + 1})
	if err != nil {
		return nil, "", err
	}
	views := make([]V, 0, min(len(found), n))
	for _, item := range found[:min(len(found), n)] {
		views = append(views, view(item))
	}
	if len(found) <= n {
		return views, "", nil
	}
	return views, id(views[n-1]), nil
}

func orgView(o iam.Org) Org {
	return Org{ID: o.ID, Slug: o.Slug, DisplayName: o.DisplayName, CreatedAt: o.CreatedAt}
}

func projectView(p iam.Project) Project {
	return Project{ID: p.ID, OrgID: p.OrgID, Slug: p.Slug, DisplayName: p.DisplayName, CreatedAt: p.CreatedAt}
}

func userView(u iam.User) User {
	out := User{
		ID: u.ID, OrgID: u.OrgID, Email: u.Email, DisplayName: u.DisplayName, PlatformAdmin: u.PlatformAdmin,
		Roles: []UserRole{}, Status: UserStatusActive, CreatedAt: u.CreatedAt,
	}
	if u.Disabled {
		out.Status = UserStatusDisabled
	}
	for _, r := range u.Roles {
		out.Roles = append(out.Roles, UserRole(r))
	}
	return out
}

func serviceAccountView(sa iam.ServiceAccount) ServiceAccount {
	return ServiceAccount{
		ID: sa.ID, ProjectID: sa.ProjectID, Name: sa.Name, Slug: sa.Slug, Description: sa.Description,
		Role: ServiceAccountRole(sa.Role), Status: ServiceAccountStatus(sa.Status), CreatedAt: sa.CreatedAt,
	}
}

func withKey(made command.ServiceAccountWithKey) ServiceAccount {
	out := serviceAccountView(made.Account)
	out.Key = ServiceAccountKey{
		KeyID: made.Key.ID, PrivateKeyPem: made.Key.PrivateKeyPEM, Algorithm: iam.KeyAlgorithm,
		CreatedAt: made.Key.CreatedAt,
	}
	return out
}
