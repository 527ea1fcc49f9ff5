package fleet

import (
	"bytes"
	"cmp"
	"context"
	"crypto/ed25519"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// defaultSite returns the id of the default site, and creates it with newID at its first use.
func defaultSite(ctx context.Context, tx db.Tx, newID string, now time.Time) (id string, err error) {
	if _, err := tx.Exec(ctx,
		`INSERT INTO sites (id, slug, name, created_at) VALUES ($1, $2, $3, $4) ON CONFLICT (slug) DO NOTHING`,
		newID, DefaultSite, "Default", now); err != nil {
		return "", err
	}
	return db.Value[string](ctx, tx, `SELECT id FROM sites WHERE slug = $1`, DefaultSite)
}

// NewToken is the input of CreateToken.
type NewToken struct {
	ID          string
	Secret      string
	Description string
	CreatedBy   string
	// TTL of 0 means DefaultTokenTTL.
	TTL time.Duration
}

// CreateToken stores a join token for the default site.
func CreateToken(ctx context.Context, tx db.Tx, in NewToken, now time.Time) (JoinToken, error) {
	if in.TTL == 0 {
		in.TTL = DefaultTokenTTL
	}
	if in.TTL < MinTokenTTL || in.TTL > MaxTokenTTL {
		return JoinToken{}, fault.New(fault.Unprocessable, codeExpiryOutOfRange,
			fmt.Sprintf("A join token lives between %s and %s.", MinTokenTTL, MaxTokenTTL), nil).WithField("/expires_in_seconds",
			"out of range")
	}
	// The token's id serves as the id of a new site: ids of different tables are not compared.
	site, err := defaultSite(ctx, tx, in.ID, now)
	if err != nil {
		return JoinToken{}, err
	}
	t := JoinToken{
		ID: in.ID, SiteID: site, Description: in.Description, CreatedBy: in.CreatedBy, CreatedAt: now,
		ExpiresAt: now.Add(in.TTL),
	}
	_, err = tx.Exec(ctx,
		`INSERT INTO join_tokens (id, secret_sha256, site_id, description, created_by, created_at, expires_at)
			VALUES ($1, $2, $3, $4, $5, $6, $7)`,
		t.ID, secretDigest(in.Secret), t.SiteID, t.Description, t.CreatedBy, t.CreatedAt, t.ExpiresAt)
	return t, err
}

//nolint:gosec // G101: names of columns
const tokenColumns = `id, site_id, description, created_by, created_at, expires_at, used_at, COALESCE(node_id::TEXT,
	'')`

func scanToken(row pgx.CollectableRow) (t JoinToken, err error) {
	err = row.Scan(&t.ID, &t.SiteID, &t.Description, &t.CreatedBy, &t.CreatedAt, &t.ExpiresAt,
		(*zeronull.Timestamptz)(&t.UsedAt), &t.NodeID)
	return t, err
}

// ListTokens returns a page of the tokens, in the order of their ids.
func ListTokens(ctx context.Context, tx db.Tx, page db.Page) ([]JoinToken, error) {
	return db.Select(ctx, tx, scanToken, `SELECT `+tokenColumns+` FROM join_tokens WHERE id > $1 ORDER BY id LIMIT $2`,
		cmp.Or(page.After, nilID), page.Limit)
}

// Enrollment is the input of Enroll.
type Enrollment struct {
	// NodeID is used when the node is new.
	NodeID   string
	Secret   string
	Hostname string
	// PublicKey is from a certificate request whose signature was checked.
	PublicKey            ed25519.PublicKey
	CertificateExpiresAt time.Time
}

// Admission is what a join token has done.
type Admission int

// The admissions. Unchanged: the node got a certificate a moment ago; it may have another, and nothing is recorded.
const (
	Unchanged Admission = iota
	Enrolled
	Renewed
)

// Enroll uses a join token. The same token with the same key returns the same node again, so that a lost answer costs
// nothing. That holds after the token's end, too: without its id the node could not even renew.
func Enroll(ctx context.Context, tx db.Tx, in Enrollment, now time.Time) (n Node, did Admission, err error) {
	t, err := db.SelectOne(ctx, tx, scanToken,
		`SELECT `+tokenColumns+` FROM join_tokens WHERE secret_sha256 = $1 FOR UPDATE`, secretDigest(in.Secret))
	if db.IsNoRows(err) || err == nil && t.NodeID == "" && !now.Before(t.ExpiresAt) {
		return Node{}, Unchanged, tokenFault()
	}
	if err != nil {
		return Node{}, Unchanged, err
	}
	if t.NodeID != "" {
		return reenroll(ctx, tx, t.NodeID, in, now)
	}
	known, err := db.Value[bool](ctx, tx, `SELECT EXISTS (SELECT 1 FROM nodes WHERE public_key = $1)`,
		[]byte(in.PublicKey))
	if err != nil {
		return Node{}, Unchanged, err
	}
	if known {
		return Node{}, Unchanged, fault.New(fault.Conflict, codeNodeKeyInUse, "A node with this key is enrolled already: "+
			"renew its certificate, or make a new key.", nil).WithField("/csr_pem", "its key is another node's").Permanent()
	}
	if err := insertNode(ctx, tx, Node{
		ID: in.NodeID, SiteID: t.SiteID, Hostname: in.Hostname, PublicKey: in.PublicKey,
		CertificateExpiresAt: in.CertificateExpiresAt,
	}, now); err != nil {
		return Node{}, Unchanged, err
	}
	if _, err := tx.Exec(ctx, `UPDATE join_tokens SET used_at = $2, node_id = $3 WHERE id = $1`, t.ID, now,
		in.NodeID); err != nil {
		return Node{}, Unchanged, err
	}
	n, err = Get(ctx, tx, in.NodeID)
	return n, Enrolled, err
}

func reenroll(ctx context.Context, tx db.Tx, nodeID string, in Enrollment, now time.Time) (Node, Admission, error) {
	n, err := Get(ctx, tx, nodeID)
	if err != nil {
		return Node{}, Unchanged, err
	}
	if !bytes.Equal(n.PublicKey, in.PublicKey) {
		return Node{}, Unchanged, tokenFault()
	}
	if err := n.admissionError(); err != nil {
		return Node{}, Unchanged, err
	}
	// A token counts for days: each use would leave an event and an audit row.
	if fault.Is(n.CheckRenewalPace(in.CertificateExpiresAt.Sub(now), now), fault.RateLimited) {
		return n, Unchanged, nil
	}
	n, err = CertificateIssued(ctx, tx, nodeID, in.CertificateExpiresAt, now)
	return n, Renewed, err
}
