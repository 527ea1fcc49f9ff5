package runtime

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/e2e/skip"
)

// A disk that has become emptier since a layer was measured, as after the removal of an image, may fill again with
// that layer.
func TestALayerThatGrowsIntoFreedSpaceIsMeasured(t *testing.T) {
	skip.Root(t, "mounts")
	disk := t.TempDir()
	require.NoError(t, unix.Mount("tmpfs", disk, "tmpfs", 0, "size=64m"))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(disk, 0)) })
	other, dir := filepath.Join(disk, "other"), filepath.Join(disk, "layer")
	require.NoError(t, os.WriteFile(other, make([]byte, 16<<20), 0o600))
	require.NoError(t, os.Mkdir(dir, 0o700))
	const limit = 4 << 20
	r := &Runtime{disk: diskWatch{layers: map[string]*layer{"none.1": {dir: dir, limit: limit}}}}
	r.host.contentRoot = disk
	over := func() []Excess {
		r.disk.restUntil = time.Time{}
		found, _ := r.fullLayers(t.Context())
		return found
	}
	require.Empty(t, over())
	require.NoError(t, os.Remove(other))
	require.Empty(t, over())
	require.NoError(t, os.WriteFile(filepath.Join(dir, "file"), make([]byte, 2*limit), 0o600))
	require.Len(t, over(), 1)
}
