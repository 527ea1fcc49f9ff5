package artifact

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// Get returns one of a project's artifacts.
func Get(ctx context.Context, tx db.Tx, projectID, id string) (Artifact, error) {
	absent := fault.New(fault.NotFound, fault.CodeNotFound, "There is no such artifact.", nil).Permanent()
	if !db.IsID(id) {
		return Artifact{}, absent
	}
	a, err := db.SelectOne(ctx, tx, scanArtifact, `SELECT `+artifactColumns+
		` FROM artifacts WHERE project_id = $1 AND id = $2`, projectID, id)
	if db.IsNoRows(err) {
		err = absent
	}
	return a, err
}

// Retire ends an artifact: no version that names it becomes active any more, and the registry does not keep its
// content for it. The caller has checked that nothing uses it. Retiring a retired artifact changes nothing.
func Retire(ctx context.Context, tx db.Tx, before Artifact, now time.Time) (after Artifact, changed bool, err error) {
	switch before.Status {
	case Retired:
		return before, false, nil
	case Revoked:
		return Artifact{}, false, errRevoked()
	case Registered, Active, Deprecated:
	}
	after = before
	after.Status, after.UpdatedAt, after.ResourceVersion = Retired, now, before.ResourceVersion+1
	return after, true, updateArtifact(ctx, tx, after)
}

// Revoke ends the trust in an artifact's content: in every artifact of its digest in the repository, whichever version
// it is for and whichever project registered it. It returns those that changed; CheckRunnable refuses them.
func Revoke(ctx context.Context, tx db.Tx, a Artifact, now time.Time) ([]Change, error) {
	list, err := db.Select(ctx, tx, scanArtifact, `SELECT `+artifactColumns+
		` FROM artifacts WHERE repository = $1 AND digest = $2 AND status <> $3 ORDER BY id`, a.Repository, a.Digest,
		Revoked)
	if err != nil {
		return nil, err
	}
	var out []Change
	for _, before := range list {
		after := before
		after.Status, after.TrustState, after.UpdatedAt, after.ResourceVersion = Revoked, TrustRevoked, now,
			before.ResourceVersion+1
		if err := updateArtifact(ctx, tx, after); err != nil {
			return nil, err
		}
		out = append(out, Change{Before: before, After: after})
	}
	return out, nil
}

// Registration is what an artifact is registered as: an image for the version of an app.
type Registration struct {
	Ref
	AppVersion string
}

// Withdrawn returns what is retired or revoked: no version may run it any more.
func Withdrawn(ctx context.Context, tx db.Tx) (map[Registration]bool, error) {
	list, err := db.Select(ctx, tx, func(row pgx.CollectableRow) (r Registration, err error) {
		return r, row.Scan(&r.Repository, &r.Digest, &r.AppVersion)
	}, `SELECT repository, digest, app_version FROM artifacts WHERE status IN ('retired', 'revoked')`)
	out := make(map[Registration]bool, len(list))
	for _, r := range list {
		out[r] = true
	}
	return out, err
}
