package filecopy_test

import (
	"archive/tar"
	"bytes"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/pkg/filecopy"
)

func openRoot(t *testing.T, dir string) *os.Root {
	t.Helper()
	r, err := os.OpenRoot(dir)
	require.NoError(t, err)
	t.Cleanup(func() { _ = r.Close() })
	return r
}

func write(t *testing.T, path, text string, mode fs.FileMode) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(t, os.WriteFile(path, []byte(text), mode))
}

func TestATreeArrivesWithModesTimesAndLinks(t *testing.T) {
	from, to := t.TempDir(), t.TempDir()
	write(t, from+"/data/run.sh", "#!", 0o750)
	write(t, from+"/data/deep/empty", "", 0o600)
	require.NoError(t, os.Chmod(from+"/data/run.sh", 0o750|fs.ModeSetuid))
	then := time.Unix(1_700_000_000, 0)
	require.NoError(t, os.Chtimes(from+"/data/run.sh", then, then))
	require.NoError(t, os.Symlink("../run.sh", from+"/data/deep/inside"))
	require.NoError(t, os.Symlink("../../outside", from+"/data/deep/outside"))
	require.NoError(t, os.Symlink("/etc/passwd", from+"/data/absolute"))
	require.NoError(t, unix.Mkfifo(from+"/data/pipe", 0o600))
	var stream bytes.Buffer
	left, err := filecopy.Pack(openRoot(t, from), "data", &stream)
	require.NoError(t, err)
	require.Equal(t, filecopy.Report{Special: 1}, left)

	write(t, to+"/copy/run.sh", "an older and longer one", 0o600)
	left, err = filecopy.Unpack(openRoot(t, to), "copy", &stream)
	require.NoError(t, err)
	require.Equal(t, "left out: 2 symbolic links that lead out of it", left.String())
	info, err := os.Stat(to + "/copy/run.sh")
	require.NoError(t, err)
	require.Equal(t, fs.FileMode(0o750), info.Mode(), "no set-user-id bit")
	require.True(t, info.ModTime().Equal(then))
	text, err := os.ReadFile(to + "/copy/deep/inside")
	require.NoError(t, err)
	require.Equal(t, "#!", string(text))
	for _, gone := range []string{"deep/outside", "absolute", "pipe"} {
		_, err := os.Lstat(to + "/copy/" + gone)
		require.ErrorIs(t, err, fs.ErrNotExist, gone)
	}
}

// archive is a stream that Pack does not write.
func archive(t *testing.T, headers ...tar.Header) *bytes.Buffer {
	t.Helper()
	out := &bytes.Buffer{}
	w := tar.NewWriter(out)
	for _, h := range headers {
		h.Mode = 0o644
		if h.Typeflag == tar.TypeReg {
			h.Size = 1
		}
		require.NoError(t, w.WriteHeader(&h))
		if h.Typeflag == tar.TypeReg {
			_, err := w.Write([]byte("x"))
			require.NoError(t, err)
		}
	}
	require.NoError(t, w.Close())
	return out
}

func TestAHostileStreamLeavesTheDirectoryAlone(t *testing.T) {
	for name, headers := range map[string][]tar.Header{
		"climbs":    {{Typeflag: tar.TypeReg, Name: "../victim"}},
		"absolute":  {{Typeflag: tar.TypeReg, Name: "/victim"}},
		"no name":   {{Typeflag: tar.TypeDir, Name: "./"}},
		"by a link": {{Typeflag: tar.TypeReg, Name: "planted/victim"}},
		"over a directory": {
			{Typeflag: tar.TypeDir, Name: "d/"},
			{Typeflag: tar.TypeReg, Name: "d"},
		},
		"over a pipe": {{Typeflag: tar.TypeReg, Name: "pipe"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			write(t, dir+"/victim", "whole", 0o600)
			require.NoError(t, os.Mkdir(dir+"/in", 0o700))
			require.NoError(t, os.Symlink("..", dir+"/in/planted"))
			require.NoError(t, unix.Mkfifo(dir+"/in/pipe", 0o600))
			_, err := filecopy.Unpack(openRoot(t, dir+"/in"), "", archive(t, headers...))
			require.Error(t, err)
			text, err := os.ReadFile(dir + "/victim")
			require.NoError(t, err)
			require.Equal(t, "whole", string(text))
		})
	}
}

// A container says where the links of a stream lead. None of them leads out of what is copied.
func TestLinksOfAStreamThatLeadOutAreNotMade(t *testing.T) {
	link := func(name, target string) tar.Header {
		return tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target}
	}
	dir := t.TempDir()
	left, err := filecopy.Unpack(openRoot(t, dir), "copy", archive(t,
		tar.Header{Typeflag: tar.TypeDir, Name: "data/"},
		link("data/inside", "file"), link("data/top", "."), link("data/round", "../copy/file"),
		link("data/absolute", "/etc/passwd"), link("data/parent", ".."), link("data/beside", "../copy-of-another"),
		link("data/far", "../../outside"), link("data/back", "../data/file")))
	require.NoError(t, err)
	require.Equal(t, filecopy.Report{Links: 5}, left)
	names, err := filepath.Glob(dir + "/copy/*")
	require.NoError(t, err)
	require.Equal(t, []string{dir + "/copy/inside", dir + "/copy/round", dir + "/copy/top"}, names)
}

// Each of two links stays within what is copied, and one through the other does not.
func TestLinksOfAStreamDoNotLeadOutTogether(t *testing.T) {
	dirOf := func(name string) tar.Header { return tar.Header{Typeflag: tar.TypeDir, Name: name} }
	file := func(name string) tar.Header { return tar.Header{Typeflag: tar.TypeReg, Name: name} }
	link := func(name, target string) tar.Header {
		return tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target}
	}
	for name, headers := range map[string][]tar.Header{
		"through a link and up": {
			dirOf("data/"), link("data/top", "."), link("data/out", "top/../beside"), file("data/out/victim"),
		},
		"up, through a link and up": {
			dirOf("data/"), dirOf("data/d/"), link("data/d/up", ".."), link("data/d/out", "../d/up/../beside"),
			file("data/d/out/victim"),
		},
		"up from below a link": {
			dirOf("data/"), dirOf("data/d/"), dirOf("data/d/e/"), link("data/d/e/up", "../.."),
			link("data/d/e/up/out", "../../../beside"), file("data/out/victim"),
		},
		"a directory below a link": {dirOf("data/"), link("data/top", "."), dirOf("data/top/d/")},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			write(t, dir+"/beside/victim", "whole", 0o600)
			_, err := filecopy.Unpack(openRoot(t, dir), "copy", archive(t, headers...))
			require.Error(t, err)
			text, err := os.ReadFile(dir + "/beside/victim")
			require.NoError(t, err)
			require.Equal(t, "whole", string(text))
			require.NoError(t, filepath.WalkDir(dir+"/copy", func(path string, _ fs.DirEntry, err error) error {
				require.NoError(t, err)
				to, err := filepath.EvalSymlinks(path)
				require.NoError(t, err)
				require.True(t, strings.HasPrefix(to+"/", dir+"/copy/"), "%s leads to %s", path, to)
				return nil
			}))
		})
	}
}

func TestSpecialFilesOfAStreamAreNotMade(t *testing.T) {
	dir := t.TempDir()
	write(t, dir+"/secret", "s", 0o600)
	left, err := filecopy.Unpack(openRoot(t, dir), "", archive(t,
		tar.Header{Typeflag: tar.TypeChar, Name: "null", Devmajor: 1, Devminor: 3},
		tar.Header{Typeflag: tar.TypeFifo, Name: "pipe"},
		tar.Header{Typeflag: tar.TypeLink, Name: "hard", Linkname: "secret"},
		tar.Header{Typeflag: tar.TypeReg, Name: "file"}))
	require.NoError(t, err)
	require.Equal(t, filecopy.Report{Special: 3}, left)
	names, err := filepath.Glob(dir + "/*")
	require.NoError(t, err)
	require.Equal(t, []string{dir + "/file", dir + "/secret"}, names)
}

func TestACopyIsBounded(t *testing.T) {
	out := &bytes.Buffer{}
	require.NoError(t, tar.NewWriter(out).WriteHeader(&tar.Header{
		Typeflag: tar.TypeReg, Name: "huge", Size: filecopy.MaxBytes + 1, Format: tar.FormatPAX,
	}))
	dir := t.TempDir()
	_, err := filecopy.Unpack(openRoot(t, dir), "", out)
	require.ErrorContains(t, err, "at most")
	require.NoFileExists(t, dir+"/huge")

	sum := archive(t, tar.Header{Typeflag: tar.TypeReg, Name: "small"})
	sum.Truncate(1024) // its header and its block, without the end
	require.NoError(t, tar.NewWriter(sum).WriteHeader(&tar.Header{
		Typeflag: tar.TypeReg, Name: "huge", Size: math.MaxInt64, Format: tar.FormatPAX,
	}))
	_, err = filecopy.Unpack(openRoot(t, dir), "", sum)
	require.ErrorContains(t, err, "at most", "also where the sum is no number")
	require.NoFileExists(t, dir+"/huge")

	many := &bytes.Buffer{}
	w := tar.NewWriter(many)
	for range filecopy.MaxFiles + 1 {
		require.NoError(t, w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: "d", Mode: 0o755}))
	}
	_, err = filecopy.Unpack(openRoot(t, dir), "", many)
	require.ErrorContains(t, err, "at most")

	deep := dir + "/deep"
	for range 101 {
		deep += "/d"
	}
	require.NoError(t, os.MkdirAll(deep, 0o755))
	_, err = filecopy.Pack(openRoot(t, dir), "deep", &bytes.Buffer{})
	require.ErrorContains(t, err, "nested")
}
