package artifact_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// shelf is a database with artifacts of one repository.
type shelf struct {
	*testing.T
	d   *db.DB
	now time.Time
}

func newShelf(t *testing.T) *shelf {
	t.Helper()
	return &shelf{t, dbtest.New(t), time.Unix(1_800_000_000, 0).UTC()}
}

func (s *shelf) tx(fn func(ctx context.Context, tx db.Tx) error) error {
	return db.WriteTx(s.Context(), s.d, func(tx db.Tx) error { return fn(s.Context(), tx) })
}

// register registers a digest for a version, in a project of its own where projectID is empty.
func (s *shelf) register(version, digest, projectID string) (out artifact.Artifact, err error) {
	if projectID == "" {
		projectID = db.NewID()
	}
	err = s.tx(func(ctx context.Context, tx db.Tx) (err error) {
		_, out, err = artifact.Register(ctx, tx, artifact.Artifact{
			ID: db.NewID(), OrgID: db.NewID(), ProjectID: projectID, AppSlug: "demo", AppVersion: version,
			Repository: repository, Digest: digest, TrustState: artifact.Verified,
			Evidence:  []artifact.Evidence{{Kind: "signature", KeyID: "k"}},
			CreatedBy: principal.Actor{Type: principal.User, ID: db.NewID()},
		}, s.now)
		return err
	})
	return out, err
}

func (s *shelf) active(version, digest string) artifact.Artifact {
	s.Helper()
	a, err := s.register(version, digest, "")
	require.NoError(s, err)
	require.NoError(s, s.activate(a))
	return s.read(a)
}

func (s *shelf) activate(a artifact.Artifact) error {
	return s.tx(func(ctx context.Context, tx db.Tx) error {
		_, err := artifact.Activate(ctx, tx, a.AppVersion, []manifest.Image{{Ref: a.Repository + "@" + a.Digest}}, s.now)
		return err
	})
}

func (s *shelf) read(a artifact.Artifact) (out artifact.Artifact) {
	s.Helper()
	require.NoError(s, s.tx(func(ctx context.Context, tx db.Tx) (err error) {
		out, err = artifact.Get(ctx, tx, a.ProjectID, a.ID)
		return err
	}))
	return out
}

func (s *shelf) retire(a artifact.Artifact) (after artifact.Artifact, changed bool, err error) {
	err = s.tx(func(ctx context.Context, tx db.Tx) (err error) {
		after, changed, err = artifact.Retire(ctx, tx, a, s.now.Add(time.Hour))
		return err
	})
	return after, changed, err
}

func (s *shelf) revoke(a artifact.Artifact) (changes []artifact.Change) {
	s.Helper()
	require.NoError(s, s.tx(func(ctx context.Context, tx db.Tx) (err error) {
		changes, err = artifact.Revoke(ctx, tx, a, s.now.Add(time.Hour))
		return err
	}))
	return changes
}

func (s *shelf) runnable(a artifact.Artifact) error {
	return s.tx(func(ctx context.Context, tx db.Tx) error {
		return artifact.CheckRunnable(ctx, tx, a.AppVersion, []*protocol.Service{{Image: a.Repository + "@" + a.Digest}})
	})
}

func (s *shelf) withdrawn() (out map[artifact.Registration]bool) {
	s.Helper()
	require.NoError(s, s.tx(func(ctx context.Context, tx db.Tx) (err error) {
		out, err = artifact.Withdrawn(ctx, tx)
		return err
	}))
	return out
}

func TestARetiredArtifactIsNotUsedAnyMore(t *testing.T) {
	s := newShelf(t)
	gone, other := s.active("1", "sha256:1"), s.active("2", "sha256:1")
	after, changed, err := s.retire(gone)
	require.NoError(t, err)
	require.True(t, changed)
	require.Equal(t, after, s.read(gone))
	require.Equal(t, artifact.Retired, after.Status)
	require.Equal(t, artifact.Verified, after.TrustState, "what it contains is as good as before")
	require.Equal(t, gone.ResourceVersion+1, after.ResourceVersion)
	require.Equal(t, s.now.Add(time.Hour), after.UpdatedAt)

	require.Equal(t, artifact.CodeNotVerified, fault.As(s.runnable(gone)).Code)
	require.Equal(t, artifact.CodeNotVerified, fault.As(s.activate(gone)).Code)
	_, err = s.register("1", "sha256:1", gone.ProjectID)
	require.EqualValues(t, "artifact_retired", fault.As(err).Code)
	require.Equal(t, map[artifact.Registration]bool{
		{Ref: artifact.Ref{Repository: repository, Digest: "sha256:1"}, AppVersion: "1"}: true,
	}, s.withdrawn())

	again, changed, err := s.retire(after)
	require.NoError(t, err)
	require.False(t, changed)
	require.Equal(t, after, again)
	require.NoError(t, s.runnable(other), "another version has the same digest")
	require.Equal(t, other, s.read(other))
}

// A digest is trusted or not, whichever version names it and whichever project registered it.
func TestLaw01NothingStartsWithADigestThatWasRevoked(t *testing.T) {
	s := newShelf(t)
	bad, alike, other := s.active("1", "sha256:1"), s.active("2", "sha256:1"), s.active("1", "sha256:2")
	retired, err := s.register("3", "sha256:1", "")
	require.NoError(t, err)
	_, _, err = s.retire(retired)
	require.NoError(t, err)

	changes := s.revoke(bad)
	require.Len(t, changes, 3)
	for n, of := range []artifact.Artifact{bad, alike, retired} {
		after := s.read(of)
		require.Equal(t, changes[n].After, after)
		require.Equal(t, of.ID, changes[n].Before.ID)
		require.NotEqual(t, artifact.Revoked, changes[n].Before.Status)
		require.Equal(t, artifact.Revoked, after.Status)
		require.Equal(t, artifact.TrustRevoked, after.TrustState)
		require.Equal(t, of.Evidence, after.Evidence, "what was found stays")
		require.Equal(t, artifact.CodeNotVerified, fault.As(s.runnable(of)).Code)
		require.Equal(t, artifact.CodeNotVerified, fault.As(s.activate(of)).Code)
		_, _, err := s.retire(after)
		require.EqualValues(t, "artifact_revoked", fault.As(err).Code)
	}
	for version, project := range map[string]string{"1": bad.ProjectID, "4": ""} {
		_, err := s.register(version, "sha256:1", project)
		require.EqualValues(t, "artifact_revoked", fault.As(err).Code, version)
	}
	require.Empty(t, s.revoke(bad), "once is enough")
	require.Len(t, s.withdrawn(), 3)
	require.NoError(t, s.runnable(other))
	require.Equal(t, other, s.read(other))
}

func TestAnArtifactOfAnotherProjectIsNotThere(t *testing.T) {
	s := newShelf(t)
	a := s.active("1", "sha256:1")
	for name, ids := range map[string][2]string{
		"another project": {db.NewID(), a.ID}, "no artifact": {a.ProjectID, db.NewID()}, "no id": {a.ProjectID, "x"},
	} {
		err := s.tx(func(ctx context.Context, tx db.Tx) error {
			_, err := artifact.Get(ctx, tx, ids[0], ids[1])
			return err
		})
		require.True(t, fault.Is(err, fault.NotFound), "%s: %v", name, err)
	}
}
