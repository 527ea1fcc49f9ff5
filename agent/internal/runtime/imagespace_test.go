package runtime_test

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	randomimage "github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// zeroLayer is a file of zeros, which compresses to a thousandth.
func zeroLayer(t *testing.T, img v1.Image, bytesOfZeros int64) v1.Image {
	t.Helper()
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		var header, end bytes.Buffer
		if err := tar.NewWriter(&header).WriteHeader(&tar.Header{
			Name: "zeros", Mode: 0o644,
			Size: bytesOfZeros,
		}); err != nil {
			return nil, err
		}
		if err := tar.NewWriter(&end).Close(); err != nil {
			return nil, err
		}
		return io.NopCloser(io.MultiReader(&header, io.LimitReader(zeroReader{}, bytesOfZeros), &end)), nil
	})
	require.NoError(t, err)
	img, err = mutate.AppendLayers(img, layer)
	require.NoError(t, err)
	return img
}

type zeroReader struct{}

func (zeroReader) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func TestImageThatUnpacksToMuchMoreThanItsLayersIsRefused(t *testing.T) {
	f := newFixture(t, func(c *runtime.Config) { c.MinUnpackBytes = 32 << 20 })
	for name, size := range map[string]int64{"small": 192 << 20, "large": 2 << 30} {
		err := f.ensure(f.registry.push("org/acme/"+f.word+name, zeroLayer(t, appImage(t), size)))
		require.True(t, fault.Is(err, fault.TooLarge), err)
		require.True(t, fault.IsPermanent(err), "another try unpacks as much")
		require.Empty(t, f.snapshots(), "nothing of it stays")
		left, err := f.rt.Images(t.Context())
		require.NoError(t, err)
		require.Empty(t, left)
	}
	require.NoError(t, f.ensure(f.registry.push("org/acme/"+f.word, zeroLayer(t, appImage(t), 8<<20))))
}

// holdLayer makes the registry keep one layer back until the returned function is called.
func (r *testRegistry) holdLayer(layer v1.Layer) (release func()) {
	r.t.Helper()
	digest, err := layer.Digest()
	require.NoError(r.t, err)
	only, mayGoOn := digest.String(), make(chan struct{})
	r.holdBlob.Store(&only)
	r.hold.Store(&mayGoOn)
	return sync.OnceFunc(func() {
		r.hold.Store(nil)
		close(mayGoOn)
	})
}

// The first layer alone is too much; the second never comes.
func TestAnImageThatIsTooLargeIsGivenUpBeforeAllOfItIsUnpacked(t *testing.T) {
	f := newFixtureOn(t, "1g", func(c *runtime.Config) { c.MinUnpackBytes = 32 << 20 })
	image := zeroLayer(t, zeroLayer(t, appImage(t), 192<<20), 1<<20)
	layers, err := image.Layers()
	require.NoError(t, err)
	pushed := f.registry.push("org/acme/"+f.word, image)
	release := f.registry.holdLayer(layers[len(layers)-1])
	defer release()
	err = f.ensure(pushed)
	require.True(t, fault.Is(err, fault.TooLarge), err)
	release()
	require.Empty(t, f.snapshots())
}

func TestAPullThatFillsTheDiskIsCancelled(t *testing.T) {
	f := newFixtureOn(t, "512m")
	image := zeroLayer(t, appImage(t), 1<<20)
	layers, err := image.Layers()
	require.NoError(t, err)
	pushed := f.registry.push("org/acme/"+f.word, image)
	release := f.registry.holdLayer(layers[len(layers)-1])
	defer release()
	done := make(chan error, 1)
	go func() { done <- f.ensure(pushed) }()
	<-f.registry.holding
	ballast := filepath.Join(f.daemon.Dir, "ballast")
	fill(t, ballast, 16<<20)
	err = <-done
	require.Positive(t, runtime.SpaceMissing(err), err)
	require.False(t, fault.IsPermanent(err), "there may be space later")
	release()
	require.NoError(t, os.Remove(ballast))
	require.Empty(t, f.snapshots())
	require.NoError(t, f.ensure(pushed))
}

// An app's next version has most of its layers in common with the one before.
func TestAPullNeedsNoSpaceForLayersThatAreThere(t *testing.T) {
	f := newFixtureOn(t, "512m")
	layer, err := randomimage.Layer(48<<20, types.OCILayer)
	require.NoError(t, err)
	first, err := mutate.AppendLayers(appImage(t), layer)
	require.NoError(t, err)
	require.NoError(t, f.ensure(f.registry.push("org/acme/"+f.word, first)))
	next := f.registry.push("org/acme/"+f.word, zeroLayer(t, first, 1<<20))
	ballast := filepath.Join(f.daemon.Dir, "ballast")
	fill(t, ballast, 80<<20)
	defer func() { require.NoError(t, os.Remove(ballast)) }()
	require.NoError(t, f.ensure(next))
}

// fill makes a file that leaves this much of its file system free.
func fill(t *testing.T, path string, leave int64) {
	t.Helper()
	file, err := os.Create(path)
	require.NoError(t, err)
	var st unix.Statfs_t
	require.NoError(t, unix.Fstatfs(int(file.Fd()), &st))
	require.NoError(t, unix.Fallocate(int(file.Fd()), 0, 0, int64(st.Bavail)*st.Bsize-leave))
	require.NoError(t, file.Close())
}

func TestImagesThatNothingUsesGoByLeastRecentUse(t *testing.T) {
	// A file system of its own: whether there is enough space must not depend on what else the machine stores.
	f := newFixtureOn(t, "1g", func(c *runtime.Config) { c.MaxImageStoreBytes = 1 << 40 })
	var refs []runtime.ImageRef
	for n := range 4 {
		image := f.image(func(c *v1.Config) { c.Env = append(c.Env, fmt.Sprintf("N=%d", n)) })
		ref, err := runtime.ParseImage(image)
		require.NoError(t, err)
		refs = append(refs, ref)
	}
	has := func() (out []bool) {
		for _, ref := range refs {
			there, err := f.rt.HasImage(t.Context(), ref)
			require.NoError(t, err)
			out = append(out, there)
		}
		return out
	}
	collect := func(rt *runtime.Runtime, need int64) {
		require.NoError(t, rt.CollectImages(context.WithoutCancel(t.Context()), need, refs[3]))
	}
	spec := f.spec(refs[0].Repository+"@"+refs[0].Digest, "hang")
	f.start(spec)
	collect(f.rt, 0)
	require.Equal(t, []bool{true, true, true, true}, has(), "there is enough space")
	f.start(f.spec(refs[1].Repository+"@"+refs[1].Digest, "hang"))
	require.NoError(t, f.rt.Remove(t.Context(), spec.ID))
	collect(f.rt, 0) // the first image is unused from now on, the third was all the time
	require.NoError(t, f.rt.Close())

	f.cfg.MaxImageStoreBytes = stored(t, f) - 1
	f.rt = f.open()
	collect(f.rt, 0)
	require.Equal(t, []bool{true, true, false, true}, has(), "removing the longest unused image is enough")
	first := refs[0].Repository + "@" + refs[0].Digest
	require.NoError(t, f.rt.PinImage(t.Context(), first, true))
	collect(f.rt, 1<<60)
	require.Equal(t, []bool{true, true, false, true}, has(), "a pinned image stays")
	require.NoError(t, f.rt.PinImage(t.Context(), first, false))
	for _, unknown := range []string{refs[2].Repository + "@" + refs[2].Digest, "", "no image"} {
		require.Equal(t, fault.Code("image_missing"), fault.As(f.rt.PinImage(t.Context(), unknown, true)).Code)
	}
	collect(f.rt, 1<<60)
	require.Equal(t, []bool{false, true, false, true}, has(), "images in use and images to keep stay, however much space "+
		"a pull lacks")
}

// No collection has noted yet that nothing uses the image.
func TestAnImageThatIsPinnedAtOnceStays(t *testing.T) {
	f := newFixtureOn(t, "1g")
	image := f.image()
	require.NoError(t, f.rt.PinImage(t.Context(), image, true))
	for range 2 {
		require.NoError(t, f.rt.CollectImages(t.Context(), 1<<60))
		require.True(t, f.has(image))
	}
	require.NoError(t, f.rt.PinImage(t.Context(), image, false))
	require.NoError(t, f.rt.CollectImages(t.Context(), 1<<60))
	require.False(t, f.has(image))
}

func stored(t *testing.T, f *fixture) int64 {
	t.Helper()
	total, err := f.open().ImageStoreBytes(context.WithoutCancel(t.Context()))
	require.NoError(t, err)
	return total
}

func TestAnImageIsUnusedSinceItsLastContainer(t *testing.T) {
	f := newFixtureOn(t, "1g", func(c *runtime.Config) { c.MaxImageStoreBytes = 1 << 40 })
	collect := func() { require.NoError(t, f.rt.CollectImages(context.WithoutCancel(t.Context()), 0)) }
	var images []string
	for n := range 2 {
		images = append(images, f.image(func(c *v1.Config) { c.Env = append(c.Env, fmt.Sprintf("N=%d", n)) }))
		collect() // the first is unused for longer
	}
	spec := f.spec(images[0], "hang")
	f.start(spec)
	collect()
	require.NoError(t, f.rt.Remove(t.Context(), spec.ID))
	collect()
	require.NoError(t, f.rt.Close())
	f.cfg.MaxImageStoreBytes = stored(t, f) - 1
	f.rt = f.open()
	collect()
	for n, there := range []bool{true, false} {
		ref, err := runtime.ParseImage(images[n])
		require.NoError(t, err)
		has, err := f.rt.HasImage(t.Context(), ref)
		require.NoError(t, err)
		require.Equal(t, there, has, n)
	}
}
