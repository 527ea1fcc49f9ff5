package volume_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/volume"
	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const mib = 1 << 20

// fixture is the volumes of one node, on the real kernel.
type fixture struct {
	t   *testing.T
	cfg volume.Config
	v   *volume.Volumes
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	skip.Root(t, "mounts")
	require.NoError(t, volume.Check())
	dir := t.TempDir()
	f := &fixture{t: t, cfg: volume.Config{
		Dir: filepath.Join(dir, "volumes"), MountDir: filepath.Join(dir, "mounts"), ReserveBytes: 64 * mib,
	}}
	f.v = f.open()
	t.Cleanup(func() {
		require.NoError(t, f.open().Purge(context.WithoutCancel(t.Context())))
		require.NotContains(t, backingFiles(t), dir, "a loop device is left")
		mounts, err := os.ReadFile("/proc/self/mounts")
		require.NoError(t, err)
		require.NotContains(t, string(mounts), dir, "a mount is left")
	})
	return f
}

func (f *fixture) open() *volume.Volumes {
	f.t.Helper()
	v, err := volume.Open(f.cfg)
	require.NoError(f.t, err)
	return v
}

// backingFiles are the files of all loop devices.
func backingFiles(t *testing.T) string {
	t.Helper()
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	require.NoError(t, err)
	var all strings.Builder
	for _, file := range files {
		text, _ := os.ReadFile(file)
		all.Write(text)
	}
	return all.String()
}

func use(revision uint64) volume.Use {
	return volume.Use{
		MemberID: "m1", Name: "data", SizeBytes: 32 * mib,
		Revision: volume.Revision{No: revision, AppVersion: fmt.Sprint(revision), Snapshot: true},
	}
}

func upgrade(revision uint64) volume.Use {
	u := use(revision)
	u.Revision.FallbackNo, u.Revision.FallbackVersion = revision-1, fmt.Sprint(revision-1)
	return u
}

func (f *fixture) prepare(u volume.Use) string {
	f.t.Helper()
	dir, err := f.v.Prepare(f.t.Context(), u)
	require.NoError(f.t, err)
	return dir
}

func (f *fixture) write(dir, text string) {
	f.t.Helper()
	require.NoError(f.t, os.WriteFile(filepath.Join(dir, "file"), []byte(text), 0o600))
}

func (f *fixture) requireContent(dir, text string) {
	f.t.Helper()
	got, err := os.ReadFile(filepath.Join(dir, "file"))
	require.NoError(f.t, err)
	require.Equal(f.t, text, string(got))
}

// reboot ends mounts and loop devices, as a restart of the machine does.
func (f *fixture) reboot(member string) {
	f.t.Helper()
	require.NoError(f.t, f.v.Detach(f.t.Context(), member))
	require.NoError(f.t, os.RemoveAll(f.cfg.MountDir))
	f.v = f.open()
}

func TestVolumeKeepsItsContentThroughRestartAndReboot(t *testing.T) {
	f := newFixture(t)
	f.write(f.prepare(use(1)), "first")
	f.v = f.open() // the agent restarts; the mount stays
	f.requireContent(f.prepare(use(1)), "first")
	f.reboot("m1")
	dir := f.prepare(use(1))
	f.requireContent(dir, "first")
	info, err := os.Stat(dir)
	require.NoError(t, err)
	require.Equal(t, os.ModeSticky|0o777, info.Mode()&(os.ModeSticky|os.ModePerm))
}

func TestVolumeHoldsItsBytesAndInodesAndNoMore(t *testing.T) {
	f := newFixture(t)
	dir := f.prepare(use(1))
	file, err := os.Create(filepath.Join(dir, "fill"))
	require.NoError(t, err)
	block, written := make([]byte, mib), 0
	for err == nil {
		var n int
		n, err = file.Write(block)
		written += n
	}
	require.NoError(t, file.Close())
	require.ErrorIs(t, err, unix.ENOSPC)
	require.Less(t, written, 32*mib)
	require.Greater(t, written, 20*mib, "the file system keeps less than that for itself")
	require.NoError(t, os.Remove(file.Name()))

	files := 0
	for err = nil; err == nil; files++ {
		err = os.WriteFile(filepath.Join(dir, fmt.Sprint(files)), nil, 0o600)
	}
	require.ErrorIs(t, err, unix.ENOSPC)
	require.LessOrEqual(t, files, 32*mib/16384)
	require.NoError(t, os.WriteFile(filepath.Join(f.cfg.Dir, "host"), []byte("x"), 0o600), "the host goes on")
	require.NoError(t, os.Remove(filepath.Join(f.cfg.Dir, "host")))
}

func TestVolumeGivesNoDevicesAndNoSetuid(t *testing.T) {
	f := newFixture(t)
	dir := f.prepare(use(1))
	node := filepath.Join(dir, "null")
	require.NoError(t, unix.Mknod(node, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	_, err := os.Open(node)
	require.ErrorIs(t, err, unix.EACCES)
	var st unix.Statfs_t
	require.NoError(t, unix.Statfs(dir, &st))
	require.NotZero(t, st.Flags&unix.ST_NOSUID)
}

func TestSpaceOfAVolumeIsReservedOnTheHost(t *testing.T) {
	f := newFixture(t)
	f.prepare(use(1))
	var st unix.Stat_t
	image := filepath.Join(f.cfg.Dir, "m1.data", "data.img")
	require.NoError(t, unix.Stat(image, &st))
	require.GreaterOrEqual(t, st.Blocks*512, int64(32*mib))

	u := use(1)
	u.Name, u.SizeBytes = "huge", 1<<50
	_, err := f.v.Prepare(t.Context(), u)
	require.Equal(t, agent.CodeVolumeNoSpace, fault.As(err).Code)
	require.NoDirExists(t, filepath.Join(f.cfg.Dir, "m1.huge"))
	left, err := filepath.Glob(filepath.Join(f.cfg.Dir, ".new-*"))
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestVolumeGrowsWithItsManifest(t *testing.T) {
	f := newFixture(t)
	f.write(f.prepare(use(1)), "first")
	u := use(2)
	u.SizeBytes = 96 * mib
	dir := f.prepare(u)
	f.requireContent(dir, "first")
	require.Greater(t, capacity(t, dir), int64(80*mib))
	f.prepare(use(3)) // a smaller size of a later version changes nothing
	require.Greater(t, capacity(t, dir), int64(80*mib))
}

// capacity is the size of the file system that a directory lies on.
func capacity(t *testing.T, dir string) int64 {
	t.Helper()
	var st unix.Statfs_t
	require.NoError(t, unix.Statfs(dir, &st))
	return int64(st.Blocks) * st.Bsize
}

// A kill between the reservation of a volume's space and its record: the disk has no room for the same space again.
func TestAnInterruptedGrowthNeedsItsSpaceOnce(t *testing.T) {
	f := newFixture(t)
	require.NoError(t, unix.Mount("tmpfs", f.cfg.Dir, "tmpfs", 0, "size=256m"))
	t.Cleanup(func() {
		require.NoError(t, f.v.RemoveMember(context.WithoutCancel(t.Context()), "m1"))
		require.NoError(t, unix.Unmount(f.cfg.Dir, 0))
	})
	f.v = f.open()
	f.write(f.prepare(use(1)), "first")
	require.NoError(t, f.v.Detach(t.Context(), "m1"))
	image, err := os.OpenFile(filepath.Join(f.cfg.Dir, "m1.data", "data.img"), os.O_RDWR, 0)
	require.NoError(t, err)
	require.NoError(t, unix.Fallocate(int(image.Fd()), 0, 0, 160*mib))
	require.NoError(t, image.Close())

	u := use(2)
	u.SizeBytes = 160 * mib
	dir := f.prepare(u)
	f.requireContent(dir, "first")
	require.Greater(t, capacity(t, dir), int64(128*mib))
	u.SizeBytes = 224 * mib
	_, err = f.v.Prepare(t.Context(), u)
	require.Equal(t, agent.CodeVolumeNoSpace, fault.As(err).Code, "64 MiB are the node's own")
}

func TestFallbackFindsTheContentBeforeTheUpgrade(t *testing.T) {
	f := newFixture(t)
	f.write(f.prepare(use(1)), "first")
	require.NoError(t, f.v.Detach(t.Context(), "m1"))
	dir := f.prepare(upgrade(2))
	f.requireContent(dir, "first")
	f.write(dir, "migrated")
	require.NoError(t, f.v.Detach(t.Context(), "m1"))
	f.requireContent(f.prepare(use(1)), "first")
	require.NoFileExists(t, filepath.Join(f.cfg.Dir, "m1.data", "upgrade.img"))
}

// A revision that leaves the service of the volume alone starts no container with it. An upgrade after that one goes
// back to it all the same.
func TestFallbackFindsTheContentThatItLeftWithoutAStart(t *testing.T) {
	for name, after := range map[string]func(*volume.Use){
		"fallback":               func(*volume.Use) {},
		"rollback by the tenant": func(u *volume.Use) { u.Revision.No, u.Revision.RollsBack = 4, true },
	} {
		f := newFixture(t)
		dir := f.prepare(use(1))
		f.write(dir, "first")
		f.write(dir, "second") // under revision 2, by the same container
		require.NoError(t, f.v.Detach(t.Context(), "m1"))
		f.write(f.prepare(upgrade(3)), "migrated")
		require.NoError(t, f.v.Detach(t.Context(), "m1"))
		back := use(2)
		after(&back)
		dir, err := f.v.Prepare(t.Context(), back)
		require.NoError(t, err, name)
		f.requireContent(dir, "second")
	}
}

// A fallback has a volume as small as before, and the upgrade after it gets what it asks for.
func TestAnUpgradeAfterAFallbackEnlargesTheVolumeAgain(t *testing.T) {
	f := newFixture(t)
	larger := func(revision uint64) volume.Use {
		u := upgrade(revision)
		u.SizeBytes = 96 * mib
		return u
	}
	f.write(f.prepare(use(1)), "first")
	require.NoError(t, f.v.Detach(t.Context(), "m1"))
	require.Greater(t, capacity(t, f.prepare(larger(2))), int64(80*mib))
	require.NoError(t, f.v.Detach(t.Context(), "m1"))
	require.Less(t, capacity(t, f.prepare(use(1))), int64(40*mib))
	require.NoError(t, f.v.Detach(t.Context(), "m1"))
	dir := f.prepare(larger(3))
	f.requireContent(dir, "first")
	require.Greater(t, capacity(t, dir), int64(80*mib))
}

// An upgrade has the volume once its snapshot is made, and not because it was tried before.
func TestAnUpgradeWhoseSnapshotFailedIsGivenOneBeforeTheVolume(t *testing.T) {
	f := newFixture(t)
	f.write(f.prepare(use(1)), "first")
	require.NoError(t, f.v.Detach(t.Context(), "m1"))
	inTheWay := filepath.Join(f.cfg.Dir, "m1.data", "upgrade.img.unfinished")
	require.NoError(t, os.MkdirAll(filepath.Join(inTheWay, "x"), 0o700))
	_, err := f.v.Prepare(t.Context(), upgrade(2))
	require.Error(t, err)
	require.NoError(t, os.RemoveAll(inTheWay))
	f.write(f.prepare(upgrade(2)), "second")
	require.NoError(t, f.v.Detach(t.Context(), "m1"))
	f.requireContent(f.prepare(use(1)), "first")
}

func TestRollbackByTheTenantRestoresOnlyWhatItLeft(t *testing.T) {
	f := newFixture(t)
	f.write(f.prepare(use(1)), "first")
	require.NoError(t, f.v.Detach(t.Context(), "m1"))
	f.write(f.prepare(upgrade(2)), "second")
	require.NoError(t, f.v.Detach(t.Context(), "m1"))

	restarted := use(3)
	restarted.Revision.AppVersion = "2"
	f.requireContent(f.prepare(restarted), "second")
	back := use(4)
	back.Revision.AppVersion, back.Revision.RollsBack = "1", true
	f.requireContent(f.prepare(back), "first")
}

func TestUpgradeThatAsksForNoSnapshotKeepsTheContent(t *testing.T) {
	f := newFixture(t)
	f.write(f.prepare(use(1)), "first")
	u := upgrade(2)
	u.Revision.Snapshot = false
	f.write(f.prepare(u), "second")
	require.NoError(t, f.v.Detach(t.Context(), "m1"))
	f.requireContent(f.prepare(use(1)), "second")
}

// A container of the revision before still writes: the snapshot is one moment all the same.
func TestSnapshotOfAVolumeInUseIsConsistent(t *testing.T) {
	f := newFixture(t)
	f.write(f.prepare(use(1)), "first")
	f.write(f.prepare(upgrade(2)), "second") // still mounted
	require.NoError(t, f.v.Detach(t.Context(), "m1"))
	f.requireContent(f.prepare(use(1)), "first")
}

func TestVolumeInUseIsNeitherRestoredNorDeleted(t *testing.T) {
	f := newFixture(t)
	f.write(f.prepare(use(1)), "first")
	dir := f.prepare(upgrade(2))
	f.write(dir, "second")
	held, err := os.Open(filepath.Join(dir, "file")) // as a container would
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err = f.v.Prepare(ctx, use(1))
	require.Error(t, err)
	require.Error(t, f.v.RemoveMember(ctx, "m1"))
	left, err := f.v.Leftovers("m1")
	require.NoError(t, err)
	require.NotEmpty(t, left)
	require.NoError(t, held.Close())
	f.requireContent(f.prepare(use(1)), "first")
}

func TestRemovalOfAMemberLeavesNothing(t *testing.T) {
	f := newFixture(t)
	f.write(f.prepare(use(1)), "first")
	f.prepare(upgrade(2))
	other := use(1)
	other.MemberID = "m10" // the name of one begins with that of the other
	f.write(f.prepare(other), "kept")
	require.NoError(t, f.v.RemoveMember(t.Context(), "m1"))
	left, err := f.v.Leftovers("m1")
	require.NoError(t, err)
	require.Empty(t, left)
	require.NotContains(t, backingFiles(t), filepath.Join(f.cfg.Dir, "m1.data"))
	f.requireContent(f.prepare(other), "kept")
}

// What a failed creation or deletion has left goes with its member, and does not wait for a restart of the agent.
func TestRemovalOfAMemberTakesWhatWasInterrupted(t *testing.T) {
	f := newFixture(t)
	f.prepare(use(1))
	for _, name := range []string{".new-m1.other", ".deleted-m1.data", ".new-m10.data"} {
		require.NoError(t, os.Mkdir(filepath.Join(f.cfg.Dir, name), 0o700))
	}
	require.NoError(t, f.v.RemoveMember(t.Context(), "m1"))
	left, err := f.v.Leftovers("m1")
	require.NoError(t, err)
	require.Empty(t, left)
	require.DirExists(t, filepath.Join(f.cfg.Dir, ".new-m10.data"))
}

// A repair of the node's disk may take any file away.
func TestRemovalOfAMemberTakesAVolumeThatLacksAFile(t *testing.T) {
	for _, name := range []string{"data.img", "record.json"} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.prepare(use(1))
			require.NoError(t, f.v.Detach(t.Context(), "m1"))
			require.NoError(t, os.Remove(filepath.Join(f.cfg.Dir, "m1.data", name)))
			require.NoError(t, f.v.RemoveMember(t.Context(), "m1"))
			left, err := f.v.Leftovers("m1")
			require.NoError(t, err)
			require.Empty(t, left)
		})
	}
}

func TestADamagedRecordDelaysNoOtherMember(t *testing.T) {
	f := newFixture(t)
	f.prepare(use(1))
	other := use(1)
	other.MemberID = "m2"
	f.write(f.prepare(other), "kept")
	require.NoError(t, os.WriteFile(filepath.Join(f.cfg.Dir, "m1.data", "record.json"), []byte("x"), 0o600))
	f.v = f.open()
	_, err := f.v.Prepare(t.Context(), use(1))
	require.Error(t, err)
	f.requireContent(f.prepare(other), "kept")
	for _, member := range []string{"m2", "m1"} {
		require.NoError(t, f.v.Detach(t.Context(), member))
		require.NoError(t, f.v.RemoveMember(t.Context(), member))
		left, err := f.v.Leftovers(member)
		require.NoError(t, err)
		require.Empty(t, left)
	}
}

// TestCrashBetweenAnyTwoStepsIsMadeGood leaves what a kill -9 in the middle would leave.
func TestCrashBetweenAnyTwoStepsIsMadeGood(t *testing.T) {
	f := newFixture(t)
	f.write(f.prepare(use(1)), "first")
	require.NoError(t, f.v.Detach(t.Context(), "m1"))
	f.write(f.prepare(upgrade(2)), "second")
	require.NoError(t, f.v.Detach(t.Context(), "m1"))
	dir := filepath.Join(f.cfg.Dir, "m1.data")
	require.NoError(t, exec.Command("cp", "-a", dir, filepath.Join(f.cfg.Dir, "..", "kept")).Run())
	restoring := `{"size_bytes":33554432,"revision":1,"app_version":"1","restoring":true}`
	const mounted = "at=../../mounts/m1.data; mkdir -p $at; mount -o loop data.img $at"
	for name, halve := range map[string]string{
		"nothing is done yet":          "true",
		"the restore is recorded":      "echo '" + restoring + "' > record.json",
		"the snapshot is in its place": "echo '" + restoring + "' > record.json; mv upgrade.img data.img",
		"the record is half written":   "echo x > .record.json.123",
		"a copy is half written":       "echo x > upgrade.img.unfinished",
		"another volume is half made":  "mkdir ../.new-m1.other; echo x > ../.new-m1.other/data.img",
		"another volume is half gone":  "mkdir -p ../.deleted-m1.other/snapshots",
		"the file system is mounted":   mounted,
		"the file system is frozen":    mounted + "; fsfreeze -f $at",
		"an earlier mount is elsewhere": "at=../../mounts/elsewhere; mkdir -p $at; mount -o loop data.img $at; " +
			"umount -l $at; rmdir $at",
		"the mount point has been left": "mkdir -p ../../mounts/m1.data",
	} {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, f.v.RemoveMember(t.Context(), "m1"))
			require.NoError(t, exec.Command("cp", "-a", filepath.Join(f.cfg.Dir, "..", "kept"), dir).Run())
			cmd := exec.Command("sh", "-ec", halve)
			cmd.Dir = dir
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, string(out))
			f.v = f.open()
			require.Empty(t, glob(t, f.cfg.Dir+"/.*-*"))
			require.Empty(t, glob(t, dir+"/*.unfinished"))
			require.Empty(t, glob(t, dir+"/.record*"))
			f.requireContent(f.prepare(use(1)), "first")
			f.write(f.prepare(use(1)), "goes on")
		})
	}
}

func glob(t *testing.T, pattern string) []string {
	t.Helper()
	found, err := filepath.Glob(pattern)
	require.NoError(t, err)
	return found
}

const childEnv = "GPUAAS_TEST_VOLUME_CHILD"
