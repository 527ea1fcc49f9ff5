package runtime_test

import (
	"archive/tar"
	"os"
	"path/filepath"
	goruntime "runtime"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// modelImage is an image of files alone, each in a layer of its own.
func modelImage(t *testing.T, names ...string) v1.Image {
	t.Helper()
	img, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{OS: "linux", Architecture: goruntime.GOARCH})
	require.NoError(t, err)
	for _, name := range names {
		img, err = mutate.AppendLayers(img, gzipLayer(t, tarOf(t, entry{
			Header: tar.Header{Name: name, Mode: 0o640, Uid: 1000, Gid: 100}, content: name,
		})))
		require.NoError(t, err)
	}
	return img
}

// Images that containers mount are on the node once, read-only, in the containers' ids, and stay while one has them.
func TestContainersShareTheImagesThatTheyMount(t *testing.T) {
	eachWay(t, func(t *testing.T, f *fixture, _ string) {
		app := f.image()
		one := f.registry.push("org/acme/"+f.word+"one", modelImage(t, "weights"))
		two := f.registry.push("org/acme/"+f.word+"two", modelImage(t, "a", "b"))
		spec := f.spec(app, "list", "/models")
		spec.Service.User = "1000:0"
		spec.Service.ImageMounts = []*protocol.ImageMount{
			{Image: one, Path: "/models/one"}, {Image: two, Path: "/models/two"},
		}
		require.NoError(t, f.ensure(one))
		_, err := f.rt.Start(t.Context(), spec)
		require.Equal(t, fault.Code("image_missing"), fault.As(err).Code)
		require.NoError(t, f.ensure(two))
		f.start(spec)
		f.waitForLog(spec.ID, "listed\n")
		for _, line := range []string{
			"/models/one/weights mode=100640 owner=1000:100", "/models/two/a mode=100640 owner=1000:100",
			"/models/two/b mode=100640 owner=1000:100",
		} {
			require.Contains(t, f.log(spec.ID), line)
		}

		again := f.spec(app, "wait")
		again.Service.ImageMounts = []*protocol.ImageMount{{Image: two, Path: "/models"}}
		f.start(again)
		_, code, err := f.command(again.ID, "touch", "/models/c")
		require.NoError(t, err)
		require.NotZero(t, code, "it is read-only")
		mounts := filepath.Join(f.cfg.StateDir, ".images")
		entries, err := os.ReadDir(mounts)
		require.NoError(t, err)
		require.Len(t, entries, 2, "one mount of each image")

		require.NoError(t, f.rt.Remove(t.Context(), spec.ID))
		require.NoError(t, f.rt.RemoveUnusedImages(t.Context()))
		require.False(t, f.has(one))
		require.True(t, f.has(two), "a container has it")
		out, code, err := f.command(again.ID, "list", "/models/a", "/models/b")
		require.NoError(t, err)
		require.Zero(t, code, out)
		require.NoError(t, f.rt.Remove(t.Context(), again.ID))
		require.NoError(t, f.rt.RemoveUnusedImages(t.Context()))
		entries, err = os.ReadDir(mounts)
		require.NoError(t, err)
		require.Empty(t, entries)
		require.Empty(t, f.snapshots())
	}, byMounts, byUnpacking, byHost)
}

func (f *fixture) has(image string) bool {
	f.t.Helper()
	ref, err := runtime.ParseImage(image)
	require.NoError(f.t, err)
	has, err := f.rt.HasImage(f.t.Context(), ref)
	require.NoError(f.t, err)
	return has
}

func TestAnImageIsMountedAtNoPlaceOfTheSystem(t *testing.T) {
	f := newFixture(t)
	image := f.image()
	for _, at := range []string{"/", "/etc", "/run", "/proc/x", "relative", "/a/../b", ""} {
		spec := f.spec(image, "wait")
		spec.Service.ImageMounts = []*protocol.ImageMount{{Image: image, Path: at}}
		_, err := f.rt.Start(t.Context(), spec)
		require.Error(t, err, at)
	}
	spec := f.spec(image, "wait")
	spec.Service.Scratch = []*protocol.Scratch{{Path: "/scratch", SizeBytes: 1 << 20}}
	spec.Service.ImageMounts = []*protocol.ImageMount{{Image: image, Path: "/scratch"}}
	_, err := f.rt.Start(t.Context(), spec)
	require.Error(t, err)
}
