package sandbox_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"

	"github.com/gpuaas/gpuaas/e2e/leakcheck"
	"github.com/gpuaas/gpuaas/e2e/sandbox"
	"github.com/gpuaas/gpuaas/e2e/skip"
)

const (
	// childEnv makes this program the one that runs in a sandbox; its value is the directory that is kept.
	childEnv = "SANDBOX_TEST_CHILD"
	// childStatus is the exit status of a child that did everything.
	childStatus = 7
	forwarding  = "/proc/sys/net/ipv4/ip_forward"
)

func TestMain(m *testing.M) {
	kept, inside := os.Getenv(childEnv), child
	if kept == "" {
		if kept, inside = os.Getenv(killedEnv), freeze; kept == "" {
			os.Exit(m.Run())
		}
	}
	code, err := sandbox.Run(sandbox.Config{Base: filepath.Join(kept, "base"), Keep: []string{kept}}, func() int {
		return inside(kept)
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}

// said is what the child tells about the machine that it sees.
type said struct {
	// Differences are what changed while the machine outside did.
	Differences []string
	// Kept is the content of a file in the kept directory, Processes how many there are inside.
	Kept      string
	Processes int
}

// child takes a snapshot, waits until the outside has changed, takes another, and then leaves things behind.
func child(kept string) int {
	before, err := leakcheck.Take(leakcheck.Scope{IgnoreFiles: []string{kept}})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println("ready")
	if _, err := bufio.NewReader(os.Stdin).ReadString('\n'); err != nil {
		return 1
	}
	after, err := leakcheck.Take(leakcheck.Scope{IgnoreFiles: []string{kept}})
	if err != nil {
		return 1
	}
	content, err := os.ReadFile(filepath.Join(kept, "file"))
	if err != nil {
		return 1
	}
	s := said{
		Differences: leakcheck.Diff(before, after), Kept: string(content),
		Processes: len(after.Items[leakcheck.Process]),
	}
	if err := json.NewEncoder(os.Stdout).Encode(s); err != nil || mess() != nil {
		return 1
	}
	return childStatus
}

// messName is in the name of everything that the child leaves behind.
func messName() string { return "sandbox-mess" }

func mess() error {
	for _, dir := range []string{"/tmp", "/run", "/var/lib", "/etc", "/dev"} {
		if err := os.WriteFile(filepath.Join(dir, messName()), nil, 0o600); err != nil {
			return err
		}
	}
	if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: messName()}}); err != nil {
		return err
	}
	if err := os.WriteFile(forwarding, []byte("1"), 0o600); err != nil {
		return err
	}
	dirs, err := filepath.Glob("/sys/fs/cgroup/*/cgroup.procs")
	if err != nil || len(dirs) == 0 {
		return fmt.Errorf("no cgroups inside: %w", err)
	}
	for _, procs := range dirs {
		if err := os.Mkdir(filepath.Join(filepath.Dir(procs), messName()), 0o700); err != nil {
			return err
		}
	}
	return exec.Command("setsid", "--fork", "sleep", "12345.678").Run()
}

// What others do on the machine is not visible inside, and what the program leaves inside is gone with it.
func TestNothingPassesBetweenTheMachineAndTheSandbox(t *testing.T) {
	skip.Root(t, "namespaces")
	kept := filepath.Join("/tmp", fmt.Sprintf("sandbox-test-%d", os.Getpid()))
	require.NoError(t, os.Mkdir(kept, 0o755))
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(kept)) })
	require.NoError(t, os.WriteFile(filepath.Join(kept, "file"), []byte("kept"), 0o600))
	forwardingBefore, err := os.ReadFile(forwarding)
	require.NoError(t, err)

	cmd := exec.Command("/proc/self/exe")
	cmd.Dir = kept // the directory of the tests may lie in one that is replaced
	cmd.Env = append(os.Environ(), childEnv+"="+kept)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	out := bufio.NewReader(stdout)
	line, err := out.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "ready\n", line)
	undo := changeMachine(t)
	_, err = io.WriteString(stdin, "\n")
	require.NoError(t, err)
	var s said
	require.NoError(t, json.NewDecoder(out).Decode(&s))
	undo()
	err = cmd.Wait()
	require.Equal(t, childStatus, cmd.ProcessState.ExitCode(), "%v", err)

	require.Empty(t, s.Differences)
	require.Equal(t, "kept", s.Kept)
	require.Equal(t, 2, s.Processes, "the sandbox's first process and the program")
	for _, dir := range []string{"/tmp", "/run", "/var/lib", "/etc", "/dev"} {
		require.NoFileExists(t, filepath.Join(dir, messName()))
	}
	_, err = netlink.LinkByName(messName())
	require.Error(t, err)
	forwardingAfter, err := os.ReadFile(forwarding)
	require.NoError(t, err)
	require.Equal(t, forwardingBefore, forwardingAfter)
	require.NotContains(t, running(t), "12345.678")
	left, err := os.ReadDir(filepath.Join(kept, "base"))
	require.NoError(t, err)
	require.Empty(t, left)
	cgroups, err := filepath.Glob(fmt.Sprintf("/sys/fs/cgroup/*/sandbox-%d", cmd.Process.Pid))
	require.NoError(t, err)
	require.Empty(t, cgroups)
}

// changeMachine does what other programs on a machine do all the time.
func changeMachine(t *testing.T) (undo func()) {
	t.Helper()
	name := fmt.Sprintf("sbx%d", os.Getpid())
	var files []string
	for _, dir := range []string{"/tmp", "/run", "/var/tmp"} {
		files = append(files, filepath.Join(dir, name))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	link := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name}}
	require.NoError(t, netlink.LinkAdd(link))
	sleep := exec.Command("sleep", "1000")
	require.NoError(t, sleep.Start())
	return func() {
		for _, f := range files {
			require.NoError(t, os.Remove(f))
		}
		require.NoError(t, netlink.LinkDel(link))
		require.NoError(t, sleep.Process.Kill())
		_ = sleep.Wait()
	}
}

// running are the command lines of all processes.
func running(t *testing.T) string {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	require.NoError(t, err)
	var all strings.Builder
	for _, f := range files {
		data, _ := os.ReadFile(f) // it may have ended
		all.Write(data)
		all.WriteByte('\n')
	}
	return all.String()
}
