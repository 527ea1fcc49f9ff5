package runtime

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/e2e/skip"
)

// grower is a layer on a small file system of its own, beside which others write and remove.
type grower struct {
	t *testing.T
	r *Runtime
	// disk is the file system, dir the layer's directory.
	disk, dir string
}

// newGrower makes a layer with a limit; other is a file of this many bytes that is none of it.
func newGrower(t *testing.T, limit, other int64) *grower {
	t.Helper()
	skip.Root(t, "mounts")
	g := &grower{t: t, disk: t.TempDir()}
	require.NoError(t, unix.Mount("tmpfs", g.disk, "tmpfs", 0, "size=64m"))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(g.disk, 0)) })
	g.dir = filepath.Join(g.disk, "layer")
	require.NoError(t, os.WriteFile(g.other(), make([]byte, other), 0o600))
	require.NoError(t, os.Mkdir(g.dir, 0o700))
	g.r = &Runtime{disk: diskWatch{layers: map[string]*layer{"none.1": {dir: g.dir, limit: limit}}}}
	g.r.host.contentRoot = g.disk
	require.Empty(t, g.over())
	return g
}

func (g *grower) other() string { return filepath.Join(g.disk, "other") }

func (g *grower) over() []Excess {
	g.r.disk.restUntil = time.Time{}
	found, _ := g.r.fullLayers(g.t.Context())
	return found
}

// A disk that has become emptier since a layer was measured, as after the removal of an image, may fill again with
// that layer.
func TestALayerThatGrowsIntoFreedSpaceIsMeasured(t *testing.T) {
	const limit = 4 << 20
	g := newGrower(t, limit, 16<<20)
	require.NoError(t, os.Remove(g.other()))
	require.Empty(t, g.over())
	require.NoError(t, os.WriteFile(filepath.Join(g.dir, "file"), make([]byte, 2*limit), 0o600))
	require.Len(t, g.over(), 1)
}

func TestALayerThatGrowsAsOthersShrinkIsMeasured(t *testing.T) {
	const limit, piece = 4 << 20, 256 << 10
	g := newGrower(t, limit, 2*limit)
	var over []Excess
	for n := int64(1); n <= 2*limit/piece && len(over) == 0; n++ {
		require.NoError(t, os.WriteFile(filepath.Join(g.dir, strconv.FormatInt(n, 10)), make([]byte, piece), 0o600))
		over = g.over()
		require.NoError(t, os.Truncate(g.other(), 2*limit-n*piece))
		over = append(over, g.over()...)
	}
	require.NotEmpty(t, over)
}
