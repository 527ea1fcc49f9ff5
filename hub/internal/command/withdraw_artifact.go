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
	return s.changeArtifact(ctx, m, projectID, id, "apps.artifact.retired", reason, func(tx db.Tx,
		before artifact.Artifact,
	) (artifact.Artifact, bool, error) {
		after, changed, err := artifact.Retire(ctx, tx, before, m.Now)
		if err == nil && changed {
			err = checkUnused(ctx, tx, before)
		}
		return after, changed, err
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

// checkUnused refuses an artifact that a version names which may be launched, or that app instances have in their
// current revision.
func checkUnused(ctx context.Context, tx db.Tx, a artifact.Artifact) error {
	if err := checkNotOffered(ctx, tx, a); err != nil {
		return err
	}
	used, err := isNamed(ctx, tx, a, instance.EachManifestInUse)
	if err == nil && used {
		err = fault.New(fault.Conflict, codeArtifactInUse, "App instances use the artifact; retire it once they are "+
			"upgraded or decommissioned, or revoke it.", nil).Permanent()
	}
	return err
}

// checkNotOffered refuses an artifact that a version names which may be launched. The version may be another app's:
// Activate and CheckRunnable compare its name alone.
func checkNotOffered(ctx context.Context, tx db.Tx, a artifact.Artifact) error {
	used, err := isNamed(ctx, tx, a, catalog.EachManifestOffered)
	if err == nil && used {
		err = fault.New(fault.Conflict, codeArtifactInUse, "The artifact is of an active version, or of one on the way "+
			"there; a platform admin has to deprecate or retire the version first.", nil).Permanent()
	}
	return err
}

// isNamed reports whether any of the manifests of the artifact's version names it.
func isNamed(ctx context.Context, tx db.Tx, a artifact.Artifact,
	eachManifest func(ctx context.Context, tx db.Tx, version string, each func(envelope []byte)) error,
) (named bool, err error) {
	image := artifact.Ref{Repository: a.Repository, Digest: a.Digest}
	err = eachManifest(ctx, tx, a.AppVersion, func(envelope []byte) {
		named = named || slices.Contains(artifact.RefsIn(envelope), image)
	})
	return named, err
}
