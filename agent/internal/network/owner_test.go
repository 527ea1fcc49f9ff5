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

// opensInotify marks a run of this program inside a member, and says how many inotify instances it tries to open.
const opensInotify = "GPUAAS_NETWORK_TEST_INOTIFY"

// maxInotifies bounds the instances that one test opens; distributions let a user have 128 to 8,192.
const maxInotifies = 20_000

// openInotify says how many instances it got, and holds them until its standard input ends.
func openInotify() {
	opened, tries := 0, 0
	_, _ = fmt.Sscan(os.Getenv(opensInotify), &tries)
	for range tries {
		if _, err := unix.InotifyInit1(unix.IN_CLOEXEC); err == nil {
			opened++
		}
	}
	fmt.Println(opened)
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// exhaustInotify opens as many instances as the member is given, until the test ends, and says how many these are.
func exhaustInotify(t *testing.T, member network.Attachment, tries int) (opened int) {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	intruder := exec.Command("nsenter", "--preserve-credentials", "--user="+member.UserNSPath, self)
	intruder.Env = append(os.Environ(), fmt.Sprintf("%s=%d", opensInotify, tries))
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
	var files unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &files))
	const otherFiles = 64
	tries := min(limit+1, maxInotifies, int(files.Max)-otherFiles)
	share := min(limit, tries)
	require.Equal(t, share, exhaustInotify(t, a, tries), "a member has a user's share")
	host, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	require.NoError(t, err, "the host's root has its own")
	require.NoError(t, unix.Close(host))
	require.Equal(t, share, exhaustInotify(t, b, tries), "and so has a neighbour")
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
