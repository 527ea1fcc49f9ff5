package runtime_test

import (
	"archive/tar"
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	goruntime "runtime"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/e2e/powerloss"
)

// TestLaw01NoTornLayerRunsAfterAPowerCut cuts the power when a pull has just ended: what containerd has on record of
// the image after that is whole, and what it has not is pulled again.
func TestLaw01NoTornLayerRunsAfterAPowerCut(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	cuts := rand.New(rand.NewPCG(seed, 0))
	var disk *powerloss.Disk
	f := newFixtureIn(t, func(dir string) string {
		var err error
		disk, err = powerloss.New(filepath.Join(dir, "disk"), filepath.Join(dir, "point"), 512)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, disk.Close()) })
		return disk.Point
	})
	for n := range 4 {
		require.NoError(t, disk.Sync())
		content := random(1 << 20)
		first := entry{tar.Header{Name: "first", Mode: 0o644}, content}
		second := entry{tar.Header{Name: "second", Mode: 0o644}, content}
		image := withLayers(t, gzipLayer(t, tarOf(t, first)), gzipLayer(t, tarOf(t, second)))
		if n%2 == 1 { // what is on the disk of a layer alone is not there because of those above it
			image = oneLayer(t, first, second)
		}
		ref := f.registry.push(fmt.Sprintf("org/acme/%s-%d", f.word, n), image)
		require.NoError(t, f.ensure(ref))
		f.cutPower(disk, cuts)

		require.NoError(t, f.ensure(ref))
		spec := f.spec(ref, "wait")
		f.start(spec)
		root := fmt.Sprintf("/proc/%d/root", f.pidOf(spec.ID))
		for _, name := range []string{"first", "second"} {
			got, err := os.ReadFile(filepath.Join(root, name))
			require.NoError(t, err)
			require.Equal(t, sha256.Sum256([]byte(content)), sha256.Sum256(got), "%s of round %d, %d bytes", name, n,
				len(got))
		}
		require.NoError(t, f.rt.Remove(t.Context(), spec.ID))
	}
}

// oneLayer is the app with these files, all in one layer.
func oneLayer(t *testing.T, files ...entry) v1.Image {
	t.Helper()
	app, err := os.ReadFile(appBinary)
	require.NoError(t, err)
	all := append([]entry{
		{Header: tar.Header{Name: "etc/", Typeflag: tar.TypeDir, Mode: 0o755}},
		{tar.Header{Name: "app", Mode: 0o755}, string(app)},
	}, files...)
	image, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{OS: "linux", Architecture: goruntime.GOARCH})
	require.NoError(t, err)
	image, err = mutate.AppendLayers(image, gzipLayer(t, tarOf(t, all...)))
	require.NoError(t, err)
	return mutate.MediaType(image, types.OCIManifestSchema1)
}

// cutPower cuts the power of the disk that containerd keeps everything on, and starts both again.
func (f *fixture) cutPower(disk *powerloss.Disk, random *rand.Rand) {
	f.t.Helper()
	lost, err := disk.Cut(random, func() error { return unix.Kill(f.daemon.PID(), unix.SIGKILL) })
	require.NoError(f.t, err)
	f.t.Logf("%d pages lost", lost)
	require.NoError(f.t, f.daemon.Kill9())
	_ = f.rt.Close()
	require.NoError(f.t, disk.PowerOn())
	require.NoError(f.t, os.RemoveAll(filepath.Join(f.daemon.Dir, "state"))) // in memory on a real machine
	require.NoError(f.t, f.daemon.Start(f.t.Context()))
	f.rt = f.open()
}
