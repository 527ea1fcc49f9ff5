// Package quota compares what an org holds with the org's limits. Package iam owns the limits; the slices count what is
// held.
package quota

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

// Usage counts what an org holds, but for the bytes in the registry, which the registry counts itself.
func Usage(ctx context.Context, tx db.Tx, orgID string, now time.Time) (iam.Limits, error) {
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
	if err != nil {
		return nil, err
	}
	used[iam.QuotaVolumeBytes], err = capacity.VolumeBytesOfOrg(ctx, tx, orgID)
	return used, err
}

// CheckVolume refuses a volume or a snapshot of so many bytes beyond the org's quota.
func CheckVolume(ctx context.Context, tx db.Tx, orgID string, bytes int64) error {
	limits, err := iam.LimitsOf(ctx, tx, orgID)
	if err != nil {
		return err
	}
	held, err := capacity.VolumeBytesOfOrg(ctx, tx, orgID)
	if err != nil {
		return err
	}
	return limits.Check(iam.QuotaVolumeBytes, held, bytes)
}

// CheckAllocation compares a new allocation with what the org held before it.
func CheckAllocation(ctx context.Context, tx db.Tx, held capacity.Held, a capacity.Allocation) error {
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

// CheckInstance refuses an instance beyond the org's quota.
func CheckInstance(ctx context.Context, tx db.Tx, orgID string) error {
	var (
		limits iam.Limits
		live   int64
	)
	if err := db.Together(ctx, tx, func(tx db.Tx) (err error) {
		limits, err = iam.LimitsOf(ctx, tx, orgID)
		return err
	}, func(tx db.Tx) (err error) {
		live, err = instance.CountLive(ctx, tx, orgID)
		return err
	}); err != nil {
		return err
	}
	return limits.Check(iam.QuotaInstances, live, 1)
}

// CheckIntent refuses a publish intent beyond the org's quota, and the app slug where the intent has reserved it.
func CheckIntent(ctx context.Context, tx db.Tx, orgID string, reserved bool, now time.Time) error {
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
	intents, err := artifact.CountOpenIntents(ctx, tx, orgID, now)
	if err != nil {
		return err
	}
	return limits.Check(iam.QuotaPublishIntents, intents, 1)
}
