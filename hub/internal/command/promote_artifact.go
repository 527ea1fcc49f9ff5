package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// changeOf changes an artifact in a transaction; changed is false where it is as wanted already.
type changeOf func(tx db.Tx, before artifact.Artifact) (after artifact.Artifact, changed bool, err error)

// changeArtifact changes one of a project's artifacts, once, and records it where something changed.
func (s *Service) changeArtifact(ctx context.Context, m Meta, projectID, id, eventType, reason string,
	apply changeOf,
) (artifact.Artifact, error) {
	check := access.Project(m.Principal, iam.ArtifactManage, projectID)
	return once(ctx, s, m, check, func(tx db.Tx, project iam.Project) (artifact.Artifact, error) {
		before, err := artifact.Get(ctx, tx, project.ID, id)
		if err != nil {
			return artifact.Artifact{}, err
		}
		after, changed, err := apply(tx, before)
		if err != nil || !changed {
			return after, err
		}
		return after, m.recordArtifact(ctx, tx, eventType, iam.ArtifactManage, reason, &before, after)
	})
}

// VerifyArtifact reads the signatures of an artifact once more: those that were pushed since, and those of publishers
// who were let in since, count now.
func (s *Service) VerifyArtifact(ctx context.Context, m Meta, projectID, id string) (artifact.Artifact, error) {
	check := access.Project(m.Principal, iam.ArtifactManage, projectID)
	// Before the transaction: reading the registry may take longer than rows should be held.
	a, err := db.ReadTx(ctx, s.DB, func(tx db.Tx) (artifact.Artifact, error) {
		project, err := check(ctx, tx)
		if err != nil {
			return artifact.Artifact{}, err
		}
		return artifact.Get(ctx, tx, project.ID, id)
	})
	if err != nil {
		return artifact.Artifact{}, err
	}
	image, unread := s.Registry.Inspect(ctx, a.Repository, a.Digest)
	return s.changeArtifact(ctx, m, projectID, id, "apps.artifact.verified", "", func(tx db.Tx,
		before artifact.Artifact,
	) (artifact.Artifact, bool, error) {
		if unread != nil {
			return artifact.Artifact{}, false, unread
		}
		keys, err := signersOf(ctx, tx, before.Repository, s.Bundle(), m)
		if err != nil {
			return artifact.Artifact{}, false, err
		}
		trust, evidence := artifact.Judge(image, before.Repository, before.Digest, keys, m.Now)
		return artifact.Judged(ctx, tx, before, trust, evidence, m.Now)
	})
}

// PromoteArtifact moves a verified artifact to a later channel.
func (s *Service) PromoteArtifact(ctx context.Context, m Meta, projectID, id, channel,
	reason string,
) (artifact.Artifact, error) {
	return s.changeArtifact(ctx, m, projectID, id, "apps.artifact.promoted", reason, func(tx db.Tx,
		before artifact.Artifact,
	) (artifact.Artifact, bool, error) {
		return artifact.Promote(ctx, tx, before, channel, m.Now)
	})
}

// DeprecateArtifact closes an artifact for versions that are not launchable yet; what has it goes on.
func (s *Service) DeprecateArtifact(ctx context.Context, m Meta, projectID, id,
	reason string,
) (artifact.Artifact, error) {
	return s.changeArtifact(ctx, m, projectID, id, "apps.artifact.deprecated", reason, func(tx db.Tx,
		before artifact.Artifact,
	) (artifact.Artifact, bool, error) {
		after, changed, err := artifact.Deprecate(ctx, tx, before, m.Now)
		if err == nil && changed {
			err = checkNotOffered(ctx, tx, before)
		}
		return after, changed, err
	})
}
