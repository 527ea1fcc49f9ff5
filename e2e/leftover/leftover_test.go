package leftover_test

import (
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

	"github.com/gpuaas/gpuaas/e2e/leftover"
)

// word marks everything that this process makes: other tests may run on the same machine.
func word() string { return fmt.Sprintf("lo%dx", os.Getpid()) }

// TestEveryKindOfRemainderIsNoticed makes one thing of each kind, expects exactly one line for it, and nothing once it
// is gone.
func TestEveryKindOfRemainderIsNoticed(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("making links, mounts and cgroups needs root")
	}
	subnet := fmt.Sprintf("10.%d.%d", 200+os.Getpid()/250%50, os.Getpid()%250)
	cases := map[leftover.Kind]func(t *testing.T, scope *leftover.Scope) (undo func()){
		leftover.Process: func(t *testing.T, _ *leftover.Scope) func() {
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
		leftover.Mount: func(t *testing.T, _ *leftover.Scope) func() {
			dir := filepath.Join(t.TempDir(), word())
			require.NoError(t, os.Mkdir(dir, 0o700))
			require.NoError(t, unix.Mount("none", dir, "tmpfs", 0, ""))
			return func() { require.NoError(t, unix.Unmount(dir, 0)) }
		},
		leftover.NetNS: func(t *testing.T, _ *leftover.Scope) func() {
			name := filepath.Join(t.TempDir(), word())
			newNetNS(t, name)
			return func() { removeNetNS(t, name) }
		},
		leftover.Link: func(t *testing.T, _ *leftover.Scope) func() {
			link := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: word()}}
			require.NoError(t, netlink.LinkAdd(link))
			return func() { require.NoError(t, netlink.LinkDel(link)) }
		},
		leftover.Route: func(t *testing.T, scope *leftover.Scope) func() {
			scope.Contains = []string{subnet}
			link := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: word()}}
			require.NoError(t, netlink.LinkAdd(link))
			require.NoError(t, netlink.LinkSetUp(link))
			dst, err := netlink.ParseIPNet(subnet + ".0/24")
			require.NoError(t, err)
			require.NoError(t, netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: dst}))
			return func() { require.NoError(t, netlink.LinkDel(link)) }
		},
		leftover.Firewall: func(t *testing.T, _ *leftover.Scope) func() {
			run(t, "nft", "add", "table", "inet", word())
			run(t, "nft", "add", "chain", "inet", word(), "empty")
			return func() { run(t, "nft", "delete", "table", "inet", word()) }
		},
		leftover.Cgroup: func(t *testing.T, _ *leftover.Scope) func() {
			dir := firstCgroup(t) + "/" + word()
			require.NoError(t, os.Mkdir(dir, 0o755))
			return func() { require.NoError(t, os.Remove(dir)) }
		},
		leftover.File: func(t *testing.T, _ *leftover.Scope) func() {
			file := "/run/" + word()
			require.NoError(t, os.WriteFile(file, nil, 0o600))
			return func() { require.NoError(t, os.Remove(file)) }
		},
	}
	for kind, create := range cases {
		t.Run(string(kind), func(t *testing.T) {
			scope := leftover.Scope{Contains: []string{word()}, Files: []string{"/run"}}
			undoScope := scope
			before := take(t, scope)
			undo := create(t, &undoScope)
			if undoScope.Contains[0] != scope.Contains[0] {
				before = leftover.Snapshot{} // the route's subnet is this process's own, so nothing was there
			}
			diff := leftover.Diff(before, take(t, undoScope))
			undo()
			require.NotEmpty(t, diff)
			require.Contains(t, strings.Join(diff, "\n"), string(kind)+" new: ")
			require.Empty(t, leftover.Diff(before, take(t, undoScope)))
		})
	}
}

func TestFirewallRuleIsNoticed(t *testing.T) {
	scope := leftover.Scope{Contains: []string{word()}, Files: []string{"/run"}}
	run(t, "nft", "add", "table", "inet", word())
	t.Cleanup(func() { run(t, "nft", "delete", "table", "inet", word()) })
	run(t, "nft", "add", "chain", "inet", word(), "c", "{ type filter hook forward priority 0; policy accept; }")
	before := take(t, scope)
	require.Empty(t, before.Items[leftover.Firewall], "an empty base chain does nothing")
	run(t, "nft", "add", "rule", "inet", word(), "c", "ip", "saddr", "192.0.2.77", "drop")
	diff := leftover.Diff(before, take(t, scope))
	require.Len(t, diff, 1)
	require.Contains(t, diff[0], "ip saddr 192.0.2.77 drop")
}

func TestChangedSysctlOfAnotherNamespaceIsNoticed(t *testing.T) {
	name := filepath.Join(t.TempDir(), word())
	newNetNS(t, name)
	t.Cleanup(func() { removeNetNS(t, name) })
	scope := leftover.Scope{NetNS: []string{name}, Contains: []string{word()}, Files: []string{"/run"}}
	before := take(t, scope)
	run(t, "nsenter", "--net="+name, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/conf/all/route_localnet")
	diff := leftover.Diff(before, take(t, scope))
	require.Len(t, diff, 1)
	require.Contains(t, diff[0], `sysctl changed: net.ipv4.conf.all.route_localnet`)
}

func TestChangedFileUnderEtcIsNoticed(t *testing.T) {
	file := "/etc/" + word()
	t.Cleanup(func() { _ = os.Remove(file) })
	scope := leftover.Scope{Contains: []string{word()}, Files: []string{"/etc"}}
	require.NoError(t, os.WriteFile(file, []byte("one"), 0o600))
	before := take(t, scope)
	require.NoError(t, os.WriteFile(file, []byte("two"), 0o600))
	require.Len(t, leftover.Diff(before, take(t, scope)), 1)
	require.NoError(t, os.Remove(file))
	diff := leftover.Diff(before, take(t, scope))
	require.Len(t, diff, 1)
	require.Contains(t, diff[0], "file gone: "+file)
}

func TestIgnoredPathsAreNotLookedAt(t *testing.T) {
	dir := filepath.Join(t.TempDir(), word())
	require.NoError(t, os.Mkdir(dir, 0o700))
	scope := leftover.Scope{Contains: []string{word()}, Files: []string{filepath.Dir(dir)}, IgnoreFiles: []string{dir}}
	before := take(t, scope)
	require.NoError(t, os.WriteFile(dir+"/new", nil, 0o600))
	require.Empty(t, leftover.Diff(before, take(t, scope)))
	scope.IgnoreFiles = nil
	require.NotEmpty(t, leftover.Diff(before, take(t, scope)))
}

// failing stands in for a test, so that a failing guard does not fail this one.
type failing struct {
	testing.TB
	cleanups []func()
	failed   string
}

func (f *failing) Helper()                           {}
func (f *failing) Cleanup(fn func())                 { f.cleanups = append(f.cleanups, fn) }
func (f *failing) Errorf(format string, args ...any) { f.failed = fmt.Sprintf(format, args...) }

func TestGuardWaitsForTheKernelAndThenTells(t *testing.T) {
	dir := t.TempDir()
	scope := leftover.Scope{Contains: []string{word()}, Files: []string{dir}}
	clean, dirty := &failing{TB: t}, &failing{TB: t}
	leftover.Guard(clean, scope)
	clean.cleanups[0]()
	require.Empty(t, clean.failed)
	leftover.Guard(dirty, scope)
	require.NoError(t, os.WriteFile(filepath.Join(dir, word()), nil, 0o600))
	dirty.cleanups[0]()
	require.Contains(t, dirty.failed, "the test left 1 things behind")
}

func TestWholeMachineCanBePhotographed(t *testing.T) {
	s := take(t, leftover.Scope{})
	for _, kind := range []leftover.Kind{
		leftover.Process, leftover.Mount, leftover.NetNS, leftover.Link, leftover.Sysctl,
		leftover.Cgroup, leftover.File,
	} {
		require.NotEmpty(t, s.Items[kind], kind)
	}
}

func take(t *testing.T, scope leftover.Scope) leftover.Snapshot {
	t.Helper()
	s, err := leftover.Take(scope)
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
