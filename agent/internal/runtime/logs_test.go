package runtime_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/runtime"
)

func TestLogTailAndFollow(t *testing.T) {
	f := newFixture(t)
	spec := f.spec(f.image(), "lines-exit", "5000")
	f.start(spec)
	follow, err := f.rt.Logs(t.Context(), spec.ID, 0, true)
	require.NoError(t, err)
	all, err := io.ReadAll(follow)
	require.NoError(t, err, "following ends with the container")
	require.Equal(t, 5000, bytes.Count(all, []byte("\n")))
	some, err := f.rt.Logs(t.Context(), spec.ID, 3, false)
	require.NoError(t, err)
	last, err := io.ReadAll(some)
	require.NoError(t, err)
	require.Equal(t, "line 4997\nline 4998\nline 4999\n", string(last))
	_, err = f.rt.Logs(t.Context(), "none.at.all", 0, false)
	require.ErrorContains(t, err, "log_missing")
	_, err = f.rt.Logs(t.Context(), "../../etc/passwd", 0, false)
	require.Error(t, err)
}

// What a container writes to its standard error before it ends at once is kept, however the shim's copies of its two
// outputs end.
func TestTheLastOutputOfAContainerIsKept(t *testing.T) {
	f := newFixture(t)
	image := f.image()
	var ending sync.WaitGroup
	logs := make([]string, 24)
	for n := range logs {
		spec := f.spec(image, "complain")
		f.start(spec)
		ending.Go(func() {
			follow, err := f.rt.Logs(t.Context(), spec.ID, 0, true)
			if err == nil {
				all, _ := io.ReadAll(follow)
				logs[n] = string(all)
			}
		})
	}
	ending.Wait()
	for _, log := range logs {
		require.Equal(t, "a last word\n", log)
	}
}

// The test writes to the log as the shim does, later than the shim of this container.
func TestFollowedLogHasWhatIsWrittenAfterTheExit(t *testing.T) {
	f := newFixture(t)
	spec := f.spec(f.image(), "lines-exit", "1")
	f.start(spec)
	shim, err := os.OpenFile(filepath.Join(f.cfg.LogDir, spec.ID+".log"), os.O_WRONLY|os.O_APPEND, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _ = shim.Close() })
	f.wait(spec.ID, runtime.StateExited)
	follow, err := f.rt.Logs(t.Context(), spec.ID, 0, true)
	require.NoError(t, err)
	first := make([]byte, len("line 0\n"))
	_, err = io.ReadFull(follow, first)
	require.NoError(t, err)
	require.Equal(t, "line 0\n", string(first))
	_, err = shim.WriteString("late\n")
	require.NoError(t, err)
	require.NoError(t, shim.Close())
	rest, err := io.ReadAll(follow)
	require.NoError(t, err)
	require.Equal(t, "late\n", string(rest))
}

func TestLogsAreBoundedWhileTheContainerWrites(t *testing.T) {
	f := newFixture(t, func(c *runtime.Config) { c.MaxLogBytes = 64 << 10 })
	spec := f.spec(f.image(), "lines", "20000", "/tmp/printed", "/tmp/go")
	tmp := fmt.Sprintf("/proc/%d/root/tmp/", f.start(spec).PID)
	// What is written between a rotation's copy and its cut is lost: the last line must not be among that.
	require.Eventually(t, func() bool {
		rotated := f.rt.RotateLogs(t.Context())
		_, err := os.Stat(tmp + "printed")
		return rotated == nil && err == nil
	}, time.Minute, time.Millisecond)
	require.NoError(t, os.WriteFile(tmp+"go", nil, 0o600))
	f.waitForLog(spec.ID, "done\n")
	require.NoError(t, f.rt.RotateLogs(t.Context()))
	var total int64
	for _, suffix := range []string{".log", ".log.1"} {
		info, err := os.Stat(filepath.Join(f.cfg.LogDir, spec.ID+suffix))
		require.NoError(t, err)
		total += info.Size()
	}
	require.LessOrEqual(t, total, 4*f.cfg.MaxLogBytes)
	require.True(t, strings.HasSuffix(f.log(spec.ID), "line 19999\ndone\n"), "the newest lines are kept")
	reader, err := f.rt.Logs(t.Context(), spec.ID, 2500, false)
	require.NoError(t, err)
	lines, err := io.ReadAll(reader)
	require.NoError(t, err)
	require.Equal(t, 2500, bytes.Count(lines, []byte("\n")), "the tail reaches into the rotated file")
	require.NoError(t, f.rt.Remove(t.Context(), spec.ID))
	left, err := filepath.Glob(f.cfg.LogDir + "/*")
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestEventsWakeAfterInterruption(t *testing.T) {
	f := newFixture(t)
	spec := f.spec(f.image(), "wait")
	wake := f.rt.Events(t.Context())
	<-wake        // once at the beginning
	f.start(spec) // no event for its own caller
	f.waitForLog(spec.ID, "ready")
	require.NoError(t, f.daemon.Kill9())
	require.NoError(t, f.daemon.Start(t.Context()))
	// Whatever happened meanwhile was not replayed: the reader is woken all the same, and sees later events again.
	f.wait(spec.ID, runtime.StateRunning)
	require.NoError(t, f.rt.Stop(t.Context(), spec.ID, 0))
	for {
		<-wake
		if c, err := f.rt.Get(t.Context(), spec.ID); err == nil && c.State == runtime.StateExited {
			break
		}
	}
}

func TestPurgeLeavesNothing(t *testing.T) {
	f := newFixture(t)
	spec := f.spec(f.image(), "wait")
	f.start(spec)
	v, err := f.rt.Version(t.Context())
	require.NoError(t, err)
	require.Equal(t, []bool{true, true}, []bool{strings.Contains(v.Containerd, "."), strings.Contains(v.Runc, ".")},
		fmt.Sprint(v))
	require.NoError(t, f.rt.Purge(t.Context()))
	namespaces, err := f.daemon.Client(t).NamespaceService().List(t.Context())
	require.NoError(t, err)
	require.NotContains(t, namespaces, f.word)
	require.NoDirExists(t, f.cfg.StateDir)
	require.NoDirExists(t, f.cfg.LogDir)
}

func TestALogIsReadSinceATime(t *testing.T) {
	f := newFixture(t, func(c *runtime.Config) { c.MaxLogBytes = 1000 })
	id := f.startWaiting(f.image())
	path := filepath.Join(f.cfg.LogDir, id+".log")
	f.waitForLog(id, "ready")
	write := func(text string) (after time.Time) {
		log, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
		require.NoError(t, err)
		_, err = log.WriteString(text)
		require.NoError(t, err)
		require.NoError(t, log.Close())
		require.NoError(t, f.rt.RotateLogs(t.Context()))
		// What is written next counts as newer than the record, however coarse the file system's clock is.
		old := time.Now().Add(-time.Minute)
		if err := os.Chtimes(path+".times", old, old); !errors.Is(err, fs.ErrNotExist) {
			require.NoError(t, err)
		}
		return time.Now()
	}
	since := func(at time.Time, tail int) string {
		r, err := f.rt.LogsSince(t.Context(), id, tail, at, false)
		require.NoError(t, err)
		defer func() { _ = r.Close() }()
		text, err := io.ReadAll(r)
		require.NoError(t, err)
		return string(text)
	}
	began := time.Now().Add(-time.Hour)
	first := write("first\n")
	second := write("second\nbegun")
	third := write(" and ended\n")
	require.Equal(t, "ready\nfirst\nsecond\nbegun and ended\n", since(began, 0))
	require.Equal(t, "second\nbegun and ended\n", since(first, 0))
	require.Equal(t, "begun and ended\n", since(second, 0), "a line is whole")
	require.Empty(t, since(third, 0))
	require.Equal(t, "begun and ended\n", since(first, 1), "the last lines of those")

	// The log before the rotation counts as well.
	long := strings.Repeat("x", 1000) + "\n"
	rotated := write(long)
	write("after\n")
	require.Equal(t, "after\n", since(rotated, 0))
	require.True(t, strings.HasSuffix(since(third, 0), long[500:]+"after\n"))
	require.NotContains(t, since(third, 0), "ended")
	other := f.open() // the times are on the disk
	r, err := other.LogsSince(t.Context(), id, 0, rotated, false)
	require.NoError(t, err)
	text, err := io.ReadAll(r)
	require.NoError(t, err)
	require.Equal(t, "after\n", string(text))
	require.NoError(t, f.rt.Remove(t.Context(), id))
	left, err := filepath.Glob(f.cfg.LogDir + "/*")
	require.NoError(t, err)
	require.Empty(t, left)
}

// A log may be cut, and grow past where its reader was, before it is read again.
func TestAFollowedLogLosesNothingByRotations(t *testing.T) {
	f := newFixture(t, func(c *runtime.Config) { c.MaxLogBytes = 1000 })
	id := f.startWaiting(f.image())
	f.waitForLog(id, "ready")
	write := func(text string) {
		log, err := os.OpenFile(filepath.Join(f.cfg.LogDir, id+".log"), os.O_WRONLY|os.O_APPEND, 0)
		require.NoError(t, err)
		_, err = log.WriteString(text)
		require.NoError(t, err)
		require.NoError(t, log.Close())
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	follow, err := f.rt.Logs(ctx, id, 0, true)
	require.NoError(t, err)
	t.Cleanup(func() { _ = follow.Close() })
	read := func(want string) {
		got := make([]byte, len(want))
		_, err := io.ReadFull(follow, got)
		require.NoError(t, err)
		require.Equal(t, want, string(got))
	}
	read("ready\n")
	first, second := strings.Repeat("a", 995)+"\n", strings.Repeat("b", 1500)+"\n"
	write(first)
	require.NoError(t, f.rt.RotateLogs(t.Context()))
	write(second)
	read(first + second)
	write("last\n")
	read("last\n")
}

func TestACopyOfALogThatFailsLeavesNothing(t *testing.T) {
	f := newFixture(t, func(c *runtime.Config) { c.MaxLogBytes = 1000 })
	id := f.startWaiting(f.image())
	f.waitForLog(id, "ready")
	path := filepath.Join(f.cfg.LogDir, id+".log")
	inTheWay := filepath.Join(path+".1", "x")
	require.NoError(t, os.MkdirAll(inTheWay, 0o700))
	require.NoError(t, os.WriteFile(path, bytes.Repeat([]byte("x"), 2000), 0o600))
	require.Error(t, f.rt.RotateLogs(t.Context()))
	require.NoFileExists(t, path+".1.new")
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Zero(t, info.Size(), "the log is bounded all the same")
	require.NoError(t, os.RemoveAll(path+".1"))
}
