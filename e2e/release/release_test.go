package release_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/release"
)

func pack(t *testing.T, entries ...tar.Header) string {
	t.Helper()
	var out bytes.Buffer
	zipped := gzip.NewWriter(&out)
	w := tar.NewWriter(zipped)
	for _, h := range entries {
		require.NoError(t, w.WriteHeader(&h))
		_, err := w.Write(bytes.Repeat([]byte("x"), int(h.Size)))
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())
	require.NoError(t, zipped.Close())
	path := filepath.Join(t.TempDir(), "recording.tar.gz")
	require.NoError(t, os.WriteFile(path, out.Bytes(), 0o600))
	return path
}

func TestUnpackKeepsNamesContentAndModes(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, release.Unpack(pack(t,
		tar.Header{Name: "./", Typeflag: tar.TypeDir, Mode: 0o700},
		tar.Header{Name: "state/", Typeflag: tar.TypeDir, Mode: 0o700},
		tar.Header{Name: "state/entry", Typeflag: tar.TypeReg, Mode: 0o640, Size: 3},
	), dir))
	content, err := os.ReadFile(filepath.Join(dir, "state/entry"))
	require.NoError(t, err)
	require.Equal(t, "xxx", string(content))
	info, err := os.Stat(filepath.Join(dir, "state/entry"))
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o640), info.Mode())
}

func TestUnpackWritesNothingOutsideItsDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "inside")
	require.NoError(t, os.Mkdir(dir, 0o700))
	require.ErrorContains(t, release.Unpack(pack(t, tar.Header{Name: "../out", Mode: 0o600}), dir), "leads out")
	require.NoFileExists(t, filepath.Join(filepath.Dir(dir), "out"))
}
