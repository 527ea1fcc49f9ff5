package command

import (
	"context"
	"slices"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// RetireArtifact ends an artifact that nothing uses, so that the registry stops keeping its content. Retiring a
// retired artifact changes nothing.
func (s *Service) RetireArtifact(ctx context.Context, m Meta, projectID, id,
	reason string,
) (artifact.Artifact, error) {
	check := access.Project(m.Principal, iam.ArtifactManage, projectID)
	return once(ctx, s, m, check, func(tx db.Tx, project iam.Project) (artifact.Artifact, error) {
		before, err := artifact.Get(ctx, tx, project.ID, id)
		if err != nil {
			return artifact.Artifact{}, err
		}
		after, changed, err := artifact.Retire(ctx, tx, before, m.Now)
		if err != nil || !changed {
			return after, err
		}
		if err := checkUnused(ctx, tx, before); err != nil {
			return artifact.Artifact{}, err
		}
		return after, m.recordArtifact(ctx, tx, "apps.artifact.retired", iam.ArtifactManage, reason, &before, after)
	})
}

// RevokeArtifact ends the trust in an artifact's content, in all artifacts that have it: nothing starts with it any
// more, and what runs goes on. Revoking a revoked artifact changes nothing.
func (s *Service) RevokeArtifact(ctx context.Context, m Meta, projectID, id,
	reason string,
) (artifact.Artifact, error) {
	check := access.Project(m.Principal, iam.ArtifactManage, projectID)
	return once(ctx, s, m, check, func(tx db.Tx, project iam.Project) (artifact.Artifact, error) {
		a, err := artifact.Get(ctx, tx, project.ID, id)
		if err != nil {
			return artifact.Artifact{}, err
		}
		changes, err := artifact.Revoke(ctx, tx, a, m.Now)
		if err != nil {
			return artifact.Artifact{}, err
		}
		for _, c := range changes {
			err := m.recordArtifact(ctx, tx, "apps.artifact.revoked", iam.ArtifactManage, reason, &c.Before, c.After)
			if err != nil {
				return artifact.Artifact{}, err
			}
			if c.After.ID == id {
				a = c.After
			}
		}
		return a, nil
	})
}

// checkUnused refuses an artifact that an active version names, or that app instances have in their current revision.
// The version may be another app's: Activate and CheckRunnable compare its name alone.
func checkUnused(ctx context.Context, tx db.Tx, a artifact.Artifact) error {
	image, used := artifact.Ref{Repository: a.Repository, Digest: a.Digest}, false
	compare := func(manifest []byte) {
		used = used || slices.Contains(artifact.RefsIn(manifest), image)
	}
	if err := catalog.EachManifestOffered(ctx, tx, a.AppVersion, compare); err != nil {
		return err
	}
	if used {
		return fault.New(fault.Conflict, codeArtifactInUse, "The artifact is of an active version; a platform admin has to "+
			"deprecate the version first.", nil).Permanent()
	}
	if err := instance.EachManifestInUse(ctx, tx, a.AppVersion, compare); err != nil {
		return err
	}
	if used {
		return fault.New(fault.Conflict, codeArtifactInUse, "App instances use the artifact; retire it once they are "+
			"upgraded or decommissioned, or revoke it.", nil).Permanent()
	}
	return nil
}
