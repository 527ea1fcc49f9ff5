package leakcheck_test

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/e2e/leakcheck"
	"github.com/gpuaas/gpuaas/e2e/skip"
)

// word marks everything that this process makes: other tests may run on the same machine.
func word() string { return fmt.Sprintf("lo%dx", os.Getpid()) }

// A worker that PostgreSQL has just forked has its parent's command line until it sets its own title.
func TestAForkOfPostgreSQLIsNoNewProcess(t *testing.T) {
	program := filepath.Join(t.TempDir(), "postgres")
	require.NoError(t, os.Symlink("/bin/sh", program))
	goOn, end, err := os.Pipe()
	require.NoError(t, err)
	defer func() { _ = end.Close() }()
	cmd := exec.Command(program, "-c", "echo runs; read a; (read b <&3; exit) & echo forked; wait", word())
	cmd.ExtraFiles = []*os.File{goOn}
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	require.NoError(t, goOn.Close())
	said := bufio.NewReader(stdout)
	line, err := said.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "runs\n", line)
	scope := leakcheck.Scope{Kinds: []leakcheck.Kind{leakcheck.Process}, Contains: []string{word()}}
	before, err := leakcheck.Take(scope)
	require.NoError(t, err)
	require.Len(t, before.Items[leakcheck.Process], 1)
	_, err = stdin.Write([]byte{'\n'})
	require.NoError(t, err)
	_, err = said.ReadString('\n')
	require.NoError(t, err)
	after, err := leakcheck.Take(scope)
	require.NoError(t, err)
	require.Empty(t, leakcheck.Diff(before, after))
	require.NoError(t, end.Close())
	require.NoError(t, cmd.Wait())
}

// remainders make one thing of each kind, and return what removes it.
func remainders() map[leakcheck.Kind]func(t *testing.T, scope *leakcheck.Scope) (undo func()) {
	subnet := fmt.Sprintf("10.%d.%d", 200+os.Getpid()/250%50, os.Getpid()%250)
	return map[leakcheck.Kind]func(t *testing.T, scope *leakcheck.Scope) (undo func()){
		leakcheck.Process: func(t *testing.T, _ *leakcheck.Scope) func() {
			cmd := exec.Command("cat")
			cmd.Args[0] = word()
			stdin, err := cmd.StdinPipe()
			require.NoError(t, err)
			stdout, err := cmd.StdoutPipe()
			require.NoError(t, err)
			require.NoError(t, cmd.Start())
			// Start returns when execve closes the pipe to the child, which is before /proc shows the new arguments. A byte
			// that comes back shows that the program runs.
			_, err = stdin.Write([]byte{'\n'})
			require.NoError(t, err)
			_, err = io.ReadFull(stdout, make([]byte, 1))
			require.NoError(t, err)
			return func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }
		},
		leakcheck.Mount: func(t *testing.T, _ *leakcheck.Scope) func() {
			dir := filepath.Join(t.TempDir(), word())
			require.NoError(t, os.Mkdir(dir, 0o700))
			require.NoError(t, unix.Mount("none", dir, "tmpfs", 0, ""))
			return func() { require.NoError(t, unix.Unmount(dir, 0)) }
		},
		leakcheck.NetNS: func(t *testing.T, _ *leakcheck.Scope) func() {
			name := filepath.Join(t.TempDir(), word())
			newNetNS(t, name)
			return func() { removeNetNS(t, name) }
		},
		leakcheck.Link: func(t *testing.T, _ *leakcheck.Scope) func() {
			link := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: word()}}
			require.NoError(t, netlink.LinkAdd(link))
			return func() { require.NoError(t, netlink.LinkDel(link)) }
		},
		leakcheck.Route: func(t *testing.T, scope *leakcheck.Scope) func() {
			scope.Contains = []string{subnet}
			link := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: word()}}
			require.NoError(t, netlink.LinkAdd(link))
			require.NoError(t, netlink.LinkSetUp(link))
			dst, err := netlink.ParseIPNet(subnet + ".0/24")
			require.NoError(t, err)
			require.NoError(t, netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: dst}))
			return func() { require.NoError(t, netlink.LinkDel(link)) }
		},
		leakcheck.Firewall: func(t *testing.T, _ *leakcheck.Scope) func() {
			run(t, "nft", "add", "table", "inet", word())
			run(t, "nft", "add", "chain", "inet", word(), "empty")
			return func() { run(t, "nft", "delete", "table", "inet", word()) }
		},
		leakcheck.Cgroup: func(t *testing.T, _ *leakcheck.Scope) func() {
			dir := firstCgroup(t) + "/" + word()
			require.NoError(t, os.Mkdir(dir, 0o755))
			return func() { require.NoError(t, os.Remove(dir)) }
		},
		leakcheck.File: func(t *testing.T, _ *leakcheck.Scope) func() {
			file := "/run/" + word()
			require.NoError(t, os.WriteFile(file, nil, 0o600))
			return func() { require.NoError(t, os.Remove(file)) }
		},
	}
}

// TestEveryKindOfLeakIsFound makes one thing of each kind, expects exactly one line for it, and nothing once it
// is gone.
func TestEveryKindOfLeakIsFound(t *testing.T) {
	skip.Root(t, "links, mounts and cgroups")
	for kind, create := range remainders() {
		t.Run(string(kind), func(t *testing.T) {
			scope := leakcheck.Scope{Contains: []string{word()}, Files: []string{"/run"}}
			undoScope := scope
			before := take(t, scope)
			undo := create(t, &undoScope)
			if undoScope.Contains[0] != scope.Contains[0] {
				before = leakcheck.Snapshot{} // the route's subnet is this process's own, so nothing was there
			}
			diff := leakcheck.Diff(before, take(t, undoScope))
			undo()
			require.NotEmpty(t, diff)
			require.Contains(t, strings.Join(diff, "\n"), string(kind)+" new: ")
			require.Empty(t, leakcheck.Diff(before, take(t, undoScope)))
		})
	}
}

func TestAFirewallRuleIsFound(t *testing.T) {
	scope := leakcheck.Scope{Contains: []string{word()}, Files: []string{"/run"}}
	run(t, "nft", "add", "table", "inet", word())
	t.Cleanup(func() { run(t, "nft", "delete", "table", "inet", word()) })
	run(t, "nft", "add", "chain", "inet", word(), "c", "{ type filter hook forward priority 0; policy accept; }")
	before := take(t, scope)
	require.Empty(t, before.Items[leakcheck.Firewall], "an empty base chain does nothing")
	run(t, "nft", "add", "rule", "inet", word(), "c", "ip", "saddr", "192.0.2.77", "drop")
	diff := leakcheck.Diff(before, take(t, scope))
	require.Len(t, diff, 1)
	require.Contains(t, diff[0], "ip saddr 192.0.2.77 drop")
}

func TestAChangedSysctlOfAnotherNamespaceIsFound(t *testing.T) {
	name := filepath.Join(t.TempDir(), word())
	newNetNS(t, name)
	t.Cleanup(func() { removeNetNS(t, name) })
	scope := leakcheck.Scope{NetNS: []string{name}, Contains: []string{word()}, Files: []string{"/run"}}
	before := take(t, scope)
	run(t, "nsenter", "--net="+name, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/conf/all/route_localnet")
	diff := leakcheck.Diff(before, take(t, scope))
	require.Len(t, diff, 1)
	require.Contains(t, diff[0], `sysctl changed: net.ipv4.conf.all.route_localnet`)
}

func TestAChangedFileUnderEtcIsFound(t *testing.T) {
	file := "/etc/" + word()
	t.Cleanup(func() { _ = os.Remove(file) })
	scope := leakcheck.Scope{Contains: []string{word()}, Files: []string{"/etc"}}
	require.NoError(t, os.WriteFile(file, []byte("one"), 0o600))
	before := take(t, scope)
	require.NoError(t, os.WriteFile(file, []byte("two"), 0o600))
	require.Len(t, leakcheck.Diff(before, take(t, scope)), 1)
	require.NoError(t, os.Remove(file))
	diff := leakcheck.Diff(before, take(t, scope))
	require.Len(t, diff, 1)
	require.Contains(t, diff[0], "file gone: "+file)
}

func TestIgnoredPathsAreNotCompared(t *testing.T) {
	dir := filepath.Join(t.TempDir(), word())
	require.NoError(t, os.Mkdir(dir, 0o700))
	scope := leakcheck.Scope{Contains: []string{word()}, Files: []string{filepath.Dir(dir)}, IgnoreFiles: []string{dir}}
	before := take(t, scope)
	require.NoError(t, os.WriteFile(dir+"/new", nil, 0o600))
	require.Empty(t, leakcheck.Diff(before, take(t, scope)))
	scope.IgnoreFiles = nil
	require.NotEmpty(t, leakcheck.Diff(before, take(t, scope)))
}

func TestMountsOfOtherProgramsAreNotCompared(t *testing.T) {
	dir := filepath.Join(t.TempDir(), word())
	require.NoError(t, os.Mkdir(dir, 0o700))
	require.NoError(t, unix.Mount("none", dir, "tmpfs", 0, ""))
	mounted := true
	t.Cleanup(func() {
		if mounted {
			require.NoError(t, unix.Unmount(dir, 0))
		}
	})
	scope := leakcheck.Scope{Kinds: []leakcheck.Kind{leakcheck.Mount}, Contains: []string{word()}}
	seen := take(t, scope)
	scope.IgnoreMounts = []string{filepath.Dir(dir)}
	ignored := take(t, scope)
	require.NoError(t, unix.Unmount(dir, 0))
	mounted = false
	require.Len(t, leakcheck.Left(seen), 1)
	require.Empty(t, leakcheck.Left(ignored))
}

// failing is a fake test, so that a failing guard does not fail the real one.
type failing struct {
	testing.TB
	cleanups []func()
	failed   string
}

func (f *failing) Helper()                           {}
func (f *failing) Cleanup(fn func())                 { f.cleanups = append(f.cleanups, fn) }
func (f *failing) Errorf(format string, args ...any) { f.failed = fmt.Sprintf(format, args...) }

func TestGuardWaitsForTheKernelBeforeItFails(t *testing.T) {
	dir := t.TempDir()
	scope := leakcheck.Scope{Contains: []string{word()}, Files: []string{dir}}
	clean, dirty := &failing{TB: t}, &failing{TB: t}
	leakcheck.Guard(clean, scope)
	clean.cleanups[0]()
	require.Empty(t, clean.failed)
	leakcheck.Guard(dirty, scope)
	require.NoError(t, os.WriteFile(filepath.Join(dir, word()), nil, 0o600))
	dirty.cleanups[0]()
	require.Contains(t, dirty.failed, "the test left 1 things behind")
}

func TestASnapshotCoversTheWholeMachine(t *testing.T) {
	s := take(t, leakcheck.Scope{})
	for _, kind := range []leakcheck.Kind{
		leakcheck.Process, leakcheck.Mount, leakcheck.NetNS, leakcheck.Link, leakcheck.Sysctl,
		leakcheck.Cgroup, leakcheck.File,
	} {
		require.NotEmpty(t, s.Items[kind], kind)
	}
}

func take(t *testing.T, scope leakcheck.Scope) leakcheck.Snapshot {
	t.Helper()
	s, err := leakcheck.Take(scope)
	require.NoError(t, err)
	return s
}

func run(t *testing.T, name string, args ...string) {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	require.NoErrorf(t, err, "%s %v: %s", name, args, out)
}

// newNetNS makes a network namespace and mounts it at path.
func newNetNS(t *testing.T, path string) {
	t.Helper()
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		if _, err := netns.New(); err != nil {
			done <- err
			return
		}
		done <- unix.Mount(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()), path, "", unix.MS_BIND, "")
	}()
	require.NoError(t, <-done)
}

func removeNetNS(t *testing.T, path string) {
	t.Helper()
	require.NoError(t, unix.Unmount(path, unix.MNT_DETACH))
	require.NoError(t, os.Remove(path))
}

func firstCgroup(t *testing.T) string {
	t.Helper()
	if _, err := os.Stat("/sys/fs/cgroup/pids"); err == nil {
		return "/sys/fs/cgroup/pids"
	}
	return "/sys/fs/cgroup"
}
