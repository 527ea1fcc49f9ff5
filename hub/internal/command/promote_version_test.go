package command_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// draft makes a published version a draft whose image is registered.
func (w *world) draft(version string) {
	w.T.Helper()
	w.Exec(`UPDATE app_versions SET status = 'draft', published_at = NULL WHERE version = $1`, version)
	w.Exec(`UPDATE artifacts SET status = 'registered' WHERE app_version = $1`, version)
}

func (w *world) promote(version string, to catalog.Status, percent int) (catalog.Version, error) {
	w.T.Helper()
	return w.Commands().PromoteAppVersion(w.T.Context(), w.Admin(db.NewID()), command.VersionMove{
		AppSlug: "demo", Version: version, Reason: "smoke tests passed",
	}, to, percent)
}

// launchVersion asks for an instance of a version, as a tenant or as a platform admin.
func (w *world) launchVersion(version string, admin bool) error {
	m := w.Meta(db.NewID())
	m.Principal.PlatformAdmin = admin
	in := w.InstanceInput()
	in.Version = version
	_, err := w.Commands().CreateInstance(w.T.Context(), m, in)
	return err
}

func TestAVersionIsPromotedStepByStep(t *testing.T) {
	w := newWorld(t)
	w.Release("2.0.0")
	w.draft("2.0.0")
	v, err := w.promote("2.0.0", catalog.Staged, 0)
	require.NoError(t, err)
	require.Equal(t, catalog.Staged, v.Status)
	require.Zero(t, v.PublishedAt)
	require.Equal(t, artifact.Active, w.demoArtifact("2.0.0").Status)
	row := w.auditOf("app_version", v.ID)
	require.Equal(t, "smoke tests passed", row.Reason)
	require.Equal(t, string(iam.CatalogManage), string(row.Action))
	require.Equal(t, catalog.CodeVersionNotActive, fault.As(w.launchVersion("2.0.0", false)).Code)
	w.Allocation()
	require.NoError(t, w.launchVersion("2.0.0", true), "a platform admin tries it")

	for percent, to := range map[int]catalog.Status{
		0: catalog.Canary, 101: catalog.Canary, -1: catalog.Canary, 5: catalog.Staged, 1: catalog.Active,
	} {
		before := w.Contents()
		_, err = w.promote("2.0.0", to, percent)
		require.Equal(t, fault.CodeInvalid, fault.As(err).Code, "%s %d", to, percent)
		require.Equal(t, before, w.Contents())
	}
	v, err = w.promote("2.0.0", catalog.Canary, 100)
	require.NoError(t, err)
	require.Equal(t, 100, v.CanaryPercent)
	require.NoError(t, w.launchVersion("2.0.0", false))
	v, err = w.promote("2.0.0", catalog.Staged, 0)
	require.NoError(t, err, "a canary goes back")
	require.Zero(t, v.CanaryPercent)
	require.Equal(t, catalog.CodeVersionNotActive, fault.As(w.launchVersion("2.0.0", false)).Code)
	v, err = w.Commands().PublishAppVersion(t.Context(), w.Admin("publish"), command.VersionMove{
		AppSlug: "demo", Version: "2.0.0",
	})
	require.NoError(t, err)
	require.Equal(t, catalog.Active, v.Status)
	require.Equal(t, []string{
		"apps.version.promoted", "apps.version.promoted", "apps.version.promoted", "apps.version.published",
	}, w.eventsOf(v.ID))
	_, err = w.promote("2.0.0", catalog.Canary, 5)
	require.Equal(t, catalog.CodeVersionStatus, fault.As(err).Code, "an active version is deprecated, not taken back")
}

func TestLaw01NoVersionIsTriedWhoseImageIsNotVerified(t *testing.T) {
	w := newWorld(t)
	w.Release("2.0.0")
	for to, percent := range map[catalog.Status]int{catalog.Staged: 0, catalog.Canary: 10} {
		w.draft("2.0.0")
		if to == catalog.Canary {
			w.Exec(`UPDATE app_versions SET status = 'staged' WHERE version = '2.0.0'`)
		}
		w.Exec(`UPDATE artifacts SET trust_state = 'unverified' WHERE app_version = '2.0.0'`)
		before := w.Contents()
		_, err := w.promote("2.0.0", to, percent)
		require.Equal(t, artifact.CodeNotVerified, fault.As(err).Code)
		require.Equal(t, before, w.Contents())
	}
}

func TestAVersionIsRetiredOnceNoInstanceHasIt(t *testing.T) {
	w := newWorld(t)
	i := w.Running()
	w.Release("2.0.0")
	retire := func(version string) error {
		_, err := w.Commands().RetireAppVersion(t.Context(), w.Admin(db.NewID()), command.VersionMove{
			AppSlug: "demo", Version: version, Reason: "superseded",
		})
		return err
	}
	inUse := func(version string) {
		t.Helper()
		before := w.Contents()
		require.EqualValues(t, "app_version_in_use", fault.As(retire(version)).Code)
		require.Equal(t, before, w.Contents())
	}
	require.Equal(t, catalog.CodeVersionStatus, fault.As(retire("1.0.0")).Code, "an active version is deprecated first")
	w.deprecate("1.0.0")
	inUse("1.0.0")
	i, err := w.upgrade(i, command.UpgradeInstanceInput{Version: "2.0.0"})
	require.NoError(t, err)
	inUse("1.0.0") // the upgrade may fail
	i = w.ready(i)
	require.NoError(t, retire("1.0.0"))
	require.True(t, w.keeps(), "another version has the same image")
	_, err = w.Commands().RollbackInstance(t.Context(), w.Meta("rollback"), w.Project.ID, i.ID, "1.0.0")
	require.Equal(t, catalog.CodeVersionNotActive, fault.As(err).Code)

	w.deprecate("2.0.0")
	_, err = w.Commands().StopInstance(t.Context(), w.Meta("stop"), w.Project.ID, i.ID)
	require.NoError(t, err)
	inUse("2.0.0") // it may start again
	w.end(i)
	require.NoError(t, retire("2.0.0"))
	require.Equal(t, catalog.CodeVersionStatus, fault.As(retire("2.0.0")).Code)
}

func TestAnInstanceOfAVersionThatWasTakenBackStartsAgain(t *testing.T) {
	w := newWorld(t)
	i := w.Running()
	w.Exec(`UPDATE app_versions SET status = 'canary', canary_percent = 100`)
	_, err := w.promote("1.0.0", catalog.Staged, 0)
	require.NoError(t, err)
	require.NoError(t, db.WriteTx(t.Context(), w.DB, func(tx db.Tx) error {
		_, err := catalog.CheckRestartable(t.Context(), tx, catalog.Want{
			AppSlug: "demo", Version: i.Version, OrgID: w.Project.OrgID, ProjectID: w.Project.ID, Now: w.Now,
		})
		return err
	}))
}

func TestADeprecatedArtifactIsInNoFurtherVersionAndStartsAgain(t *testing.T) {
	w := newWorld(t)
	i, a := w.Running(), w.demoArtifact("1.0.0")
	deprecate := func() (artifact.Artifact, error) {
		return w.Commands().DeprecateArtifact(t.Context(), w.Meta(db.NewID()), w.Project.ID, a.ID, "superseded")
	}
	for _, status := range []string{"staged", "canary", "active"} {
		w.Exec(`UPDATE app_versions SET status = $1`, status)
		before := w.Contents()
		_, err := deprecate()
		require.EqualValues(t, "artifact_in_use", fault.As(err).Code)
		require.Equal(t, before, w.Contents())
	}
	w.deprecate("1.0.0")
	after, err := deprecate()
	require.NoError(t, err)
	require.Equal(t, artifact.Deprecated, after.Status)
	require.Equal(t, []string{"apps.artifact.deprecated"}, w.eventsOf(a.ID))
	_, err = w.Commands().PublishAppVersion(t.Context(), w.Admin("publish"), command.VersionMove{
		AppSlug: "demo", Version: "1.0.0",
	})
	require.Equal(t, artifact.CodeNotVerified, fault.As(err).Code)
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		services, err := instance.Services(ctx, tx, i.Members[0].ID, i.Revision)
		require.NoError(t, err)
		return artifact.CheckRunnable(ctx, tx, "1.0.0", services)
	})
}

func TestAnArtifactIsPromotedForwardOnly(t *testing.T) {
	w := newWorld(t)
	w.Running()
	w.Exec(`UPDATE artifacts SET channel = 'dev'`)
	a := w.demoArtifact("1.0.0")
	promote := func(channel string) (artifact.Artifact, error) {
		return w.Commands().PromoteArtifact(t.Context(), w.Meta(db.NewID()), w.Project.ID, a.ID, channel, "tested")
	}
	refused := func(channel string, code fault.Code) {
		t.Helper()
		before := w.Contents()
		_, err := promote(channel)
		require.Equal(t, code, fault.As(err).Code)
		require.Equal(t, before, w.Contents())
	}
	refused("moon", "artifact_not_promotable")
	w.Exec(`UPDATE artifacts SET trust_state = 'rejected'`)
	refused("stage", artifact.CodeNotVerified)
	w.Exec(`UPDATE artifacts SET trust_state = 'verified'`)
	after, err := promote("stage")
	require.NoError(t, err)
	require.Equal(t, "stage", after.Channel)
	require.Equal(t, "tested", w.auditOf("artifact", a.ID).Reason)
	refused("dev", "artifact_not_promotable")
	_, err = promote("prod")
	require.NoError(t, err)
	require.Equal(t, []string{"apps.artifact.promoted", "apps.artifact.promoted"}, w.eventsOf(a.ID))
	w.Exec(`UPDATE artifacts SET status = 'retired'`)
	refused("prod", "artifact_retired")
	w.Exec(`UPDATE artifacts SET status = 'deprecated', channel = 'dev'`)
	refused("prod", "artifact_not_promotable")
	w.Exec(`UPDATE artifacts SET status = 'active'`)

	w.Tx(func(ctx context.Context, tx db.Tx) error {
		a.Channel = "dev"
		_, again, err := artifact.Register(ctx, tx, a, w.Now)
		require.NoError(t, err)
		require.Equal(t, "dev", again.Channel)
		a.Channel = "stage"
		_, _, err = artifact.Register(ctx, tx, a, w.Now)
		require.NoError(t, err)
		a.Channel = "dev"
		_, again, err = artifact.Register(ctx, tx, a, w.Now)
		require.Equal(t, "stage", again.Channel, "registering it again does not take it back")
		return err
	})
}
