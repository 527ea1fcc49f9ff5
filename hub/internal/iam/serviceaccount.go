package iam

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// States of a service account. A deleted one is not listed any more; its row stays, because events and audit rows name
// it.
const (
	StatusActive   = "active"
	StatusDisabled = "disabled"
)

// KeyAlgorithm is that of every service-account key.
const KeyAlgorithm = "Ed25519"

const maxDescription = 2048

// MaxKeyOverlap is the longest time for which a key stays valid beside the one that replaces it.
const MaxKeyOverlap = 30 * 24 * time.Hour

// ServiceAccount is a program's identity, bound to one project.
type ServiceAccount struct {
	ID, OrgID, ProjectID    string
	Name, Slug, Description string
	Role                    Role
	// CustomPermissions are those of a custom role.
	CustomPermissions []Permission
	Status            string
	// AppInstanceID is the app instance whose account it is; empty for the project's own.
	AppInstanceID string
	// ResourceVersion counts the changes of the account, its making included.
	ResourceVersion int64
	CreatedAt       time.Time
	// Keys are those that are valid, the oldest first. Answers that show the account have them.
	Keys []PublicKey `db:"-"`
}

// PublicKey says of a valid key of a service account what may be known.
type PublicKey struct {
	ID        string
	CreatedAt time.Time
	// ExpiresAt is the end of a key that a newer one has replaced; zero for the newest one.
	ExpiresAt time.Time
}

// Key is a service account's key pair at the moment it is made. The hub keeps the public half only.
type Key struct {
	ID string
	// PrivateKeyPEM is PKCS #8; it exists in the answer that makes it and nowhere else.
	PrivateKeyPEM string
	Public        ed25519.PublicKey
	CreatedAt     time.Time
}

// NewKey makes a key pair.
func NewKey(id string, now time.Time) (Key, error) {
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return Key{}, fmt.Errorf("make service-account key: %w", err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		return Key{}, fmt.Errorf("encode service-account key: %w", err)
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
	return Key{ID: id, PrivateKeyPEM: string(text), Public: public, CreatedAt: now}, nil
}

// CreateServiceAccount makes an active account with its first key.
func CreateServiceAccount(ctx context.Context, tx db.Tx, sa ServiceAccount, key Key) (ServiceAccount, error) {
	if err := checkNames(sa.Slug, sa.Name, "/name"); err != nil {
		return ServiceAccount{}, err
	}
	if len([]rune(sa.Description)) > maxDescription {
		return ServiceAccount{}, invalid().WithHint("/description", "is too long", "at most 2048 characters")
	}
	if sa.Role == "" {
		sa.Role = AppOperator
	}
	var customRoleID string
	switch {
	case sa.Role.IsCustom():
		r, err := GetCustomRole(ctx, tx, sa.OrgID, string(sa.Role))
		if fault.Is(err, fault.NotFound) {
			err = invalid().WithField("/custom_role", "there is no such role in the org")
		}
		if err != nil {
			return ServiceAccount{}, err
		}
		customRoleID, sa.CustomPermissions = r.ID, r.Permissions
	case !sa.Role.ForServiceAccount():
		return ServiceAccount{}, invalid().WithHint("/role", "is no role of a service account",
			"app_operator, app_publisher or viewer")
	}
	sa.Status, sa.ResourceVersion = StatusActive, 1
	if err := below(ctx, tx, maxServiceAccountsPerProject, "service accounts in the project",
		`SELECT count(*) FROM service_accounts
		WHERE project_id = $1 AND deleted_at IS NULL AND app_instance_id IS NULL`, sa.ProjectID); err != nil {
		return ServiceAccount{}, err
	}
	if err := CheckQuota(ctx, tx, sa.OrgID, QuotaServiceAccounts, key.CreatedAt); err != nil {
		return ServiceAccount{}, err
	}
	made, err := affects(tx.Exec(ctx, `
		INSERT INTO service_accounts (id, org_id, project_id, slug, name, description, role, custom_role_id, status,
		                              created_at, updated_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $10)
		ON CONFLICT (project_id, slug) WHERE deleted_at IS NULL AND app_instance_id IS NULL DO NOTHING`,
		sa.ID, sa.OrgID, sa.ProjectID, sa.Slug, sa.Name, sa.Description, string(sa.Role),
		db.OrNull(customRoleID), sa.Status, sa.CreatedAt))
	if err != nil {
		return ServiceAccount{}, err
	}
	if !made {
		return ServiceAccount{}, taken("service account of this project", "/slug")
	}
	sa.Keys = []PublicKey{{ID: key.ID, CreatedAt: key.CreatedAt}}
	return sa, insertKey(ctx, tx, sa.ID, key)
}

// GetServiceAccount finds one of the project's own accounts. Nobody changes those of app instances by hand.
func GetServiceAccount(ctx context.Context, tx db.Tx, projectID, id string) (ServiceAccount, error) {
	sa, err := selectByID[ServiceAccount](ctx, tx, `SELECT `+serviceAccountColumns+
		` FROM service_accounts s WHERE s.id = $1 AND s.deleted_at IS NULL`, id)
	if err == nil && (sa.ProjectID != projectID || sa.AppInstanceID != "") {
		err = ErrNotFound()
	}
	return sa, err
}

// ListServiceAccounts lists the project's own accounts with their keys.
func ListServiceAccounts(ctx context.Context, tx db.Tx, projectID string, now time.Time,
	page db.Page,
) ([]ServiceAccount, error) {
	all, err := selectPage[ServiceAccount](ctx, tx, page, `
		SELECT `+serviceAccountColumns+` FROM service_accounts s
		WHERE s.project_id = $1 AND s.deleted_at IS NULL AND s.app_instance_id IS NULL
		AND ($2::UUID IS NULL OR s.id > $2::UUID)
		ORDER BY s.id LIMIT $3`, projectID)
	if err != nil {
		return nil, err
	}
	return all, readKeys(ctx, tx, all, now)
}

func withKeys(ctx context.Context, tx db.Tx, sa ServiceAccount, now time.Time) (ServiceAccount, error) {
	one := []ServiceAccount{sa}
	err := readKeys(ctx, tx, one, now)
	return one[0], err
}

// DisableServiceAccount stops the account: neither its keys nor tokens already given out count any more. Disabling
// twice is no error.
func DisableServiceAccount(ctx context.Context, tx db.Tx, sa ServiceAccount, now time.Time) (ServiceAccount, error) {
	if sa.Status == StatusDisabled {
		return sa, nil
	}
	sa.Status = StatusDisabled
	if err := revokeKeys(ctx, tx, sa.ID, now); err != nil {
		return sa, err
	}
	return updateServiceAccount(ctx, tx, sa, false, now)
}

// RotateKey gives the account a new key. The newest of the older keys stays valid for the overlap; every other one ends
// at once, with the tokens minted by it. Without an overlap that is all of them: a key may be rotated because it is
// known to others.
func RotateKey(ctx context.Context, tx db.Tx, sa ServiceAccount, key Key,
	overlap time.Duration,
) (ServiceAccount, error) {
	if sa.Status != StatusActive {
		return sa, fault.New(fault.Conflict, codeServiceAccountDisabled, "The service account is disabled.", nil).Permanent()
	}
	if overlap < 0 || overlap > MaxKeyOverlap {
		return sa, invalid().WithField("/overlap_seconds", "must be from 0 to 2592000")
	}
	if err := replaceKeys(ctx, tx, sa.ID, key.CreatedAt, overlap); err != nil {
		return sa, err
	}
	if err := insertKey(ctx, tx, sa.ID, key); err != nil {
		return sa, err
	}
	sa, err := updateServiceAccount(ctx, tx, sa, false, key.CreatedAt)
	if err != nil {
		return sa, err
	}
	return withKeys(ctx, tx, sa, key.CreatedAt)
}

// DeleteServiceAccount removes the account; its slug is free again.
func DeleteServiceAccount(ctx context.Context, tx db.Tx, sa ServiceAccount, now time.Time) (ServiceAccount, error) {
	if err := revokeKeys(ctx, tx, sa.ID, now); err != nil {
		return sa, err
	}
	sa.Status = StatusDisabled
	return updateServiceAccount(ctx, tx, sa, true, now)
}
