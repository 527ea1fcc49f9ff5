package artifact_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// A service runs only while each of its images is trusted: its own, and those that it mounts.
func TestLaw01NothingRunsWithAnImageThatIsNoLongerTrusted(t *testing.T) {
	d, now := dbtest.New(t), time.Unix(1_800_000_000, 0).UTC()
	images := map[string]string{"own": db.NewID(), "weights": db.NewID()}
	tx := func(fn func(tx db.Tx) error) error { return db.WriteTx(t.Context(), d, fn) }
	for name, id := range images {
		require.NoError(t, tx(func(tx db.Tx) error {
			_, _, err := artifact.Register(t.Context(), tx, artifact.Artifact{
				ID: id, OrgID: db.NewID(), ProjectID: db.NewID(), AppSlug: "demo", AppVersion: "1",
				Repository: "org/acme/demo/" + name, Digest: "sha256:1", TrustState: artifact.Verified,
				CreatedBy: principal.Actor{Type: principal.User, ID: db.NewID()},
			}, now)
			return err
		}))
	}
	set := func(id, column, value string) {
		require.NoError(t, tx(func(tx db.Tx) error {
			return tx.Queue(t.Context(), `UPDATE artifacts SET `+column+` = $2 WHERE id = $1`, id, value)
		}))
	}
	check := func() error {
		return tx(func(tx db.Tx) error {
			return artifact.CheckRunnable(t.Context(), tx, "1", []*protocol.Service{{
				Name: "main", Image: "org/acme/demo/own@sha256:1",
				ImageMounts: []*protocol.ImageMount{{Image: "org/acme/demo/weights@sha256:1", Path: "/models"}},
			}})
		})
	}
	for _, id := range images {
		require.Equal(t, artifact.CodeNotVerified, fault.As(check()).Code, "none or one of both is active")
		set(id, "status", "active")
	}
	require.NoError(t, check())
	for name, id := range images {
		set(id, "trust_state", "revoked")
		require.Equal(t, artifact.CodeNotVerified, fault.As(check()).Code, name)
		set(id, "trust_state", "verified")
		require.NoError(t, check())
	}
}
