package command_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/pkg/manifest/manifesttest"
	"github.com/gpuaas/gpuaas/protocol"
)

// releaseStartFirst publishes a version of the demo that asks for start_first, with a probe of its own.
func (w *world) releaseStartFirst(version string) {
	w.T.Helper()
	w.releaseFirst(version, commandtest.Manifest())
}

func (w *world) releaseFirst(version, doc string) {
	w.T.Helper()
	doc = strings.NewReplacer("version: 1.0.0", "version: "+version+"\n  upgrade: {strategy: start_first}",
		"path: /}", "path: /"+version+"}").Replace(doc)
	verified, env := w.Sign(doc)
	w.PublishVersion(version, verified, env)
}

// strategy is what the last request for an upgrade says of it.
func (w *world) strategy(id string) (strategy, reason string) {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		return tx.QueryRow(ctx, `SELECT coalesce(data->>'strategy', ''), coalesce(data->>'strategy_reason', '') FROM events
			WHERE subject = $1 AND type = 'apps.instance.upgrade_requested' ORDER BY resource_version DESC LIMIT 1`,
			id).Scan(&strategy, &reason)
	})
	return strategy, reason
}

func TestAFailedUpgradeThatStartedFirstKeepsRoomForOneVersion(t *testing.T) {
	w := newWorld(t)
	w.Allocation()
	i, err := w.sized(manifest.Choice{CPUMillis: 200, MemoryMiB: 64})
	require.NoError(t, err)
	i = w.ready(i)
	w.releaseStartFirst("2.0.0")
	i, err = w.upgrade(i, command.UpgradeInstanceInput{Version: "2.0.0", Resources: manifest.Choice{CPUMillis: 100}})
	require.NoError(t, err)
	a, _ := w.free(i)
	require.EqualValues(t, 700, a.FreeCPUMillis)
	s := w.Says(i, protocol.WorkloadStatus_FAILED)
	s.Revision, s.Reason = uint64(i.Revision), protocol.WorkloadStatus_CRASH_LOOP
	w.Report(uint64(i.Revision), s)
	w.Now = w.Now.Add(time.Minute)
	w.Report(uint64(i.Revision), s) // again: it counts
	i = w.Get(i.ID)
	require.Equal(t, lifecycle.Failed, i.Lifecycle.Status)
	a, _ = w.free(i)
	require.EqualValues(t, 800, a.FreeCPUMillis, "the larger of both")
	require.EqualValues(t, (512-64)<<20, a.FreeMemoryBytes)
	_, err = w.sized(manifest.Choice{CPUMillis: 800, MemoryMiB: 64})
	require.NoError(t, err)
	_, err = w.Commands().RollbackInstance(t.Context(), w.Meta("back"), w.Project.ID, i.ID, "")
	require.NoError(t, err, "its room was kept")
	w.consistent()
}

func TestAnUpgradeThatStartsFirstReservesBothVersions(t *testing.T) {
	w := newWorld(t)
	w.Allocation()
	i, err := w.sized(manifest.Choice{CPUMillis: 200, MemoryMiB: 64})
	require.NoError(t, err)
	i = w.ready(i)
	w.Release("1.1.0")
	w.releaseStartFirst("2.0.0")
	w.releaseStartFirst("3.0.0")

	i, err = w.upgrade(i, command.UpgradeInstanceInput{Version: "2.0.0"})
	require.NoError(t, err)
	strategy, reason := w.strategy(i.ID)
	require.Equal(t, []string{"start_first", ""}, []string{strategy, reason})
	a, services := w.free(i)
	require.True(t, services[0].GetStartFirst())
	require.EqualValues(t, 600, a.FreeCPUMillis, "both run for a while")
	require.EqualValues(t, (512-128)<<20, a.FreeMemoryBytes)
	w.consistent()
	i = w.ready(i)
	a, _ = w.free(i)
	require.EqualValues(t, 800, a.FreeCPUMillis, "the one before has gone")

	// A neighbour leaves no room for two.
	_, err = w.sized(manifest.Choice{CPUMillis: 700, MemoryMiB: 64})
	require.NoError(t, err)
	i, err = w.upgrade(i, command.UpgradeInstanceInput{Version: "3.0.0"})
	require.NoError(t, err)
	strategy, reason = w.strategy(i.ID)
	require.Equal(t, []string{"recreate", "the allocation has no room for both"}, []string{strategy, reason})
	_, services = w.free(i)
	require.True(t, services[0].GetRecreate())
	i = w.ready(i)

	i, err = w.upgrade(i, command.UpgradeInstanceInput{Version: "1.1.0"})
	require.NoError(t, err)
	strategy, _ = w.strategy(i.ID)
	require.Empty(t, strategy, "the manifest does not ask for it")
	w.consistent()
}

func TestAnUpgradeOfSeveralServicesReservesThoseThatDifferTwice(t *testing.T) {
	w := newWorld(t)
	w.Allocation()
	for _, version := range []string{"4.0.0", "4.1.0"} {
		w.releaseFirst(version, manifesttest.Services("demo", commandtest.Image))
	}
	in := w.InstanceInput()
	in.Version, in.Resources = "4.0.0", manifest.Choice{CPUMillis: 100, MemoryMiB: 16}
	i, err := w.Commands().CreateInstance(t.Context(), w.Meta("services"), in)
	require.NoError(t, err)
	i, err = w.upgrade(w.ready(i), command.UpgradeInstanceInput{Version: "4.1.0"})
	require.NoError(t, err)
	strategy, reason := w.strategy(i.ID)
	require.Equal(t, []string{"start_first", ""}, []string{strategy, reason})
	a, services := w.free(i)
	require.True(t, services[0].GetStartFirst() && services[1].GetStartFirst())
	require.EqualValues(t, 1000-(200+100)-100, a.FreeCPUMillis, "the database is as it was")
	w.consistent()
	a, _ = w.free(w.ready(i))
	require.EqualValues(t, 700, a.FreeCPUMillis)
}

func TestARollbackStartsFirst(t *testing.T) {
	w := newWorld(t)
	w.Allocation()
	w.releaseStartFirst("2.0.0")
	w.releaseStartFirst("3.0.0")
	in := w.InstanceInput()
	in.Version, in.Resources = "2.0.0", manifest.Choice{CPUMillis: 300, MemoryMiB: 64}
	i, err := w.Commands().CreateInstance(t.Context(), w.Meta("first"), in)
	require.NoError(t, err)
	i, err = w.upgrade(w.ready(i), command.UpgradeInstanceInput{Version: "3.0.0"})
	require.NoError(t, err)
	i = w.ready(i)
	back := func() []string {
		t.Helper()
		i, err = w.Commands().RollbackInstance(t.Context(), w.Meta(db.NewID()), w.Project.ID, i.ID, "")
		require.NoError(t, err)
		w.consistent()
		var strategy, reason string
		w.Tx(func(ctx context.Context, tx db.Tx) error {
			return tx.QueryRow(ctx, `SELECT coalesce(data->>'strategy', ''), coalesce(data->>'strategy_reason', '') FROM events
				WHERE subject = $1 AND type = 'apps.instance.rollback_requested' ORDER BY resource_version DESC LIMIT 1`,
				i.ID).Scan(&strategy, &reason)
		})
		return []string{strategy, reason}
	}
	fallback := func() (no uint64) {
		w.Tx(func(ctx context.Context, tx db.Tx) error {
			members, err := instance.SnapshotFor(ctx, tx, w.Node)
			if members[0].Fallback != nil {
				no = members[0].Fallback.Revision
			}
			return err
		})
		return no
	}
	require.Equal(t, []string{"start_first", ""}, back())
	a, services := w.free(i)
	require.False(t, services[0].GetRecreate())
	require.EqualValues(t, 400, a.FreeCPUMillis)
	require.EqualValues(t, 2, fallback(), "it serves meanwhile")
	i = w.ready(i)
	require.Equal(t, "2.0.0", i.Version)
	a, _ = w.free(i)
	require.EqualValues(t, 700, a.FreeCPUMillis)
	require.Zero(t, fallback())

	_, err = w.sized(manifest.Choice{CPUMillis: 600, MemoryMiB: 64})
	require.NoError(t, err)
	require.Equal(t, []string{"recreate", "the allocation has no room for both"}, back())
	_, services = w.free(i)
	require.True(t, services[0].GetRecreate())
	require.Zero(t, fallback())
}
