package iam

import (
	"cmp"
	"slices"
	"strings"

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
	// AppInstanceID is the app instance that a service account is for; empty for the others.
	AppInstanceID string
	// PlatformAdmin may do everything in every org. Never true for a service account.
	PlatformAdmin bool
	// Disabled is a user or service account that may do nothing. It cannot authenticate; explanations show it.
	Disabled bool
	// SessionID is the login that the user's token belongs to; empty for a personal token.
	SessionID string
	// Bindings are the roles held in OrgID, sorted by role and then by project, the org-wide one first.
	Bindings []Binding
	// memo is of a principal that a PrincipalCache has returned.
	memo *memo
}

// Binding is a role held in the whole org, or in one project of it.
type Binding struct {
	Role Role
	// ProjectID empty means every project of the org.
	ProjectID string
	// Permissions are a custom role's; those of the others are in policies.cedar.
	Permissions []Permission
}

// Actor names p in rows, events and the audit trail.
func (p Principal) Actor() principal.Actor { return principal.Actor{Type: p.Type, ID: p.ID} }

// Permissions lists, sorted, the keys that p holds anywhere.
func (p Principal) Permissions() []Permission {
	return slices.DeleteFunc(Permissions(), func(key Permission) bool { return Authorize(p, key, "", "") != nil })
}

// Authorize is Decide, with the answer to a caller that may not: NotFound for a resource that p may not even know of,
// as if it did not exist; Forbidden for one that it may know of.
func Authorize(p Principal, permission Permission, orgID, projectID string) error {
	return AuthorizeOn(p, permission, orgID, projectID, "")
}

// AuthorizeOn is Authorize for something that is done to one app instance, which need not exist: its own service
// account may do that, and nothing else in the project.
func AuthorizeOn(p Principal, permission Permission, orgID, projectID, instanceID string) error {
	if p.ID == "" || principalType(p.Type) == "" {
		return ErrUnauthenticated()
	}
	allowed, err := p.allowed(permission, orgID, projectID, OnInstance{ID: instanceID})
	if err != nil || allowed {
		return err
	}
	known, err := p.allowed(Know, orgID, projectID, OnInstance{})
	switch {
	case err != nil:
		return err
	case known:
		return forbidden(permission)
	default:
		return ErrNotFound()
	}
}

// AuthorizeOperation reports as Forbidden that p may do something to app instances of a project, but not to this one.
// It comes after Authorize.
func AuthorizeOperation(p Principal, permission Permission, orgID, projectID string, on OnInstance) error {
	allowed, err := p.allowed(permission, orgID, projectID, on)
	if err != nil || allowed {
		return err
	}
	because := "the platform manages the app instance."
	if on.Attached {
		because = "the app instance belongs to another project, to which this one is attached."
	}
	return fault.New(fault.Forbidden, codeForbidden, "You may not do this: "+because, nil).Permanent()
}

// reach is where a principal holds a permission, for the WHERE clause of a listing.
type reach struct {
	// Everywhere is every org; OrgWide is every project of OrgID. Otherwise it is the projects of OrgID that are named.
	Everywhere, OrgWide bool
	OrgID               string
	ProjectIDs          []string
}

// reachOf asks the policies once for each role: where p holds it, it is allowed what the role allows.
func reachOf(p Principal, permission Permission) (reach, error) {
	out := reach{Everywhere: p.everywhere(), OrgID: p.OrgID}
	decision, err := Decide(p, permission, p.OrgID, "")
	if err != nil {
		return reach{}, err
	}
	out.OrgWide = p.OrgID != "" && decision.Allowed
	for of := range bindingsByRole(p.Bindings) {
		one := p
		one.Bindings = of[len(of)-1:]
		if decision, err = Decide(one, permission, p.OrgID, one.Bindings[0].ProjectID); err != nil {
			return reach{}, err
		}
		for _, b := range of {
			if decision.Allowed && b.ProjectID != "" {
				out.ProjectIDs = append(out.ProjectIDs, b.ProjectID)
			}
		}
	}
	return out, nil
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

// everywhere reports whether listings show p the rows of all orgs.
func (p Principal) everywhere() bool { return p.PlatformAdmin && p.Type == principal.User }

// sortBindings makes the order that Bindings promises.
func (p *Principal) sortBindings() {
	slices.SortFunc(p.Bindings, func(a, b Binding) int {
		return cmp.Or(strings.Compare(string(a.Role), string(b.Role)), strings.Compare(a.ProjectID, b.ProjectID))
	})
}
