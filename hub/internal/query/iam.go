package query

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
)

// Orgs lists the orgs that the caller may see.
func (s *Service) Orgs(ctx context.Context, p iam.Principal, page db.Page) ([]iam.Org, error) {
	return read(ctx, s, access.Platform(p, iam.OrgRead), func(tx db.Tx, _ access.Nothing) ([]iam.Org, error) {
		return iam.ListOrgs(ctx, tx, p, page)
	})
}

// Projects lists the projects that the caller may see; an empty org is any.
func (s *Service) Projects(ctx context.Context, p iam.Principal, orgID string, page db.Page) ([]iam.Project, error) {
	return read(ctx, s, access.Platform(p, iam.ProjectRead), func(tx db.Tx, _ access.Nothing) ([]iam.Project, error) {
		return iam.ListProjects(ctx, tx, p, orgID, page)
	})
}

// Project reads one project.
func (s *Service) Project(ctx context.Context, p iam.Principal, id string) (iam.Project, error) {
	return read(ctx, s, access.Project(p, iam.ProjectRead, id), itself)
}

// Users lists users for a platform admin; an empty org is any.
func (s *Service) Users(ctx context.Context, p iam.Principal, orgID string, page db.Page) ([]iam.User, error) {
	return listIn(ctx, s, access.Platform(p, iam.UserWrite), iam.ListUsers, orgID, page)
}

// OrgUsers lists the users of an org.
func (s *Service) OrgUsers(ctx context.Context, p iam.Principal, orgID string, page db.Page) ([]iam.User, error) {
	return listIn(ctx, s, access.Org(p, iam.UserRead, orgID), iam.ListUsers, orgID, page)
}

// User reads one user: the caller, or a user of an org that the caller may read.
func (s *Service) User(ctx context.Context, p iam.Principal, id string) (iam.User, error) {
	return read(ctx, s, access.UserOrSelf(p, iam.UserRead, id), itself)
}

// UserTokens lists a user's valid tokens, without their text.
func (s *Service) UserTokens(ctx context.Context, p iam.Principal, userID string, now time.Time,
	page db.Page,
) ([]iam.UserToken, error) {
	return read(ctx, s, access.UserOrSelf(p, iam.UserRead, userID),
		func(tx db.Tx, user iam.User) ([]iam.UserToken, error) {
			return iam.ListUserTokens(ctx, tx, user.ID, now, page)
		})
}

// ServiceAccounts lists a project's service accounts with their public keys.
func (s *Service) ServiceAccounts(ctx context.Context, p iam.Principal, projectID string, now time.Time,
	page db.Page,
) ([]iam.ServiceAccount, error) {
	check := access.Project(p, iam.ServiceAccountRead, projectID)
	return read(ctx, s, check, func(tx db.Tx, project iam.Project) ([]iam.ServiceAccount, error) {
		return iam.ListServiceAccounts(ctx, tx, project.ID, now, page)
	})
}

// ProjectRoles lists who holds roles in this project only.
func (s *Service) ProjectRoles(ctx context.Context, p iam.Principal, projectID string,
	page db.Page,
) ([]iam.ProjectRoles, error) {
	return listIn(ctx, s, access.Project(p, iam.RoleRead, projectID), iam.ListProjectRoles, projectID, page)
}

// Question is whether a principal has a permission on what belongs to a project, an org or, where both are empty, the
// platform.
type Question struct {
	Permission iam.Permission
	Of         access.Scope
	// InstanceID is an app instance that it would be done to; empty for none.
	InstanceID string
	// About is another principal; the zero value is the caller.
	About principal.Actor
}

// Answer is the explanation, and the project with its org, or the org, that it is about.
type Answer struct {
	iam.Explanation
	Of access.Scope
}

// Explain says why a principal has a permission, or why not.
func (s *Service) Explain(ctx context.Context, p iam.Principal, q Question) (Answer, error) {
	return read(ctx, s, access.Known(p, q.Of), func(tx db.Tx, of access.Scope) (Answer, error) {
		about := p
		if q.About.ID != "" && q.About != p.Actor() {
			var err error
			if about, err = iam.PrincipalOf(ctx, tx, p, q.About); err != nil {
				return Answer{}, err
			}
		}
		var on iam.OnInstance
		if q.InstanceID != "" {
			// Whether it exists is for those to know who may read it there.
			if _, err := access.Instance(p, iam.InstanceRead, of.ProjectID, q.InstanceID)(ctx, tx); err != nil {
				return Answer{}, err
			}
			var err error
			if _, on, err = instanceOf(ctx, tx, of.ProjectID, q.InstanceID); err != nil {
				return Answer{}, err
			}
		}
		why, err := iam.Explain(about, q.Permission, of.OrgID, of.ProjectID, on)
		return Answer{Explanation: why, Of: of}, err
	})
}

// CustomRoles lists the roles that an org has made.
func (s *Service) CustomRoles(ctx context.Context, p iam.Principal, orgID string,
	page db.Page,
) ([]iam.CustomRole, error) {
	return listIn(ctx, s, access.Org(p, iam.RoleRead, orgID), iam.ListCustomRoles, orgID, page)
}

// CustomRole reads one of them.
func (s *Service) CustomRole(ctx context.Context, p iam.Principal, orgID, id string) (iam.CustomRole, error) {
	return read(ctx, s, access.CustomRole(p, iam.RoleRead, orgID, id), itself)
}

// Sessions lists the caller's sessions that count.
func (s *Service) Sessions(ctx context.Context, p iam.Principal, now time.Time, page db.Page) ([]iam.Session, error) {
	return read(ctx, s, access.Anyone, func(tx db.Tx, _ access.Nothing) ([]iam.Session, error) {
		return iam.ListSessions(ctx, tx, p.ID, now, page)
	})
}

// Invitations lists the open invitations of an org.
func (s *Service) Invitations(ctx context.Context, p iam.Principal, orgID string, now time.Time,
	page db.Page,
) ([]iam.Invitation, error) {
	return read(ctx, s, access.Org(p, iam.UserRead, orgID), func(tx db.Tx, org iam.Org) ([]iam.Invitation, error) {
		return iam.ListInvitations(ctx, tx, org.ID, now, page)
	})
}
