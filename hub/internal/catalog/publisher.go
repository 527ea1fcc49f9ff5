package catalog

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

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
	return p, upsertPublisher(ctx, tx, p, now)
}

// checkPrefixes keeps an org's delegation inside the org and the platform's outside of orgs, whatever was signed.
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

// Publishers lists delegations by key and org; after is the Cursor of the last one seen.
func Publishers(ctx context.Context, tx db.Tx, after string, limit int) ([]Publisher, error) {
	return selectPublishers(ctx, tx, after, pageOf(limit))
}

// Cursor marks p's place in the listing.
func (p Publisher) Cursor() string { return p.KeyID + "." + p.OrgSlug }

// PublishersOf lists who may sign for a repository now.
func PublishersOf(ctx context.Context, tx db.Tx, repository string, now time.Time) ([]Publisher, error) {
	all, err := selectPublishers(ctx, tx, "", maxPublishers)
	if err != nil {
		return nil, err
	}
	var out []Publisher
	for _, p := range all {
		if !p.Expired(now) && covers(p.RepositoryPrefixes, repository) {
			out = append(out, p)
		}
	}
	return out, nil
}

// PublishersWithKey lists a key's delegations: one for each org, or for the platform.
func PublishersWithKey(ctx context.Context, tx db.Tx, keyID string) ([]Publisher, error) {
	return selectPublishersWithKey(ctx, tx, keyID)
}

// maxPublishers bounds how many delegations are read for one repository; more of them means that the search has to
// move into SQL.
const maxPublishers = 10_000

func covers(prefixes []string, repository string) bool {
	for _, p := range prefixes {
		if strings.HasPrefix(repository, p) {
			return true
		}
	}
	return false
}
