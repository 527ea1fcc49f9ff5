// Package artifact owns publish intents, artifacts with their digests and the evidence that makes them trusted, and the
// OCI registry that stores the bytes. Callers pass the keys that may sign for a repository. It does not own apps and
// versions (catalog).
package artifact

import (
	"context"
	"crypto/ed25519"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/imagesign"
	"github.com/gpuaas/gpuaas/pkg/manifest"
)

const (
	// MaxPage bounds a listing: a page of the API and one more, by which its reader sees that there is another page.
	MaxPage = 201
	// IntentLifetime is how long the credentials of a publish intent get tokens.
	IntentLifetime = time.Hour
)

// KindOCI is the only kind of artifact.
const KindOCI = "oci"

// Status of an artifact.
type Status string

// The statuses. Only an active artifact may be named by an active version.
const (
	Registered Status = "registered"
	Active     Status = "active"
	Deprecated Status = "deprecated"
	Retired    Status = "retired"
	Revoked    Status = "revoked"
)

// TrustState says what is known about an artifact's signature.
type TrustState string

// The trust states.
const (
	// Unverified has no signature.
	Unverified TrustState = "unverified"
	// Verified is signed by a publisher who may speak for the repository.
	Verified TrustState = "verified"
	// Rejected has signatures, none of which counts.
	Rejected TrustState = "rejected"
	// TrustRevoked belongs to a digest that was revoked: its content is not trusted any more.
	TrustRevoked TrustState = "revoked"
)

// Intent lets one project push to one repository until it expires.
type Intent struct {
	ID, OrgID, ProjectID string
	AppSlug, AppVersion  string
	ArtifactName         string
	ArtifactKind         string
	Channel              string
	Repository, Tag      string
	CreatedBy            principal.Actor
	CreatedAt, ExpiresAt time.Time
}

// Evidence is one reason to trust an artifact.
type Evidence struct {
	// Kind is signature or provenance.
	Kind string `json:"kind"`
	// KeyID is the publisher's.
	KeyID string `json:"key_id"`
	// Digest is of the signed payload.
	Digest     string    `json:"digest,omitempty"`
	VerifiedAt time.Time `json:"verified_at"`
}

// Artifact is one registered digest.
type Artifact struct {
	ID, OrgID, ProjectID string
	AppSlug, AppVersion  string
	ArtifactName         string
	ArtifactKind         string
	Repository           string
	// Digest is sha256:<hex> of the image's manifest or index.
	Digest    string
	MediaType string
	// SizeBytes counts manifests, configs and layers, each as often as it is named.
	SizeBytes int64
	// Platforms are os/architecture[/variant].
	Platforms       []string
	Status          Status
	TrustState      TrustState
	Channel         string
	Evidence        []Evidence
	ResourceVersion int64
	CreatedBy       principal.Actor
	CreatedAt       time.Time
	UpdatedAt       time.Time
}

// Repository names the repository of an app's artifact; orgSlug is empty for apps of the platform.
func Repository(orgSlug, appSlug, artifactName string) string {
	if orgSlug == "" {
		return "apps/" + appSlug + "/" + artifactName
	}
	return "org/" + orgSlug + "/" + appSlug + "/" + artifactName
}

// OrgSlugOf returns the org that owns a repository; empty for the platform. ok is false for a name that no artifact can
// have.
func OrgSlugOf(repository string) (orgSlug string, ok bool) {
	steps := strings.Split(repository, "/")
	switch {
	case len(steps) == 4 && steps[0] == "org":
		return steps[1], true
	case len(steps) == 3 && steps[0] == "apps":
		return "", true
	}
	return "", false
}

// tagOf returns the tag of a version; a tag cannot contain the plus sign of a version.
func tagOf(version, channel string) string {
	return strings.ReplaceAll(version, "+", "_") + "-" + channel
}

// NewIntent returns an intent without storing it.
func NewIntent(i Intent, now time.Time) Intent {
	i.Tag = tagOf(i.AppVersion, i.Channel)
	i.CreatedAt, i.ExpiresAt = now, now.Add(IntentLifetime)
	return i
}

// CountOpenIntents returns how many intents of the org have not ended.
func CountOpenIntents(ctx context.Context, tx db.Tx, orgID string, now time.Time) (int64, error) {
	return db.Value[int64](ctx, tx, `SELECT count(*) FROM publish_intents WHERE org_id = $1 AND expires_at > $2`, orgID,
		now)
}

// InUse reports whether artifacts of the app exist, or open intents of its owner; orgID is empty for an app of the
// platform, for which any org may have intents.
func InUse(ctx context.Context, tx db.Tx, orgID, appSlug string, now time.Time) (bool, error) {
	return db.Value[bool](ctx, tx, `
		SELECT EXISTS (SELECT 1 FROM artifacts WHERE app_slug = $1)
		    OR EXISTS (SELECT 1 FROM publish_intents WHERE ($2::UUID IS NULL OR org_id = $2::UUID) AND expires_at > $3
		    AND app_slug = $1)`, appSlug, db.OrNull(orgID), now)
}

// CheckIntentOpen reports, as a fault, that an intent does not exist or has ended.
func CheckIntentOpen(ctx context.Context, tx db.Tx, id string, now time.Time) error {
	ended := fault.New(fault.Unauthenticated, CodeIntentEnded, "The publish intent has ended; ask for a new one.",
		nil).Permanent()
	if !db.IsID(id) {
		return ended
	}
	expiresAt, err := db.Value[time.Time](ctx, tx, `SELECT expires_at FROM publish_intents WHERE id = $1`, id)
	if db.IsNoRows(err) || err == nil && now.After(expiresAt) {
		return ended
	}
	return err
}

// SignerKey is the key of a publisher who may sign for the repository.
type SignerKey struct {
	KeyID string
	Key   ed25519.PublicKey
}

// Judge derives an image's trust state from its signatures. signers must not contain revoked keys.
func Judge(img Image, repository, digest string, signers []SignerKey, now time.Time) (TrustState, []Evidence) {
	if len(img.Signatures) == 0 {
		return Unverified, []Evidence{}
	}
	evidence := []Evidence{}
	for _, s := range img.Signatures {
		for _, k := range signers {
			if imagesign.Check(k.Key, s.Payload, s.Signature, repository, digest) != nil {
				continue
			}
			e := Evidence{Kind: "signature", KeyID: k.KeyID, Digest: s.PayloadDigest, VerifiedAt: now}
			if !slices.ContainsFunc(evidence, func(old Evidence) bool { return old.KeyID == e.KeyID }) {
				evidence = append(evidence, e)
			}
		}
	}
	if len(evidence) == 0 {
		return Rejected, evidence
	}
	return Verified, evidence
}

// Register stores an artifact. Registering the same digest for the same version again updates its trust state, so that
// a signature that was pushed late counts; a verified artifact stays verified, and a promoted one promoted. A revoked
// digest is not registered again for any version, a retired one not for the same.
func Register(ctx context.Context, tx db.Tx, a Artifact, now time.Time) (before *Artifact, after Artifact, err error) {
	revoked, err := db.Value[bool](ctx, tx, `SELECT EXISTS (SELECT 1 FROM artifacts
		WHERE repository = $1 AND digest = $2 AND status = $3)`, a.Repository, a.Digest, Revoked)
	if err != nil {
		return nil, Artifact{}, err
	}
	old, found, err := selectOne(ctx, tx, a.Repository, a.Digest, a.AppVersion)
	if err != nil {
		return nil, Artifact{}, err
	}
	a.CreatedAt, a.UpdatedAt, a.Status, a.ResourceVersion = now, now, Registered, 1
	a.Platforms, a.Evidence = append([]string{}, a.Platforms...), append([]Evidence{}, a.Evidence...) // nil is NULL
	switch {
	case found && old.ProjectID != a.ProjectID:
		return nil, Artifact{}, fault.New(fault.Conflict, codeArtifactExists, "Another project has registered this digest "+
			"for this version.", nil).
			WithField("/digest", "is registered already").Permanent()
	case revoked:
		return nil, Artifact{}, errRevoked().WithField("/digest", "was revoked")
	case !found:
		return nil, a, insertArtifact(ctx, tx, a)
	case old.Status == Retired:
		return nil, Artifact{}, fault.New(fault.Conflict, codeArtifactRetired, "This artifact was retired; register the "+
			"digest for another version.", nil).
			WithField("/digest", "was retired for this version").Permanent()
	}
	if old.TrustState == Verified && a.TrustState != Verified {
		// Every project of the org may overwrite the tag with the signatures; that must not undo a verification.
		a.TrustState, a.Evidence = old.TrustState, old.Evidence
	}
	a.Channel = later(old.Channel, a.Channel)
	a.ID, a.CreatedAt, a.CreatedBy, a.Status, a.ResourceVersion = old.ID, old.CreatedAt, old.CreatedBy, old.Status,
		old.ResourceVersion+1
	return &old, a, updateArtifact(ctx, tx, a)
}

func errRevoked() *fault.Error {
	return fault.New(fault.Conflict, codeArtifactRevoked, "This artifact was revoked; push and register another one.",
		nil).Permanent()
}

// Change is an artifact before and after a change.
type Change struct{ Before, After Artifact }

// Activate makes the artifacts of a version's images active, and returns those that changed. Its fault names
// each image that is not verified.
func Activate(ctx context.Context, tx db.Tx, appVersion string, images []manifest.Image,
	now time.Time,
) ([]Change, error) {
	refused := fault.New(fault.Conflict, CodeNotVerified,
		"The version names images that are not registered and verified; push, sign and register them first.", nil).Permanent()
	var out []Change
	for _, image := range images {
		repository, digest := manifest.RepositoryOf(image.Ref), manifest.DigestOf(image.Ref)
		a, found, err := selectOne(ctx, tx, repository, digest, appVersion)
		if err != nil {
			return nil, err
		}
		switch {
		case !found:
			refused = refused.WithField(image.Pointer, "is not registered for this version")
		case a.TrustState != Verified:
			refused = refused.WithField(image.Pointer, "is "+string(a.TrustState))
		case a.Status != Registered && a.Status != Active:
			refused = refused.WithField(image.Pointer, "is "+string(a.Status))
		case a.Status == Registered:
			next := a
			next.Status, next.UpdatedAt, next.ResourceVersion = Active, now, a.ResourceVersion+1
			if err := updateArtifact(ctx, tx, next); err != nil {
				return nil, err
			}
			out = append(out, Change{Before: a, After: next})
		}
	}
	if len(refused.Fields) > 0 {
		return nil, refused
	}
	return out, nil
}

// Filter says which artifacts a listing shows.
type Filter struct {
	ProjectID string
	// AppSlug empty means all apps.
	AppSlug string
	// After is the id of the last artifact of the page before.
	After string
	Limit int
}

// List returns a project's artifacts in the order of their registration.
func List(ctx context.Context, tx db.Tx, f Filter) ([]Artifact, error) {
	if f.After != "" && !db.IsID(f.After) {
		return nil, fault.CursorInvalid()
	}
	if f.Limit <= 0 || f.Limit > MaxPage {
		f.Limit = MaxPage
	}
	return db.Select(ctx, tx, scanArtifact, `
		SELECT `+artifactColumns+` FROM artifacts
		WHERE project_id = $1 AND ($2 = '' OR app_slug = $2) AND ($3::UUID IS NULL OR id > $3::UUID)
		ORDER BY id LIMIT $4`, f.ProjectID, f.AppSlug, db.OrNull(f.After), f.Limit)
}

// OfVersions returns the artifacts of an app's versions, by version, of whichever project.
func OfVersions(ctx context.Context, tx db.Tx, appSlug string, appVersions []string) (map[string][]Artifact, error) {
	list, err := db.Select(ctx, tx, scanArtifact, `SELECT `+artifactColumns+
		` FROM artifacts WHERE app_slug = $1 AND app_version = ANY($2) ORDER BY id`, appSlug, appVersions)
	out := map[string][]Artifact{}
	for _, a := range list {
		out[a.AppVersion] = append(out[a.AppVersion], a)
	}
	return out, err
}
