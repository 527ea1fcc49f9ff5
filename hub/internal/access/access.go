// Package access answers, for commands and queries alike, whether a caller may do what it asks, and reads the project,
// org or user that the answer depends on. The rules are iam's. What the caller may not see is NotFound.
package access

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
)

// Check reports as a fault that a caller may not do something, or returns what it has read to decide that.
type Check[T any] func(ctx context.Context, tx db.Tx) (T, error)

// Nothing is what a check returns that reads nothing.
type Nothing struct{}

// Anyone lets every caller in: the request carries a proof of its own.
func Anyone(context.Context, db.Tx) (Nothing, error) { return Nothing{}, nil }

// Platform is for what belongs to no org.
func Platform(p iam.Principal, permission iam.Permission) Check[Nothing] {
	return func(context.Context, db.Tx) (Nothing, error) {
		return Nothing{}, iam.Authorize(p, permission, "", "")
	}
}

// Project returns a project in which the caller has the permission.
func Project(p iam.Principal, permission iam.Permission, id string) Check[iam.Project] {
	return func(ctx context.Context, tx db.Tx) (iam.Project, error) {
		return iam.InProject(ctx, tx, p, permission, id)
	}
}

// Instance is Project for something that is done to one app instance of it, which need not exist.
func Instance(p iam.Principal, permission iam.Permission, projectID, id string) Check[iam.Project] {
	return func(ctx context.Context, tx db.Tx) (iam.Project, error) {
		return iam.InProjectOn(ctx, tx, p, permission, projectID, id)
	}
}

// Org returns an org in which the caller has the permission.
func Org(p iam.Principal, permission iam.Permission, id string) Check[iam.Org] {
	return func(ctx context.Context, tx db.Tx) (iam.Org, error) {
		org, err := iam.GetOrg(ctx, tx, id)
		if err != nil {
			return iam.Org{}, err
		}
		return org, iam.Authorize(p, permission, org.ID, "")
	}
}

// CustomRole returns a role that an org has made, where the caller has the permission.
func CustomRole(p iam.Principal, permission iam.Permission, orgID, id string) Check[iam.CustomRole] {
	return func(ctx context.Context, tx db.Tx) (iam.CustomRole, error) {
		org, err := Org(p, permission, orgID)(ctx, tx)
		if err != nil {
			return iam.CustomRole{}, err
		}
		return iam.GetCustomRole(ctx, tx, org.ID, id)
	}
}

// User returns a user of an org in which the caller has the permission.
func User(p iam.Principal, permission iam.Permission, id string) Check[iam.User] {
	return func(ctx context.Context, tx db.Tx) (iam.User, error) { return iam.OfUser(ctx, tx, p, permission, id) }
}

// UserOrSelf is User, and the caller itself.
func UserOrSelf(p iam.Principal, permission iam.Permission, id string) Check[iam.User] {
	return func(ctx context.Context, tx db.Tx) (iam.User, error) {
		return iam.OfUserOrSelf(ctx, tx, p, permission, id)
	}
}

// Scope is whose rows a listing shows: a project's, an org's, or, where both are empty, all.
type Scope struct {
	OrgID, ProjectID string
}

// InScope decides whose rows the caller sees: those of the project or org that it names, else of its own org. A
// platform admin who names none sees all, a service account its project's.
func InScope(p iam.Principal, permission iam.Permission, named Scope) Check[Scope] {
	return func(ctx context.Context, tx db.Tx) (Scope, error) {
		if named.ProjectID == "" && p.Type == principal.ServiceAccount {
			named.ProjectID = p.ProjectID
		}
		switch {
		case named.ProjectID != "":
			project, err := iam.InProject(ctx, tx, p, permission, named.ProjectID)
			if err == nil && named.OrgID != "" && named.OrgID != project.OrgID {
				err = iam.ErrNotFound()
			}
			return Scope{OrgID: project.OrgID, ProjectID: project.ID}, err
		case named.OrgID == "" && p.PlatformAdmin:
			return Scope{}, iam.Authorize(p, permission, "", "")
		case named.OrgID == "" && p.OrgID == "":
			return Scope{}, iam.ErrNotFound()
		case named.OrgID == "":
			named.OrgID = p.OrgID
		}
		if err := iam.Authorize(p, permission, named.OrgID, ""); err != nil {
			return Scope{}, err
		}
		org, err := iam.GetOrg(ctx, tx, named.OrgID)
		return Scope{OrgID: org.ID}, err
	}
}

// Known returns the project, org or, where both are empty, platform that the caller named and may know of.
func Known(p iam.Principal, named Scope) Check[Scope] {
	return func(ctx context.Context, tx db.Tx) (Scope, error) {
		if named.ProjectID != "" {
			project, err := iam.InProject(ctx, tx, p, iam.Know, named.ProjectID)
			if err == nil && named.OrgID != "" && named.OrgID != project.OrgID {
				err = iam.ErrNotFound()
			}
			return Scope{OrgID: project.OrgID, ProjectID: project.ID}, err
		}
		if named.OrgID == "" {
			return Scope{}, iam.Authorize(p, iam.Know, "", "")
		}
		org, err := Org(p, iam.Know, named.OrgID)(ctx, tx)
		return Scope{OrgID: org.ID}, err
	}
}

// OrgID is Org for an org that is not read: whether it exists, the command finds out.
func OrgID(p iam.Principal, permission iam.Permission, id string) Check[Nothing] {
	return func(context.Context, db.Tx) (Nothing, error) {
		return Nothing{}, iam.Authorize(p, permission, id, "")
	}
}
