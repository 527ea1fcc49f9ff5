package runtime_test

import (
	"io"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/internal/runtime"
)

// untilOver calls OverLimit as the agent does until it names the container.
func (f *fixture) untilOver(id string) runtime.Excess {
	f.t.Helper()
	var found runtime.Excess
	require.Eventually(f.t, func() bool {
		over, _ := f.rt.OverLimit(f.t.Context())
		for _, x := range over {
			if x.ID == id {
				found = x
			}
		}
		return found.ID != ""
	}, 60*time.Second, runtime.GuardEvery)
	return found
}

func TestContainerIsOverItsLimitByWhateverItWrites(t *testing.T) {
	limit := func(c *runtime.Config) { c.DiskBytes = 16 << 20 }
	// A file system of its own: what else the machine removes must not hide what a container writes.
	f := newFixtureOn(t, "1g", limit)
	image := f.image()
	for what, args := range map[string][]string{
		"a file":                         {"fill", "/junk", "24"},
		"a file that it has removed":     {"fill-removed", "/junk", "24"},
		"a removed file that is mapped":  {"fill-mapped", "/junk", "24"},
		"a removed file of one thread":   {"fill-apart", "/junk", "24"},
		"a removed file of another root": {"fill-outside", "/junk", "24"},
	} {
		t.Run(what, func(t *testing.T) { f.requireOverLimit(image, args...) })
	}
	t.Run("directories that nobody measures", func(t *testing.T) { // they take no space of a file system in memory
		f := newFixture(t, limit)
		f.requireOverLimit(f.image(), "deep", "1500")
	})
}

// requireOverLimit expects that a container is over the limit, and that its neighbour, which writes half as much as it
// may, is not.
func (f *fixture) requireOverLimit(image string, args ...string) {
	f.t.Helper()
	spec, small := f.spec(image, args...), f.spec(image, "fill", "/some", "8")
	spec.Service.Capabilities = []string{"CAP_SYS_CHROOT"}
	f.start(small)
	f.start(spec)
	require.NotEmpty(f.t, f.untilOver(spec.ID).Detail)
	f.waitForLog(small.ID, "filled")
	over, _ := f.rt.OverLimit(f.t.Context())
	for _, x := range over {
		require.NotEqual(f.t, small.ID, x.ID)
	}
	for _, id := range []string{spec.ID, small.ID} {
		require.NoError(f.t, f.rt.Stop(f.t.Context(), id, 0))
		require.NoError(f.t, f.rt.Remove(f.t.Context(), id))
	}
}

func TestTheDiskIsWatchedMoreCloselyWhileContainersWrite(t *testing.T) {
	f := newFixture(t)
	_, idle := f.rt.OverLimit(t.Context())
	spec := f.spec(f.image(), "wait", "0")
	f.start(spec)
	_, first := f.rt.OverLimit(t.Context())
	require.Less(t, first, idle, "a container runs")
	log, err := os.OpenFile(filepath.Join(f.cfg.LogDir, spec.ID+".log"), os.O_WRONLY|os.O_APPEND, 0)
	require.NoError(t, err)
	defer func() { require.NoError(t, log.Close()) }()
	_, err = log.Write(make([]byte, 1<<20))
	require.NoError(t, err)
	_, pause := f.rt.OverLimit(t.Context())
	require.Equal(t, runtime.GuardEvery, pause)
}

func TestLimitOfTheServiceCountsAlsoAfterARestartOfTheAgent(t *testing.T) {
	f := newFixture(t)
	spec := f.spec(f.image(), "fill", "/junk", "24")
	spec.Service.Resources.DiskBytes = 16 << 20
	f.start(spec)
	f.waitForLog(spec.ID, "filled")
	f.rt = f.open()
	require.NotNil(t, f.wait(spec.ID, runtime.StateRunning))
	require.Contains(t, f.untilOver(spec.ID).Detail, "16 MiB")
}

// No file on the node grows without bound, however fast a container writes to its standard output.
func TestContainerThatFloodsItsLogIsOverItsLimit(t *testing.T) {
	f := newFixture(t, func(c *runtime.Config) { c.MaxLogBytes = 64 << 10 })
	spec := f.spec(f.image(), "shout")
	f.start(spec)
	require.Contains(t, f.untilOver(spec.ID).Detail, "output")
	require.NoError(t, f.rt.Stop(t.Context(), spec.ID, 0))
	// The shim may still copy the output of a container that has ended.
	follow, err := f.rt.Logs(t.Context(), spec.ID, 1, true)
	require.NoError(t, err)
	_, err = io.Copy(io.Discard, follow)
	require.NoError(t, err)
	f.rt.OverLimit(t.Context())
	require.NoError(t, f.rt.RotateLogs(t.Context()))
	var kept int64
	logs, err := filepath.Glob(filepath.Join(f.cfg.LogDir, spec.ID+"*"))
	require.NoError(t, err)
	for _, path := range logs {
		info, err := os.Stat(path)
		require.NoError(t, err)
		kept += info.Size()
	}
	require.LessOrEqual(t, kept, 2*f.cfg.MaxLogBytes)
}

// A directory may have as many files as the disk has inodes; the agent's memory is for all members.
func TestADirectoryOfManyFilesIsNotHeldInMemory(t *testing.T) {
	const files = 20_000
	dir := t.TempDir()
	for i := range files {
		require.NoError(t, os.WriteFile(filepath.Join(dir, strconv.Itoa(i)), nil, 0o600))
	}
	require.NoError(t, os.Mkdir(filepath.Join(dir, "more"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "more", "data"), make([]byte, 64<<10), 0o600))
	used, err := runtime.LayerUse(t.Context(), dir, 1<<40)
	require.NoError(t, err)
	require.GreaterOrEqual(t, used, int64(files*4<<10+64<<10))

	var before, after goruntime.MemStats
	goruntime.ReadMemStats(&before)
	used, err = runtime.LayerUse(t.Context(), dir, 1<<20)
	goruntime.ReadMemStats(&after)
	require.NoError(t, err)
	require.Greater(t, used, int64(1<<20))
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(1<<20))
}

// A container may replace a directory between the reading of its name and that of its content.
func TestAPipeInThePlaceOfADirectoryIsNotOpened(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, unix.Mkfifo(filepath.Join(dir, "pipe"), 0o600))
	writer, err := os.OpenFile(filepath.Join(dir, "pipe"), os.O_RDWR, 0) // without it, a failing test would hang
	require.NoError(t, err)
	defer func() { require.NoError(t, writer.Close()) }()
	require.NoError(t, os.Symlink("/etc", filepath.Join(dir, "link")))
	root, err := os.OpenRoot(dir)
	require.NoError(t, err)
	defer func() { require.NoError(t, root.Close()) }()
	for _, name := range []string{"pipe", "link", "gone"} {
		used, err := runtime.DirUse(t.Context(), root, name)
		require.NoError(t, err)
		require.Zero(t, used, name)
	}
}

// A removed file that a process holds open takes space of its file system: one on a volume or in memory takes none of
// the container's own.
func TestARemovedFileOfAnotherFileSystemIsNotTheContainersOwn(t *testing.T) {
	f := newFixture(t, func(c *runtime.Config) { c.DiskBytes = 4 << 20 })
	image := f.image()
	elsewhere, own := f.spec(image, "fill-removed", "/dev/shm/junk", "8"), f.spec(image, "fill-removed", "/junk", "8")
	f.start(elsewhere)
	f.waitForLog(elsewhere.ID, "filled")
	f.start(own)
	f.waitForLog(own.ID, "filled")
	over := map[string]bool{}
	require.Eventually(t, func() bool { // both are measured together
		found, _ := f.rt.OverLimit(t.Context())
		for _, x := range found {
			over[x.ID] = true
		}
		return over[own.ID]
	}, 60*time.Second, runtime.GuardEvery)
	require.False(t, over[elsewhere.ID])
}

// A container may hold as many files open as the kernel has room for; the agent's memory and time are for all members.
func TestAProcessWithManyOpenFilesIsNotReadToItsEnd(t *testing.T) {
	const held = 2000
	for range held {
		fd, err := unix.Dup(0)
		require.NoError(t, err)
		t.Cleanup(func() { _ = unix.Close(fd) })
	}
	_, err := runtime.RemovedUse(t.Context(), 10*held, os.Getpid())
	require.NoError(t, err)
	_, err = runtime.RemovedUse(t.Context(), held, os.Getpid())
	require.ErrorContains(t, err, "files open")
}

func TestFilesThatThreadsShareAreReadOnce(t *testing.T) {
	const held = 2000
	for range held {
		fd, err := unix.Dup(0)
		require.NoError(t, err)
		t.Cleanup(func() { _ = unix.Close(fd) })
	}
	goruntime.LockOSThread()
	defer goruntime.UnlockOSThread()
	other, done := make(chan int), make(chan struct{})
	defer close(done)
	go func() {
		goruntime.LockOSThread()
		other <- unix.Gettid()
		<-done
	}()
	_, err := runtime.RemovedUse(t.Context(), held*3/2, unix.Gettid(), <-other)
	require.NoError(t, err)
}
