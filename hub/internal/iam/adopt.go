package iam

import (
	"cmp"
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// Adopt makes an org and a project that a restored hub does not know but for which workloads run, or volumes are kept.
// Their names tell the admin why they exist; their members are lost. orgSlug is empty where it is lost, too.
func Adopt(ctx context.Context, tx db.Tx, orgID, orgSlug, projectID string,
	now time.Time,
) (madeOrg, madeProject bool, err error) {
	if _, err := GetOrg(ctx, tx, orgID); err != nil {
		if !fault.Is(err, fault.NotFound) {
			return false, false, err
		}
		orgSlug = cmp.Or(orgSlug, recoveredSlug(orgID))
		org := Org{ID: orgID, Slug: orgSlug, DisplayName: orgSlug, CreatedAt: now}
		if madeOrg, err = insertOrg(ctx, tx, org); err == nil && !madeOrg {
			org.Slug = recoveredSlug(orgID) // another org has taken the name since the restore
			madeOrg, err = insertOrg(ctx, tx, org)
		}
		if err != nil {
			return false, false, err
		}
	}
	if _, err := GetProject(ctx, tx, projectID); err != nil {
		if !fault.Is(err, fault.NotFound) {
			return madeOrg, false, err
		}
		slug := recoveredSlug(projectID)
		madeProject, err = insertProject(ctx, tx, Project{
			ID: projectID, OrgID: orgID, Slug: slug, DisplayName: slug, CreatedAt: now,
		})
		return madeOrg, madeProject, err
	}
	return madeOrg, false, nil
}

func recoveredSlug(id string) string { return "recovered-" + id }
