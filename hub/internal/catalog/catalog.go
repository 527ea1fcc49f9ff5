// Package catalog owns apps, their versions with the publishers' signed manifests, the publishers that the catalog key
// delegated to, and the entitlements of projects. It resolves a request for an app into a version and the effective
// values. It does not own images (artifact) and does not decide whether a caller may ask (iam).
package catalog

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
)

// MaxPage bounds a listing: a page of the API and one more, by which its reader sees that there is another page.
const MaxPage = 201

// Status of a version. An active version can be launched by every project that is entitled to the app, a staged one by
// the org that owns the app and by platform admins, a canary by them and by a share of the other projects.
type Status string

// The statuses, in the order of a version's life.
const (
	Draft      Status = "draft"
	Staged     Status = "staged"
	Canary     Status = "canary"
	Active     Status = "active"
	Deprecated Status = "deprecated"
	Retired    Status = "retired"
)

// next says to which status a version may go. A canary may get another share.
func (s Status) next() []Status {
	switch s {
	case Draft:
		return []Status{Staged, Active, Retired}
	case Staged:
		return []Status{Canary, Active, Retired}
	case Canary:
		return []Status{Staged, Canary, Active, Retired}
	case Active:
		return []Status{Deprecated}
	case Deprecated:
		return []Status{Active, Retired}
	case Retired:
	}
	return nil
}

// App is a catalogue entry.
type App struct {
	Slug string
	// OrgID is the org that owns the app; empty for apps of the platform.
	OrgID          string
	DisplayName    string
	Description    string
	Category       string
	RuntimeBackend string
	// Described is false while the slug is only reserved by a publish intent.
	Described bool
	// LatestVersion is the active version that was published last; empty where none is.
	LatestVersion   string
	ResourceVersion int64
}

// VisibleTo reports whether an org may know of the app.
func (a App) VisibleTo(orgID string) bool { return a.OrgID == "" || a.OrgID == orgID }

// Version is one release of an app.
type Version struct {
	ID      string
	AppSlug string
	Version string
	Status  Status
	// Manifest is the document's content with its defaults.
	Manifest manifest.Manifest `json:"-"`
	// ManifestJSON is the same as JSON.
	ManifestJSON []byte
	// ManifestEnvelope is the protobuf of the envelope that the publisher signed. It and Manifest are left out of an
	// answer that is kept for replays.
	ManifestEnvelope []byte `json:"-"`
	ManifestSHA256   []byte
	PublisherKeyID   string
	// PublisherOrgSlug is that of the delegation; Delegated is false where a catalog key signed directly.
	PublisherOrgSlug string
	Delegated        bool
	// CanaryPercent is the share of projects that may launch a canary; 0 in every other status.
	CanaryPercent int
	// PublishedAt is zero before the first publish.
	PublishedAt     time.Time
	ResourceVersion int64
	CreatedAt       time.Time
	UpdatedAt       time.Time
}

// Publisher is a key that a catalog key let sign for some repositories.
type Publisher struct {
	KeyID              string
	OrgSlug            string
	PublicKey          []byte
	RepositoryPrefixes []string
	IssuedAt           time.Time
	ExpiresAt          time.Time
	DelegationEnvelope []byte
	ResourceVersion    int64
}

// Expired reports whether the delegation has ended.
func (p Publisher) Expired(now time.Time) bool {
	return now.After(p.ExpiresAt)
}

// Policy narrows what a project may do with an app; an empty list leaves the app's own choice.
type Policy struct {
	AllowedOperatingModes     []string `json:"allowed_operating_modes,omitempty"`
	AllowedControlPlaneScopes []string `json:"allowed_control_plane_scopes,omitempty"`
	AllowedVersions           []string `json:"allowed_versions,omitempty"`
	// MaxAccelerators is 0 for no limit.
	MaxAccelerators int `json:"max_accelerators,omitempty"`
}

// Entitlement lets a project launch an app.
type Entitlement struct {
	ProjectID       string
	OrgID           string
	AppSlug         string
	Enabled         bool
	Policy          Policy
	UpdatedAt       time.Time
	UpdatedBy       string
	ResourceVersion int64
}

func notFound() *fault.Error {
	return fault.New(fault.NotFound, fault.CodeNotFound, "There is no such resource.", nil)
}

func orNotFound(err error) error {
	if db.IsNoRows(err) {
		return notFound()
	}
	return err
}

func conflict(code fault.Code, public string) *fault.Error {
	return fault.New(fault.Conflict, code, public, nil).Permanent()
}

func pageOf(limit int) int {
	if limit <= 0 || limit > MaxPage {
		return MaxPage
	}
	return limit
}

func (s Status) mayBecome(next Status) error {
	if slices.Contains(s.next(), next) {
		return nil
	}
	return conflict(CodeVersionStatus, fmt.Sprintf("The version is %s and cannot become %s.", s, next))
}
