// Package idempotency runs an effect once for each key and gives its answer again. It owns the table of answers; the
// effect and its answer are written in one transaction, which the caller opens.
package idempotency

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
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	// Window is how long an answer can be asked for again.
	Window = 24 * time.Hour
	// purgeBatchRows bounds one deleting transaction, so that it never holds up requests for long.
	purgeBatchRows = 1000
)

// Sealer encrypts what may be shown once but has to be replayed: the plain text never reaches the database.
type Sealer interface {
	Seal(plaintext, aad []byte) ([]byte, error)
	Open(sealed, aad []byte) ([]byte, error)
}

// Request names a request that may be sent again.
type Request struct {
	Caller principal.Actor
	// Route is the operation's method and path template: the same key on another route is another request.
	Route string
	// Key is the caller's; empty where the operation takes none, and then the effect is not remembered.
	Key string
	// BodyMAC is the keyed SHA-256 over the concrete path, the query and the body.
	BodyMAC []byte
	Now     time.Time
	// OnReplay is called when the answer is an earlier one; it may be nil.
	OnReplay func()
}

// Purge deletes the answers that are past their window and returns how many.
func Purge(ctx context.Context, d *db.DB, now time.Time) (int64, error) {
	var total int64
	for {
		n, err := db.RunTx(ctx, d, func(tx db.Tx) (int64, error) {
			tag, err := tx.Exec(ctx, `DELETE FROM idempotency WHERE (principal_type, principal_id, route, key) IN (
				SELECT principal_type, principal_id, route, key FROM idempotency WHERE created_at < $1 ORDER BY created_at
				LIMIT $2)`,
				now.Add(-Window), purgeBatchRows)
			return tag.RowsAffected(), err
		})
		total += n
		if err != nil || n < purgeBatchRows {
			return total, err
		}
	}
}

// Do runs fn once for each key, route and caller, and returns its first result for each repetition. A duplicate in
// flight waits for the first one's transaction and then gets its answer. T must survive a round trip through JSON.
func Do[T any](ctx context.Context, tx db.Tx, r Request, seal Sealer, fn func() (T, error)) (T, error) {
	if r.Key == "" {
		return fn()
	}
	var zero T
	stored, err := claim(ctx, tx, r)
	if err != nil {
		return zero, err
	}
	if stored != nil {
		return replay[T](r, seal, stored)
	}
	failpoint.Hit("hub/command/key_claimed")
	out, err := fn()
	if err != nil {
		return zero, err
	}
	failpoint.Hit("hub/command/executed")
	text, err := json.Marshal(out)
	if err != nil {
		return zero, fmt.Errorf("encode the answer to keep: %w", err)
	}
	if text, err = seal.Seal(text, r.aad()); err != nil {
		return zero, fmt.Errorf("seal the answer to keep: %w", err)
	}
	if err := tx.Queue(ctx, `UPDATE idempotency SET response = $5
		WHERE principal_type = $1 AND principal_id = $2 AND route = $3 AND key = $4`,
		r.Caller.Type, r.Caller.ID, r.Route, r.Key, text); err != nil {
		return zero, err
	}
	failpoint.Hit("hub/command/answer_stored")
	return out, nil
}

// Answered reports whether Do has an answer for the request's key, or refuses it for another body: fn will not be
// called, unless the answer is purged meanwhile.
func Answered(ctx context.Context, tx db.Tx, r Request) (bool, error) {
	if r.Key == "" {
		return false, nil
	}
	return db.Value[bool](ctx, tx, `SELECT EXISTS (SELECT 1 FROM idempotency
		WHERE principal_type = $1 AND principal_id = $2 AND route = $3 AND key = $4 AND created_at >= $5)`,
		r.Caller.Type, r.Caller.ID, r.Route, r.Key, r.Now.Add(-Window))
}

// claim inserts the key in this transaction and returns nil, or the answer that an earlier one stored under it.
func claim(ctx context.Context, tx db.Tx, r Request) ([]byte, error) {
	// Inserted before any effect: a duplicate in flight waits here for the first one's end.
	const insert = `INSERT INTO idempotency (principal_type, principal_id, route, key, body_mac, created_at)
		VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (principal_type, principal_id, route, key) DO NOTHING`
	args := []any{r.Caller.Type, r.Caller.ID, r.Route, r.Key, r.BodyMAC, r.Now}
	tag, err := tx.Exec(ctx, insert, args...)
	if err != nil || tag.RowsAffected() == 1 {
		return nil, err
	}
	var (
		hash, response []byte
		at             time.Time
	)
	err = tx.QueryRow(ctx, `SELECT body_mac, response, created_at FROM idempotency
		WHERE principal_type = $1 AND principal_id = $2 AND route = $3 AND key = $4`, args[:4]...).Scan(&hash, &response, &at)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, fault.New(fault.Unavailable, db.CodeDatabaseBusy, "The same request is being purged; send it again.",
			err).RetryAfter(time.Second)
	case err != nil:
		return nil, err
	case at.Before(r.Now.Add(-Window)):
		// Past its window but not yet purged: as if it were not there.
		_, err := tx.Exec(ctx, `UPDATE idempotency SET body_mac = $5, response = NULL, created_at = $6
			WHERE principal_type = $1 AND principal_id = $2 AND route = $3 AND key = $4`, args...)
		return nil, err
	case !bytes.Equal(hash, r.BodyMAC):
		return nil, fault.New(fault.Unprocessable, codeIdempotencyKeyReused,
			"This X-Idempotency-Key was used for another request; choose a new key for a new effect.", nil).
			WithField("header/X-Idempotency-Key", "was used with another path, query or body").Permanent()
	case response == nil:
		return nil, fmt.Errorf("idempotency row without an answer for route %s", r.Route)
	}
	return response, nil
}

func replay[T any](r Request, seal Sealer, stored []byte) (T, error) {
	var out, zero T
	text, err := seal.Open(stored, r.aad())
	if err != nil {
		return zero, fmt.Errorf("open the kept answer: %w", err)
	}
	if err := json.Unmarshal(text, &out); err != nil {
		return zero, fmt.Errorf("decode the kept answer: %w", err)
	}
	if r.OnReplay != nil {
		r.OnReplay()
	}
	return out, nil
}

// aad binds a sealed answer to its row: moved to another row, it does not open.
func (r Request) aad() []byte {
	return []byte(strings.Join([]string{"idempotency", string(r.Caller.Type), r.Caller.ID, r.Route, r.Key},
		"\x00"))
}

// Plain stores answers as they are: those that hold no secret.
type Plain struct{}

// Seal implements Sealer.
func (Plain) Seal(text, _ []byte) ([]byte, error) { return text, nil }

// Open implements Sealer.
func (Plain) Open(text, _ []byte) ([]byte, error) { return text, nil }
