package network_test

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/internal/network"
)

// opensInotify marks a run of this program inside a member.
const opensInotify = "GPUAAS_NETWORK_TEST_INOTIFY"

// inotifies is more than the kernel gives one user by default (fs.inotify.max_user_instances is 128).
const inotifies = 1000

// openInotify says how many instances it got, and holds them until its standard input ends.
func openInotify() {
	opened := 0
	for range inotifies {
		if _, err := unix.InotifyInit1(unix.IN_CLOEXEC); err == nil {
			opened++
		}
	}
	fmt.Println(opened)
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// exhaustInotify opens as many instances as the member is given, until the test ends, and says how many these are.
func exhaustInotify(t *testing.T, member network.Attachment) (opened int) {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	intruder := exec.Command("nsenter", "--preserve-credentials", "--user="+member.UserNSPath, self)
	intruder.Env = append(os.Environ(), opensInotify+"=1")
	stdin, err := intruder.StdinPipe()
	require.NoError(t, err)
	stdout, err := intruder.StdoutPipe()
	require.NoError(t, err)
	intruder.Stderr = os.Stderr
	require.NoError(t, intruder.Start())
	t.Cleanup(func() {
		_ = stdin.Close()
		_ = intruder.Wait()
	})
	answer, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err)
	_, err = fmt.Sscan(strings.TrimSpace(answer), &opened)
	require.NoError(t, err)
	return opened
}

func TestAMembersInotifyInstancesAreNobodyElses(t *testing.T) {
	f := newFixture(t)
	a, b := f.setup("m1"), f.setup("m2")
	limit := 0
	_, err := fmt.Sscan(sh(t, "cat /proc/sys/fs/inotify/max_user_instances"), &limit)
	require.NoError(t, err)
	if limit >= inotifies {
		t.Skipf("this machine lets a user have %d inotify instances", limit)
	}
	require.Equal(t, limit, exhaustInotify(t, a), "a member has a user's share")
	host, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	require.NoError(t, err, "the host's root has its own")
	require.NoError(t, unix.Close(host))
	require.Equal(t, limit, exhaustInotify(t, b), "and so has a neighbour")
}

// Images whose entry point steps down to a service user (gosu, su-exec) call setgroups.
func TestMembersMaySetTheirGroups(t *testing.T) {
	f := newFixture(t)
	a := f.setup("m1")
	require.Equal(t, "allow", sh(t, "nsenter --preserve-credentials --user="+a.UserNSPath+" cat /proc/self/setgroups"))
}

// What the members' namespaces are made by must not stay with the agent's threads.
func TestMakingNamespacesLeavesTheAgentsUser(t *testing.T) {
	f := newFixture(t)
	for i := range 8 {
		f.setup(fmt.Sprintf("m%d", i))
	}
	threads, err := filepath.Glob("/proc/self/task/*/status")
	require.NoError(t, err)
	for _, status := range threads {
		text, err := os.ReadFile(status)
		if err != nil {
			continue // it has ended
		}
		require.Contains(t, string(text), "\nUid:\t0\t0\t0\t0\n")
	}
}
