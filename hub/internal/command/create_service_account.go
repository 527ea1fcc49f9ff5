package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// CreateServiceAccountInput is what the caller chooses.
type CreateServiceAccountInput struct {
	ProjectID               string
	Name, Slug, Description string
	// Role empty means app_operator.
	Role iam.Role
}

// ServiceAccountWithKey holds the private key, which is shown this once; Key is empty where none was made.
type ServiceAccountWithKey struct {
	Account iam.ServiceAccount
	Key     iam.Key
}

// CreateServiceAccount makes a service account with its first key.
func (s *Service) CreateServiceAccount(ctx context.Context, m Meta,
	in CreateServiceAccountInput,
) (ServiceAccountWithKey, error) {
	key, err := iam.NewKey(db.NewID(), m.Now)
	if err != nil {
		return ServiceAccountWithKey{}, err
	}
	id := db.NewID()
	return db.RunTx(ctx, s.DB, func(tx db.Tx) (ServiceAccountWithKey, error) {
		project, err := iam.InProject(ctx, tx, m.Principal, iam.ServiceAccountWrite, in.ProjectID)
		if err != nil {
			return ServiceAccountWithKey{}, err
		}
		return IdempotentSealed(ctx, tx, m, s.Sealer, func() (ServiceAccountWithKey, error) {
			sa, err := iam.CreateServiceAccount(ctx, tx, iam.ServiceAccount{
				ID: id, OrgID: project.OrgID, ProjectID: project.ID, Name: in.Name, Slug: in.Slug, Description: in.Description,
				Role: in.Role, CreatedAt: m.Now,
			}, key)
			if err != nil {
				return ServiceAccountWithKey{}, err
			}
			return ServiceAccountWithKey{Account: sa, Key: key}, m.recordServiceAccount(ctx, tx, "iam.service_account.created",
				sa, nil, map[string]any{
					"name": sa.Name, "slug": sa.Slug, "role": sa.Role, "status": sa.Status, "key_id": key.ID,
				})
		})
	})
}

func (m Meta) recordServiceAccount(ctx context.Context, tx db.Tx, eventType string, sa iam.ServiceAccount, before,
	after any,
) error {
	return m.recordIAM(ctx, tx, iamChange{
		event: eventType, action: iam.ServiceAccountWrite, resourceType: resourceServiceAccount, resourceID: sa.ID,
		version: sa.ResourceVersion,
		orgID:   sa.OrgID, projectID: sa.ProjectID, before: before, after: after,
	})
}
