package webhook

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// DeadLetter is an event that a webhook could not deliver.
type DeadLetter struct {
	EventID, Type, Subject string
	Pos                    int64
	Tries                  int
	LastError              string
	FailedAt               time.Time
	// Replaying says that it waits to be sent once more.
	Replaying bool
}

const letterColumns = `event_id, type, subject, pos, tries, last_error, failed_at, replaying`

// Bury makes an event that failed a dead letter; the webhook goes on with the next one.
func Bury(ctx context.Context, tx db.Tx, webhookID string, d DeadLetter) error {
	if err := tx.Queue(ctx, `
		INSERT INTO webhook_dead_letters (webhook_id, event_id, type, subject, pos, tries, last_error, failed_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT (webhook_id, event_id) DO NOTHING`,
		webhookID, d.EventID, d.Type, d.Subject, d.Pos, d.Tries, d.LastError, d.FailedAt); err != nil {
		return err
	}
	return tx.Queue(ctx, `
		UPDATE webhooks SET pos = GREATEST(pos, $2), tries = 0, next_try_at = NULL,
			failing_since = COALESCE(failing_since, $4), last_error = $3
		WHERE id = $1`, webhookID, d.Pos, d.LastError, d.FailedAt)
}

// DeadLetters lists the dead letters of a webhook, oldest first.
func DeadLetters(ctx context.Context, tx db.Tx, webhookID string, page db.Page) ([]DeadLetter, error) {
	return db.Select(ctx, tx, pgx.RowToStructByPos[DeadLetter], `
		SELECT `+letterColumns+` FROM webhook_dead_letters
		WHERE webhook_id = $1 AND ($2::UUID IS NULL OR event_id > $2::UUID) ORDER BY event_id LIMIT $3`,
		webhookID, db.OrNull(page.After), page.Limit)
}

// Replay marks the dead letters of a webhook, or the one of an event, to be sent once more. It returns how many.
func Replay(ctx context.Context, tx db.Tx, webhookID, eventID string) (int64, error) {
	tx.Enqueue(Queue, webhookID)
	tag, err := tx.Exec(ctx, `
		UPDATE webhook_dead_letters SET replaying = TRUE WHERE webhook_id = $1 AND ($2::UUID IS NULL OR event_id = $2::UUID)`,
		webhookID, db.OrNull(eventID))
	return tag.RowsAffected(), err
}

// Replaying returns the oldest dead letter of a webhook that is to be sent once more; nil where there is none.
func Replaying(ctx context.Context, tx db.Tx, webhookID string) (*DeadLetter, error) {
	found, err := db.Select(ctx, tx, pgx.RowToAddrOfStructByPos[DeadLetter], `
		SELECT `+letterColumns+` FROM webhook_dead_letters WHERE webhook_id = $1 AND replaying ORDER BY pos LIMIT 1`,
		webhookID)
	if err != nil || len(found) == 0 {
		return nil, err
	}
	return found[0], nil
}

// Replayed records how the replay of a dead letter went: it is gone, which is a delivery, or stays with why it failed.
func Replayed(ctx context.Context, tx db.Tx, webhookID, eventID, failure string, now time.Time) error {
	if failure == "" {
		if err := tx.Queue(ctx, `DELETE FROM webhook_dead_letters WHERE webhook_id = $1 AND event_id = $2`, webhookID,
			eventID); err != nil {
			return err
		}
		// Another event may wait for its next try.
		return tx.Queue(ctx, `
			UPDATE webhooks SET failing_since = NULL, delivered_at = $2,
				last_error = CASE WHEN tries = 0 THEN '' ELSE last_error END
			WHERE id = $1`, webhookID, now)
	}
	return tx.Queue(ctx, `
		UPDATE webhook_dead_letters SET replaying = FALSE, tries = tries + 1, last_error = $3, failed_at = $4
		WHERE webhook_id = $1 AND event_id = $2`, webhookID, eventID, failure, now)
}

// DeleteOldDeadLetters deletes a batch of dead letters whose events are no longer kept.
func DeleteOldDeadLetters(ctx context.Context, tx db.Tx, o db.Old[string]) (last string, n int, err error) {
	return db.DeleteOld(ctx, tx, o, `
		SELECT event_id FROM webhook_dead_letters WHERE event_id >= $1 AND event_id < $2 AND failed_at < $3
		ORDER BY event_id LIMIT $4`,
		`DELETE FROM webhook_dead_letters WHERE event_id = ANY($1::UUID[])`)
}
