package harness

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/client"
)

// Shell is a person at a terminal with a home directory of the test's own.
type Shell struct {
	Testbed *Testbed
	Env     []string
}

// Output is what one command wrote and how it ended.
type Output struct {
	Out, Err string
	Code     int
}

// Shell is a user's terminal with a configuration of its own.
func (w *Testbed) Shell(home string) *Shell {
	w.T.Helper()
	dir := filepath.Join(w.Dir, home)
	require.NoError(w.T, os.MkdirAll(dir, 0o700))
	s := &Shell{Testbed: w, Env: []string{"HOME=" + dir, "PATH=" + os.Getenv("PATH")}}
	if coverage, set := os.LookupEnv("GOCOVERDIR"); set { // programs that count coverage would complain
		s.Env = append(s.Env, "GOCOVERDIR="+coverage)
	}
	return s
}

// Run runs gpuaas.
func (s *Shell) Run(name string, args ...string) Output {
	s.Testbed.T.Helper()
	cmd := exec.CommandContext(s.Testbed.Ctx, name, args...)
	cmd.Env = s.Env
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	err := cmd.Run()
	if _, exited := errors.AsType[*exec.ExitError](err); err != nil && !exited {
		require.NoError(s.Testbed.T, err)
	}
	return Output{Out: out.String(), Err: stderr.String(), Code: cmd.ProcessState.ExitCode()}
}

// MustRun runs the command, which must end with 0, and returns what it wrote.
func (s *Shell) MustRun(args ...string) string {
	s.Testbed.T.Helper()
	r := s.Run(filepath.Join(Binaries(s.Testbed.T), "gpuaas"), args...)
	require.Zero(s.Testbed.T, r.Code, "gpuaas %s: %s", strings.Join(args, " "), r.Err)
	return r.Out
}

// AwaitLog waits until the command prints a log with this text: what a container writes is in its log a moment later.
func (s *Shell) AwaitLog(text string, args ...string) {
	s.Testbed.T.Helper()
	s.Testbed.Eventually("the log has "+text, func() error {
		return Pending(nil, strings.Contains(s.MustRun(args...), text))
	})
}

// Fails runs the command, which must end with this code and say these words.
func (s *Shell) Fails(code int, words string, args ...string) {
	s.Testbed.T.Helper()
	r := s.Run(filepath.Join(Binaries(s.Testbed.T), "gpuaas"), args...)
	require.Equal(s.Testbed.T, code, r.Code, "gpuaas %s: %s%s", strings.Join(args, " "), r.Out, r.Err)
	require.Contains(s.Testbed.T, r.Err, words)
	require.Empty(s.Testbed.T, r.Out, "an error belongs on standard error")
}

// AsJSON runs the command with -o json and reads its answer.
func AsJSON[T any](s *Shell, args ...string) T {
	s.Testbed.T.Helper()
	var v T
	require.NoError(s.Testbed.T, json.Unmarshal([]byte(s.MustRun(append(args, "-o", "json")...)), &v), "%v", args)
	return v
}

// Forward keeps gpuaas port-forward running until the end of the test, and returns the address on this machine.
func (s *Shell) Forward(args ...string) (url string) {
	w := s.Testbed
	w.T.Helper()
	cmd := exec.CommandContext(w.Ctx, filepath.Join(Binaries(w.T), "gpuaas"), append([]string{"port-forward"}, args...)...)
	cmd.Env = s.Env
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	require.NoError(w.T, err)
	require.NoError(w.T, cmd.Start())
	w.T.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		_ = cmd.Wait()
		if w.T.Failed() {
			w.T.Logf("port-forward: %s", stderr.String())
		}
	})
	line, _ := bufio.NewReader(out).ReadString('\n')
	words := strings.Fields(line)
	require.Greater(w.T, len(words), 1, "port-forward says %q", line)
	return words[1]
}

// Items is a page of a list as gpuaas prints it.
type Items[T any] struct {
	Items []T `json:"items"`
}

// UserEmail is the user of UserShell.
const UserEmail = "ada@acme.example"

// UserShell makes a user who may operate the apps of the project main, and returns the user's terminal.
func (w *Testbed) UserShell(admin *Shell) *Shell { return w.ShellOf(admin, "ada", "main") }

// ShellOf makes a user who may operate the apps of one project, and returns the user's terminal.
func (w *Testbed) ShellOf(admin *Shell, name, project string) *Shell {
	w.T.Helper()
	email := name + "@acme.example"
	admin.MustRun("users", "create", email, "--org", "acme")
	admin.MustRun("roles", "set", email, "app_operator", "--project", project)
	token := AsJSON[client.UserToken](admin, "users", "token", email)
	s := w.Shell(name)
	file := filepath.Join(w.Dir, name, "token")
	require.NoError(w.T, os.WriteFile(file, []byte(token.Token), 0o600))
	s.MustRun("login", "--url", w.Hub.Ready.APIURL, "--ca-file", w.Hub.Ready.CAFile, "--token-file", file)
	return s
}
