package secret

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// Identity is the service account of an app instance as its member gets it.
type Identity struct {
	MemberID, InstanceID, OrgID, ProjectID, NodeID string
	// RenewAt is when it gets another key.
	RenewAt time.Time
}

// HasIdentity reports whether a member has an identity.
func HasIdentity(ctx context.Context, tx db.Tx, memberID string) (bool, error) {
	return db.Value[bool](ctx, tx, `SELECT EXISTS (SELECT 1 FROM instance_identities WHERE member_id = $1)`, memberID)
}

// IsIdentityDue reports whether a member has an identity that is due.
func IsIdentityDue(ctx context.Context, tx db.Tx, memberID string, now time.Time) (bool, error) {
	return db.Value[bool](ctx, tx, `SELECT EXISTS (SELECT 1 FROM instance_identities
		WHERE member_id = $1 AND renew_at <= $2)`, memberID, now)
}

// PutIdentity stores an identity, sealed to the member's node.
func PutIdentity(ctx context.Context, tx db.Tx, i Identity, sealed []byte) error {
	_, err := tx.Exec(ctx, `INSERT INTO instance_identities (member_id, instance_id, org_id, project_id, node_id, sealed,
			renew_at) VALUES ($1, $2, $3, $4, $5, $6, $7)
		ON CONFLICT (member_id) DO UPDATE SET sealed = excluded.sealed, renew_at = excluded.renew_at`,
		i.MemberID, i.InstanceID, i.OrgID, i.ProjectID, i.NodeID, sealed, i.RenewAt)
	return err
}

// PostponeIdentity lets an identity be renewed later.
func PostponeIdentity(ctx context.Context, tx db.Tx, memberID string, until time.Time) error {
	return tx.Queue(ctx, `UPDATE instance_identities SET renew_at = $2 WHERE member_id = $1`, memberID, until)
}

// RenewIdentities makes all identities due: a restored hub does not know the keys that were issued after its backup.
func RenewIdentities(ctx context.Context, tx db.Tx, now time.Time) error {
	return tx.Queue(ctx, `UPDATE instance_identities SET renew_at = $1 WHERE renew_at > $1`, now)
}

// IdentitiesOn returns the app instances with an identity on a node, sorted.
func IdentitiesOn(ctx context.Context, tx db.Tx, nodeID string) ([]string, error) {
	return db.Select(ctx, tx, pgx.RowTo[string], `SELECT instance_id::TEXT FROM instance_identities
		WHERE node_id = $1 ORDER BY 1`, nodeID)
}

// DueIdentities returns identities that are due, sorted by member, after one.
func DueIdentities(ctx context.Context, tx db.Tx, after string, now time.Time, limit int) ([]Identity, error) {
	return db.Select(ctx, tx, pgx.RowToStructByPos[Identity], `
		SELECT member_id, instance_id, org_id, project_id, node_id, renew_at FROM instance_identities
		WHERE renew_at <= $1 AND ($2::UUID IS NULL OR member_id > $2::UUID) ORDER BY member_id LIMIT $3`,
		now, db.OrNull(after), limit)
}
