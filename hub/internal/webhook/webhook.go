// Package webhook owns the rows of webhooks: where events of an org go, how far each webhook is, and the dead letters
// that it could not deliver. It sends nothing; package delivery does.
package webhook

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"net/netip"
	"net/url"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	// Queue is the work queue of webhooks whose rows a caller has changed.
	Queue = "webhooks.changed"
	// MaxPerOrg bounds the webhooks of an org.
	MaxPerOrg = 20

	// maxPreviousSecrets bounds the secrets that sign beside the present one: each costs a header a signature.
	maxPreviousSecrets = 4

	secretPrefix = "whsec_"
	secretBytes  = 32
)

// Status says whether a webhook sends.
type Status string

// The statuses.
const (
	Active   Status = "active"
	Disabled Status = "disabled"
)

// Reason is why a webhook was disabled.
type Reason string

// The reasons: nothing could be delivered for long, the URL answered 410, the owner may have no webhook any more.
const (
	Failing         Reason = "failing"
	Gone            Reason = "gone"
	OwnerNotAllowed Reason = "owner_not_allowed"
)

// Webhook is where events of an org go.
type Webhook struct {
	ID, OrgID string
	// ProjectID is empty for the events of all projects.
	ProjectID string
	// Owner is who made or enabled it; what the owner may see is sent.
	Owner            principal.Actor
	URL, Description string
	// Types are types of events or what they begin with; empty for all.
	Types          []string
	Status         Status
	DisabledReason Reason
	SealedSecret   []byte
	// Previous are the secrets before, the newest first.
	Previous []PreviousSecret
	// Pos is the position of the last event that the webhook is done with. Tries, NextTryAt and LastError are about the
	// one after it.
	Pos       int64
	Tries     int
	NextTryAt *time.Time
	// FailingSince is the first failure after the last delivery.
	FailingSince *time.Time
	LastError    string
	DeliveredAt  *time.Time

	ResourceVersion      int64
	CreatedAt, UpdatedAt time.Time
}

const columns = `id, org_id, COALESCE(project_id::TEXT, ''), owner_type, owner_id, url, description, types, status,
	disabled_reason, sealed_secret, previous_secrets, pos, tries, next_try_at, failing_since,
	last_error, delivered_at, resource_version, created_at, updated_at`

func scan(row pgx.CollectableRow) (w Webhook, err error) {
	err = row.Scan(&w.ID, &w.OrgID, &w.ProjectID, &w.Owner.Type, &w.Owner.ID, &w.URL, &w.Description, &w.Types, &w.Status,
		&w.DisabledReason, &w.SealedSecret, &w.Previous, &w.Pos, &w.Tries, &w.NextTryAt, &w.FailingSince,
		&w.LastError, &w.DeliveredAt, &w.ResourceVersion, &w.CreatedAt, &w.UpdatedAt)
	return w, err
}

// NewSecret makes the text of a secret, as Standard Webhooks writes it.
func NewSecret() string {
	key := make([]byte, secretBytes)
	_, _ = rand.Read(key) // never fails; it ends the program
	return secretPrefix + base64.StdEncoding.EncodeToString(key)
}

// Key returns the bytes that a secret signs with.
func Key(secret string) ([]byte, error) {
	return base64.StdEncoding.DecodeString(strings.TrimPrefix(secret, secretPrefix))
}

// SecretAAD binds a sealed secret to its webhook.
func SecretAAD(id string) []byte { return []byte("webhook\x00" + id) }

// CheckURL refuses what no webhook can be sent to. The addresses of a name are checked when it is dialled.
func CheckURL(text string, mayDial func(netip.Addr) bool) error {
	refused := func(reason string) error {
		return fault.New(fault.Unprocessable, fault.CodeInvalid, "Events cannot be sent to this URL.", nil).
			WithField("/url", reason).Permanent()
	}
	u, err := url.Parse(text)
	switch {
	case err != nil || u.Scheme != "https" || u.Hostname() == "":
		return refused("must be an https URL")
	case u.User != nil:
		return refused("must not hold credentials")
	case u.Fragment != "":
		return refused("must not have a fragment")
	}
	if ip, err := netip.ParseAddr(u.Hostname()); err == nil && !mayDial(ip) {
		return refused("must be a public address")
	}
	return nil
}

// Create adds a webhook. ID, SealedSecret, Owner, Pos and CreatedAt are set by the caller.
func Create(ctx context.Context, tx db.Tx, w Webhook) (Webhook, error) {
	n, err := db.Value[int](ctx, tx, `SELECT count(*) FROM webhooks WHERE org_id = $1`, w.OrgID)
	if err != nil {
		return Webhook{}, err
	}
	if n >= MaxPerOrg {
		return Webhook{}, fault.New(fault.Conflict, codeTooManyWebhooks,
			"The org has as many webhooks as it may; remove one first.", nil)
	}
	if w.Types == nil {
		w.Types = []string{}
	}
	tx.Enqueue(Queue, w.ID)
	return db.SelectOne(ctx, tx, scan, `
		INSERT INTO webhooks (id, org_id, project_id, owner_type, owner_id, url, description, types, status, sealed_secret,
			pos, created_at, updated_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, 'active', $9, $10, $11, $11) RETURNING `+columns,
		w.ID, w.OrgID, db.OrNull(w.ProjectID), w.Owner.Type, w.Owner.ID, w.URL, w.Description, w.Types, w.SealedSecret,
		w.Pos, w.CreatedAt)
}

// Get finds a webhook of an org.
func Get(ctx context.Context, tx db.Tx, orgID, id string) (Webhook, error) {
	w, err := ByID(ctx, tx, id)
	if err == nil && w.OrgID != orgID {
		return Webhook{}, absent()
	}
	return w, err
}

// ByID finds a webhook.
func ByID(ctx context.Context, tx db.Tx, id string) (Webhook, error) {
	if !db.IsID(id) {
		return Webhook{}, absent()
	}
	w, err := db.SelectOne(ctx, tx, scan, `SELECT `+columns+` FROM webhooks WHERE id = $1`, id)
	if db.IsNoRows(err) {
		return Webhook{}, absent()
	}
	return w, err
}

func absent() error {
	return fault.New(fault.NotFound, fault.CodeNotFound, "There is no such resource.", nil)
}

// List lists the webhooks of an org.
func List(ctx context.Context, tx db.Tx, orgID string, page db.Page) ([]Webhook, error) {
	return db.Select(ctx, tx, scan, `
		SELECT `+columns+` FROM webhooks WHERE org_id = $1 AND ($2::UUID IS NULL OR id > $2::UUID) ORDER BY id LIMIT $3`,
		orgID, db.OrNull(page.After), page.Limit)
}

// ActiveIDs lists all webhooks that send.
func ActiveIDs(ctx context.Context, tx db.Tx) ([]string, error) {
	return db.Select(ctx, tx, pgx.RowTo[string], `SELECT id::TEXT FROM webhooks WHERE status = 'active' ORDER BY id`)
}

// Delete removes a webhook with its dead letters.
func Delete(ctx context.Context, tx db.Tx, id string) error {
	if err := tx.Queue(ctx, `DELETE FROM webhook_dead_letters WHERE webhook_id = $1`, id); err != nil {
		return err
	}
	tx.Enqueue(Queue, id)
	return tx.Queue(ctx, `DELETE FROM webhooks WHERE id = $1`, id)
}

// Enable lets a disabled webhook send again, for a new owner, from where it stopped.
func Enable(ctx context.Context, tx db.Tx, w Webhook, owner principal.Actor, now time.Time) (Webhook, error) {
	if w.Status != Disabled {
		return Webhook{}, fault.New(fault.Conflict, codeWebhookActive, "The webhook is not disabled.", nil)
	}
	tx.Enqueue(Queue, w.ID)
	return db.SelectOne(ctx, tx, scan, `
		UPDATE webhooks SET status = 'active', disabled_reason = '', owner_type = $2, owner_id = $3, tries = 0,
			next_try_at = NULL, failing_since = NULL, updated_at = $4, resource_version = resource_version + 1
		WHERE id = $1 RETURNING `+columns, w.ID, owner.Type, owner.ID, now)
}

// Disable stops a webhook.
func Disable(ctx context.Context, tx db.Tx, id string, reason Reason, now time.Time) (Webhook, error) {
	return db.SelectOne(ctx, tx, scan, `
		UPDATE webhooks SET status = 'disabled', disabled_reason = $2, next_try_at = NULL, updated_at = $3,
			resource_version = resource_version + 1
		WHERE id = $1 RETURNING `+columns, id, reason, now)
}

// PreviousSecret signs until its end, beside the present secret.
type PreviousSecret struct {
	Sealed []byte    `json:"sealed"`
	Until  time.Time `json:"until"`
}

// Signing returns the sealed secrets that sign at a time, the present one first.
func (w Webhook) Signing(now time.Time) [][]byte {
	signing := [][]byte{w.SealedSecret}
	for _, p := range w.Previous {
		if now.Before(p.Until) {
			signing = append(signing, p.Sealed)
		}
	}
	return signing
}

// PreviousUntil returns when the last of the secrets before ends; zero without one.
func (w Webhook) PreviousUntil() (last time.Time) {
	for _, p := range w.Previous {
		if p.Until.After(last) {
			last = p.Until
		}
	}
	return last
}

// Rotate gives a webhook another secret. The one before signs as well for the overlap, and those before it until the
// end that they had. Without an overlap all of them end: a secret may be rotated because others know it.
func Rotate(ctx context.Context, tx db.Tx, w Webhook, sealed []byte, overlap time.Duration, now time.Time,
) (Webhook, error) {
	previous := []PreviousSecret{}
	if overlap > 0 {
		previous = append(previous, PreviousSecret{w.SealedSecret, now.Add(overlap)})
		for _, p := range w.Previous {
			if now.Before(p.Until) {
				previous = append(previous, p)
			}
		}
	}
	if len(previous) > maxPreviousSecrets {
		return Webhook{}, fault.New(fault.Unprocessable, fault.CodeInvalid, "The webhook has as many secrets within their "+
			"overlap as it may: wait, or end all of them.", nil).
			WithField("/overlap_seconds", "must be 0 now, which ends all older secrets").Permanent()
	}
	return db.SelectOne(ctx, tx, scan, `
		UPDATE webhooks SET previous_secrets = $3, sealed_secret = $2, updated_at = $4,
			resource_version = resource_version + 1
		WHERE id = $1 RETURNING `+columns, w.ID, sealed, previous, now)
}

// Advance records that a webhook is done with the events up to a position, of which none was taken.
func Advance(ctx context.Context, tx db.Tx, id string, pos int64) error {
	return tx.Queue(ctx, `UPDATE webhooks SET pos = $2, tries = 0, next_try_at = NULL WHERE id = $1 AND pos < $2`, id, pos)
}

// Delivered records that the event at a position was taken.
func Delivered(ctx context.Context, tx db.Tx, id string, pos int64, now time.Time) error {
	return tx.Queue(ctx, `
		UPDATE webhooks SET pos = GREATEST(pos, $2), tries = 0, next_try_at = NULL, failing_since = NULL, last_error = '',
			delivered_at = $3
		WHERE id = $1`, id, pos, now)
}

// Failure is a try that failed.
type Failure struct {
	// Pos is the position of the event.
	Pos       int64
	Reason    string
	NextTryAt time.Time
	At        time.Time
}

// Failed records a failed try of the event that follows the webhook's position from then on.
func Failed(ctx context.Context, tx db.Tx, id string, f Failure) error {
	return tx.Queue(ctx, `
		UPDATE webhooks SET pos = GREATEST(pos, $5 - 1), tries = tries + 1, next_try_at = $3,
			failing_since = COALESCE(failing_since, $4), last_error = $2
		WHERE id = $1`, id, f.Reason, f.NextTryAt, f.At, f.Pos)
}
