package secret

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// WrappingTokenTTL is how long a wrapping token can be used; keepTokens is how long a later use of it
// is recorded as a misuse.
const (
	WrappingTokenTTL = 10 * time.Minute
	keepTokens       = 30 * 24 * time.Hour
)

// WrappingToken delivers a secret once, to who asked for it.
type WrappingToken struct {
	ID, CredentialID string
	Requester        principal.Actor
	Sealed           []byte
	ExpiresAt        time.Time
	UsedAt           time.Time
}

// NewToken makes the text of a wrapping token.
func NewToken() string { return "gpuaas_wrap_" + rand.Text() }

// AAD binds what a wrapping token wraps to it.
func (t WrappingToken) AAD() []byte { return []byte("wrapping_token\x00" + t.ID) }

// CreateToken stores a wrapping token; the database has a hash of its text only.
func CreateToken(ctx context.Context, tx db.Tx, t WrappingToken, text string, now time.Time) error {
	if err := tx.Queue(ctx, `DELETE FROM wrapping_tokens WHERE credential_id = $1 AND expires_at < $2`, t.CredentialID,
		now.Add(-keepTokens)); err != nil {
		return err
	}
	hash := sha256.Sum256([]byte(text))
	return tx.Queue(ctx, `INSERT INTO wrapping_tokens (id, hash, credential_id, requester_type, requester_id, sealed,
		expires_at) VALUES ($1, $2, $3, $4, $5, $6, $7)`, t.ID, hash[:], t.CredentialID, string(t.Requester.Type),
		t.Requester.ID, t.Sealed, t.ExpiresAt)
}

// OfToken returns a wrapping token with its credential.
func OfToken(ctx context.Context, tx db.Tx, text string) (t WrappingToken, c Credential, err error) {
	hash := sha256.Sum256([]byte(text))
	_, err = db.SelectOne(ctx, tx, func(row pgx.CollectableRow) (struct{}, error) {
		return struct{}{}, row.Scan(&t.ID, &t.CredentialID, &t.Requester.Type, &t.Requester.ID, &t.Sealed, &t.ExpiresAt,
			(*zeronull.Timestamptz)(&t.UsedAt), &c.ID, &c.OrgID, &c.ProjectID, &c.Name, &c.PublicKey, &c.Version, &c.Status,
			&c.ResourceVersion, &c.CreatedAt, &c.UpdatedAt)
	}, `SELECT t.id, t.credential_id, t.requester_type, t.requester_id, t.sealed, t.expires_at, t.used_at, `+
		keyColumns+` FROM wrapping_tokens t JOIN access_credentials c ON c.id = t.credential_id
		WHERE t.hash = $1 FOR UPDATE`, hash[:])
	if db.IsNoRows(err) {
		err = ErrTokenInvalid()
	}
	return t, c, err
}

// ErrTokenInvalid is the answer to a guess, and to another principal than the requester.
func ErrTokenInvalid() error {
	return fault.New(fault.NotFound, codeTokenInvalid, "There is no such wrapping token.", nil).Permanent()
}

// PurgeExpired destroys what a batch of wrapping tokens wraps that expired unused. The tokens stay, so that a use is
// recorded as a misuse.
func PurgeExpired(ctx context.Context, tx db.Tx, o db.Old[string]) (last string, n int, err error) {
	return db.DeleteOld(ctx, tx, o,
		`SELECT id FROM wrapping_tokens
		WHERE id >= $1 AND id < $2 AND expires_at <= $3 AND sealed <> '' ORDER BY id LIMIT $4`,
		`UPDATE wrapping_tokens SET sealed = '' WHERE id = ANY($1::UUID[])`)
}

// EndToken uses a wrapping token up.
func EndToken(ctx context.Context, tx db.Tx, id string, now time.Time) error {
	return tx.Queue(ctx, `UPDATE wrapping_tokens SET used_at = $2, sealed = '' WHERE id = $1`, id, now)
}
