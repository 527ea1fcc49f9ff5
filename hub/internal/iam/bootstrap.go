package iam

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// BootstrapEmail is the name of the first platform admin.
const BootstrapEmail = "admin@localhost"

// BootstrapTokenLifetime is that of a token given out at the hub's own machine.
const BootstrapTokenLifetime = maxTokenLifetime

// Bootstrap makes the first platform admin, with a token of text, unless a platform admin exists. It reports whether it
// did: of two hubs that start at once, one does, and only its token counts.
func Bootstrap(ctx context.Context, tx db.Tx, userID, tokenID, text string, now time.Time) (User, bool, error) {
	if _, found, err := selectFirstAdmin(ctx, tx); err != nil || found {
		return User{}, false, err
	}
	admin, err := CreateUser(ctx, tx, User{
		ID: userID, Email: BootstrapEmail, DisplayName: "Platform admin",
		PlatformAdmin: true, CreatedAt: now,
	})
	if err != nil {
		return User{}, false, err
	}
	err = CreateUserToken(ctx, tx, UserToken{
		ID: tokenID, UserID: admin.ID, Description: "made at the first start",
		CreatedAt: now, ExpiresAt: now.Add(BootstrapTokenLifetime),
	}, text)
	return admin, true, err
}

// SetFirstAdminPassword gives the first platform admin the password with that hash and no one-time codes, and ends the
// admin's logins; tokens stay. It is reachable only for programs that run as the hub's user on its machine.
func SetFirstAdminPassword(ctx context.Context, tx db.Tx, hash string, now time.Time) (User, error) {
	admin, err := firstAdmin(ctx, tx)
	if err != nil {
		return User{}, err
	}
	if err := setPassword(ctx, tx, nil, admin.ID, hash, nil, now); err != nil {
		return User{}, err
	}
	if err := endOtherSessions(ctx, tx, admin.ID, "", now); err != nil {
		return User{}, err
	}
	return updateUser(ctx, tx, admin, now)
}

// RecoverAdmin gives the first platform admin a new token and revokes the older ones, which may have been stolen. It is
// reachable only for programs that run as the hub's user on its machine.
func RecoverAdmin(ctx context.Context, tx db.Tx, tokenID, text string, now time.Time) (User, error) {
	admin, err := firstAdmin(ctx, tx)
	if err != nil {
		return User{}, err
	}
	if _, err := revokeTokens(ctx, tx, admin.ID, now); err != nil {
		return User{}, err
	}
	err = CreateUserToken(ctx, tx, UserToken{
		ID: tokenID, UserID: admin.ID, Description: "made by gpuaas-hub admin-token",
		CreatedAt: now, ExpiresAt: now.Add(BootstrapTokenLifetime),
	}, text)
	return admin, err
}

func firstAdmin(ctx context.Context, tx db.Tx) (User, error) {
	admin, found, err := selectFirstAdmin(ctx, tx)
	if err == nil && !found {
		err = fault.New(fault.NotFound, codeNoPlatformAdmin, "There is no platform admin yet; the hub's first start makes "+
			"one.", nil)
	}
	return admin, err
}

func selectFirstAdmin(ctx context.Context, tx db.Tx) (User, bool, error) {
	id, err := db.Value[string](ctx, tx,
		`SELECT id FROM users WHERE platform_admin AND disabled_at IS NULL ORDER BY created_at, id LIMIT 1`)
	if db.IsNoRows(err) {
		return User{}, false, nil
	}
	if err != nil {
		return User{}, false, err
	}
	u, err := GetUser(ctx, tx, id)
	return u, err == nil, err
}
