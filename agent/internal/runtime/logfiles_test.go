package runtime

import (
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/e2e/skip"
)

// A disk without room for the copy of a log must not let the log grow, and what is written to it afterwards is read.
func TestALogIsCutThoughNothingOfItCanBeKept(t *testing.T) {
	skip.Root(t, "mounts")
	for name, test := range map[string]struct {
		options string
		filler  int
	}{
		"no space": {"size=1m", 800 << 10},
		"no inode": {"size=1m,nr_inodes=4", 0}, // the directory, the log, its times, the filler
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			require.NoError(t, unix.Mount("tmpfs", dir, "tmpfs", 0, test.options))
			t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, unix.MNT_DETACH)) })
			r := &Runtime{cfg: Config{LogDir: dir, MaxLogBytes: 100 << 10}}
			log, err := os.OpenFile(r.logPath("m.1"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
			require.NoError(t, err)
			defer func() { require.NoError(t, log.Close()) }()
			write := func(lines int) string {
				text := strings.Repeat("line\n", lines)
				_, err := log.WriteString(text)
				require.NoError(t, err)
				return text
			}
			write(1000)
			require.NoError(t, r.RotateLogs(t.Context()), "the size of the log is noted with the time")
			noted := time.Now()
			require.NoError(t, os.WriteFile(dir+"/filler", make([]byte, test.filler), 0o600))
			write(30_000)
			require.ErrorIs(t, r.RotateLogs(t.Context()), unix.ENOSPC)
			info, err := log.Stat()
			require.NoError(t, err)
			require.Zero(t, info.Size())

			require.NoError(t, os.Remove(dir+"/filler"))
			text := write(2000)
			since, err := r.LogsSince(t.Context(), "m.1", 0, noted, false)
			require.NoError(t, err)
			got, err := io.ReadAll(since)
			require.NoError(t, err)
			require.Equal(t, text, string(got))
			require.NoError(t, since.Close())
		})
	}
}

// A container may be removed between the listing of its log and the note of the log's size.
func TestLaw09TheTimeOfALogThatWasRemovedMeanwhileIsNotNoted(t *testing.T) {
	r := &Runtime{cfg: Config{LogDir: t.TempDir()}}
	_, _, err := r.makeLog("m.1")
	require.NoError(t, err)
	listed, err := os.Stat(r.logPath("m.1"))
	require.NoError(t, err)
	require.NoError(t, r.removeLogs("m.1"))
	require.NoError(t, r.noteLogTime("m.1", listed, time.Now()))
	left, err := os.ReadDir(r.cfg.LogDir)
	require.NoError(t, err)
	require.Empty(t, left)
}

// Who follows a log that is removed with its container has read all of it.
func TestAFollowedLogThatIsRemovedIsNotReadAgain(t *testing.T) {
	r := &Runtime{cfg: Config{LogDir: t.TempDir(), MaxLogBytes: 10}}
	_, _, err := r.makeLog("m.1")
	require.NoError(t, err)
	log, err := os.OpenFile(r.logPath("m.1"), os.O_APPEND|os.O_RDWR, 0o600)
	require.NoError(t, err)
	defer func() { require.NoError(t, log.Close()) }()
	cursor := &logCursor{r: r, id: "m.1", log: log}
	defer cursor.close()
	read := func() string {
		text, err := io.ReadAll(cursor)
		require.NoError(t, err)
		return string(text)
	}
	_, err = log.WriteString("one line\nand another\n")
	require.NoError(t, err)
	require.NoError(t, r.RotateLogs(t.Context()))
	_, err = log.WriteString("last\n")
	require.NoError(t, err)
	require.Contains(t, read(), "last\n")
	require.NoError(t, r.removeLogs("m.1"))
	require.Empty(t, read())
}

// Who reads a log slowly gets all that it had, also where a rotation has cut it meanwhile.
func TestALogThatIsRotatedWhileItIsReadIsReadToItsEnd(t *testing.T) {
	r := &Runtime{cfg: Config{LogDir: t.TempDir(), MaxLogBytes: 1000}}
	_, _, err := r.makeLog("m.1")
	require.NoError(t, err)
	write := func(text string) {
		log, err := os.OpenFile(r.logPath("m.1"), os.O_APPEND|os.O_WRONLY, 0o600)
		require.NoError(t, err)
		_, err = log.WriteString(text)
		require.NoError(t, err)
		require.NoError(t, log.Close())
	}
	write("an old line\n")
	require.NoError(t, r.rotate("m.1"))
	write("the newest line\n")
	log, err := r.LogsSince(t.Context(), "m.1", 0, time.Time{}, false)
	require.NoError(t, err)
	first := make([]byte, 1)
	_, err = io.ReadFull(log, first) // the rest of the old line waits for its reader
	require.NoError(t, err)
	require.NoError(t, r.rotate("m.1"))
	rest, err := io.ReadAll(log)
	require.NoError(t, err)
	require.Equal(t, "an old line\nthe newest line\n", string(first)+string(rest))
	require.NoError(t, log.Close())
}
