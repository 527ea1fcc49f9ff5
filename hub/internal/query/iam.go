package query

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// Orgs lists the orgs that the caller may see.
func (s *Service) Orgs(ctx context.Context, p iam.Principal, page iam.Page) ([]iam.Org, error) {
	if err := iam.Authorize(p, iam.OrgRead, "", ""); err != nil {
		return nil, err
	}
	return db.ReadTx(ctx, s.DB, func(tx db.Tx) ([]iam.Org, error) { return iam.ListOrgs(ctx, tx, p, page) })
}

// Projects lists the projects that the caller may see; an empty org is any.
func (s *Service) Projects(ctx context.Context, p iam.Principal, orgID string, page iam.Page) ([]iam.Project, error) {
	if err := iam.Authorize(p, iam.ProjectRead, "", ""); err != nil {
		return nil, err
	}
	return db.ReadTx(ctx, s.DB, func(tx db.Tx) ([]iam.Project, error) {
		return iam.ListProjects(ctx, tx, p, orgID, page)
	})
}

// Project reads one project.
func (s *Service) Project(ctx context.Context, p iam.Principal, id string) (iam.Project, error) {
	return db.ReadTx(ctx, s.DB, func(tx db.Tx) (iam.Project, error) {
		return iam.InProject(ctx, tx, p, iam.ProjectRead, id)
	})
}

// Users lists users for a platform admin; an empty org is any.
func (s *Service) Users(ctx context.Context, p iam.Principal, orgID string, page iam.Page) ([]iam.User, error) {
	if err := iam.Authorize(p, iam.UserWrite, "", ""); err != nil {
		return nil, err
	}
	return db.ReadTx(ctx, s.DB, func(tx db.Tx) ([]iam.User, error) { return iam.ListUsers(ctx, tx, orgID, page) })
}

// OrgUsers lists the users of an org.
func (s *Service) OrgUsers(ctx context.Context, p iam.Principal, orgID string, page iam.Page) ([]iam.User, error) {
	return db.ReadTx(ctx, s.DB, func(tx db.Tx) ([]iam.User, error) {
		org, err := orgFor(ctx, tx, p, iam.UserRead, orgID)
		if err != nil {
			return nil, err
		}
		return iam.ListUsers(ctx, tx, org.ID, page)
	})
}

// User reads one user: the caller, or a user of an org that the caller may read.
func (s *Service) User(ctx context.Context, p iam.Principal, id string) (iam.User, error) {
	return db.ReadTx(ctx, s.DB, func(tx db.Tx) (iam.User, error) {
		return iam.OfUserOrSelf(ctx, tx, p, iam.UserRead, id)
	})
}

// UserTokens lists a user's valid tokens, without their text.
func (s *Service) UserTokens(ctx context.Context, p iam.Principal, userID string, now time.Time,
	page iam.Page,
) ([]iam.UserToken, error) {
	return db.ReadTx(ctx, s.DB, func(tx db.Tx) ([]iam.UserToken, error) {
		user, err := iam.OfUserOrSelf(ctx, tx, p, iam.UserRead, userID)
		if err != nil {
			return nil, err
		}
		return iam.ListUserTokens(ctx, tx, user.ID, now, page)
	})
}

// ServiceAccounts lists a project's service accounts, without keys.
func (s *Service) ServiceAccounts(ctx context.Context, p iam.Principal, projectID string,
	page iam.Page,
) ([]iam.ServiceAccount, error) {
	return db.ReadTx(ctx, s.DB, func(tx db.Tx) ([]iam.ServiceAccount, error) {
		project, err := iam.InProject(ctx, tx, p, iam.ServiceAccountRead, projectID)
		if err != nil {
			return nil, err
		}
		return iam.ListServiceAccounts(ctx, tx, project.ID, page)
	})
}

// ProjectRoles lists who holds roles in this project only.
func (s *Service) ProjectRoles(ctx context.Context, p iam.Principal, projectID string,
	page iam.Page,
) ([]iam.ProjectRoles, error) {
	return db.ReadTx(ctx, s.DB, func(tx db.Tx) ([]iam.ProjectRoles, error) {
		project, err := iam.InProject(ctx, tx, p, iam.RoleRead, projectID)
		if err != nil {
			return nil, err
		}
		return iam.ListProjectRoles(ctx, tx, project.ID, page)
	})
}

// orgFor reads an org for a caller who has the permission in it; to others a foreign org looks like an absent one.
func orgFor(ctx context.Context, tx db.Tx, p iam.Principal, permission iam.Permission, orgID string) (iam.Org, error) {
	org, err := iam.GetOrg(ctx, tx, orgID)
	if err != nil {
		return iam.Org{}, err
	}
	return org, iam.Authorize(p, permission, org.ID, "")
}
