package host

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

const mappedBytes = 1 << 20

// mapFile maps a new file, changes every page of it, and returns what it holds then.
func mapFile(t *testing.T, name string, flags int) (path string, mapped, want []byte) {
	t.Helper()
	path = filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, bytes.Repeat([]byte("file"), mappedBytes/4), 0o600))
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer func() { require.NoError(t, f.Close()) }()
	mapped, err = unix.Mmap(int(f.Fd()), 0, mappedBytes, unix.PROT_READ|unix.PROT_WRITE, flags)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Munmap(mapped)) })
	want = bytes.Repeat([]byte("data"), mappedBytes/4)
	copy(mapped, want)
	return path, mapped, want
}

// residentKB is how much of a mapped file is in this process's memory.
func residentKB(t *testing.T, path string) (kb int) {
	t.Helper()
	smaps, err := os.ReadFile("/proc/self/smaps")
	require.NoError(t, err)
	_, after, found := strings.Cut(string(smaps), path)
	require.True(t, found)
	_, after, _ = strings.Cut(after, "Rss:")
	_, err = fmt.Sscan(after, &kb)
	require.NoError(t, err)
	return kb
}

func TestGiveBackKeepsWhatMappedFilesHold(t *testing.T) {
	shared, sharedBytes, want := mapFile(t, "shared", unix.MAP_SHARED)
	_, privateBytes, _ := mapFile(t, "private", unix.MAP_PRIVATE)
	require.Equal(t, mappedBytes/1024, residentKB(t, shared))
	require.NoError(t, GiveBack())
	require.Zero(t, residentKB(t, shared))
	require.True(t, bytes.Equal(want, sharedBytes), "what was written is in the file")
	require.True(t, bytes.Equal(want, privateBytes), "what is this process's alone is untouched")
}

func TestOnlyCopiesOfFilesAreGivenBack(t *testing.T) {
	for line, want := range map[string]bool{
		"00400000-00ef3000 r-xp 00000000 fe:00 9986117      /usr/bin/gpuaas-agent":    true,
		"7f0000000000-7f0000800000 rw-s 00000000 fe:00 11   /var/lib/state/00001.mem": true,
		"00ef3000-01bbc000 r--p 00af3000 fe:00 9986117      /usr/bin/gpuaas-agent":    false, // may hold what the loader has relocated
		"01bbc000-01c5c000 rw-p 017bc000 fe:00 9986117      /usr/bin/gpuaas-agent":    false,
		"00500000-00501000 rwxp 00000000 fe:00 9986117      /usr/bin/gpuaas-agent":    false,
		"c000000000-c000400000 rw-p 00000000 00:00 0 ":                                false,
		"7ffc0000-7ffc1000 r-xp 00000000 00:00 0            [vdso]":                   false,
		"7ffd0000-7ffd1000 rw-s 00000000 00:0e 1053         anon_inode:[perf_event]":  false,
		"nonsense": false,
	} {
		m, ok := parseMapping(line)
		require.Equal(t, want, ok && m.isCopyOfFile(), line)
	}
}
