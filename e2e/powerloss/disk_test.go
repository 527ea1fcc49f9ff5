package powerloss

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/e2e/sandbox"
	"github.com/gpuaas/gpuaas/e2e/skip"
)

const (
	testMiB = 64
	seeds   = 8
)

// killedEnv is the directory of a disk that this program makes before it is killed.
const killedEnv = "POWERLOSS_TEST_KILLED"

// killedMiB is the size of that disk, which no other disk of any test has.
const killedMiB = 71

// TestMain runs the tests in a mount namespace of their own: one that another package's tests make meanwhile would have
// a copy of their mounts, and keep a loop device in use.
func TestMain(m *testing.M) {
	if dir := os.Getenv(killedEnv); dir != "" {
		waitWithDisk(dir)
	}
	os.Exit(sandbox.RunInTree(m.Run))
}

// testDisk is a disk with a file of eight pages of 'A' that is durable.
func testDisk(t *testing.T) (_ *Disk, path string) {
	t.Helper()
	skip.Root(t, "mounts and loop devices")
	d, err := New(filepath.Join(t.TempDir(), "disk"), filepath.Join(t.TempDir(), "point"), testMiB)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	path = filepath.Join(d.Point, "file")
	require.NoError(t, os.WriteFile(path, pages('A'), 0o600))
	require.NoError(t, d.Sync())
	return d, path
}

func pages(b byte) []byte { return bytes.Repeat([]byte{b}, 8*pageBytes) }

// writeDirectly overwrites the file past the kernel's page cache: the device has all of it when the function returns.
func writeDirectly(t *testing.T, path string, content []byte) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|unix.O_DIRECT, 0)
	require.NoError(t, err)
	memory, err := unix.Mmap(-1, 0, len(content), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	require.NoError(t, err)
	copy(memory, content)
	_, err = f.WriteAt(memory, 0)
	require.NoError(t, err)
	require.NoError(t, unix.Munmap(memory))
	return f
}

// cutAndRead cuts the power and returns what is left of each file, by its name.
func cutAndRead(t *testing.T, d *Disk, seed uint64) map[string]string {
	t.Helper()
	t.Logf("seed %d", seed)
	_, err := d.Cut(rand.New(rand.NewPCG(seed, 0)), func() error { return nil })
	require.NoError(t, err)
	left := map[string]string{}
	require.NoError(t, d.Examine(func() {
		entries, err := os.ReadDir(d.Point)
		require.NoError(t, err)
		for _, entry := range entries {
			if entry.Type().IsRegular() {
				content, err := os.ReadFile(filepath.Join(d.Point, entry.Name()))
				require.NoError(t, err)
				left[entry.Name()] = string(content)
			}
		}
	}))
	return left
}

func TestASyncedWriteSurvivesEveryCut(t *testing.T) {
	d, path := testDisk(t)
	for i := range seeds {
		content := pages('B' + byte(i))
		f := writeDirectly(t, path, content)
		require.NoError(t, unix.Fdatasync(int(f.Fd())))
		require.NoError(t, f.Close())
		require.Equal(t, string(content), cutAndRead(t, d, rand.Uint64())["file"])
		require.NoError(t, d.PowerOn())
	}
}

// What the device has but did not flush is lost, or in part: by sectors, in any order.
func TestAnUnsyncedWriteIsLostOrTorn(t *testing.T) {
	d, path := testDisk(t)
	lost, torn := 0, 0
	for seed := range uint64(seeds) {
		f := writeDirectly(t, path, pages('B'))
		require.NoError(t, f.Close())
		left := cutAndRead(t, d, seed)["file"]
		require.Len(t, left, 8*pageBytes)
		written := strings.Count(left, "B")
		require.Equal(t, 8*pageBytes, written+strings.Count(left, "A"))
		require.Zero(t, written%sectorBytes, "no sector is torn")
		switch written {
		case 0:
			lost++
		case 8 * pageBytes:
		default:
			torn++
		}
		require.NoError(t, d.PowerOn())
		require.NoError(t, os.WriteFile(path, pages('A'), 0o600))
		require.NoError(t, d.Sync())
	}
	require.Positive(t, lost, "some cuts take everything")
	require.Positive(t, torn, "some cuts tear")
}

// What the kernel had not written yet is lost too.
func TestAWriteIntoThePageCacheIsLost(t *testing.T) {
	d, path := testDisk(t)
	for range seeds {
		require.NoError(t, os.WriteFile(filepath.Join(d.Point, "new"), pages('N'), 0o600))
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		require.NoError(t, err)
		_, err = f.Write(pages('B'))
		require.NoError(t, err)
		require.NoError(t, f.Close())
		left := cutAndRead(t, d, rand.Uint64())
		require.NotContains(t, left["new"], "N")
		require.Equal(t, string(pages('A')), left["file"])
		require.NoError(t, d.PowerOn())
	}
}

func TestARenameIsDurableAfterTheDirectorysSyncAlone(t *testing.T) {
	d, path := testDisk(t)
	for _, sync := range []bool{false, true} {
		before := 0
		for i := range seeds {
			old, err := os.ReadFile(path)
			require.NoError(t, err)
			content := fmt.Sprint("content ", sync, i)
			replace(t, path, content, sync)
			left := cutAndRead(t, d, rand.Uint64())["file"]
			require.Contains(t, []string{string(old), content}, left, "the one or the other, and nothing else")
			if left != content {
				before++
			}
			require.NoError(t, d.PowerOn())
		}
		if sync {
			require.Zero(t, before)
		} else {
			require.Positive(t, before, "a rename that nobody synced is lost")
		}
	}
}

func replace(t *testing.T, path, content string, syncDirectory bool) {
	t.Helper()
	f, err := os.Create(path + ".new")
	require.NoError(t, err)
	_, err = f.WriteString(content)
	require.NoError(t, err)
	require.NoError(t, f.Sync())
	require.NoError(t, f.Close())
	require.NoError(t, os.Rename(path+".new", path))
	if syncDirectory {
		dir, err := os.Open(filepath.Dir(path))
		require.NoError(t, err)
		require.NoError(t, dir.Sync())
		require.NoError(t, dir.Close())
	}
}

// flushed is how often the cache was flushed.
func (c *cache) flushed(t *testing.T) (n int) {
	t.Helper()
	require.NoError(t, c.do(func() error {
		n = c.flushes
		return nil
	}))
	return n
}

// What the tests promise about a cut holds for the flushes of a real disk: the kernel takes the device for one with a
// volatile cache, and an fsync is answered when the durable file has the data, no earlier.
func TestAnFsyncEndsInAFlushOfTheDevice(t *testing.T) {
	d, path := testDisk(t)
	loop := filepath.Base(d.device.loop.Name())
	mode, err := os.ReadFile(filepath.Join("/sys/block", loop, "queue/write_cache"))
	require.NoError(t, err)
	require.Equal(t, "write back\n", string(mode))
	durable := func() bool {
		image, err := os.ReadFile(d.image())
		require.NoError(t, err)
		return bytes.Contains(image, pages('D'))
	}
	f := writeDirectly(t, path, pages('D'))
	require.False(t, durable(), "the device alone has it")
	before := d.device.cache.flushed(t)
	require.NoError(t, f.Sync())
	require.Greater(t, d.device.cache.flushed(t), before)
	require.True(t, durable())
	require.NoError(t, f.Close())
}

// Processes that wait for a disk without power end when they are killed; the next power-on finds a sound file system.
func TestNothingIsAnsweredWithoutPower(t *testing.T) {
	d, path := testDisk(t)
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = f.WriteString("unsynced")
	require.NoError(t, err)
	synced := make(chan error, 1)
	_, err = d.Cut(rand.New(rand.NewPCG(rand.Uint64(), 0)), func() error {
		go func() { synced <- f.Sync() }()
		return nil
	})
	require.NoError(t, err)
	require.ErrorIs(t, <-synced, unix.EIO)
	require.NoError(t, f.Close())
	require.NoError(t, d.PowerOn())
	left, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(pages('A')), string(left))
}

// waitWithDisk makes a disk, says so, and waits for the end.
func waitWithDisk(dir string) {
	if _, err := New(filepath.Join(dir, "disk"), filepath.Join(dir, "point"), killedMiB); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("ready")
	select {}
}

func TestAKilledProgramLeavesNoDisk(t *testing.T) {
	skip.Root(t, "mounts and loop devices")
	dir := t.TempDir()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), killedEnv+"="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	stderr, err := cmd.StderrPipe() // that of the shell, too
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	said, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "ready\n", said)
	require.Len(t, traces(t, dir), 3, "two mounts and a loop device")
	require.NoError(t, syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL))
	left, err := io.ReadAll(stderr)
	require.NoError(t, err, "all of its processes have ended")
	require.Empty(t, string(left))
	require.Error(t, cmd.Wait(), "killed")
	require.Empty(t, traces(t, dir))
	require.NoDirExists(t, filepath.Join(dir, "disk"))
}

// traces are the mounts in a directory, and the loop devices of killedMiB.
func traces(t *testing.T, dir string) (found []string) {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	require.NoError(t, err)
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, dir) {
			found = append(found, line)
		}
	}
	sizes, err := filepath.Glob("/sys/block/loop*/size")
	require.NoError(t, err)
	for _, size := range sizes {
		sectors, _ := os.ReadFile(size) // it may have gone
		if string(sectors) == fmt.Sprintln(killedMiB<<20/sectorBytes) {
			found = append(found, size)
		}
	}
	return found
}
