package artifact

import (
	"context"
	"encoding/json"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

func insertIntent(ctx context.Context, tx db.Tx, i Intent) error {
	_, err := tx.Exec(ctx, `
		INSERT INTO publish_intents (id, org_id, project_id, app_slug, app_version, artifact_name, artifact_kind, channel,
		repository, tag,
		                             created_by_type, created_by_id, created_at, expires_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)`,
		i.ID, i.OrgID, i.ProjectID, i.AppSlug, i.AppVersion, i.ArtifactName, i.ArtifactKind, i.Channel, i.Repository, i.Tag,
		i.CreatedBy.Type, i.CreatedBy.ID, i.CreatedAt, i.ExpiresAt)
	return err
}

func selectIntent(ctx context.Context, tx db.Tx, id string) (Intent, bool, error) {
	var i Intent
	err := tx.QueryRow(ctx, `
		SELECT id, org_id, project_id, app_slug, app_version, artifact_name, artifact_kind, channel, repository, tag,
		       created_by_type, created_by_id, created_at, expires_at
		FROM publish_intents WHERE id = $1`, id).Scan(
		&i.ID, &i.OrgID, &i.ProjectID, &i.AppSlug, &i.AppVersion, &i.ArtifactName, &i.ArtifactKind, &i.Channel, &i.Repository,
		&i.Tag,
		&i.CreatedBy.Type, &i.CreatedBy.ID, &i.CreatedAt, &i.ExpiresAt)
	if db.IsNoRows(err) {
		return Intent{}, false, nil
	}
	return i, err == nil, err
}

func insertArtifact(ctx context.Context, tx db.Tx, a Artifact) error {
	platforms, evidence, err := lists(a)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `
		INSERT INTO artifacts (id, org_id, project_id, app_slug, app_version, artifact_name, artifact_kind, repository,
		digest, media_type, size_bytes,
		                       platforms, status, trust_state, channel, evidence, resource_version, created_by_type,
		                       created_by_id, created_at, updated_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21)`,
		a.ID, a.OrgID, a.ProjectID, a.AppSlug, a.AppVersion, a.ArtifactName, a.ArtifactKind, a.Repository, a.Digest,
		a.MediaType, a.SizeBytes,
		platforms, a.Status, a.TrustState, a.Channel, evidence, a.ResourceVersion, a.CreatedBy.Type, a.CreatedBy.ID,
		a.CreatedAt, a.UpdatedAt)
	return err
}

func updateArtifact(ctx context.Context, tx db.Tx, a Artifact) error {
	platforms, evidence, err := lists(a)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `
		UPDATE artifacts SET artifact_name = $2, media_type = $3, size_bytes = $4, platforms = $5, status = $6, trust_state =
		$7, channel = $8,
		       evidence = $9, resource_version = $10, updated_at = $11
		WHERE id = $1`,
		a.ID, a.ArtifactName, a.MediaType, a.SizeBytes, platforms, a.Status, a.TrustState, a.Channel, evidence,
		a.ResourceVersion, a.UpdatedAt)
	return err
}

func lists(a Artifact) (platforms, evidence json.RawMessage, err error) {
	if platforms, err = json.Marshal(a.Platforms); err != nil {
		return nil, nil, err
	}
	evidence, err = json.Marshal(a.Evidence)
	return platforms, evidence, err
}

const artifactColumns = `id, org_id, project_id, app_slug, app_version, artifact_name, artifact_kind, repository,
	digest, media_type, size_bytes,
	platforms, status, trust_state, channel, evidence, resource_version, created_by_type, created_by_id, created_at,
	updated_at`

func scanArtifact(row pgx.CollectableRow) (Artifact, error) {
	var a Artifact
	var platforms, evidence []byte
	err := row.Scan(&a.ID, &a.OrgID, &a.ProjectID, &a.AppSlug, &a.AppVersion, &a.ArtifactName, &a.ArtifactKind,
		&a.Repository, &a.Digest, &a.MediaType,
		&a.SizeBytes, &platforms, &a.Status, &a.TrustState, &a.Channel, &evidence, &a.ResourceVersion, &a.CreatedBy.Type,
		&a.CreatedBy.ID, &a.CreatedAt, &a.UpdatedAt)
	if err != nil {
		return Artifact{}, err
	}
	if err := json.Unmarshal(platforms, &a.Platforms); err != nil {
		return Artifact{}, err
	}
	return a, json.Unmarshal(evidence, &a.Evidence)
}

func selectOne(ctx context.Context, tx db.Tx, repository, digest, appVersion string) (Artifact, bool, error) {
	rows, err := tx.Query(ctx, `SELECT `+artifactColumns+
		` FROM artifacts WHERE repository = $1 AND digest = $2 AND app_version = $3`,
		repository, digest, appVersion)
	if err != nil {
		return Artifact{}, false, err
	}
	a, err := pgx.CollectExactlyOneRow(rows, scanArtifact)
	if db.IsNoRows(err) {
		return Artifact{}, false, nil
	}
	return a, err == nil, err
}

func selectArtifacts(ctx context.Context, tx db.Tx, f Filter) ([]Artifact, error) {
	var after *string
	if f.After != "" {
		after = &f.After
	}
	rows, err := tx.Query(ctx, `
		SELECT `+artifactColumns+` FROM artifacts
		WHERE project_id = $1 AND ($2 = '' OR app_slug = $2) AND ($3::UUID IS NULL OR id > $3::UUID)
		ORDER BY id LIMIT $4`, f.ProjectID, f.AppSlug, after, f.Limit)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, scanArtifact)
}

func selectOfVersion(ctx context.Context, tx db.Tx, appSlug, appVersion string) ([]Artifact, error) {
	rows, err := tx.Query(ctx, `SELECT `+artifactColumns+
		` FROM artifacts WHERE app_slug = $1 AND app_version = $2 ORDER BY id`, appSlug, appVersion)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, scanArtifact)
}

func countOpenIntents(ctx context.Context, tx db.Tx, orgID string, now time.Time) (n int64, err error) {
	err = tx.QueryRow(ctx, `SELECT count(*) FROM publish_intents WHERE org_id = $1 AND expires_at > $2`, orgID,
		now).Scan(&n)
	return n, err
}

// inUse finds artifacts under the slug, and for open intents of its owner; a slug of the platform has intents of
// any org.
func inUse(ctx context.Context, tx db.Tx, orgID, appSlug string, now time.Time) (used bool, err error) {
	err = tx.QueryRow(ctx, `
		SELECT EXISTS (SELECT 1 FROM artifacts WHERE app_slug = $1)
		    OR EXISTS (SELECT 1 FROM publish_intents WHERE ($2::UUID IS NULL OR org_id = $2::UUID) AND expires_at > $3
		    AND app_slug = $1)`,
		appSlug, nullID(orgID), now).Scan(&used)
	return used, err
}

func nullID(id string) *string {
	if id == "" {
		return nil
	}
	return &id
}

// selectRoots lists what Collect keeps of this slice's rows. A revoked or retired artifact is kept only where a
// manifest names it.
func selectRoots(ctx context.Context, tx db.Tx, openAfter time.Time) (Roots, error) {
	var out Roots
	rows, err := tx.Query(ctx,
		`SELECT DISTINCT repository, digest FROM artifacts WHERE status NOT IN ('retired', 'revoked')`)
	if err != nil {
		return Roots{}, err
	}
	if out.Images, err = pgx.CollectRows(rows, pgx.RowToStructByPos[Ref]); err != nil {
		return Roots{}, err
	}
	if rows, err = tx.Query(ctx, `SELECT DISTINCT repository FROM publish_intents WHERE expires_at > $1`,
		openAfter); err != nil {
		return Roots{}, err
	}
	out.Repositories, err = pgx.CollectRows(rows, pgx.RowTo[string])
	return out, err
}
