package access_test

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/pkg/execstream"
)

// processes counts the processes in the machine's process table whose arguments are these.
func processes(t *testing.T, args ...string) (n int) {
	t.Helper()
	want := strings.Join(args, "\x00") + "\x00"
	list, err := filepath.Glob("/proc/[0-9]*/cmdline")
	require.NoError(t, err)
	for _, path := range list {
		if text, err := os.ReadFile(path); err == nil && string(text) == want {
			n++
		}
	}
	return n
}

// run runs a command in the app by the command line.
func run(w *harness.Testbed, s *harness.Shell, input string, args ...string) harness.Output {
	w.T.Helper()
	cmd := exec.CommandContext(w.Ctx, filepath.Join(harness.Binaries(w.T), "gpuaas"),
		append([]string{"exec", "--project", "main", "app", "-i"}, args...)...)
	var out, stderr bytes.Buffer
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = s.Env, strings.NewReader(input), &out, &stderr
	_ = cmd.Run()
	return harness.Output{Out: out.String(), Err: stderr.String(), Code: cmd.ProcessState.ExitCode()}
}

func TestACommandRunsInTheAppAndDiesWithItsStream(t *testing.T) {
	w := harness.NewPlatform(t)
	i := w.Launch("app")
	admin := w.AdminShell()
	user := w.UserShell(admin)

	input := strings.Repeat("input ", 1<<18)
	got := run(w, user, input, "--", "/app", "cat")
	require.Zero(t, got.Code, got.Err)
	require.Equal(t, input, got.Out)
	got = run(w, user, "", "--", "/app", "exit", "7")
	require.Equal(t, harness.Output{Err: "exiting\n", Code: 7}, got)
	require.Equal(t, "no terminal\n", run(w, user, "", "--", "/app", "size").Out)
	require.Contains(t, run(w, user, "", "--", "/no/such/program").Err, "gpuaas: ")

	open := func(hub *client.Hub, c client.AppInstanceExec) (*client.Stream, error) {
		return hub.Exec(w.Ctx, w.Tenant.Project.ID, i.ID, c)
	}
	s, err := open(w.Operator, client.AppInstanceExec{
		Command: []string{"/app", "size"}, Terminal: true, Rows: 33, Columns: 99,
	})
	require.NoError(t, err)
	kind, payload, err := execstream.Receive(s)
	require.NoError(t, err)
	require.Equal(t, execstream.Stdout, kind)
	require.Equal(t, "33 99", strings.TrimSpace(string(payload)))
	s.Abort()

	requireDeathWithStream(w, admin, i, open)
	rows := harness.AsJSON[harness.Items[client.AuditRow]](admin, "audit", "list", "--resource", i.ID, "--action",
		"apps.instance.exec").Items
	require.NotEmpty(t, rows)
	for _, row := range rows {
		require.NotContains(t, fmt.Sprint(row.After), "wait", "arguments may be secret")
	}
	w.Decommission(i)
}

// requireDeathWithStream: a command dies when its caller goes, does not read or loses the right, and when the agent is
// killed.
func requireDeathWithStream(w *harness.Testbed, admin *harness.Shell, i client.AppInstance,
	open func(hub *client.Hub, c client.AppInstanceExec) (*client.Stream, error),
) {
	t := w.T
	t.Helper()
	waiting := client.AppInstanceExec{Command: []string{"/app", "wait"}}
	begin := func(c client.AppInstanceExec, hub *client.Hub) *client.Stream {
		s, err := open(hub, c)
		require.NoError(t, err)
		kind, _, err := execstream.Receive(s)
		require.NoError(t, err)
		require.Equal(t, execstream.Stdout, kind)
		require.Equal(t, 1, processes(t, c.Command...))
		return s
	}
	dead := func(c client.AppInstanceExec) {
		w.Eventually("the command is dead", func() error {
			return harness.Pending(nil, processes(t, c.Command...) == 0)
		})
	}
	begin(waiting, w.Operator).Abort()
	dead(waiting)
	zeroes := client.AppInstanceExec{Command: []string{"/app", "zeroes"}}
	begin(zeroes, w.Operator).Abort()
	dead(zeroes)

	token, err := os.ReadFile(filepath.Join(w.Dir, "ada", "token"))
	require.NoError(t, err)
	mine, err := client.Open(client.Config{
		URL: w.Hub.Ready.APIURL, CAFile: w.Hub.Ready.CAFile, Credential: client.BearerToken(token),
	})
	require.NoError(t, err)
	t.Cleanup(mine.Close)
	s := begin(waiting, mine)
	admin.MustRun("roles", "set", harness.UserEmail, "viewer", "--project", "main")
	admin.MustRun("users", "set-roles", harness.UserEmail, "org_billing")
	_, err = io.Copy(io.Discard, s)
	require.Error(t, err)
	dead(waiting)
	_, err = open(mine, waiting)
	require.ErrorContains(t, err, "apps.instance.exec")

	pid := w.PidOf(i)
	s = begin(waiting, w.Operator)
	require.NoError(t, w.Agent.Kill9())
	_, err = io.Copy(io.Discard, s)
	require.Error(t, err)
	w.RestartAgent(w.Agent)
	dead(waiting)
	require.Equal(t, pid, w.PidOf(i))
}
