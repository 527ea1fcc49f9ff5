package release_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/release"
)

// git runs the Git tool without the settings of this machine.
func git(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "git", append([]string{
		"-C", dir, "-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "init.defaultBranch=main",
	}, args...)...)
	cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_NOSYSTEM=1")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "git %s: %s", strings.Join(args, " "), out)
	return strings.TrimSpace(string(out))
}

func TestAShallowCloneHasNoEarlierVersionAndSaysSo(t *testing.T) {
	t.Setenv(release.From, "")
	whole, shallow := t.TempDir(), filepath.Join(t.TempDir(), "shallow")
	git(t, whole, "init", "-q")
	git(t, whole, "commit", "-q", "--allow-empty", "-m", "first")
	first := git(t, whole, "rev-parse", "HEAD")
	git(t, whole, "tag", "v0.1.0")
	git(t, whole, "commit", "-q", "--allow-empty", "-m", "second")
	second := git(t, whole, "rev-parse", "HEAD")
	git(t, whole, "clone", "-q", "--depth", "1", "file://"+whole, shallow)

	v, ok, err := release.Last(t.Context(), whole)
	require.NoError(t, err)
	require.True(t, ok)
	require.Equal(t, first, v.Commit)

	_, ok, err = release.Last(t.Context(), shallow)
	require.NoError(t, err)
	require.False(t, ok)
	v, err = release.Find(t.Context(), shallow, second)
	require.NoError(t, err)
	require.Equal(t, second, v.Commit)
	_, err = release.Find(t.Context(), shallow, first)
	require.Error(t, err)
	t.Setenv(release.From, first) // a version that was asked for by name must not be missed silently
	_, _, err = release.Last(t.Context(), shallow)
	require.Error(t, err)
}
