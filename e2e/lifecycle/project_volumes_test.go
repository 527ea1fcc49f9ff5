package lifecycle_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// TestAVolumeOfTheProjectOutlivesItsInstances takes a volume through everything that a tenant does with it.
func TestAVolumeOfTheProjectOutlivesItsInstances(t *testing.T) {
	w := harness.NewPlatform(t)
	s := w.AdminShell()
	w.ShipVersion("2.0.0", "    scratch:", "    volumes:\n      - {name: data, path: /data, size_mib: {min: 16, default: "+
		"16, max: 64}, scope: project}\n    scratch:")
	onNode := func() []string {
		found, err := filepath.Glob(filepath.Join(w.Agent.Config.DataDir(), "volumes", "*"))
		require.NoError(t, err)
		return found
	}
	volumes := func(args ...string) client.Volume {
		t.Helper()
		return harness.AsJSON[client.Volume](s, append([]string{"volumes"}, append(args, "--project", "main")...)...)
	}

	// The node is away when the volume is asked for, and killed while it makes it.
	require.NoError(t, w.Agent.Stop())
	made := volumes("create", "models", "--size-mib", "32")
	require.Equal(t, client.VolumeStatusPending, made.Status)
	require.Empty(t, onNode())
	w.RestartAgent(w.Agent)
	require.NoError(t, w.Agent.Kill9())
	w.RestartAgent(w.Agent)
	ready := volumes("get", "models")
	w.Eventually("the volume is ready", func() error {
		ready = volumes("get", "models")
		return harness.Pending(nil, ready.Status == client.VolumeStatusReady)
	})
	require.Equal(t, []string{filepath.Join(w.Agent.Config.DataDir(), "volumes", made.ID)}, onNode())

	launch := func(name string) client.AppInstance {
		t.Helper()
		i, _, err := w.Tenant.Launch(w.Ctx, w.Operator, client.AppInstanceCreate{
			AppSlug: harness.AppSlug, Version: "2.0.0", DisplayName: name,
			Volumes: client.VolumeChoices{{Name: "data", VolumeID: made.ID}},
		}, nil)
		require.NoError(t, err)
		require.Equal(t, client.VolumeChoices{{Name: "data", VolumeID: made.ID, SizeMib: 32}}, i.Volumes)
		return i
	}
	file := func(i client.AppInstance) string { return fmt.Sprintf("/proc/%d/root/data/file", w.PidOf(i)) }
	first := launch("first")
	require.NoError(t, os.WriteFile(file(first), []byte("of the first"), 0o600))
	s.Fails(6, "volume_in_use", "volumes", "delete", "models", "--project", "main")
	s.Fails(6, "volume_in_use", "instances", "create", harness.AppSlug, "--project", "main", "--version", "2.0.0",
		"--volume",
		"data=models")
	snapshot := harness.AsJSON[client.VolumeSnapshot](s, "volumes", "snapshot", "models", "--wait", "--project", "main",
		"--description", "of a running app")
	require.Equal(t, client.VolumeSnapshotStatusReady, snapshot.Status)
	s.Fails(6, "volume_in_use", "volumes", "restore", "models", snapshot.ID, "--project", "main")
	w.Decommission(first)
	require.Len(t, onNode(), 1)

	second := launch("second")
	requireFile(t, file(second), "of the first")
	require.NoError(t, os.WriteFile(file(second), []byte("of the second"), 0o600))
	require.NoError(t, os.WriteFile(file(second)+"2", []byte("more"), 0o600))
	_, err := w.Tenant.Stop(w.Ctx, w.Operator, second.ID)
	require.NoError(t, err)
	require.Equal(t, client.VolumeStatusReady, volumes("restore", "models", snapshot.ID, "--wait").Status)
	_, err = w.Tenant.Start(w.Ctx, w.Operator, second.ID)
	require.NoError(t, err)
	again := w.Instance(second.ID)
	requireFile(t, file(again), "of the first")
	require.NoFileExists(t, file(again)+"2")
	w.Decommission(again)

	require.Equal(t, client.VolumeStatusDeleted, volumes("delete", "models", "--wait").Status)
	require.Empty(t, onNode())
	requireNoTrace(t, made.ID)
	require.Empty(t, harness.AsJSON[client.VolumeList](s, "volumes", "list", "--project", "main").Items)
}

func requireFile(t *testing.T, path, want string) {
	t.Helper()
	content, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, want, string(content))
}

// requireNoTrace requires that no mount and no loop device of a volume is left.
func requireNoTrace(t *testing.T, volumeID string) {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mounts")
	require.NoError(t, err)
	require.NotContains(t, string(mounts), volumeID)
	backing, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	require.NoError(t, err)
	for _, path := range backing {
		name, _ := os.ReadFile(path)
		require.NotContains(t, string(name), volumeID, "a loop device is left")
	}
}
