package command

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	// IdempotencyWindow is how long an answer can be asked for again.
	IdempotencyWindow = 24 * time.Hour
	// purgeBatchRows bounds one deleting transaction, so that it never holds up requests for long.
	purgeBatchRows = 1000
)

// Sealer encrypts what may be shown once but has to be replayed: the plain text never reaches the database.
type Sealer interface {
	Seal(plaintext, aad []byte) ([]byte, error)
	Open(sealed, aad []byte) ([]byte, error)
}

// Idempotent runs fn once for each key, route and caller, and gives its result again to whoever asks again. The row is
// written in the caller's transaction, so that effect and memory of it are never apart; a duplicate in flight waits on
// the row's key and then replays. T must survive a round trip through JSON.
func Idempotent[T any](ctx context.Context, tx db.Tx, m Meta, fn func() (T, error)) (T, error) {
	return idempotent(ctx, tx, m, plain{}, fn)
}

// IdempotentSealed is Idempotent for results that hold a secret.
func IdempotentSealed[T any](ctx context.Context, tx db.Tx, m Meta, sealer Sealer, fn func() (T, error)) (T, error) {
	return idempotent(ctx, tx, m, sealer, fn)
}

// PurgeIdempotency forgets answers that are past their window and says how many.
func PurgeIdempotency(ctx context.Context, d *db.DB, now time.Time) (int64, error) {
	var total int64
	for {
		n, err := db.RunTx(ctx, d, func(tx db.Tx) (int64, error) {
			tag, err := tx.Exec(ctx, `DELETE FROM idempotency WHERE (principal_type, principal_id, route, key) IN (
				SELECT principal_type, principal_id, route, key FROM idempotency WHERE created_at < $1 ORDER BY created_at
				LIMIT $2)`,
				now.Add(-IdempotencyWindow), purgeBatchRows)
			return tag.RowsAffected(), err
		})
		total += n
		if err != nil || n < purgeBatchRows {
			return total, err
		}
	}
}

func idempotent[T any](ctx context.Context, tx db.Tx, m Meta, seal Sealer, fn func() (T, error)) (T, error) {
	if m.IdempotencyKey == "" {
		return fn()
	}
	var zero T
	stored, err := claim(ctx, tx, m)
	if err != nil {
		return zero, err
	}
	if stored != nil {
		return replay[T](m, seal, stored)
	}
	failpoint.Hit("hub/command/claimed")
	out, err := fn()
	if err != nil {
		return zero, err
	}
	failpoint.Hit("hub/command/done")
	text, err := json.Marshal(out)
	if err != nil {
		return zero, fmt.Errorf("encode the answer to keep: %w", err)
	}
	if text, err = seal.Seal(text, m.aad()); err != nil {
		return zero, fmt.Errorf("seal the answer to keep: %w", err)
	}
	if err := tx.Queue(ctx, `UPDATE idempotency SET response = $5
		WHERE principal_type = $1 AND principal_id = $2 AND route = $3 AND key = $4`,
		m.Principal.Type, m.Principal.ID, m.Route, m.IdempotencyKey, text); err != nil {
		return zero, err
	}
	failpoint.Hit("hub/command/kept")
	return out, nil
}

// claim takes the key for this transaction and returns nil, or the answer that another one stored under it.
func claim(ctx context.Context, tx db.Tx, m Meta) ([]byte, error) {
	// Taken before any effect: a duplicate in flight waits here for the first one's end instead of working in parallel.
	const insert = `INSERT INTO idempotency (principal_type, principal_id, route, key, body_sha256, created_at)
		VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (principal_type, principal_id, route, key) DO NOTHING`
	args := []any{m.Principal.Type, m.Principal.ID, m.Route, m.IdempotencyKey, m.BodyHash, m.Now}
	tag, err := tx.Exec(ctx, insert, args...)
	if err != nil || tag.RowsAffected() == 1 {
		return nil, err
	}
	var (
		hash, response []byte
		at             time.Time
	)
	err = tx.QueryRow(ctx, `SELECT body_sha256, response, created_at FROM idempotency
		WHERE principal_type = $1 AND principal_id = $2 AND route = $3 AND key = $4`, args[:4]...).Scan(&hash, &response, &at)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, fault.New(fault.Unavailable, db.CodeDatabaseBusy, "The same request is being purged; send it again.",
			err).RetryAfter(time.Second)
	case err != nil:
		return nil, err
	case at.Before(m.Now.Add(-IdempotencyWindow)):
		// Past its window but not yet purged: as if it were not there.
		_, err := tx.Exec(ctx, `UPDATE idempotency SET body_sha256 = $5, response = NULL, created_at = $6
			WHERE principal_type = $1 AND principal_id = $2 AND route = $3 AND key = $4`, args...)
		return nil, err
	case !bytes.Equal(hash, m.BodyHash):
		return nil, fault.New(fault.Unprocessable, codeIdempotencyKeyReused,
			"This X-Idempotency-Key was used for another request; choose a new key for a new effect.", nil).
			WithField("header/X-Idempotency-Key", "was used with another path, query or body").Permanent()
	case response == nil:
		return nil, fmt.Errorf("idempotency row without an answer for route %s", m.Route)
	}
	return response, nil
}

func replay[T any](m Meta, seal Sealer, stored []byte) (T, error) {
	var out, zero T
	text, err := seal.Open(stored, m.aad())
	if err != nil {
		return zero, fmt.Errorf("open the kept answer: %w", err)
	}
	if err := json.Unmarshal(text, &out); err != nil {
		return zero, fmt.Errorf("decode the kept answer: %w", err)
	}
	if m.OnReplay != nil {
		m.OnReplay()
	}
	return out, nil
}

// aad binds a sealed answer to its row: moved to another row, it does not open.
func (m Meta) aad() []byte {
	return []byte(strings.Join([]string{
		"idempotency", string(m.Principal.Type), m.Principal.ID, m.Route,
		m.IdempotencyKey,
	},
		"\x00"))
}

// plain keeps answers that hold no secret.
type plain struct{}

func (plain) Seal(text, _ []byte) ([]byte, error) { return text, nil }
func (plain) Open(text, _ []byte) ([]byte, error) { return text, nil }
