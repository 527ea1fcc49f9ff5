package command

import (
	"cmp"
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/idempotency"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// RegisterArtifact records a pushed digest, as the registry has it, and judges its signatures. in names what was
// pushed, with the project; an empty kind is oci, an empty channel dev. A repository and a media type, where given,
// must be those of the digest. A repeated request gets the first answer, whatever the registry still has.
func (s *Service) RegisterArtifact(ctx context.Context, m Meta, in artifact.Artifact) (artifact.Artifact, error) {
	if err := onlyOCI(in.ArtifactKind); err != nil {
		return artifact.Artifact{}, err
	}
	in.ArtifactKind, in.Channel = artifact.KindOCI, cmp.Or(in.Channel, "dev")
	check := repositoryOf(m, in)
	var answered bool
	target, err := db.ReadTx(ctx, s.DB, func(tx db.Tx) (target repository, err error) {
		if target, err = check(ctx, tx); err == nil {
			answered, err = idempotency.Answered(ctx, tx, m.request())
		}
		return target, err
	})
	if err != nil {
		return artifact.Artifact{}, err
	}
	var image artifact.Image
	if !answered {
		// Before the transaction: reading the registry may take longer than rows should be held.
		if image, err = s.inspect(ctx, target, in); err != nil {
			return artifact.Artifact{}, err
		}
	}
	in.ID, in.CreatedBy = db.NewID(), m.Principal.Actor()
	in.MediaType, in.SizeBytes, in.Platforms = image.MediaType, image.SizeBytes, image.Platforms
	return once(ctx, s, m, check, func(tx db.Tx, target repository) (artifact.Artifact, error) {
		if answered {
			return artifact.Artifact{}, fault.New(fault.Unavailable, db.CodeDatabaseBusy, "The same request is being purged; "+
				"send it again.", nil).RetryAfter(time.Second)
		}
		keys, err := signersOf(ctx, tx, target.name, s.Bundle(), m)
		if err != nil {
			return artifact.Artifact{}, err
		}
		a := in
		a.OrgID, a.ProjectID, a.Repository = target.project.OrgID, target.project.ID, target.name
		a.TrustState, a.Evidence = artifact.Judge(image, target.name, in.Digest, keys, m.Now)
		before, after, err := artifact.Register(ctx, tx, a, m.Now)
		if err != nil {
			return artifact.Artifact{}, err
		}
		return after, m.recordArtifact(ctx, tx, "apps.artifact.registered", iam.ArtifactPublish, "", before, after)
	})
}

// inspect reads a pushed digest from the registry, and checks that it has the media type that is given, if one is.
func (s *Service) inspect(ctx context.Context, target repository, in artifact.Artifact) (artifact.Image, error) {
	image, err := s.Registry.Inspect(ctx, target.name, in.Digest)
	if err == nil && in.MediaType != "" && in.MediaType != image.MediaType {
		err = fault.New(fault.Unprocessable, artifact.CodeUnsupported, "The pushed manifest has another media type.", nil).
			WithHint("/media_type", "is not that of the digest", image.MediaType).Permanent()
	}
	return image, err
}

// repository is where an app's artifact lies, for a project that may push there.
type repository struct {
	project iam.Project
	name    string
}

// repositoryOf finds the project and the repository that the app's artifact has there.
func repositoryOf(m Meta, in artifact.Artifact) access.Check[repository] {
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

func (m Meta) recordArtifact(ctx context.Context, tx db.Tx, eventType, action, reason string, before *artifact.Artifact,
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
		Reason:       reason,
		Data:         artifactState(after),
		After:        artifactState(after),
	}
	if before != nil {
		entry.Before = artifactState(*before)
	}
	if reason != "" {
		entry.Data["reason"] = reason
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
