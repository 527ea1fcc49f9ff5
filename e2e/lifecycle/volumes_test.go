package lifecycle_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// TestVolumesStayThroughUpgradesAndGoBackWithARollback keeps data in a volume of a chosen size.
func TestVolumesStayThroughUpgradesAndGoBackWithARollback(t *testing.T) {
	w := harness.NewPlatform(t)
	const volume = "    volumes:\n      - {name: data, path: /data, size_mib: {min: 16, default: 16, max: 64}, " +
		"snapshot_on_upgrade: true}\n    scratch:"
	w.ShipVersion("2.0.0", "    scratch:", volume)
	w.ShipVersion("3.0.0", "    scratch:", volume)
	first, _, err := w.Tenant.Launch(w.Ctx, w.Operator, client.AppInstanceCreate{
		AppSlug: harness.AppSlug, Version: "2.0.0", DisplayName: "keeper",
		Volumes: client.VolumeChoices{{Name: "data", SizeMib: 32}},
	}, nil)
	require.NoError(t, err)
	require.Equal(t, client.VolumeChoices{{Name: "data", SizeMib: 32}}, first.Volumes)
	file := func(i client.AppInstance) string { return fmt.Sprintf("/proc/%d/root/data/file", w.PidOf(i)) }
	requireContent := func(i client.AppInstance, want string) {
		t.Helper()
		got, err := os.ReadFile(file(i))
		require.NoError(t, err)
		require.Equal(t, want, string(got))
	}
	var st unix.Statfs_t
	require.NoError(t, unix.Statfs(filepath.Dir(file(first)), &st))
	require.Less(t, st.Blocks*uint64(st.Bsize), uint64(32<<20))
	require.Greater(t, st.Blocks*uint64(st.Bsize), uint64(24<<20))
	require.NoError(t, os.WriteFile(file(first), []byte("of 2.0.0"), 0o600))

	_, err = client.Read[client.AppInstance](w.Operator.UpgradeAppInstance(w.Ctx, w.Tenant.Project.ID, first.ID,
		client.AppInstanceUpgrade{TargetVersion: "3.0.0"}))
	require.NoError(t, err)
	second, err := w.Tenant.AwaitStatus(w.Ctx, w.Operator, first.ID, client.AppInstanceStatusRunning, nil)
	require.NoError(t, err)
	requireContent(second, "of 2.0.0")
	require.NoError(t, os.WriteFile(file(second), []byte("of 3.0.0"), 0o600))

	back, err := w.Tenant.Rollback(w.Ctx, w.Operator, first.ID, nil)
	require.NoError(t, err)
	require.Equal(t, "2.0.0", back.Version)
	requireContent(back, "of 2.0.0")

	w.Decommission(first)
	left, err := filepath.Glob(filepath.Join(w.Agent.Config.DataDir(), "volumes", "*"))
	require.NoError(t, err)
	require.Empty(t, left)
}
