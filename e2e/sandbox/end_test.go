package sandbox_test

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/e2e/skip"
)

const (
	// killedEnv is childEnv for a program that is killed.
	killedEnv = "SANDBOX_TEST_KILLED"
	// frozenMiB is the size of the file system that it freezes. No loop device of any other test has it.
	frozenMiB = 73
)

// freeze freezes a file system on a loop device and waits for the end. So does a process in a session of its own, which
// writes to that file system.
func freeze(kept string) int {
	const script = `cd "$1"; truncate -s "$2"M image; mkfs.ext4 -q image; mkdir -p /tmp/at; mount -o loop image /tmp/at
		fsfreeze --freeze /tmp/at; setsid --fork sh -c ': > /tmp/at/file' > /dev/null 2>&1`
	out, err := exec.Command("bash", "-ec", script, "bash", kept, strconv.Itoa(frozenMiB)).CombinedOutput()
	if err != nil {
		fmt.Fprintln(os.Stderr, err, string(out))
		return 1
	}
	fmt.Println("ready")
	select {}
}

// The kernel keeps a frozen file system after its last mount, and its loop device and image with it.
func TestAKilledProgramLeavesNoProcessAndNoFrozenFileSystem(t *testing.T) {
	skip.Root(t, "namespaces")
	kept := filepath.Join("/tmp", fmt.Sprintf("sandbox-killed-%d", os.Getpid()))
	require.NoError(t, os.Mkdir(kept, 0o755))
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(kept)) })
	cmd := exec.Command("/proc/self/exe")
	cmd.Dir = kept
	cmd.Env = append(os.Environ(), killedEnv+"="+kept)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	line, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "ready\n", line)
	require.Len(t, frozen(t), 1)
	inits := childrenOf(t, cmd.Process.Pid)
	require.Len(t, inits, 1)
	init, err := unix.PidfdOpen(inits[0], 0)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Close(init)) })

	require.NoError(t, syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL))
	require.Error(t, cmd.Wait())
	awaitEnd(t, init) // and before it that of each other process of its namespace
	require.Empty(t, frozen(t))
}

// frozen are the loop devices of frozenMiB.
func frozen(t *testing.T) (found []string) {
	t.Helper()
	sizes, err := filepath.Glob("/sys/block/loop*/size")
	require.NoError(t, err)
	for _, size := range sizes {
		sectors, _ := os.ReadFile(size) // it may have gone
		if string(sectors) == fmt.Sprintln(frozenMiB<<20/512) {
			found = append(found, size)
		}
	}
	return found
}

func childrenOf(t *testing.T, parent int) (pids []int) {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", parent))
	require.NoError(t, err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		for field := range strings.FieldsSeq(string(text)) {
			pid, err := strconv.Atoi(field)
			require.NoError(t, err)
			pids = append(pids, pid)
		}
	}
	return pids
}

// awaitEnd waits until the process of a file descriptor has ended.
func awaitEnd(t *testing.T, pidfd int) {
	t.Helper()
	const limitMillis = 60_000
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, limitMillis)
		if err == unix.EINTR {
			continue
		}
		require.NoError(t, err)
		require.Equal(t, 1, n, "init ends")
		return
	}
}
