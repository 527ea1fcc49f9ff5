package volume_test

import (
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/internal/volume"
)

// events are what happened to each name in a directory since it is watched.
func events(t *testing.T, fd int) map[string][]uint32 {
	t.Helper()
	raw := make([]byte, 4096)
	n, err := unix.Read(fd, raw)
	require.NoError(t, err)
	found := map[string][]uint32{}
	for raw = raw[:n]; len(raw) > 0; {
		mask, length := binary.NativeEndian.Uint32(raw[4:]), binary.NativeEndian.Uint32(raw[12:])
		raw = raw[unix.SizeofInotifyEvent:]
		name := unix.ByteSliceToString(raw[:length])
		found[name], raw = append(found[name], mask&^unix.IN_ISDIR), raw[length:]
	}
	return found
}

// The directory of a volume's content has its mode before it has its name: a kill at any moment leaves none that only
// root may use, for all the life of the volume.
func TestTheContentOfAVolumeHasItsModeBeforeItsName(t *testing.T) {
	const everybody = os.ModeDir | os.ModeSticky | os.ModePerm
	modeOf := func(path string) os.FileMode {
		info, err := os.Stat(path)
		require.NoError(t, err)
		return info.Mode()
	}
	at := t.TempDir()
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Close(fd)) })
	_, err = unix.InotifyAddWatch(fd, at, unix.IN_CREATE|unix.IN_ATTRIB|unix.IN_MOVED_TO)
	require.NoError(t, err)
	content, err := volume.MakeContent(at)
	require.NoError(t, err)
	require.Equal(t, everybody, modeOf(content))
	require.Equal(t, []uint32{unix.IN_MOVED_TO}, events(t, fd)[filepath.Base(content)])

	require.NoError(t, os.Chmod(content, 0o750))
	_, err = volume.MakeContent(at)
	require.NoError(t, err)
	require.Equal(t, os.ModeDir|0o750, modeOf(content), "what the tenant has set stays")

	at = t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(at, "content.unfinished"), 0o700))
	content, err = volume.MakeContent(at)
	require.NoError(t, err, "a kill has left it")
	require.Equal(t, everybody, modeOf(content))
	require.NoDirExists(t, filepath.Join(at, "content.unfinished"))
}

// What an interrupted deletion has left cannot be removed: the node starts all the same, and every other volume and
// environment is there.
func TestWhatCannotBeRemovedKeepsNothingElseFromBeingUsed(t *testing.T) {
	f := newEnvironments(t)
	f.write(f.prepare(use(1)), "first")
	f.install("member.1")
	require.NoError(t, f.e.Commit(t.Context(), "member.1", volume.Environment{ID: "project.1"}))
	left := []string{
		filepath.Join(f.fixture.cfg.Dir, ".deleted-other"), filepath.Join(f.cfg.Dir, ".deleted-other"),
	}
	for _, dir := range left {
		require.NoError(t, os.MkdirAll(filepath.Join(dir, "busy"), 0o700))
		require.NoError(t, unix.Mount("tmpfs", filepath.Join(dir, "busy"), "tmpfs", 0, "size=64k"))
	}
	end := sync.OnceFunc(func() {
		for _, dir := range left {
			require.NoError(t, unix.Unmount(filepath.Join(dir, "busy"), 0))
		}
	})
	t.Cleanup(end)
	f.v = f.open()
	f.requireContent(f.prepare(use(1)), "first")
	f.e = f.reopen()
	_, _, err := f.e.Use(t.Context(), "project.1")
	require.NoError(t, err)
	end()
	f.v, f.e = f.open(), f.reopen()
	for _, dir := range left {
		require.NoDirExists(t, dir)
	}
}

// The snapshot of an upgrade has been copied, and cannot be recorded: a rollback finds the one of the upgrade before.
func TestASnapshotThatIsNotRecordedReplacesNone(t *testing.T) {
	f := newFixture(t)
	f.write(f.prepare(use(1)), "first")
	f.write(f.prepare(upgrade(2)), "second")
	record := filepath.Join(f.cfg.Dir, "m1.data", "record.json")
	require.NoError(t, unix.Mount(record, record, "", unix.MS_BIND, ""), "no file takes the place of a mount")
	_, err := f.v.Prepare(t.Context(), upgrade(3))
	require.NoError(t, unix.Unmount(record, 0))
	require.Error(t, err)
	f.v = f.open()
	back := use(4)
	back.Revision.AppVersion, back.Revision.RollsBack = "1", true
	f.requireContent(f.prepare(back), "first")
}

// A kill during a snapshot leaves the file system frozen, whatever becomes of the volume's record.
func TestAFrozenVolumeWithADamagedRecordIsThawed(t *testing.T) {
	f := newFixture(t)
	at := filepath.Dir(f.prepare(use(1)))
	require.NoError(t, exec.Command("fsfreeze", "--freeze", at).Run())
	thaw := func() error { return exec.Command("fsfreeze", "--unfreeze", at).Run() }
	t.Cleanup(func() { _ = thaw() })
	require.NoError(t, os.WriteFile(filepath.Join(f.cfg.Dir, "m1.data", "record.json"), []byte("x"), 0o600))
	f.v = f.open()
	require.Error(t, thaw(), "it is not frozen any more")
}

// The upgrade asked for no snapshot: that of an earlier upgrade is the content of another version.
func TestAFallbackGetsNoSnapshotOfAnEarlierUpgrade(t *testing.T) {
	f := newFixture(t)
	f.write(f.prepare(use(1)), "first")
	require.NoError(t, f.v.Detach(t.Context(), "m1"))
	f.write(f.prepare(upgrade(2)), "second")
	u := upgrade(3)
	u.Revision.Snapshot = false
	f.write(f.prepare(u), "third")
	f.requireContent(f.prepare(use(2)), "third")
}
