package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// RegisterArtifactInput names what was pushed.
type RegisterArtifactInput struct {
	ProjectID, AppSlug, AppVersion string
	ArtifactName, ArtifactKind     string
	Digest                         string
	// Repository and MediaType, where given, must be what they are.
	Repository, MediaType string
	// Channel empty means dev.
	Channel string
}

// RegisterArtifact takes note of a pushed digest and judges its signatures. It looks the digest up in the registry and
// keeps what it finds.
func (s *Service) RegisterArtifact(ctx context.Context, m Meta, in RegisterArtifactInput) (artifact.Artifact, error) {
	if err := onlyOCI(in.ArtifactKind); err != nil {
		return artifact.Artifact{}, err
	}
	if in.Channel == "" {
		in.Channel = "dev"
	}
	repository, err := db.ReadTx(ctx, s.DB, func(tx db.Tx) (string, error) {
		_, repository, err := in.resolve(ctx, tx, m)
		return repository, err
	})
	if err != nil {
		return artifact.Artifact{}, err
	}
	// Before the transaction: reading the registry may take longer than rows should be held.
	image, err := s.Registry.Inspect(ctx, repository, in.Digest)
	if err != nil {
		return artifact.Artifact{}, err
	}
	if in.MediaType != "" && in.MediaType != image.MediaType {
		return artifact.Artifact{}, fault.New(fault.Unprocessable, artifact.CodeUnsupported,
			"The pushed manifest has another media type.", nil).
			WithHint("/media_type", "is not that of the digest", image.MediaType).Permanent()
	}
	id := db.NewID()
	return db.RunTx(ctx, s.DB, func(tx db.Tx) (artifact.Artifact, error) {
		project, repository, err := in.resolve(ctx, tx, m)
		if err != nil {
			return artifact.Artifact{}, err
		}
		return Idempotent(ctx, tx, m, func() (artifact.Artifact, error) {
			keys, err := signersOf(ctx, tx, repository, s.Bundle(), m)
			if err != nil {
				return artifact.Artifact{}, err
			}
			a := artifact.Artifact{
				ID: id, OrgID: project.OrgID, ProjectID: project.ID, AppSlug: in.AppSlug, AppVersion: in.AppVersion,
				ArtifactName: in.ArtifactName,
				ArtifactKind: artifact.KindOCI, Repository: repository, Digest: in.Digest, MediaType: image.MediaType,
				SizeBytes: image.SizeBytes,
				Platforms: image.Platforms, Channel: in.Channel, CreatedBy: m.Principal.Actor(),
			}
			a.TrustState, a.Evidence = artifact.Judge(image, repository, in.Digest, keys, m.Now)
			before, after, err := artifact.Register(ctx, tx, a, m.Now)
			if err != nil {
				return artifact.Artifact{}, err
			}
			return after, m.recordArtifact(ctx, tx, "apps.artifact.registered", iam.ArtifactPublish, before, after)
		})
	})
}

// resolve finds the project and the repository that the app's artifact has there.
func (in RegisterArtifactInput) resolve(ctx context.Context, tx db.Tx, m Meta) (iam.Project, string, error) {
	project, err := iam.InProject(ctx, tx, m.Principal, iam.ArtifactPublish, in.ProjectID)
	if err != nil {
		return iam.Project{}, "", err
	}
	app, err := catalog.GetApp(ctx, tx, in.AppSlug)
	if err != nil && !fault.Is(err, fault.NotFound) {
		return iam.Project{}, "", err
	}
	orgSlug := project.OrgSlug
	switch {
	case err == nil && app.OrgID == "" && m.Principal.PlatformAdmin:
		orgSlug = ""
	case err != nil || app.OrgID != project.OrgID:
		return iam.Project{}, "", fault.New(fault.Unprocessable, fault.CodeReferenceUnknown,
			"Ask for a publish intent for this "+
				"app first.", nil).
			WithField("/app_slug", "is no app of this org").Permanent()
	}
	repository := artifact.Repository(orgSlug, in.AppSlug, in.ArtifactName)
	if in.Repository != "" && in.Repository != repository {
		return iam.Project{}, "", fault.New(fault.Unprocessable, codeRepositoryWrong, "The artifact lies in another "+
			"repository.", nil).
			WithHint("/repository", "is not the repository of this app's artifact", repository).Permanent()
	}
	return project, repository, nil
}

func (m Meta) recordArtifact(ctx context.Context, tx db.Tx, eventType, action string, before *artifact.Artifact,
	after artifact.Artifact,
) error {
	told := func(a artifact.Artifact) map[string]any {
		return map[string]any{
			"app_slug": a.AppSlug, "app_version": a.AppVersion, "artifact_name": a.ArtifactName, "repository": a.Repository,
			"digest": a.Digest, "status": a.Status, "trust_state": a.TrustState,
		}
	}
	change := shipChange{
		event: eventType, action: action, resourceType: resourceArtifact, resourceID: after.ID,
		version: after.ResourceVersion,
		orgID:   after.OrgID, projectID: after.ProjectID, data: told(after), after: told(after),
	}
	if before != nil {
		change.before = told(*before)
	}
	return m.recordShipping(ctx, tx, change)
}
