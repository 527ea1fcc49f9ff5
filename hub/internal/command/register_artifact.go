package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/change"
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

// RegisterArtifact records a pushed digest, as the registry has it, and judges its signatures.
func (s *Service) RegisterArtifact(ctx context.Context, m Meta, in RegisterArtifactInput) (artifact.Artifact, error) {
	if err := onlyOCI(in.ArtifactKind); err != nil {
		return artifact.Artifact{}, err
	}
	if in.Channel == "" {
		in.Channel = "dev"
	}
	check := in.repositoryOf(m)
	target, err := db.ReadTx(ctx, s.DB, func(tx db.Tx) (repository, error) { return check(ctx, tx) })
	if err != nil {
		return artifact.Artifact{}, err
	}
	// Before the transaction: reading the registry may take longer than rows should be held.
	image, err := s.Registry.Inspect(ctx, target.name, in.Digest)
	if err != nil {
		return artifact.Artifact{}, err
	}
	if in.MediaType != "" && in.MediaType != image.MediaType {
		return artifact.Artifact{}, fault.New(fault.Unprocessable, artifact.CodeUnsupported,
			"The pushed manifest has another media type.", nil).
			WithHint("/media_type", "is not that of the digest", image.MediaType).Permanent()
	}
	id := db.NewID()
	return once(ctx, s, m, check, func(tx db.Tx, target repository) (artifact.Artifact, error) {
		keys, err := signersOf(ctx, tx, target.name, s.Bundle(), m)
		if err != nil {
			return artifact.Artifact{}, err
		}
		a := artifact.Artifact{
			ID:           id,
			OrgID:        target.project.OrgID,
			ProjectID:    target.project.ID,
			AppSlug:      in.AppSlug,
			AppVersion:   in.AppVersion,
			ArtifactName: in.ArtifactName,
			ArtifactKind: artifact.KindOCI,
			Repository:   target.name,
			Digest:       in.Digest,
			MediaType:    image.MediaType,
			SizeBytes:    image.SizeBytes,
			Platforms:    image.Platforms,
			Channel:      in.Channel,
			CreatedBy:    m.Principal.Actor(),
		}
		a.TrustState, a.Evidence = artifact.Judge(image, target.name, in.Digest, keys, m.Now)
		before, after, err := artifact.Register(ctx, tx, a, m.Now)
		if err != nil {
			return artifact.Artifact{}, err
		}
		return after, m.recordArtifact(ctx, tx, "apps.artifact.registered", iam.ArtifactPublish, before, after)
	})
}

// repository is where an app's artifact lies, for a project that may push there.
type repository struct {
	project iam.Project
	name    string
}

// repositoryOf finds the project and the repository that the app's artifact has there.
func (in RegisterArtifactInput) repositoryOf(m Meta) access.Check[repository] {
	inProject := access.Project(m.Principal, iam.ArtifactPublish, in.ProjectID)
	return func(ctx context.Context, tx db.Tx) (repository, error) {
		project, err := inProject(ctx, tx)
		if err != nil {
			return repository{}, err
		}
		app, err := catalog.GetApp(ctx, tx, in.AppSlug)
		if err != nil && !fault.Is(err, fault.NotFound) {
			return repository{}, err
		}
		orgSlug := project.OrgSlug
		switch {
		case err == nil && app.OrgID == "" && m.Principal.PlatformAdmin:
			orgSlug = ""
		case err != nil || app.OrgID != project.OrgID:
			return repository{}, fault.New(fault.Unprocessable, fault.CodeReferenceUnknown, "Ask for a publish intent for this "+
				"app first.", nil).
				WithField("/app_slug", "is no app of this org").Permanent()
		}
		name := artifact.Repository(orgSlug, in.AppSlug, in.ArtifactName)
		if in.Repository != "" && in.Repository != name {
			return repository{}, fault.New(fault.Unprocessable, codeRepositoryWrong, "The artifact lies in another "+
				"repository.", nil).
				WithHint("/repository", "is not the repository of this app's artifact", name).Permanent()
		}
		return repository{project, name}, nil
	}
}

func (m Meta) recordArtifact(ctx context.Context, tx db.Tx, eventType, action string, before *artifact.Artifact,
	after artifact.Artifact,
) error {
	entry := change.Entry{
		Event:        eventType,
		Action:       action,
		ResourceType: resourceArtifact,
		ResourceID:   after.ID,
		Version:      after.ResourceVersion,
		OrgID:        after.OrgID,
		ProjectID:    after.ProjectID,
		Data:         artifactState(after),
		After:        artifactState(after),
	}
	if before != nil {
		entry.Before = artifactState(*before)
	}
	return change.Record(ctx, tx, m.by(), entry)
}

func artifactState(a artifact.Artifact) map[string]any {
	return map[string]any{
		"app_slug":      a.AppSlug,
		"app_version":   a.AppVersion,
		"artifact_name": a.ArtifactName,
		"repository":    a.Repository,
		"digest":        a.Digest,
		"status":        a.Status,
		"trust_state":   a.TrustState,
	}
}
