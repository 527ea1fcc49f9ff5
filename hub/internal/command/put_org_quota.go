package command

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
)

// PutOrgQuota sets what an org may hold. It replaces the limits that were set; quotas that are not named get the
// default.
func (s *Service) PutOrgQuota(ctx context.Context, m Meta, orgID string, set iam.Limits) (iam.Org, error) {
	return db.RunTx(ctx, s.DB, func(tx db.Tx) (iam.Org, error) { return s.putOrgQuota(ctx, tx, m, orgID, set) })
}

func (s *Service) putOrgQuota(ctx context.Context, tx db.Tx, m Meta, orgID string, set iam.Limits) (iam.Org, error) {
	if err := iam.Authorize(m.Principal, iam.QuotaWrite, "", ""); err != nil {
		return iam.Org{}, err
	}
	org, err := iam.GetOrg(ctx, tx, orgID)
	if err != nil {
		return iam.Org{}, err
	}
	before, err := iam.LimitsOf(ctx, tx, org.ID)
	if err != nil {
		return iam.Org{}, err
	}
	version, err := iam.SetLimits(ctx, tx, org.ID, set, m.Now)
	if err != nil {
		return iam.Org{}, err
	}
	after, err := iam.LimitsOf(ctx, tx, org.ID)
	if err != nil {
		return iam.Org{}, err
	}
	return org, m.recordIAM(ctx, tx, iamChange{
		event: "iam.org.quota_changed", action: iam.QuotaWrite, resourceType: resourceOrg, resourceID: org.ID,
		version: version, orgID: org.ID,
		before: before, after: after,
	})
}

// QuotaUsage counts what an org holds, but for the bytes in the registry, which the registry counts itself.
func QuotaUsage(ctx context.Context, tx db.Tx, orgID string, now time.Time) (iam.Limits, error) {
	used, err := iam.Usage(ctx, tx, orgID, now)
	if err != nil {
		return nil, err
	}
	slugs, err := catalog.CountApps(ctx, tx, orgID)
	if err != nil {
		return nil, err
	}
	intents, err := artifact.CountOpenIntents(ctx, tx, orgID, now)
	if err != nil {
		return nil, err
	}
	held, err := capacity.HeldByOrg(ctx, tx, orgID)
	if err != nil {
		return nil, err
	}
	instances, err := instance.CountLive(ctx, tx, orgID)
	used[iam.QuotaAppSlugs], used[iam.QuotaPublishIntents], used[iam.QuotaInstances] = slugs, intents, instances
	used[iam.QuotaAllocations], used[iam.QuotaCPUCores], used[iam.QuotaAccelerators] = held.Allocations, held.CPUCores,
		held.Accelerators
	return used, err
}

// checkAllocationQuota compares a new allocation with what the org held before it.
func checkAllocationQuota(ctx context.Context, tx db.Tx, held capacity.Held, a capacity.Allocation) error {
	limits, err := iam.LimitsOf(ctx, tx, a.OrgID)
	if err != nil {
		return err
	}
	if err := limits.Check(iam.QuotaAllocations, held.Allocations, 1); err != nil {
		return err
	}
	if err := limits.Check(iam.QuotaCPUCores, held.CPUCores, a.CPUCores); err != nil {
		return err
	}
	return limits.Check(iam.QuotaAccelerators, held.Accelerators, int64(a.AcceleratorCount))
}

func checkInstanceQuota(ctx context.Context, tx db.Tx, orgID string) error {
	limits, err := iam.LimitsOf(ctx, tx, orgID)
	if err != nil {
		return err
	}
	live, err := instance.CountLive(ctx, tx, orgID)
	if err != nil {
		return err
	}
	return limits.Check(iam.QuotaInstances, live, 1)
}

// checkIntentQuota is for one more publish intent, and for the app slug where the intent has reserved it.
func checkIntentQuota(ctx context.Context, tx db.Tx, m Meta, orgID string, reserved bool) error {
	limits, err := iam.LimitsOf(ctx, tx, orgID)
	if err != nil {
		return err
	}
	if reserved {
		slugs, err := catalog.CountApps(ctx, tx, orgID)
		if err != nil {
			return err
		}
		if err := limits.Check(iam.QuotaAppSlugs, slugs-1, 1); err != nil {
			return err
		}
	}
	intents, err := artifact.CountOpenIntents(ctx, tx, orgID, m.Now)
	if err != nil {
		return err
	}
	return limits.Check(iam.QuotaPublishIntents, intents, 1)
}
