package iam

import (
	"maps"
	"slices"

	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// Principal is who makes a request. The zero value may do nothing.
type Principal struct {
	// Type is User, ServiceAccount or Node.
	Type principal.Type
	ID   string
	// Name is for people: a display name or a service account's name.
	Name string
	// OrgID is empty for a platform admin that belongs to no org, and for nodes.
	OrgID string
	// ProjectID is the project that a service account is bound to; empty for users.
	ProjectID string
	// PlatformAdmin may do everything in every org. Never true for a service account.
	PlatformAdmin bool
	// Bindings are the roles held in OrgID, in the order of role and project.
	Bindings []Binding
}

// Binding is a role held in the whole org, or in one project of it.
type Binding struct {
	Role Role
	// ProjectID empty means every project of the org.
	ProjectID string
}

// Actor names p in rows, events and the audit trail.
func (p Principal) Actor() principal.Actor { return principal.Actor{Type: p.Type, ID: p.ID} }

// Permissions lists, sorted, the keys that p holds anywhere.
func (p Principal) Permissions() []Permission {
	if p.PlatformAdmin && p.Type == principal.User {
		return slices.Clone(allPermissions())
	}
	held := map[Permission]bool{}
	for _, b := range p.Bindings {
		for _, perm := range b.Role.Permissions() {
			held[perm] = true
		}
	}
	return slices.Sorted(maps.Keys(held))
}

// Authorize decides whether p may do permission on a resource of orgID and projectID. Both empty means a resource of
// the platform (catalogue, nodes, prices); projectID empty means one of the org as a whole. The answer to a resource
// that p may not even know of is NotFound, as if it did not exist; to one that it may know of, Forbidden.
func Authorize(p Principal, permission Permission, orgID, projectID string) error {
	if p.ID == "" || (p.Type != principal.User && p.Type != principal.ServiceAccount && p.Type != principal.Node) {
		return ErrUnauthenticated()
	}
	if p.PlatformAdmin && p.Type == principal.User {
		return nil
	}
	if orgID == "" && projectID == "" {
		if slices.ContainsFunc(p.Bindings, func(b Binding) bool { return b.Role.has(permission) }) {
			return nil
		}
		return forbidden(permission)
	}
	if p.OrgID == "" || orgID != p.OrgID {
		return ErrNotFound()
	}
	if p.Type == principal.ServiceAccount && projectID != "" && projectID != p.ProjectID {
		return ErrNotFound()
	}
	known := projectID == ""
	for _, b := range p.Bindings {
		if b.ProjectID != "" && b.ProjectID != projectID {
			continue
		}
		if b.Role.has(permission) {
			return nil
		}
		known = true
	}
	if known {
		return forbidden(permission)
	}
	return ErrNotFound()
}

// ErrNotFound is what an absent resource and another tenant's resource answer alike.
func ErrNotFound() *fault.Error {
	return fault.New(fault.NotFound, fault.CodeNotFound, "There is no such resource.", nil)
}

// ErrUnauthenticated answers a request without a usable credential.
func ErrUnauthenticated() *fault.Error {
	return fault.New(fault.Unauthenticated, codeUnauthenticated, "Send a valid token: Authorization: Bearer <token>.", nil)
}

func forbidden(permission Permission) *fault.Error {
	return fault.New(fault.Forbidden, codeForbidden, "You may not do this; it needs the permission "+string(permission)+
		".",
		nil).Permanent()
}
