package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// CreateCustomRole makes a role of an org. It sets the role's id and time.
func (s *Service) CreateCustomRole(ctx context.Context, m Meta, wanted iam.CustomRole) (iam.CustomRole, error) {
	wanted.ID, wanted.CreatedAt = db.NewID(), m.Now
	check := access.Org(m.Principal, iam.RoleWrite, wanted.OrgID)
	return once(ctx, s, m, check, func(tx db.Tx, _ iam.Org) (iam.CustomRole, error) {
		role, err := iam.CreateCustomRole(ctx, tx, m.Principal, wanted)
		if err != nil {
			return iam.CustomRole{}, err
		}
		return role, m.recordRole(ctx, tx, "iam.role.created", role, nil, roleState(role))
	})
}

// PutCustomRole replaces name, description and permissions of a role, for all who hold it. The same ones change
// nothing.
func (s *Service) PutCustomRole(ctx context.Context, m Meta, wanted iam.CustomRole) (iam.CustomRole, error) {
	check := access.CustomRole(m.Principal, iam.RoleWrite, wanted.OrgID, wanted.ID)
	return run(ctx, s, check, func(tx db.Tx, before iam.CustomRole) (iam.CustomRole, error) {
		after, err := iam.SetCustomRole(ctx, tx, m.Principal, before, wanted, m.Now)
		if err != nil || after.ResourceVersion == before.ResourceVersion {
			return after, err
		}
		return after, m.recordRole(ctx, tx, "iam.role.changed", after, roleState(before), roleState(after))
	})
}

// DeleteCustomRole removes a role that nobody holds. Removing it twice is NotFound.
func (s *Service) DeleteCustomRole(ctx context.Context, m Meta, orgID, id string) error {
	check := access.CustomRole(m.Principal, iam.RoleWrite, orgID, id)
	return do(ctx, s, check, func(tx db.Tx, role iam.CustomRole) error {
		if err := iam.DeleteCustomRole(ctx, tx, role); err != nil {
			return err
		}
		before := roleState(role)
		role.ResourceVersion++
		return m.recordRole(ctx, tx, "iam.role.deleted", role, before, nil)
	})
}

func (m Meta) recordRole(ctx context.Context, tx db.Tx, eventType string, r iam.CustomRole, before, after any) error {
	return change.Record(ctx, tx, m.by(), change.Entry{
		Event:        eventType,
		Action:       iam.RoleWrite,
		ResourceType: resourceRole,
		ResourceID:   r.ID,
		Version:      r.ResourceVersion,
		OrgID:        r.OrgID,
		Before:       before,
		After:        after,
	})
}

func roleState(r iam.CustomRole) map[string]any {
	return map[string]any{
		"slug": r.Slug, "display_name": r.DisplayName, "description": r.Description, "permissions": r.Permissions,
	}
}
