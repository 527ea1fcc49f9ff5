package volume_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/volume"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

type environments struct {
	*fixture
	cfg volume.Config
	e   *volume.Environments
}

func newEnvironments(t *testing.T) *environments {
	t.Helper()
	f := newFixture(t)
	dir := filepath.Dir(f.cfg.Dir)
	e := &environments{fixture: f, cfg: volume.Config{
		Dir: filepath.Join(dir, "environments"), MountDir: filepath.Join(dir, "mounted"),
	}}
	e.e = e.reopen()
	t.Cleanup(func() { require.NoError(t, e.reopen().Purge(context.WithoutCancel(t.Context()))) })
	return e
}

func (f *environments) reopen() *volume.Environments {
	f.t.Helper()
	e, err := volume.OpenEnvironments(f.cfg, f.v)
	require.NoError(f.t, err)
	return e
}

// install does what a container of that run would.
func (f *environments) install(runID string) {
	f.t.Helper()
	dir, err := f.e.Begin(f.t.Context(), runID, "org", 32*mib, nil)
	require.NoError(f.t, err)
	packages := filepath.Join(dir, "lib", "python3.11", "site-packages")
	require.NoError(f.t, os.MkdirAll(packages, 0o755))
	require.NoError(f.t, os.WriteFile(filepath.Join(packages, "module.py"), []byte("x = 1\n"), 0o644))
}

func TestAnEnvironmentIsKeptWholeAndReadOnly(t *testing.T) {
	f := newEnvironments(t)
	f.install("member.1")
	require.False(t, f.e.Has("project.1"))
	require.NoError(t, f.e.Commit(t.Context(), "member.1", volume.Environment{ID: "project.1"}))
	require.NoError(t, f.e.Commit(t.Context(), "member.1", volume.Environment{ID: "project.1"}), "after a crash")
	for range 2 {
		require.True(t, f.e.Has("project.1"))
		dir, packages, err := f.e.Use(t.Context(), "project.1")
		require.NoError(t, err)
		require.Equal(t, "lib/python3.11/site-packages", packages)
		require.FileExists(t, filepath.Join(dir, packages, "module.py"))
		require.ErrorIs(t, os.WriteFile(filepath.Join(dir, "more"), nil, 0o600), unix.EROFS)
		f.e = f.reopen()
	}
	all, err := f.e.List()
	require.NoError(t, err)
	require.Len(t, all, 1)
	require.Positive(t, all[0].SizeBytes)
	require.Less(t, all[0].SizeBytes, uint64(16*mib), "unused space is given back")
	require.WithinDuration(t, time.Now(), all[0].UsedAt, time.Minute)
}

// An agent that is killed while it keeps an environment has unmounted it already.
func TestAnEnvironmentIsKeptAfterACrash(t *testing.T) {
	f := newEnvironments(t)
	f.install("member.1")
	require.NoError(t, unix.Unmount(filepath.Join(f.cfg.MountDir, ".build-member.1"), 0))
	f.e = f.reopen()
	require.NoError(t, f.e.Commit(t.Context(), "member.1", volume.Environment{ID: "project.1"}))
	require.True(t, f.e.Has("project.1"))
}

// What a killed agent leaves of an installation is no environment, and goes once nothing has it.
func TestAnUnfinishedEnvironmentIsCollected(t *testing.T) {
	f := newEnvironments(t)
	f.install("member.1")
	f.install("member.2")
	require.NoError(t, f.e.Collect(t.Context(), nil, func(string) bool { return false }))
	f.e = f.reopen()
	require.NoError(t, f.e.Collect(t.Context(), nil, func(run string) bool { return run == "member.2" }))
	require.NoDirExists(t, filepath.Join(f.cfg.Dir, ".build-member.1"))
	require.NoError(t, f.e.Commit(t.Context(), "member.2", volume.Environment{ID: "project.2"}), "its container goes on")
	err := f.e.Commit(t.Context(), "member.1", volume.Environment{ID: "project.1"})
	require.True(t, fault.IsPermanent(err))
	require.False(t, f.e.Has("project.1"))

	f.install("member.3")
	f.install("members.4")
	require.NoError(t, f.e.RemoveMember(t.Context(), "member"))
	require.NoDirExists(t, filepath.Join(f.cfg.Dir, ".build-member.3"))
	require.NoError(t, f.e.Discard(t.Context(), "members.4"))
	require.NoError(t, f.e.Discard(t.Context(), "members.4"))
}

func TestADamagedEnvironmentIsInstalledAnew(t *testing.T) {
	f := newEnvironments(t)
	record := filepath.Join(f.cfg.Dir, "project.1", "record.json")
	image := filepath.Join(filepath.Dir(record), "data.img")
	use := func() {
		_, _, err := f.e.Use(t.Context(), "project.1")
		require.Error(t, err)
	}
	overwrite := func() { require.NoError(t, os.WriteFile(record, []byte("x"), 0o600)) }
	for _, c := range []struct{ damage, notice func() }{
		{overwrite, use},
		{overwrite, func() { require.NoError(t, f.e.Collect(t.Context(), nil, func(string) bool { return false })) }},
		{func() { require.NoError(t, os.Truncate(image, 4096)) }, use},
		{func() { require.NoError(t, os.Remove(image)) }, use},
	} {
		f.install("member.1")
		require.NoError(t, f.e.Commit(t.Context(), "member.1", volume.Environment{ID: "project.1"}))
		c.damage()
		c.notice()
		require.False(t, f.e.Has("project.1"))
		require.NoDirExists(t, filepath.Dir(record))
	}
	f.install("member.2")
	require.NoError(t, f.e.Commit(t.Context(), "member.2", volume.Environment{ID: "project.1"}))
	_, _, err := f.e.Use(t.Context(), "project.1")
	require.NoError(t, err)

	// A record that cannot be read at present says nothing of the environment.
	require.NoError(t, os.Rename(record, record+".kept"))
	require.NoError(t, os.Mkdir(record, 0o700))
	_, _, err = f.e.Use(t.Context(), "project.1")
	require.Error(t, err)
	require.NoError(t, f.e.Collect(t.Context(), nil, func(string) bool { return false }))
	require.NoError(t, os.Remove(record))
	require.NoError(t, os.Rename(record+".kept", record))
	_, _, err = f.e.Use(t.Context(), "project.1")
	require.NoError(t, err)
}

func TestRoomIsMadeOfUnusedEnvironments(t *testing.T) {
	f := newEnvironments(t)
	for _, id := range []string{"1", "2", "3"} {
		f.install("member." + id)
		require.NoError(t, f.e.Commit(t.Context(), "member."+id, volume.Environment{ID: "project." + id}))
	}
	_, _, err := f.e.Use(t.Context(), "project.1")
	require.NoError(t, err)
	damaged := filepath.Join(f.cfg.Dir, "project.0")
	require.NoError(t, os.Mkdir(damaged, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(damaged, "record.json"), []byte("x"), 0o600))
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(damaged)) })
	_, err = f.e.Begin(t.Context(), "member.4", "org", 1<<50, map[string]string{"project.2": "org"})
	require.Equal(t, agent.CodeVolumeNoSpace, fault.As(err).Code)
	require.False(t, f.e.Has("project.1"))
	require.True(t, f.e.Has("project.2"), "it is used")
	require.False(t, f.e.Has("project.3"))

	dir, _, err := f.e.Use(t.Context(), "project.2")
	require.NoError(t, err)
	held, err := os.Open(dir)
	require.NoError(t, err)
	bind := t.TempDir()
	require.NoError(t, unix.Mount(dir, bind, "", unix.MS_BIND, ""), "as a container has it")
	deleted := make(chan error, 1)
	go func() { deleted <- f.e.Delete(t.Context(), "project.2") }()
	require.Never(t, func() bool { return len(deleted) > 0 }, 100*time.Millisecond, 10*time.Millisecond,
		"it waits for the container")
	require.NoError(t, held.Close())
	require.NoError(t, unix.Unmount(bind, 0))
	require.NoError(t, <-deleted)
	require.False(t, f.e.Has("project.2"))
}

// A container that does not end keeps its environment, and no other one from making room.
func TestAnEnvironmentThatAContainerHasKeepsNoOtherFromGoing(t *testing.T) {
	f := newEnvironments(t)
	for _, id := range []string{"1", "2"} {
		f.install("member." + id)
		require.NoError(t, f.e.Commit(t.Context(), "member."+id, volume.Environment{ID: "project." + id}))
	}
	dir, _, err := f.e.Use(t.Context(), "project.1")
	require.NoError(t, err)
	unused := time.Now().Add(-time.Hour)
	require.NoError(t, os.Chtimes(filepath.Join(f.cfg.Dir, "project.1", "record.json"), unused, unused))
	bind := t.TempDir()
	require.NoError(t, unix.Mount(dir, bind, "", unix.MS_BIND, ""), "as a container has it")
	_, err = f.e.Begin(t.Context(), "member.3", "org", 1<<50, nil)
	require.NoError(t, unix.Unmount(bind, 0))
	require.Equal(t, agent.CodeVolumeNoSpace, fault.As(err).Code)
	require.True(t, f.e.Has("project.1"), "its container has it")
	require.False(t, f.e.Has("project.2"))
}

// One org cannot take the environments of a node from all others.
func TestAnOrgHasHalfOfTheEnvironmentsAtMost(t *testing.T) {
	f, used := newEnvironments(t), map[string]string{}
	for n := range protocol.MaxEnvironments / 2 {
		id := fmt.Sprintf("project.%d", n)
		used[id] = "org"
		require.NoError(t, os.Mkdir(filepath.Join(f.cfg.Dir, id), 0o700))
		record := fmt.Sprintf(`{"id": %q}`, id)
		require.NoError(t, os.WriteFile(filepath.Join(f.cfg.Dir, id, "record.json"), []byte(record), 0o600))
	}
	begin := func(runID, orgID string) error {
		_, err := f.e.Begin(t.Context(), runID, orgID, 32*mib, used)
		return err
	}
	refused := func(runID string) {
		require.Equal(t, agent.CodeVolumeNoSpace, fault.As(begin(runID, "org")).Code)
	}
	refused("member.1")
	require.NoError(t, begin("member.2", "another"))
	delete(used, "project.0")
	require.NoError(t, begin("member.3", "org"), "it does not use one any more")
	refused("member.4")
}
