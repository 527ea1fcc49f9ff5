package runtime

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/containerd/v2/core/images"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/e2e/skip"
)

// The agent reads manifests and configurations into memory, and a tenant may push any blob as one.
func TestADocumentOfAnImageIsNotFetchedWhereItIsTooLarge(t *testing.T) {
	fetched := false
	u := &unpacking{r: &Runtime{cfg: Config{MaxImageBytes: 1 << 40}}}
	guard := u.sizeGuard(images.HandlerFunc(func(context.Context, ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		fetched = true
		return nil, nil
	}))
	for _, media := range []string{
		ocispec.MediaTypeImageIndex, ocispec.MediaTypeImageManifest, ocispec.MediaTypeImageConfig, "text/plain",
	} {
		fetched = false
		_, err := guard.Handle(t.Context(), ocispec.Descriptor{MediaType: media, Size: maxDocumentBytes + 1})
		require.ErrorIs(t, err, errImageTooLarge, media)
		require.False(t, fetched, media)
		_, err = guard.Handle(t.Context(), ocispec.Descriptor{MediaType: media, Size: maxDocumentBytes})
		require.NoError(t, err, media)
	}
	_, err := guard.Handle(t.Context(), ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayerGzip, Size: 1 << 30})
	require.NoError(t, err, "layers are unpacked as they come")
}

// A manifest may name addresses for what it lists. The node stands in networks that no tenant may reach.
func TestAnImageNamesNoHostThatTheNodeAsks(t *testing.T) {
	u := &unpacking{r: &Runtime{cfg: Config{MaxImageBytes: 1 << 40}}}
	guard := u.sizeGuard(images.HandlerFunc(func(context.Context, ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		internal := []string{"http://169.254.169.254/"}
		return []ocispec.Descriptor{
			{MediaType: ocispec.MediaTypeImageManifest, URLs: internal},
			{MediaType: ocispec.MediaTypeImageConfig, URLs: internal},
			{MediaType: ocispec.MediaTypeImageLayerGzip, URLs: internal},
		}, nil
	}))
	for _, media := range []string{ocispec.MediaTypeImageIndex, ocispec.MediaTypeImageManifest} {
		children, err := guard.Handle(t.Context(), ocispec.Descriptor{MediaType: media})
		require.NoError(t, err)
		require.Len(t, children, 3)
		for _, c := range children {
			require.Empty(t, c.URLs, c.MediaType)
		}
	}
}

// A few megabytes of layers hold millions of empty files, which take no other space than their inodes.
func TestAPullThatTakesAllInodesIsCancelled(t *testing.T) {
	skip.Root(t, "mounts")
	disk := t.TempDir()
	require.NoError(t, unix.Mount("tmpfs", disk, "tmpfs", 0, "nr_inodes=100"))
	defer func() { require.NoError(t, unix.Unmount(disk, unix.MNT_DETACH)) }()
	u := &unpacking{r: &Runtime{cfg: Config{MinUnpackBytes: 1 << 30}, host: hostSupport{contentRoot: disk}}}
	fill := func(until uint64) {
		var st unix.Statfs_t
		for n := 0; ; n++ {
			require.NoError(t, unix.Statfs(disk, &st))
			if st.Ffree <= until {
				return
			}
			require.NoError(t, os.WriteFile(filepath.Join(disk, fmt.Sprint(until, "-", n)), nil, 0o600))
		}
	}
	require.NoError(t, unix.Statfs(disk, &u.before))
	fill(5)
	require.NoError(t, u.check(t.Context()))
	fill(4)
	require.ErrorIs(t, u.check(t.Context()), unix.ENOSPC)
	require.NoError(t, unix.Statfs(disk, &u.before))
	require.NoError(t, u.check(t.Context()), "of a pull that has taken none")
}
