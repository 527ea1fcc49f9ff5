// Package etag reads the version of each resource that a request can change: what its ETag is made of. It changes
// nothing; a slice that changes a resource counts its version on.
package etag

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// Resource names a resource as the contract does.
type Resource struct {
	// Kind is the x-resource of its operations.
	Kind string
	// Param returns a parameter of the path.
	Param func(name string) string
}

// Known reports whether there is such a kind.
func Known(kind string) bool {
	sql, _ := query(kind)
	return sql != ""
}

// Of returns the ETag of a resource; empty for one that there is not.
func Of(ctx context.Context, tx db.Tx, r Resource) (string, error) {
	sql, params := query(r.Kind)
	if sql == "" {
		return "", fmt.Errorf("etag: no resource is of the kind %q", r.Kind)
	}
	args := make([]any, len(params))
	for i, name := range params {
		args[i] = r.Param(name)
	}
	version, err := db.Value[string](ctx, tx, sql, args...)
	if errors.Is(err, pgx.ErrNoRows) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	return From(version), nil
}

// From returns the ETag for a version.
func From(version string) string { return `"` + version + `"` }

// Match reports whether a header If-Match names the ETag; a weak one never does.
func Match(header, current string) bool { return current != "" && names(header, current, "") }

// NoneMatch reports whether a header If-None-Match names the ETag, weak or strong: then the caller has the resource.
func NoneMatch(header, current string) bool { return current != "" && names(header, current, "W/") }

func names(header, current, ignored string) bool {
	for tag := range strings.SplitSeq(header, ",") {
		if tag = strings.TrimSpace(tag); tag == "*" || strings.TrimPrefix(tag, ignored) == current {
			return true
		}
	}
	return false
}

// query returns what reads the version of a kind of resource, and which parameters of the path it takes: also those by
// which access was decided, so that nobody learns of another's resource.
func query(kind string) (sql string, params []string) {
	one := func(name string) []string { return []string{name} }
	switch kind {
	case "allocation":
		return `SELECT resource_version::TEXT FROM allocations WHERE id = $1 AND project_id = $2`,
			[]string{"allocation_id", "project_id"}
	case "operator_ssh_keys", "app_ssh_keys":
		// A set that was never set is empty, and of version 0.
		return `SELECT coalesce(k.resource_version, 0)::TEXT FROM allocations a LEFT JOIN ssh_key_sets k
			ON k.allocation_id = a.id AND k.managed_by = '` + strings.TrimSuffix(kind, "_ssh_keys") + `'
			WHERE a.id = $1 AND a.project_id = $2`, []string{"allocation_id", "project_id"}
	case "app":
		return `SELECT resource_version::TEXT FROM apps WHERE slug = $1`, one("app_slug")
	case "app_slug":
		return `SELECT resource_version::TEXT FROM apps WHERE slug = $1 AND org_id = $2`, []string{"app_slug", "org_id"}
	case "app_instance":
		return `SELECT resource_version::TEXT FROM app_instances WHERE id = $1 AND project_id = $2`,
			[]string{"app_instance_id", "project_id"}
	case "app_version":
		return `SELECT resource_version::TEXT FROM app_versions WHERE app_slug = $1 AND version = $2`,
			[]string{"app_slug", "version"}
	case "artifact":
		return `SELECT resource_version::TEXT FROM artifacts WHERE id = $1 AND project_id = $2`,
			[]string{"artifact_id", "project_id"}
	case "attachment":
		return `SELECT i.resource_version::TEXT FROM instance_attachments a JOIN app_instances i ON i.id = a.instance_id
			WHERE a.id = $1 AND i.id = $2 AND $3 IN (a.owner_project_id, a.project_id)`,
			[]string{"attachment_id", "app_instance_id", "project_id"}
	case "entitlement":
		return `SELECT resource_version::TEXT FROM entitlements WHERE project_id = $1 AND app_slug = $2`,
			[]string{"project_id", "app_slug"}
	case "environment":
		return `SELECT encode(description_sha256, 'hex') FROM environments
			WHERE project_id = $1 AND digest = $2 AND node_id = $3`, []string{"project_id", "digest", "node_id"}
	case "node":
		return `SELECT resource_version::TEXT FROM nodes WHERE id = $1`, one("node_id")
	case "org_quota":
		return `SELECT resource_version::TEXT FROM orgs WHERE id = $1`, one("org_id")
	case "package_index":
		return `SELECT resource_version::TEXT FROM package_indexes WHERE project_id = $1 AND url <> ''`, one("project_id")
	case "sku":
		return `SELECT CASE WHEN retired_at IS NULL THEN 'active' ELSE 'retired' END FROM skus WHERE slug = $1`, one("sku")
	case "task":
		return `SELECT md5(t.updated_at::TEXT || t.state || t.attempt::TEXT || t.phase)
			FROM instance_tasks t JOIN app_instances i ON i.id = t.instance_id
			WHERE t.id = $1 AND i.id = $2 AND i.project_id = $3`, []string{"task_id", "app_instance_id", "project_id"}
	case "volume":
		return `SELECT resource_version::TEXT FROM volumes WHERE id = $1 AND project_id = $2`,
			[]string{"volume_id", "project_id"}
	case "volume_snapshot":
		return `SELECT resource_version::TEXT FROM volume_snapshots WHERE id = $1 AND volume_id = $2`,
			[]string{"snapshot_id", "volume_id"}
	case "webhook":
		return `SELECT resource_version::TEXT FROM webhooks WHERE id = $1 AND org_id = $2`,
			[]string{"webhook_id", "org_id"}
	default:
		return accessQuery(kind)
	}
}

// accessQuery is query for who may do what, and what they prove it with.
func accessQuery(kind string) (sql string, params []string) {
	one := func(name string) []string { return []string{name} }
	switch kind {
	case "access_credential":
		return `SELECT resource_version::TEXT FROM access_credentials WHERE id = $1 AND project_id = $2`,
			[]string{"access_credential_id", "project_id"}
	case "custom_role":
		return `SELECT resource_version::TEXT FROM custom_roles WHERE id = $1 AND org_id = $2`,
			[]string{"role_id", "org_id"}
	case "invitation":
		return `SELECT 'open' FROM invitations WHERE id = $1 AND org_id = $2 AND ended_at IS NULL`,
			[]string{"invitation_id", "org_id"}
	case "project_roles":
		return `SELECT md5(COALESCE(string_agg(role, ',' ORDER BY role), '')) FROM role_bindings
			WHERE scope = $1 AND user_id = $2`, []string{"project_id", "user_id"}
	case "secret":
		return `SELECT resource_version::TEXT FROM runtime_secrets WHERE id = $1 AND project_id = $2`,
			[]string{"secret_id", "project_id"}
	case "service_account":
		return `SELECT resource_version::TEXT FROM service_accounts
			WHERE id = $1 AND project_id = $2 AND deleted_at IS NULL AND app_instance_id IS NULL`,
			[]string{"service_account_id", "project_id"}
	case "session":
		return `SELECT md5(refreshed_at::TEXT) FROM sessions WHERE id = $1 AND revoked_at IS NULL`, one("session_id")
	case "user":
		return `SELECT resource_version::TEXT FROM users WHERE id = $1 AND removed_at IS NULL`, one("user_id")
	case "user_token":
		return `SELECT 'valid' FROM user_tokens WHERE id = $1 AND user_id = $2 AND revoked_at IS NULL`,
			[]string{"token_id", "user_id"}
	case "user_tokens":
		return `SELECT md5(COALESCE(string_agg(id::TEXT, ',' ORDER BY id), '')) FROM user_tokens
			WHERE user_id = $1 AND revoked_at IS NULL`, one("user_id")
	default:
		return "", nil
	}
}
