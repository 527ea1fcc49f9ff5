package containerdtest_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/containerdtest"
	"github.com/gpuaas/gpuaas/e2e/leakcheck"
)

func TestDaemonSurvivesKillAndLeavesNothing(t *testing.T) {
	leakcheck.Guard(t, leakcheck.Scope{Contains: []string{fmt.Sprintf("ctrd-%d-", os.Getpid())}})
	d := containerdtest.Start(t)
	c := d.Client(t)
	first, err := c.Version(t.Context())
	require.NoError(t, err)
	pid := d.PID()
	require.NoError(t, d.Kill9())
	require.NoError(t, d.Start(t.Context()))
	require.NotEqual(t, pid, d.PID())
	again, err := c.Version(t.Context())
	require.NoError(t, err)
	require.Equal(t, first, again)
}

func TestContainerdObjectsAreLeftovers(t *testing.T) {
	d := containerdtest.Start(t)
	c := d.Client(t)
	scope := leakcheck.Scope{ContainerdAddress: d.Address, Contains: []string{"someone"}, Files: []string{"/run"}}
	before, err := leakcheck.Take(scope)
	require.NoError(t, err)
	ctx := namespaces.WithNamespace(t.Context(), "someone")
	_, err = c.ImageService().Create(ctx, images.Image{Name: "an/image", Target: ocispec.Descriptor{
		MediaType: ocispec.MediaTypeImageManifest, Digest: digest.FromString("x"), Size: 1,
	}})
	require.NoError(t, err)
	_, err = c.LeasesService().Create(ctx, func(l *leases.Lease) error { l.ID = "a-lease"; return nil })
	require.NoError(t, err)
	after, err := leakcheck.Take(scope)
	require.NoError(t, err)
	require.Equal(t, []string{
		"containerd new: image someone/an/image " + digest.FromString("x").String(),
		"containerd new: lease someone/a-lease map[]",
		"containerd new: namespace someone ",
	}, leakcheck.Diff(before, after))
}
