package runtime_test

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

func TestAnImageCannotTakeTheSnapshotOfAnotherByItsDiffIDs(t *testing.T) {
	layer := func(content string) []byte {
		return tarOf(t, entry{Header: tar.Header{Name: "file", Mode: 0o644}, content: content})
	}
	for _, first := range []string{"theirs", "own"} {
		t.Run(first+" first", func(t *testing.T) {
			f := newFixture(t)
			theirs := f.registry.push("org/acme/"+f.word, withLayers(t, gzipLayer(t, layer("theirs"))))
			claims := builtLayer{static.NewLayer(gzipOf(t, layer("own")), types.OCILayer), sumOf(t, layer("theirs"))}
			own := f.registry.push("org/acme/"+f.word+"b", withLayers(t, claims))
			images := []string{own, theirs}
			if first == "theirs" {
				slices.Reverse(images)
			}
			for _, image := range images {
				require.NoError(t, f.ensure(image))
			}
			for image, want := range map[string]string{theirs: "theirs", own: "own"} {
				dirs, _ := layerDirs(t, f, f.word, image, "")
				got, err := os.ReadFile(filepath.Join(dirs[0], "file"))
				require.NoError(t, err)
				require.Equal(t, want, string(got))
			}
		})
	}
}

func TestEachByteOfALayerIsChecked(t *testing.T) {
	f := newFixture(t)
	plain := tarOf(t, entry{Header: tar.Header{Name: "file", Mode: 0o644}, content: random(1 << 20)})
	refused := func(image, public string) {
		t.Helper()
		err := f.ensure(image)
		require.ErrorContains(t, err, public)
		require.True(t, fault.IsPermanent(err), err)
		require.Empty(t, f.snapshots())
	}
	image := f.registry.push("org/acme/"+f.word, withLayers(t, gzipLayer(t, plain)))
	header := func(body []byte) []byte {
		if len(body) > 1<<20 && bytes.HasPrefix(body, []byte{0x1f, 0x8b}) {
			body = bytes.Clone(body)
			body[4] ^= 1 // the time in gzip's header: what it unpacks to is the same
		}
		return body
	}
	f.registry.alter.Store(&header)
	refused(image, "is not what its digest says")
	middle := func(body []byte) []byte {
		if len(body) > 1<<20 {
			body = bytes.Clone(body)
			body[len(body)/2] ^= 1
		}
		return body
	}
	f.registry.alter.Store(&middle)
	refused(image, "is not what its digest says")
	f.registry.alter.Store(nil)
	require.NoError(t, f.ensure(image))

	// Digests that are right do not make an archive of anything.
	noTar := []byte(random(2048))
	err := f.ensure(f.registry.push("org/acme/"+f.word+"tar", withLayers(t, gzipLayer(t, noTar))))
	require.Error(t, err)
	has, err := f.rt.HasImage(t.Context(), parsed(t, image))
	require.NoError(t, err)
	require.True(t, has)
}

// Its digest is right, so that the registry has nothing else to give, however often a node asks.
func TestALayerThatIsNoArchiveIsRefusedForGood(t *testing.T) {
	f := newFixture(t)
	plain := tarOf(t, entry{Header: tar.Header{Name: "file", Mode: 0o644}, content: random(1 << 20)})
	packed := gzipOf(t, plain)
	broken := slices.Clone(packed)
	broken[len(broken)-8] ^= 1 // of the checksum
	for name, data := range map[string][]byte{
		"no archive": []byte(strings.Repeat("text", 1000)), "cut": packed[:len(packed)/2], "cut archive": plain[:1<<19],
		"wrong checksum": broken, "no zstd": append([]byte{0x28, 0xb5, 0x2f, 0xfd}, random(1000)...),
	} {
		layer := builtLayer{static.NewLayer(data, types.OCILayer), sumOf(t, plain)}
		err := f.ensure(f.registry.push("org/acme/"+f.word, withLayers(t, layer)))
		require.True(t, fault.IsPermanent(err), "%s: %v", name, err)
		require.Empty(t, f.snapshots(), name)
	}
}
