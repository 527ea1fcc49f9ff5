package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// DisableServiceAccount stops a service account, its keys and its tokens. A disabled one stays as it is.
func (s *Service) DisableServiceAccount(ctx context.Context, m Meta, projectID, id string) (iam.ServiceAccount, error) {
	return db.RunTx(ctx, s.DB, func(tx db.Tx) (iam.ServiceAccount, error) {
		sa, err := accountToChange(ctx, tx, m, projectID, id)
		if err != nil {
			return iam.ServiceAccount{}, err
		}
		return Idempotent(ctx, tx, m, func() (iam.ServiceAccount, error) {
			after, err := iam.DisableServiceAccount(ctx, tx, sa, m.Now)
			if err != nil || after.ResourceVersion == sa.ResourceVersion {
				return after, err
			}
			return after, m.recordServiceAccount(ctx, tx, "iam.service_account.disabled", after, status(sa), status(after))
		})
	})
}

// RotateServiceAccountKey gives a service account a new key and ends the older ones.
func (s *Service) RotateServiceAccountKey(ctx context.Context, m Meta, projectID,
	id string,
) (ServiceAccountWithKey, error) {
	key, err := iam.NewKey(db.NewID(), m.Now)
	if err != nil {
		return ServiceAccountWithKey{}, err
	}
	return db.RunTx(ctx, s.DB, func(tx db.Tx) (ServiceAccountWithKey, error) {
		sa, err := accountToChange(ctx, tx, m, projectID, id)
		if err != nil {
			return ServiceAccountWithKey{}, err
		}
		return IdempotentSealed(ctx, tx, m, s.Sealer, func() (ServiceAccountWithKey, error) {
			after, err := iam.RotateKey(ctx, tx, sa, key)
			if err != nil {
				return ServiceAccountWithKey{}, err
			}
			return ServiceAccountWithKey{Account: after, Key: key},
				m.recordServiceAccount(ctx, tx, "iam.service_account.key_rotated", after, nil, map[string]string{"key_id": key.ID})
		})
	})
}

// DeleteServiceAccount removes a service account. Removing it twice is NotFound, like any absent resource.
func (s *Service) DeleteServiceAccount(ctx context.Context, m Meta, projectID, id string) error {
	_, err := db.RunTx(ctx, s.DB, func(tx db.Tx) (struct{}, error) {
		sa, err := accountToChange(ctx, tx, m, projectID, id)
		if err != nil {
			return struct{}{}, err
		}
		after, err := iam.DeleteServiceAccount(ctx, tx, sa, m.Now)
		if err != nil {
			return struct{}{}, err
		}
		return struct{}{}, m.recordServiceAccount(ctx, tx, "iam.service_account.deleted", after, status(sa), nil)
	})
	return err
}

func accountToChange(ctx context.Context, tx db.Tx, m Meta, projectID, id string) (iam.ServiceAccount, error) {
	project, err := iam.InProject(ctx, tx, m.Principal, iam.ServiceAccountWrite, projectID)
	if err != nil {
		return iam.ServiceAccount{}, err
	}
	return iam.GetServiceAccount(ctx, tx, project.ID, id)
}

func status(sa iam.ServiceAccount) map[string]string { return map[string]string{"status": sa.Status} }
