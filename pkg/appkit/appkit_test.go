package appkit_test

import (
	"archive/tar"
	"bytes"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/appkit"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestKeyFilesAreClosedToOthersAndNeverOverwritten(t *testing.T) {
	dir := t.TempDir()
	key, pub := filepath.Join(dir, "publisher.key"), filepath.Join(dir, "publisher.pub")
	made, err := appkit.GenerateKey(key, pub)
	require.NoError(t, err)
	info, err := os.Stat(key)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
	loaded, err := appkit.LoadKey(key)
	require.NoError(t, err)
	require.Equal(t, made.KeyID(), loaded.KeyID())

	_, err = appkit.GenerateKey(key, pub)
	require.True(t, fault.Is(err, fault.Conflict))
	require.NoError(t, os.Chmod(key, 0o640))
	_, err = appkit.LoadKey(key)
	require.EqualValues(t, "key_exposed", fault.As(err).Code)
	_, err = appkit.LoadKey(filepath.Join(dir, "absent"))
	require.EqualValues(t, "key_unreadable", fault.As(err).Code)
	require.NoError(t, os.Chmod(pub, 0o600))
	_, err = appkit.LoadKey(pub)
	require.EqualValues(t, "key_unreadable", fault.As(err).Code)
}

// A private key without its public half is of no use, and would keep the next call from its path.
func TestAPublicKeyThatCannotBeWrittenLeavesNoPrivateOne(t *testing.T) {
	dir := t.TempDir()
	key, pub := filepath.Join(dir, "publisher.key"), filepath.Join(dir, "publisher.pub")
	require.NoError(t, os.WriteFile(pub, []byte("another's"), 0o600))
	_, err := appkit.GenerateKey(key, pub)
	require.True(t, fault.Is(err, fault.Conflict))
	require.NoFileExists(t, key)
	require.NoError(t, os.Remove(pub))
	_, err = appkit.GenerateKey(key, pub)
	require.NoError(t, err)
}

func TestTheSameFilesGiveTheSameDigest(t *testing.T) {
	source := filepath.Join(t.TempDir(), "app")
	require.NoError(t, os.WriteFile(source, []byte("binary"), 0o600))
	build := func(mode int64) string {
		img, err := appkit.ImageFromFiles([]appkit.File{
			{Path: "/usr/bin/app", Source: source, Mode: mode}, {Path: "/etc/app.conf", Content: []byte("x"), Mode: 0o644},
		}, appkit.ImageConfig{Architecture: "amd64", Entrypoint: []string{"/usr/bin/app"}, User: "10001:10001"})
		require.NoError(t, err)
		digest, err := appkit.Digest(img)
		require.NoError(t, err)
		return digest
	}
	first := build(0o755)
	require.NoError(t, os.Chtimes(source, time.Unix(1, 0), time.Unix(1, 0)))
	require.Equal(t, first, build(0o755))
	require.NotEqual(t, first, build(0o700))
	_, err := appkit.ImageFromFiles([]appkit.File{{Path: "/a"}, {Path: "//a"}}, appkit.ImageConfig{})
	require.Error(t, err)
}

func writeTar(t *testing.T, path string, at time.Time) {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, h := range []*tar.Header{
		{Typeflag: tar.TypeDir, Name: "./", Mode: 0o755},
		{Typeflag: tar.TypeDir, Name: "./dev/", Mode: 0o755},
		{Typeflag: tar.TypeChar, Name: "./dev/null", Devmajor: 1, Devminor: 3},
		{Typeflag: tar.TypeReg, Name: "./file", Mode: 0o4755, Uid: 10, Uname: "ten", Size: 3, PAXRecords: map[string]string{
			"SCHILY.xattr.security.capability": "x",
		}},
		{Typeflag: tar.TypeLink, Name: "./hard", Linkname: "./file"},
		{Typeflag: tar.TypeSymlink, Name: "./soft", Linkname: "../file"},
	} {
		h.ModTime = at
		require.NoError(t, w.WriteHeader(h))
		if h.Typeflag == tar.TypeReg {
			_, err := w.Write([]byte("abc"))
			require.NoError(t, err)
		}
	}
	require.NoError(t, w.Close())
	require.NoError(t, os.WriteFile(path, buf.Bytes(), 0o600))
}

func TestRootFileSystemLosesWhatDiffersFromDayToDay(t *testing.T) {
	dir := t.TempDir()
	digests := map[string]bool{}
	for _, at := range []time.Time{time.Unix(1, 0), time.Unix(2, 0)} {
		work := t.TempDir()
		path := filepath.Join(dir, "rootfs.tar")
		writeTar(t, path, at)
		img, err := appkit.ImageFromTar(path, work, appkit.ImageConfig{Architecture: "amd64"})
		require.NoError(t, err)
		digest, err := appkit.Digest(img)
		require.NoError(t, err)
		digests[digest] = true

		layers, err := img.Layers()
		require.NoError(t, err)
		require.Len(t, layers, 1)
		content, err := layers[0].Uncompressed()
		require.NoError(t, err)
		r, names := tar.NewReader(content), map[string]*tar.Header{}
		for {
			h, err := r.Next()
			if err == io.EOF {
				break
			}
			require.NoError(t, err)
			names[h.Name] = h
		}
		require.NoError(t, content.Close())
		require.Len(t, names, 4)
		require.NotContains(t, names, "dev/null")
		require.Equal(t, "file", names["hard"].Linkname)
		require.Equal(t, "../file", names["soft"].Linkname)
		require.Equal(t, int64(0o4755), names["file"].Mode)
		require.Equal(t, 10, names["file"].Uid)
		require.Empty(t, names["file"].Uname)
		require.Empty(t, names["file"].PAXRecords)
	}
	require.Len(t, digests, 1)
}

func TestTemplateTakesPlainWordsAndMissesNothing(t *testing.T) {
	out, err := appkit.FillTemplate([]byte("a: ${one}\nb: ${two}-${one}\n"), map[string]string{
		"one": "1",
		"two": "org/x@sha256:ab",
	})
	require.NoError(t, err)
	require.Equal(t, "a: 1\nb: org/x@sha256:ab-1\n", string(out))
	for _, values := range []map[string]string{{}, {"one": "1", "two": "2"}, {"one": "x\ny: z"}, {"one": "a #b"}} {
		_, err := appkit.FillTemplate([]byte("a: ${one}\n"), values)
		require.EqualValues(t, "template_value", fault.As(err).Code)
	}
}

func TestSignManifestRefusesWhatTheHubWouldRefuse(t *testing.T) {
	signer, err := appkit.GenerateKey(filepath.Join(t.TempDir(), "k"), filepath.Join(t.TempDir(), "p"))
	require.NoError(t, err)
	_, err = appkit.SignManifest([]byte("app: {}"), signer)
	require.True(t, fault.Is(err, fault.Malformed))
	doc, err := os.ReadFile("../manifest/testdata/jupyter.yaml")
	require.NoError(t, err)
	envelope, err := appkit.SignManifest(doc, signer)
	require.NoError(t, err)
	env, err := protocol.EnvelopeFromJSON(envelope)
	require.NoError(t, err)
	require.Equal(t, doc, env.GetPayload())
}
