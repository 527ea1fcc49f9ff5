package command

import (
	"cmp"
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// ServiceAccountWithKey holds the private key, which is shown this once; Key is empty where none was made.
type ServiceAccountWithKey struct {
	Account iam.ServiceAccount
	Key     iam.Key
}

// CreateServiceAccount makes a service account of a project with its first key; without a role and a custom one it is
// app_operator. It sets the account's id and time.
func (s *Service) CreateServiceAccount(ctx context.Context, m Meta, wanted iam.ServiceAccount, customRoleID string,
) (ServiceAccountWithKey, error) {
	key, err := iam.NewKey(db.NewID(), m.Now)
	if err != nil {
		return ServiceAccountWithKey{}, err
	}
	wanted.ID, wanted.CreatedAt = db.NewID(), m.Now
	check := access.Project(m.Principal, iam.ServiceAccountWrite, wanted.ProjectID)
	return onceSealed(ctx, s, m, s.Sealer, check, func(tx db.Tx, project iam.Project) (ServiceAccountWithKey, error) {
		if customRoleID != "" && wanted.Role != "" {
			return ServiceAccountWithKey{}, fault.New(fault.Unprocessable, fault.CodeInvalid, "A service account has one role.",
				nil).WithField("/custom_role", "contradicts role").Permanent()
		}
		sa := wanted
		sa.OrgID, sa.ProjectID, sa.Role = project.OrgID, project.ID, cmp.Or(wanted.Role, iam.Role(customRoleID))
		sa, err := iam.CreateServiceAccount(ctx, tx, sa, key)
		if err == nil {
			err = iam.MayGrantAccount(m.Principal, sa)
		}
		if err != nil {
			return ServiceAccountWithKey{}, err
		}
		after := map[string]any{"name": sa.Name, "slug": sa.Slug, "role": sa.Role, "status": sa.Status, "key_id": key.ID}
		return ServiceAccountWithKey{sa, key},
			m.recordServiceAccount(ctx, tx, "iam.service_account.created", sa, nil, after)
	})
}

// DisableServiceAccount stops a service account, its keys and its tokens. A disabled one stays as it is.
func (s *Service) DisableServiceAccount(ctx context.Context, m Meta, projectID, id string) (iam.ServiceAccount, error) {
	return once(ctx, s, m, accountToChange(m, projectID, id), func(tx db.Tx,
		sa iam.ServiceAccount,
	) (iam.ServiceAccount, error) {
		after, err := iam.DisableServiceAccount(ctx, tx, sa, m.Now)
		if err != nil || after.ResourceVersion == sa.ResourceVersion {
			return after, err
		}
		return after, m.recordServiceAccount(ctx, tx, "iam.service_account.disabled", after, status(sa), status(after))
	})
}

// RotateServiceAccountKey gives a service account a new key and ends the older ones; the one that it replaces after an
// overlap.
func (s *Service) RotateServiceAccountKey(ctx context.Context, m Meta, projectID, id string,
	overlap time.Duration,
) (ServiceAccountWithKey, error) {
	key, err := iam.NewKey(db.NewID(), m.Now)
	if err != nil {
		return ServiceAccountWithKey{}, err
	}
	return onceSealed(ctx, s, m, s.Sealer, accountToChange(m, projectID, id), func(tx db.Tx,
		sa iam.ServiceAccount,
	) (ServiceAccountWithKey, error) {
		// Who has the key may do what the account may.
		if err := iam.MayGrantAccount(m.Principal, sa); err != nil {
			return ServiceAccountWithKey{}, err
		}
		after, err := iam.RotateKey(ctx, tx, sa, key, overlap)
		if err != nil {
			return ServiceAccountWithKey{}, err
		}
		return ServiceAccountWithKey{after, key},
			m.recordServiceAccount(ctx, tx, "iam.service_account.key_rotated", after, nil,
				map[string]any{"key_id": key.ID, "overlap_seconds": overlap / time.Second})
	})
}

// DeleteServiceAccount removes a service account. Removing it twice is NotFound, like any absent resource.
func (s *Service) DeleteServiceAccount(ctx context.Context, m Meta, projectID, id string) error {
	return do(ctx, s, accountToChange(m, projectID, id), func(tx db.Tx, sa iam.ServiceAccount) error {
		after, err := iam.DeleteServiceAccount(ctx, tx, sa, m.Now)
		if err != nil {
			return err
		}
		return m.recordServiceAccount(ctx, tx, "iam.service_account.deleted", after, status(sa), nil)
	})
}

func accountToChange(m Meta, projectID, id string) access.Check[iam.ServiceAccount] {
	inProject := access.Project(m.Principal, iam.ServiceAccountWrite, projectID)
	return func(ctx context.Context, tx db.Tx) (iam.ServiceAccount, error) {
		project, err := inProject(ctx, tx)
		if err != nil {
			return iam.ServiceAccount{}, err
		}
		return iam.GetServiceAccount(ctx, tx, project.ID, id)
	}
}

func status(sa iam.ServiceAccount) map[string]string { return map[string]string{"status": sa.Status} }

func (m Meta) recordServiceAccount(ctx context.Context, tx db.Tx, eventType string, sa iam.ServiceAccount, before,
	after any,
) error {
	return change.Record(ctx, tx, m.by(), change.Entry{
		Event:        eventType,
		Action:       iam.ServiceAccountWrite,
		ResourceType: resourceServiceAccount,
		ResourceID:   sa.ID,
		Version:      sa.ResourceVersion,
		OrgID:        sa.OrgID,
		ProjectID:    sa.ProjectID,
		Before:       before,
		After:        after,
	})
}
