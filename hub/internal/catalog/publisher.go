package catalog

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/protocol"
)

// AddPublisher stores a verified delegation. A later one for the same key and org replaces it; an earlier one is
// refused, so that a narrowed delegation is not widened again by an old file.
func AddPublisher(ctx context.Context, tx db.Tx, d protocol.Verified[*protocol.Delegation],
	now time.Time,
) (Publisher, error) {
	if !d.OK() {
		return Publisher{}, errors.New("add publisher: the delegation was not verified")
	}
	m := d.Message()
	envelope, err := proto.MarshalOptions{Deterministic: true}.Marshal(d.Envelope())
	if err != nil {
		return Publisher{}, fmt.Errorf("encode the delegation's envelope: %w", err)
	}
	p := Publisher{
		KeyID: m.GetPublisher().GetKeyId(), OrgSlug: m.GetOrgSlug(), PublicKey: m.GetPublisher().GetEd25519(),
		RepositoryPrefixes: m.GetRepositoryPrefixes(), IssuedAt: m.GetIssuedAt().AsTime().Truncate(time.Microsecond),
		DelegationEnvelope: envelope, ResourceVersion: 1,
	}
	if m.GetExpiresAt() == nil {
		return Publisher{}, conflict(CodePublisherInvalid, "The delegation has no end; sign one that expires.").WithField(
			"/delegation", "has no expires_at")
	}
	p.ExpiresAt = m.GetExpiresAt().AsTime().Truncate(time.Microsecond)
	if err := checkPrefixes(p); err != nil {
		return Publisher{}, err
	}
	old, found, err := selectPublisher(ctx, tx, p.KeyID, p.OrgSlug)
	if err != nil {
		return Publisher{}, err
	}
	if found {
		if p.IssuedAt.Before(old.IssuedAt) {
			return Publisher{}, conflict(CodePublisherOlder, "A newer delegation of this publisher is here already.").
				WithField("/delegation", "is older than the one in use")
		}
		p.ResourceVersion = old.ResourceVersion + 1
	}
	_, err = tx.Exec(ctx, `
		INSERT INTO publishers (key_id, org_slug, public_key, repository_prefixes, issued_at, expires_at, delegation_envelope,
		resource_version, created_at, updated_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $9)
		ON CONFLICT (key_id, org_slug) DO UPDATE SET public_key = excluded.public_key, repository_prefixes =
		excluded.repository_prefixes,
			issued_at = excluded.issued_at, expires_at = excluded.expires_at, delegation_envelope = excluded.delegation_envelope,
			resource_version = excluded.resource_version, updated_at = excluded.updated_at`,
		p.KeyID, p.OrgSlug, p.PublicKey, append([]string{}, p.RepositoryPrefixes...), p.IssuedAt, p.ExpiresAt,
		p.DelegationEnvelope,
		p.ResourceVersion, now)
	return p, err
}

// checkPrefixes refuses prefixes outside the org of the delegation, and those of orgs in one of the platform.
func checkPrefixes(p Publisher) error {
	want := "apps/"
	if p.OrgSlug != "" {
		want = "org/" + p.OrgSlug + "/"
	}
	for _, prefix := range p.RepositoryPrefixes {
		if !strings.HasPrefix(prefix, want) {
			return conflict(CodePublisherInvalid, "The delegation names repositories that are not its org's.").
				WithHint("/delegation", "has a repository prefix outside its org", "every prefix starts with "+want)
		}
	}
	return nil
}

// publisherColumns are the fields of Publisher.
const publisherColumns = `key_id, org_slug, public_key, repository_prefixes, issued_at, expires_at, delegation_envelope,
	resource_version`

func selectPublisher(ctx context.Context, tx db.Tx, keyID, orgSlug string) (p Publisher, found bool, err error) {
	p, err = db.SelectOne(ctx, tx, pgx.RowToStructByPos[Publisher], `SELECT `+publisherColumns+
		` FROM publishers WHERE key_id = $1 AND org_slug = $2`, keyID, orgSlug)
	if db.IsNoRows(err) {
		return Publisher{}, false, nil
	}
	return p, err == nil, err
}

// Publishers lists delegations by key and org; after is the Cursor of the last one of the page before.
func Publishers(ctx context.Context, tx db.Tx, page db.Page) ([]Publisher, error) {
	return selectPublishers(ctx, tx, page.After, pageOf(page.Limit))
}

func selectPublishers(ctx context.Context, tx db.Tx, after string, limit int) ([]Publisher, error) {
	keyID, orgSlug, _ := strings.Cut(after, ".")
	return db.Select(ctx, tx, pgx.RowToStructByPos[Publisher], `
		SELECT `+publisherColumns+` FROM publishers WHERE $1 = '' OR (key_id, org_slug) > ($2, $3)
		ORDER BY key_id, org_slug LIMIT $4`, after, keyID, orgSlug, limit)
}

// Cursor is p's position in the listing.
func (p Publisher) Cursor() string { return p.KeyID + "." + p.OrgSlug }

// PublishersOf lists the publishers who may sign for a repository now.
func PublishersOf(ctx context.Context, tx db.Tx, repository string, now time.Time) ([]Publisher, error) {
	all, err := selectPublishers(ctx, tx, "", maxPublishers)
	return slices.DeleteFunc(all, func(p Publisher) bool {
		return p.Expired(now) || !slices.ContainsFunc(p.RepositoryPrefixes, func(prefix string) bool {
			return strings.HasPrefix(repository, prefix)
		})
	}), err
}

// PublishersWithKey lists a key's delegations: one for each org, or for the platform.
func PublishersWithKey(ctx context.Context, tx db.Tx, keyID string) ([]Publisher, error) {
	return db.Select(ctx, tx, pgx.RowToStructByPos[Publisher],
		`SELECT `+publisherColumns+` FROM publishers WHERE key_id = $1 ORDER BY org_slug`, keyID)
}

// maxPublishers bounds how many delegations are read for one repository; more of them means that the search has to
// move into SQL.
const maxPublishers = 10_000
