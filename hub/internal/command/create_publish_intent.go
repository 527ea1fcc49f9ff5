package command

import (
	"context"
	"crypto/ed25519"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/quota"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// CreatedPublishIntent holds the password, which is shown this once.
type CreatedPublishIntent struct {
	Intent             artifact.Intent
	Username, Password string
	// SigningKeyID is the publisher's whose signature counts; empty where none or several may sign.
	SigningKeyID string
}

// CreatePublishIntent makes an intent of a project for an app's version and artifact, and gives credentials for it. It
// reserves the slug where it is new. An empty kind is oci.
func (s *Service) CreatePublishIntent(ctx context.Context, m Meta, in artifact.Intent) (CreatedPublishIntent, error) {
	if err := onlyOCI(in.ArtifactKind); err != nil {
		return CreatedPublishIntent{}, err
	}
	in.ID, in.ArtifactKind, in.CreatedBy = db.NewID(), artifact.KindOCI, m.Principal.Actor()
	check := access.Project(m.Principal, iam.ArtifactPublish, in.ProjectID)
	return onceSealed(ctx, s, m, s.Sealer, check, func(tx db.Tx, project iam.Project) (CreatedPublishIntent, error) {
		orgSlug, reserved, err := publisherOrg(ctx, tx, m, project, in.AppSlug)
		if err != nil {
			return CreatedPublishIntent{}, err
		}
		if err := quota.CheckIntent(ctx, tx, project.OrgID, reserved, m.Now); err != nil {
			return CreatedPublishIntent{}, err
		}
		in.OrgID, in.ProjectID = project.OrgID, project.ID
		in.Repository = artifact.Repository(orgSlug, in.AppSlug, in.ArtifactName)
		intent := artifact.NewIntent(in, m.Now)
		if err := artifact.AddIntent(ctx, tx, intent); err != nil {
			return CreatedPublishIntent{}, err
		}
		out := CreatedPublishIntent{Intent: intent}
		if out.Username, out.Password, err = s.Registry.IntentCredential(intent); err != nil {
			return CreatedPublishIntent{}, err
		}
		keys, err := signersOf(ctx, tx, intent.Repository, s.Bundle(), m)
		if err != nil {
			return CreatedPublishIntent{}, err
		}
		if len(keys) == 1 {
			out.SigningKeyID = keys[0].KeyID
		}
		return out, m.recordIntent(ctx, tx, intent)
	})
}

func (m Meta) recordIntent(ctx context.Context, tx db.Tx, i artifact.Intent) error {
	data := map[string]any{
		"app_slug":      i.AppSlug,
		"app_version":   i.AppVersion,
		"artifact_name": i.ArtifactName,
		"repository":    i.Repository,
		"expires_at":    i.ExpiresAt,
	}
	return change.Record(ctx, tx, m.by(), change.Entry{
		Event:        "apps.artifact.publish_requested",
		Action:       iam.ArtifactPublish,
		ResourceType: resourcePublishIntent,
		ResourceID:   i.ID,
		OrgID:        i.OrgID,
		ProjectID:    i.ProjectID,
		Data:         data,
		After:        data,
	})
}

func onlyOCI(kind string) error {
	if kind == "" || kind == artifact.KindOCI {
		return nil
	}
	return fault.New(fault.Unprocessable, artifact.CodeUnsupported, "Only OCI artifacts are served so far.",
		nil).WithField("/artifact_kind", "must be oci").Permanent()
}

// publisherOrg reserves the slug for the project's org and returns the org's slug; empty for an app of the platform,
// for which only a platform admin publishes.
func publisherOrg(ctx context.Context, tx db.Tx, m Meta, project iam.Project,
	appSlug string,
) (orgSlug string, reserved bool, err error) {
	app, err := catalog.GetApp(ctx, tx, appSlug)
	if err != nil && !fault.Is(err, fault.NotFound) {
		return "", false, err
	}
	if err == nil && app.OrgID == "" && m.Principal.PlatformAdmin {
		return "", false, nil
	}
	_, reserved, err = catalog.Reserve(ctx, tx, appSlug, project.OrgID, m.Now)
	return project.OrgSlug, reserved, err
}

// signersOf lists the keys whose signature under an image of the repository counts now.
func signersOf(ctx context.Context, tx db.Tx, repository string, b protocol.Bundle,
	m Meta,
) ([]artifact.SignerKey, error) {
	publishers, err := catalog.PublishersOf(ctx, tx, repository, m.Now)
	if err != nil {
		return nil, err
	}
	var out []artifact.SignerKey
	for _, p := range publishers {
		if !b.Revoked(p.KeyID) {
			out = append(out, artifact.SignerKey{KeyID: p.KeyID, Key: ed25519.PublicKey(p.PublicKey)})
		}
	}
	return out, nil
}
