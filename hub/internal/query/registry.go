package query

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
)

// RegistryAccess answers the registry's questions about people and intents. It changes nothing.
type RegistryAccess struct {
	DB  *db.DB
	Now func() time.Time
}

// IntentOpen reports as a fault that a publish intent has ended.
func (a *RegistryAccess) IntentOpen(ctx context.Context, intentID string) error {
	_, err := db.ReadTx(ctx, a.DB, func(tx db.Tx) (struct{}, error) {
		return struct{}{}, artifact.CheckIntentOpen(ctx, tx, intentID, a.Now())
	})
	return err
}

// Authenticate finds out whose access token this is.
func (a *RegistryAccess) Authenticate(ctx context.Context, accessToken string) (subject string, err error) {
	p, err := a.principal(ctx, accessToken)
	return string(p.Type) + ":" + p.ID, err
}

// MayPull reports as a fault that the token's owner may not read the repository.
func (a *RegistryAccess) MayPull(ctx context.Context, accessToken, repository string) error {
	p, err := a.principal(ctx, accessToken)
	if err != nil {
		return err
	}
	orgSlug, ok := artifact.OrgSlugOf(repository)
	if !ok {
		return iam.ErrNotFound()
	}
	if orgSlug == "" {
		return iam.Authorize(p, iam.ArtifactRead, "", "")
	}
	org, err := db.ReadTx(ctx, a.DB, func(tx db.Tx) (iam.Org, error) { return iam.GetOrgBySlug(ctx, tx, orgSlug) })
	if err != nil {
		return err
	}
	// Repositories belong to the org; a service account reads them by its role in its own project.
	return iam.Authorize(p, iam.ArtifactRead, org.ID, p.ProjectID)
}

// Quota is how many bytes the org may store in the registry.
func (a *RegistryAccess) Quota(ctx context.Context, orgSlug string) (int64, error) {
	return db.ReadTx(ctx, a.DB, func(tx db.Tx) (int64, error) {
		org, err := iam.GetOrgBySlug(ctx, tx, orgSlug)
		if err != nil {
			return 0, err
		}
		limits, err := iam.LimitsOf(ctx, tx, org.ID)
		return limits[iam.QuotaRegistryBytes], err
	})
}

// Roots are what the registry keeps: artifacts, repositories that may be pushed to, and what the manifests of versions
// and of instances name. A version does not keep what is retired or revoked for it, because it cannot run that; an
// instance keeps all that it names until it is decommissioned. The manifests of instances count, because a restored hub
// may know an instance and not its version.
func (a *RegistryAccess) Roots(ctx context.Context) (artifact.Roots, error) {
	return db.ReadTx(ctx, a.DB, func(tx db.Tx) (artifact.Roots, error) {
		roots, err := artifact.RootsOf(ctx, tx, a.Now())
		if err != nil {
			return artifact.Roots{}, err
		}
		withdrawn, err := artifact.Withdrawn(ctx, tx)
		if err != nil {
			return artifact.Roots{}, err
		}
		if err := catalog.EachManifest(ctx, tx, func(version string, envelope []byte) {
			for _, ref := range artifact.RefsIn(envelope) {
				if !withdrawn[artifact.Registration{Ref: ref, AppVersion: version}] {
					roots.Images = append(roots.Images, ref)
				}
			}
		}); err != nil {
			return artifact.Roots{}, err
		}
		return roots, instance.EachManifest(ctx, tx, func(envelope []byte) {
			roots.Images = append(roots.Images, artifact.RefsIn(envelope)...)
		})
	})
}

func (a *RegistryAccess) principal(ctx context.Context, accessToken string) (iam.Principal, error) {
	return db.Query(ctx, a.DB, func(tx db.Tx) (iam.Principal, error) {
		return iam.Authenticate(ctx, tx, nil, nil, accessToken, a.Now())
	})
}
