package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/skip"
)

// asProgram makes this program the command; own is its value in a network namespace that has just been made.
const (
	asProgram = "ATTACH_TEST_PROGRAM"
	own       = "own"
)

func TestMain(m *testing.M) {
	if where := os.Getenv(asProgram); where != "" {
		if where == own {
			if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
				fmt.Fprintf(os.Stderr, "bring the loopback up: %s: %s", err, out)
				os.Exit(2)
			}
		}
		main()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// attacher is the command in a network namespace and a mount namespace of its own.
type attacher struct {
	t     *testing.T
	state string
	pid   int
	in    io.WriteCloser
	out   *json.Decoder
	wait  func() error
}

func start(t *testing.T) *attacher {
	skip.Root(t, "network namespaces")
	dir := t.TempDir()
	require.NoError(t, os.Chmod(dir, 0o711))
	a := &attacher{t: t, state: filepath.Join(dir, "state")}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-bridge", "gpattach0", "-cidr", "10.221.0.0/24", "-state-dir",
		a.state, "-uid-base", "100000", "-uid-size", "65536")
	cmd.Env = append(os.Environ(), asProgram+"="+own)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS}
	cmd.Stderr = os.Stderr
	var err error
	a.in, err = cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	a.pid, a.out, a.wait = cmd.Process.Pid, json.NewDecoder(out), cmd.Wait
	return a
}

func (a *attacher) ask(r request) {
	a.t.Helper()
	require.NoError(a.t, json.NewEncoder(a.in).Encode(r))
}

func (a *attacher) answer(step string) (r reply) {
	a.t.Helper()
	require.NoError(a.t, a.out.Decode(&r))
	require.Equal(a.t, step, r.Step, r.Error)
	return r
}

// end closes the program's input, and checks that it leaves nothing of its networks.
func (a *attacher) end() {
	a.t.Helper()
	require.NoError(a.t, a.in.Close())
	require.ErrorIs(a.t, a.out.Decode(&reply{}), io.EOF)
	require.NoError(a.t, a.wait())
	left, err := filepath.Glob(filepath.Join(a.state, "ns", "*"))
	require.NoError(a.t, err)
	require.Empty(a.t, left)
}

func TestABadRequestIsAnsweredAndTheNextOneServed(t *testing.T) {
	a := start(t)
	a.ask(request{ID: "a"}) // no port 0 can be published
	require.Equal(t, filepath.Join(a.state, "ns"), filepath.Dir(a.answer("paths").NetNSPath))
	require.Contains(t, a.answer("done").Error, "port")
	a.ask(request{ID: "a", Remove: true}) // nothing has this network
	require.Equal(t, reply{Step: "done"}, a.answer("done"))
	a.end()
}

func TestANetworkIsMadeAndRemovedAndTheLastOneEndsWithTheInput(t *testing.T) {
	a := start(t)
	addresses := func(path string) (string, error) {
		inside := fmt.Sprintf("--net=/proc/%d/root%s", a.pid, path)
		out, err := exec.CommandContext(t.Context(), "nsenter", inside, "ip", "-4", "-o", "addr", "show").CombinedOutput()
		return string(out), err
	}
	made := func(id string, port uint16) string {
		a.ask(request{ID: id, HostPort: port, ContainerPort: 80})
		paths := a.answer("paths")
		a.answer("namespaces")
		require.FileExists(t, fmt.Sprintf("/proc/%d/root%s", a.pid, paths.UserNSPath))
		require.Empty(t, a.answer("done").Error)
		found, err := addresses(paths.NetNSPath)
		require.NoError(t, err, found)
		require.Contains(t, found, "inet 10.221.0.")
		return paths.NetNSPath
	}
	first := made("a", 20001)
	made("b", 20002)
	a.ask(request{ID: "a", Remove: true})
	require.Equal(t, reply{Step: "done"}, a.answer("done"))
	found, err := addresses(first)
	require.Error(t, err, found)
	a.end()
}

func TestANetworkWithoutABridgeEndsTheProgram(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-cidr", "nonsense", "-state-dir", t.TempDir())
	cmd.Env = append(os.Environ(), asProgram+"=1")
	out, err := cmd.CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "attach:")
	require.Equal(t, 1, cmd.ProcessState.ExitCode())
}
