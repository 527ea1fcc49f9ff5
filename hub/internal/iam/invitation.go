package iam

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	// DefaultInvitationLifetime is that of an invitation whose maker names none.
	DefaultInvitationLifetime = 3 * 24 * time.Hour
	minInvitationLifetime     = time.Minute
	maxInvitationLifetime     = 30 * 24 * time.Hour
	// maxOpenInvitations of an org answer 409 limit_reached when full.
	maxOpenInvitations = 200

	invitationPrefix = "gpuaas_it_"
)

// Invitation lets the owner of an e-mail address become a user of an org, with roles in the whole org.
type Invitation struct {
	ID, OrgID, Email     string
	Roles                []Role
	InvitedBy            string
	CreatedAt, ExpiresAt time.Time
}

// Acceptance is what the invited person chooses.
type Acceptance struct {
	// Token is the invitation's.
	Token, DisplayName, PasswordHash string
	// TOTP is nil without one-time codes.
	TOTP *TOTP
}

const invitationColumns = `i.id, i.org_id, i.email, i.roles, i.invited_by, i.created_at, i.expires_at
	FROM invitations i`

// NewInvitationToken makes the token of an invitation. It is given out once; the database keeps its SHA-256.
func NewInvitationToken() string { return invitationPrefix + randomText() }

// CreateInvitation invites an address into an org that exists, as a member where no role is named. by gives no
// permission that it does not hold there. Open invitations of the same address end; they are returned, too.
func CreateInvitation(ctx context.Context, tx db.Tx, by Principal, i Invitation, token string,
) (made Invitation, ended []Invitation, err error) {
	if i.Email, err = checkEmail(i.Email); err != nil {
		return Invitation{}, nil, err
	}
	if len(i.Roles) == 0 {
		i.Roles = []Role{OrgMember}
	}
	if i.Roles, err = checkRoles(i.Roles, Role.ForUser, orgRoles); err != nil {
		return Invitation{}, nil, err
	}
	if err := checkGrants(ctx, tx, by, i.OrgID, "", i.Roles, nil); err != nil {
		return Invitation{}, nil, err
	}
	if life := i.ExpiresAt.Sub(i.CreatedAt); life < minInvitationLifetime || life > maxInvitationLifetime {
		return Invitation{}, nil, invalid().WithHint("/expires_in_seconds", "is out of range", "60 to 2592000")
	}
	member, err := db.Value[bool](ctx, tx,
		`SELECT EXISTS (SELECT 1 FROM users WHERE email = $1 AND org_id = $2)`, i.Email, i.OrgID)
	if err == nil && member {
		err = taken("user", "/email")
	}
	if err != nil {
		return Invitation{}, nil, err
	}
	ended, err = db.Select(ctx, tx, pgx.RowToStructByPos[Invitation], `SELECT `+invitationColumns+`
		WHERE i.org_id = $1 AND i.email = $2 AND i.ended_at IS NULL AND i.expires_at > $3 ORDER BY i.id`,
		i.OrgID, i.Email, i.CreatedAt)
	if err != nil {
		return Invitation{}, nil, err
	}
	if _, err := tx.Exec(ctx, `
		UPDATE invitations SET ended_at = $3 WHERE org_id = $1 AND email = $2 AND ended_at IS NULL`,
		i.OrgID, i.Email, i.CreatedAt); err != nil {
		return Invitation{}, nil, err
	}
	if err := below(ctx, tx, maxOpenInvitations, "open invitations of the org",
		`SELECT count(*) FROM invitations WHERE org_id = $1 AND ended_at IS NULL AND expires_at > $2`, i.OrgID,
		i.CreatedAt); err != nil {
		return Invitation{}, nil, err
	}
	_, err = tx.Exec(ctx, `
		INSERT INTO invitations (id, org_id, email, roles, hash, invited_by, created_at, expires_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8)`,
		i.ID, i.OrgID, i.Email, i.Roles, hashToken(token), i.InvitedBy, i.CreatedAt, i.ExpiresAt)
	return i, ended, err
}

// ListInvitations lists the open invitations of an org.
func ListInvitations(ctx context.Context, tx db.Tx, orgID string, now time.Time, page db.Page) ([]Invitation, error) {
	return selectPage[Invitation](ctx, tx, page, `
		SELECT `+invitationColumns+`
		WHERE i.org_id = $1 AND i.ended_at IS NULL AND i.expires_at > $2 AND ($3::UUID IS NULL OR i.id > $3::UUID)
		ORDER BY i.id LIMIT $4`, orgID, now)
}

// RevokeInvitation ends an open invitation of the org.
func RevokeInvitation(ctx context.Context, tx db.Tx, orgID, id string, now time.Time) (Invitation, error) {
	i, err := selectByID[Invitation](ctx, tx, `SELECT `+invitationColumns+` WHERE i.id = $1 AND i.ended_at IS NULL`, id)
	if err == nil && (i.OrgID != orgID || !i.ExpiresAt.After(now)) {
		err = ErrNotFound()
	}
	if err != nil {
		return Invitation{}, err
	}
	_, err = tx.Exec(ctx, `UPDATE invitations SET ended_at = $2 WHERE id = $1`, i.ID, now)
	return i, err
}

// OpenInvitation finds an invitation by its token. One that was accepted, revoked or expired, or whose maker is no
// active user any more or may not make it now, is Unauthenticated alike.
func OpenInvitation(ctx context.Context, tx db.Tx, token string, now time.Time) (Invitation, error) {
	i, err := openInvitation(ctx, tx, "i.hash", hashToken(token), "", now)
	if db.IsNoRows(err) {
		err = fault.New(fault.Unauthenticated, codeInvitationInvalid, "The invitation does not count: it was accepted or "+
			"revoked, or its time is over. Ask for another one.", nil).Permanent()
	}
	return i, err
}

// openInvitation finds the newest invitation whose column has the value and that counts, of one org where orgID is not
// empty; the error is db.IsNoRows without one.
func openInvitation(ctx context.Context, tx db.Tx, column string, value any, orgID string, now time.Time,
) (Invitation, error) {
	open, err := db.Select(ctx, tx, pgx.RowToStructByPos[Invitation], `
		SELECT `+invitationColumns+` JOIN users u ON u.id = i.invited_by
		WHERE `+column+` = $1 AND i.ended_at IS NULL AND i.expires_at > $2 AND u.disabled_at IS NULL
			AND u.removed_at IS NULL AND ($3::UUID IS NULL OR i.org_id = $3::UUID) ORDER BY i.id DESC`, value, now,
		db.OrNull(orgID))
	if err != nil {
		return Invitation{}, err
	}
	for _, i := range open {
		maker, err := CurrentPrincipal(ctx, tx, principal.Actor{Type: principal.User, ID: i.InvitedBy})
		if err == nil {
			err = Authorize(maker, UserManage, i.OrgID, "")
		}
		if err == nil {
			err = checkGrants(ctx, tx, maker, i.OrgID, "", i.Roles, nil)
		}
		switch {
		case err == nil:
			return i, nil
		case !fault.Is(err, fault.Forbidden) && !fault.Is(err, fault.NotFound):
			return Invitation{}, err
		}
	}
	return Invitation{}, pgx.ErrNoRows
}

// AcceptInvitation makes the user, with a password, and ends the invitation. userID is a fresh id.
func AcceptInvitation(ctx context.Context, tx db.Tx, sealer Sealer, userID string, a Acceptance,
	now time.Time,
) (User, error) {
	i, err := OpenInvitation(ctx, tx, a.Token, now)
	if err != nil {
		return User{}, err
	}
	user, err := CreateUser(ctx, tx, User{
		ID: userID, OrgID: i.OrgID, Email: i.Email, DisplayName: a.DisplayName, Roles: i.Roles, CreatedAt: now,
	})
	if err != nil {
		return User{}, err
	}
	if err := setPassword(ctx, tx, sealer, user.ID, a.PasswordHash, a.TOTP, now); err != nil {
		return User{}, err
	}
	_, err = tx.Exec(ctx, `UPDATE invitations SET ended_at = $2 WHERE id = $1`, i.ID, now)
	return user, err
}
