package artifact

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// AddIntent stores an intent.
func AddIntent(ctx context.Context, tx db.Tx, i Intent) error {
	_, err := tx.Exec(ctx, `
		INSERT INTO publish_intents (id, org_id, project_id, app_slug, app_version, artifact_name, artifact_kind, channel,
		repository, tag,
		                             created_by_type, created_by_id, created_at, expires_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)`,
		i.ID, i.OrgID, i.ProjectID, i.AppSlug, i.AppVersion, i.ArtifactName, i.ArtifactKind, i.Channel, i.Repository, i.Tag,
		i.CreatedBy.Type, i.CreatedBy.ID, i.CreatedAt, i.ExpiresAt)
	return err
}

func insertArtifact(ctx context.Context, tx db.Tx, a Artifact) error {
	_, err := tx.Exec(ctx, `
		INSERT INTO artifacts (id, org_id, project_id, app_slug, app_version, artifact_name, artifact_kind, repository,
		digest, media_type, size_bytes,
		                       platforms, status, trust_state, channel, evidence, resource_version, created_by_type,
		                       created_by_id, created_at, updated_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21)`,
		a.ID, a.OrgID, a.ProjectID, a.AppSlug, a.AppVersion, a.ArtifactName, a.ArtifactKind, a.Repository, a.Digest,
		a.MediaType, a.SizeBytes, a.Platforms, a.Status, a.TrustState, a.Channel, a.Evidence, a.ResourceVersion,
		a.CreatedBy.Type, a.CreatedBy.ID,
		a.CreatedAt, a.UpdatedAt)
	return err
}

func updateArtifact(ctx context.Context, tx db.Tx, a Artifact) error {
	_, err := tx.Exec(ctx, `
		UPDATE artifacts SET artifact_name = $2, media_type = $3, size_bytes = $4, platforms = $5, status = $6, trust_state =
		$7, channel = $8,
		       evidence = $9, resource_version = $10, updated_at = $11
		WHERE id = $1`,
		a.ID, a.ArtifactName, a.MediaType, a.SizeBytes, a.Platforms, a.Status, a.TrustState, a.Channel, a.Evidence,
		a.ResourceVersion, a.UpdatedAt)
	return err
}

const artifactColumns = `id, org_id, project_id, app_slug, app_version, artifact_name, artifact_kind, repository,
	digest, media_type, size_bytes,
	platforms, status, trust_state, channel, evidence, resource_version, created_by_type, created_by_id, created_at,
	updated_at`

func scanArtifact(row pgx.CollectableRow) (Artifact, error) {
	var a Artifact
	err := row.Scan(&a.ID, &a.OrgID, &a.ProjectID, &a.AppSlug, &a.AppVersion, &a.ArtifactName, &a.ArtifactKind,
		&a.Repository, &a.Digest, &a.MediaType, &a.SizeBytes, &a.Platforms, &a.Status, &a.TrustState, &a.Channel,
		&a.Evidence, &a.ResourceVersion, &a.CreatedBy.Type, &a.CreatedBy.ID, &a.CreatedAt, &a.UpdatedAt)
	return a, err
}

func selectOne(ctx context.Context, tx db.Tx, repository, digest,
	appVersion string,
) (a Artifact, found bool, err error) {
	a, err = db.SelectOne(ctx, tx, scanArtifact, `SELECT `+artifactColumns+
		` FROM artifacts WHERE repository = $1 AND digest = $2 AND app_version = $3`, repository, digest, appVersion)
	if db.IsNoRows(err) {
		return Artifact{}, false, nil
	}
	return a, err == nil, err
}
