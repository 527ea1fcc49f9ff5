package runtime_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// A secret is a read-only file in memory that the container's user reads, and it is not in what containerd keeps.
func TestLaw11SecretsAreFilesInMemoryThatGoWithTheContainer(t *testing.T) {
	f := newFixture(t)
	defer unix.Umask(unix.Umask(0o077)) // the agent's own
	spec := f.spec(f.image(), "wait")
	spec.Service.User = "1234:5678"
	spec.Secrets = map[string][]byte{"token": []byte("correct-horse"), "former": []byte("battery")}
	root := fmt.Sprintf("/proc/%d/root", f.start(spec).PID)
	for _, path := range []string{"/run/gpuaas-parameters/token", "/etc/hosts", "/etc/resolv.conf"} {
		text, notes, code := f.copyOut(spec.ID, path)
		require.Zero(t, code, "%s: %s", path, notes)
		require.Equal(t, path == "/run/gpuaas-parameters/token", text == "correct-horse", path)
	}
	var s unix.Statfs_t
	require.NoError(t, unix.Statfs(root+"/run/gpuaas-parameters", &s))
	require.EqualValues(t, unix.TMPFS_MAGIC, s.Type)
	require.ErrorIs(t, os.WriteFile(root+"/run/gpuaas-parameters/token", nil, 0o600), unix.EROFS)

	delete(spec.Secrets, "former")
	require.NoError(t, f.rt.DeliverSecrets(t.Context(), spec.ID, spec.Secrets, nil))
	require.NoFileExists(t, root+"/run/gpuaas-parameters/former")
	require.FileExists(t, root+"/run/gpuaas-parameters/token")
	require.ErrorIs(t, os.WriteFile(root+"/run/gpuaas-parameters/token", nil, 0o600), unix.EROFS)

	mounts, err := os.ReadFile("/proc/self/mounts")
	require.NoError(t, err)
	mounted := regexp.MustCompile(`.*` + regexp.QuoteMeta(spec.ID) + `\S* tmpfs .*`).FindString(string(mounts))
	require.NotEmpty(t, mounted)
	require.Equal(t, canKeepOffSwap(t), strings.Contains(mounted, "noswap"), mounted)

	container, err := f.daemon.Client(t).LoadContainer(f.ns(), spec.ID)
	require.NoError(t, err)
	info, err := container.Info(f.ns())
	require.NoError(t, err)
	require.Contains(t, string(info.Spec.GetValue()), "GPUAAS_PARAMETERS_DIR=/run/gpuaas-parameters")
	require.NotContains(t, string(info.Spec.GetValue()), "correct-horse")

	require.NoError(t, f.rt.Remove(t.Context(), spec.ID))
	require.NoDirExists(t, filepath.Join(f.cfg.StateDir, spec.ID))
	mounts, err = os.ReadFile("/proc/self/mounts")
	require.NoError(t, err)
	require.NotContains(t, string(mounts), spec.ID)
}

// canKeepOffSwap reports whether the kernel knows the option; since Linux 6.4.
func canKeepOffSwap(t *testing.T) bool {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "noswap"); err != nil {
		require.ErrorIs(t, err, unix.EINVAL)
		return false
	}
	require.NoError(t, unix.Unmount(dir, 0))
	return true
}

// A kill of the agent before containerd has the container leaves its files, and its secrets mounted read-only.
func TestPurgeRemovesAnInterruptedStart(t *testing.T) {
	f := newFixture(t)
	secrets := filepath.Join(f.cfg.StateDir, "m1.app.1", "secrets")
	require.NoError(t, os.MkdirAll(secrets, 0o755))
	require.NoError(t, unix.Mount("tmpfs", secrets, "tmpfs", 0, ""))
	t.Cleanup(func() { _ = unix.Unmount(secrets, unix.MNT_DETACH) })
	require.NoError(t, os.WriteFile(filepath.Join(secrets, "token"), nil, 0o600))
	require.NoError(t, unix.Mount("", secrets, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	require.NoError(t, f.rt.Purge(t.Context()))
	require.NoDirExists(t, f.cfg.StateDir)
}
