package access_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// copyBytes are more than the buffers between the command line and the container hold.
const copyBytes = 12 << 20

func TestFilesAreCopiedIntoAndOutOfAnAppAndItsLogIsReadSinceATime(t *testing.T) {
	w := harness.NewPlatform(t)
	began := time.Now()
	i := w.Launch("app")
	admin := w.AdminShell()
	user := w.UserShell(admin)
	cp := func(args ...string) []string { return append([]string{"cp", "--project", "main"}, args...) }

	tree := filepath.Join(t.TempDir(), "tree")
	require.NoError(t, os.MkdirAll(tree+"/deep", 0o755))
	text := strings.Repeat("weights ", copyBytes/8)
	require.NoError(t, os.WriteFile(tree+"/deep/model", []byte(text), 0o640))
	require.NoError(t, os.Symlink("/etc/passwd", tree+"/leads-out"))
	out := user.Run(filepath.Join(harness.Binaries(t), "gpuaas"), cp(tree, "app:/dev/shm")...)
	require.Zero(t, out.Code, out.Err)
	require.Contains(t, out.Err, "1 symbolic links")
	back := t.TempDir()
	user.MustRun(cp("app:/dev/shm/tree", back)...)
	user.MustRun(cp("app:/dev/shm/tree/deep/model", back+"/renamed")...)
	for _, path := range []string{"/tree/deep/model", "/renamed"} {
		got, err := os.ReadFile(back + path)
		require.NoError(t, err)
		require.Equal(t, text, string(got))
	}
	require.NoFileExists(t, back+"/tree/leads-out")
	user.Fails(1, "no such file", cp("app:/none", back)...)
	user.Fails(1, "kernel", cp(tree, "app:/proc/1")...)
	user.Fails(2, "INSTANCE:/PATH", cp(tree, back)...)

	admin.MustRun("roles", "set", harness.UserEmail, "viewer", "--project", "main")
	admin.MustRun("users", "set-roles", harness.UserEmail, "org_billing")
	user.Fails(4, "apps.instance.exec", cp("app:/dev/shm/tree", back)...)
	rows := harness.AsJSON[harness.Items[client.AuditRow]](admin, "audit", "list", "--resource", i.ID, "--action",
		"apps.instance.copy").Items
	require.Len(t, rows, 5)
	require.Contains(t, fmt.Sprint(rows[len(rows)-1].After), "/dev/shm")

	all := user.MustRun("logs", "--project", "main", "app", "--since", began.Format(time.RFC3339))
	require.NotEmpty(t, all)
	require.Empty(t, user.MustRun("logs", "--project", "main", "app", "--since", "0s"))
	require.NotEmpty(t, harness.AsJSON[harness.Items[client.AuditRow]](admin, "audit", "list", "--resource", i.ID,
		"--action", "apps.instance.logs").Items)
	w.Decommission(i)
}
