package iam

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// Quota names something of which an org may hold only so much.
type Quota string

// The quotas. Counts are of what exists now; the owner of the rows counts them.
const (
	// QuotaRegistryBytes counts blobs in the org's repositories, each once, and unfinished uploads.
	QuotaRegistryBytes Quota = "registry_bytes"
	QuotaAllocations   Quota = "allocations"
	QuotaCPUCores      Quota = "cpu_cores"
	QuotaAccelerators  Quota = "accelerators"
	QuotaInstances     Quota = "app_instances"
	// QuotaVolumeBytes counts the sizes of the volumes of projects and of their snapshots.
	QuotaVolumeBytes     Quota = "volume_bytes"
	QuotaServiceAccounts Quota = "service_accounts"
	QuotaAppSlugs        Quota = "app_slugs"
	// QuotaPublishIntents counts intents that have not ended.
	QuotaPublishIntents Quota = "publish_intents"
	QuotaUsers          Quota = "users"
	// QuotaUserTokens counts the valid tokens of all users of the org.
	QuotaUserTokens Quota = "user_tokens"
)

// Limits are an org's quotas.
type Limits map[Quota]int64

// DefaultLimits are those of an org for which no admin has set others: beyond what one machine can hold, so that only
// runaway programs and abuse meet them.
func DefaultLimits() Limits {
	return Limits{
		QuotaRegistryBytes:   1 << 40,
		QuotaAllocations:     5000,
		QuotaCPUCores:        100_000,
		QuotaAccelerators:    10_000,
		QuotaInstances:       10_000,
		QuotaVolumeBytes:     1 << 50,
		QuotaServiceAccounts: 5000,
		QuotaAppSlugs:        200,
		QuotaPublishIntents:  1000,
		QuotaUsers:           10_000,
		QuotaUserTokens:      20_000,
	}
}

// QuotaNames lists all quotas in alphabetical order.
func QuotaNames() []Quota {
	return slices.Sorted(maps.Keys(DefaultLimits()))
}

// Check reports as a fault that more does not fit beside what is used.
func (l Limits) Check(name Quota, used, more int64) error {
	if more <= 0 || used+more <= l[name] {
		return nil
	}
	return fault.New(fault.Conflict, fault.CodeQuotaExceeded,
		fmt.Sprintf("The org's quota %s is %d and %d are in use; %d more do not fit. Give some back, or ask a platform "+
			"admin to raise it.",
			name, l[name], used, more), nil).
		WithHint("quota/"+string(name), "is exceeded", fmt.Sprintf("limit %d, in use %d", l[name], used))
}

// LimitsOf returns the org's quotas.
func LimitsOf(ctx context.Context, tx db.Tx, orgID string) (Limits, error) {
	set, err := db.CollectMap[Quota, int64](tx.Query(ctx, `SELECT name, max_value FROM org_quotas WHERE org_id = $1`,
		orgID))
	limits := DefaultLimits()
	maps.Copy(limits, set)
	return limits, err
}

// SetLimits replaces the limits that were set for the org; quotas that are not named get the default. It returns the
// org's new resource version.
func SetLimits(ctx context.Context, tx db.Tx, orgID string, set Limits, now time.Time) (version int64, err error) {
	known := DefaultLimits()
	for name, limit := range set {
		if _, ok := known[name]; !ok || limit < 0 {
			return 0, invalid().WithField("/limits", "names no quota, or a negative limit")
		}
	}
	if _, err := tx.Exec(ctx, `DELETE FROM org_quotas WHERE org_id = $1`, orgID); err != nil {
		return 0, err
	}
	for _, name := range QuotaNames() {
		limit, ok := set[name]
		if !ok {
			continue
		}
		if _, err := tx.Exec(ctx, `INSERT INTO org_quotas (org_id, name, max_value, updated_at) VALUES ($1, $2, $3, $4)`,
			orgID, string(name), limit, now); err != nil {
			return 0, err
		}
	}
	err = tx.QueryRow(ctx, `
		UPDATE orgs SET updated_at = $2, resource_version = resource_version + 1 WHERE id = $1 RETURNING resource_version`,
		orgID, now).Scan(&version)
	return version, absent(err)
}

// Usage is what of this slice an org holds.
func Usage(ctx context.Context, tx db.Tx, orgID string, now time.Time) (Limits, error) {
	var accounts, users, tokens int64
	err := tx.QueryRow(ctx, `
		SELECT (SELECT count(*) FROM service_accounts
		        WHERE org_id = $1 AND deleted_at IS NULL AND app_instance_id IS NULL),
		       (SELECT count(*) FROM users WHERE org_id = $1 AND removed_at IS NULL),
		       (SELECT count(*) FROM user_tokens t JOIN users u ON u.id = t.user_id
		        WHERE u.org_id = $1 AND u.removed_at IS NULL AND t.expires_at > $2 AND t.revoked_at IS NULL
		        AND t.session_id IS NULL)`, orgID, now).
		Scan(&accounts, &users, &tokens)
	return Limits{QuotaServiceAccounts: accounts, QuotaUsers: users, QuotaUserTokens: tokens}, err
}

// CheckQuota reports as a fault that one more user, token or service account does not fit.
func CheckQuota(ctx context.Context, tx db.Tx, orgID string, name Quota, now time.Time) error {
	limits, err := LimitsOf(ctx, tx, orgID)
	if err != nil {
		return err
	}
	used, err := Usage(ctx, tx, orgID, now)
	if err != nil {
		return err
	}
	return limits.Check(name, used[name], 1)
}
