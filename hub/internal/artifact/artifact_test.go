package artifact_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
)

// TestAVerifiedArtifactStaysVerifiedWhenItsSignatureTagIsOverwritten: every project of the org may push to that tag.
func TestAVerifiedArtifactStaysVerifiedWhenItsSignatureTagIsOverwritten(t *testing.T) {
	d := dbtest.New(t)
	now := time.Unix(1_800_000_000, 0).UTC()
	a := artifact.Artifact{
		ID: db.NewID(), OrgID: db.NewID(), ProjectID: db.NewID(), AppSlug: "demo", AppVersion: "1", Repository: repository,
		Digest:     "sha256:1",
		TrustState: artifact.Verified, Evidence: []artifact.Evidence{{Kind: "signature", KeyID: "k"}},
		CreatedBy: principal.Actor{Type: principal.User, ID: db.NewID()},
	}
	register := func(state artifact.TrustState, evidence ...artifact.Evidence) artifact.Artifact {
		again := a
		again.TrustState, again.Evidence = state, evidence
		after, err := db.RunTx(t.Context(), d, func(tx db.Tx) (artifact.Artifact, error) {
			_, after, err := artifact.Register(t.Context(), tx, again, now)
			return after, err
		})
		require.NoError(t, err)
		return after
	}
	register(artifact.Unverified)
	register(artifact.Verified, a.Evidence...)
	for _, state := range []artifact.TrustState{artifact.Rejected, artifact.Unverified} {
		after := register(state)
		require.Equal(t, artifact.Verified, after.TrustState)
		require.Equal(t, a.Evidence, after.Evidence)
	}
}

func TestRetiredAndRevokedArtifactsAndEndedIntentsAreNoRoots(t *testing.T) {
	d := dbtest.New(t)
	now := time.Unix(1_800_000_000, 0).UTC()
	roots := func(at time.Time) artifact.Roots {
		out, err := db.ReadTx(t.Context(), d, func(tx db.Tx) (artifact.Roots, error) {
			return artifact.RootsOf(t.Context(), tx, at)
		})
		require.NoError(t, err)
		return out
	}
	_, err := db.RunTx(t.Context(), d, func(tx db.Tx) (struct{}, error) {
		for _, status := range []string{"registered", "active", "deprecated", "retired", "revoked"} {
			a := artifact.Artifact{
				ID: db.NewID(), OrgID: db.NewID(), ProjectID: db.NewID(), AppVersion: "1", Repository: repository,
				Digest:    "sha256:" + status,
				CreatedBy: principal.Actor{Type: principal.User, ID: db.NewID()},
			}
			if _, _, err := artifact.Register(t.Context(), tx, a, now); err != nil {
				return struct{}{}, err
			}
			if _, err := tx.Exec(t.Context(), `UPDATE artifacts SET status = $2 WHERE id = $1`, a.ID, status); err != nil {
				return struct{}{}, err
			}
		}
		return struct{}{}, artifact.AddIntent(t.Context(), tx, artifact.NewIntent(artifact.Intent{
			ID: db.NewID(), OrgID: db.NewID(), ProjectID: db.NewID(), Repository: "org/acme/open/runtime",
			CreatedBy: principal.Actor{Type: principal.User, ID: db.NewID()},
		}, now))
	})
	require.NoError(t, err)
	var kept []string
	for _, ref := range roots(now).Images {
		kept = append(kept, ref.Digest)
	}
	require.ElementsMatch(t, []string{"sha256:registered", "sha256:active", "sha256:deprecated"}, kept)
	require.Equal(t, []string{"org/acme/open/runtime"}, roots(now.Add(artifact.IntentLifetime)).Repositories)
	require.Empty(t, roots(now.Add(2*artifact.IntentLifetime)).Repositories)
}
