package command_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/query"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// demoArtifact is the artifact of a version of the demo.
func (w *world) demoArtifact(version string) (a artifact.Artifact) {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		list, err := artifact.OfVersions(ctx, tx, "demo", []string{version})
		require.Len(w.T, list[version], 1)
		a = list[version][0]
		return err
	})
	return a
}

// keeps reports whether the registry keeps the demo's image.
func (w *world) keeps() bool {
	w.T.Helper()
	registry := &query.RegistryAccess{DB: w.DB, Now: func() time.Time { return w.Now }}
	roots, err := registry.Roots(w.T.Context())
	require.NoError(w.T, err)
	repository, digest, _ := strings.Cut(commandtest.Image, "@")
	return slices.Contains(roots.Images, artifact.Ref{Repository: repository, Digest: digest})
}

func (w *world) retire(a artifact.Artifact) (artifact.Artifact, error) {
	return w.Commands().RetireArtifact(w.T.Context(), w.Meta(db.NewID()), w.Project.ID, a.ID, "superseded")
}

// inUse requires that the artifact cannot be retired, for a reason, and that nothing changes by that.
func (w *world) inUse(a artifact.Artifact, why string) {
	w.T.Helper()
	before := w.Contents()
	_, err := w.retire(a)
	require.EqualValues(w.T, "artifact_in_use", fault.As(err).Code, "%v", err)
	require.Contains(w.T, fault.As(err).Public, why)
	require.Equal(w.T, before, w.Contents())
}

func (w *world) deprecate(version string) {
	w.T.Helper()
	_, err := w.Commands().DeprecateAppVersion(w.T.Context(), w.Admin("deprecate "+version), command.VersionMove{
		AppSlug: "demo", Version: version,
	})
	require.NoError(w.T, err)
}

func TestAnArtifactIsRetiredOnceNothingUsesIt(t *testing.T) {
	w := newWorld(t)
	i, a := w.Running(), w.demoArtifact("1.0.0")
	w.inUse(a, "active version")
	w.deprecate("1.0.0")
	w.inUse(a, "App instances")
	w.Release("2.0.0")
	i, err := w.upgrade(i, command.UpgradeInstanceInput{Version: "2.0.0"})
	require.NoError(t, err)
	w.inUse(a, "App instances") // the upgrade may fail
	i = w.ready(i)

	retired, err := w.retire(a)
	require.NoError(t, err)
	require.Equal(t, artifact.Retired, retired.Status)
	require.Equal(t, artifact.Verified, retired.TrustState)
	require.Equal(t, []string{"apps.artifact.retired"}, w.eventsOf(a.ID))
	row := w.auditOf("artifact", a.ID)
	require.Equal(t, "superseded", row.Reason)
	require.Equal(t, w.User.Actor(), row.Actor)
	require.Equal(t, string(iam.ArtifactManage), string(row.Action))
	require.True(t, w.keeps(), "another version has the same image")

	_, err = w.Commands().PublishAppVersion(t.Context(), w.Admin("publish"), command.VersionMove{
		AppSlug: "demo", Version: "1.0.0",
	})
	require.Equal(t, artifact.CodeNotVerified, fault.As(err).Code)
	_, err = w.Commands().RollbackInstance(t.Context(), w.Meta("rollback"), w.Project.ID, i.ID, "1.0.0")
	require.Equal(t, artifact.CodeNotVerified, fault.As(err).Code)

	w.deprecate("2.0.0")
	last := w.demoArtifact("2.0.0")
	w.inUse(last, "App instances")
	_, err = w.Commands().StopInstance(t.Context(), w.Meta("stop"), w.Project.ID, i.ID)
	require.NoError(t, err)
	w.inUse(last, "App instances") // it may start again
	w.end(i)
	_, err = w.retire(last)
	require.NoError(t, err)
	require.False(t, w.keeps())
}

// eventsOf are the types of a resource's events; commandtest registers and activates artifacts without any.
func (w *world) eventsOf(subject string) (types []string) {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		list, err := event.BySubject(ctx, tx, event.SubjectQuery{Subject: subject})
		for _, e := range list {
			types = append(types, e.Type)
		}
		return err
	})
	return types
}

// end decommissions an instance, and has the node prove that nothing is left of it.
func (w *world) end(i instance.Instance) {
	w.T.Helper()
	w.decommissioned(i)
	w.Report(uint64(i.Revision)+1, w.Removed(i))
	require.EqualValues(w.T, "decommissioned", w.Get(i.ID).Lifecycle.Status)
}

// A revoked image starts nowhere; what runs with it goes on, and can be pulled for as long.
func TestRevokingAnArtifactStopsNothingThatRuns(t *testing.T) {
	w := newWorld(t)
	i := w.Running()
	w.Release("2.0.0")
	a, alike := w.demoArtifact("1.0.0"), w.demoArtifact("2.0.0")
	of := []string{"app_instances", "instance_members", "instance_revisions", "leases", "node_intents", "allocations"}
	before := w.Contents()
	revoked, err := w.Commands().RevokeArtifact(t.Context(), w.Meta("revoke"), w.Project.ID, a.ID, "has a backdoor")
	require.NoError(t, err)
	after := w.Contents()
	for _, table := range of {
		require.Contains(t, before, table)
		require.Equal(t, before[table], after[table], table)
	}
	require.Equal(t, artifact.Revoked, revoked.Status)
	require.Equal(t, artifact.TrustRevoked, revoked.TrustState)
	for _, id := range []string{a.ID, alike.ID} {
		require.Equal(t, []string{"apps.artifact.revoked"}, w.eventsOf(id))
		require.Equal(t, "has a backdoor", w.auditOf("artifact", id).Reason)
	}
	_, err = w.retire(a)
	require.EqualValues(t, "artifact_revoked", fault.As(err).Code)

	refused := func(err error) {
		t.Helper()
		require.Equal(t, artifact.CodeNotVerified, fault.As(err).Code, "%v", err)
	}
	_, err = w.upgrade(i, command.UpgradeInstanceInput{Version: "2.0.0"})
	refused(err)
	_, err = w.Commands().StopInstance(t.Context(), w.Meta("stop"), w.Project.ID, i.ID)
	require.NoError(t, err)
	w.Report(2, w.Says(i, protocol.WorkloadStatus_STOPPED))
	_, err = w.Commands().StartInstance(t.Context(), w.Meta("start"), w.Project.ID, i.ID)
	refused(err)
	in := w.InstanceInput()
	in.AllocationIDs = []string{w.Allocation().ID}
	_, err = w.Commands().CreateInstance(t.Context(), w.Meta("create"), in)
	refused(err)

	require.True(t, w.keeps(), "the instance is there")
	w.end(i)
	require.False(t, w.keeps(), "although versions name it")
}
