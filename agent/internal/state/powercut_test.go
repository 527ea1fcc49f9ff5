package state_test

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/e2e/skip"
)

const (
	// ext4Shutdown (EXT4_IOC_SHUTDOWN) stops a file system at once; with shutdownNoLogFlush, what was not synced is lost.
	ext4Shutdown       = 0x8004587d
	shutdownNoLogFlush = 2
	diskBytes          = 256 << 20
)

// victimOnDisk mounts the image $1 at $2 and runs the victim there. Its parent is this script, so that the file system
// is unmounted when it has ended.
const victimOnDisk = `mount -o loop "$1" "$2" && mkdir -p "$2/store" || exit 9
	` + victimEnv + `="$2/store" "$3" & echo "pid $!"
	wait; umount "$2"`

// TestLaw05NothingPromisedIsLostByAPowerCut: unlike a kill, a power cut takes what the kernel has not written yet.
func TestLaw05NothingPromisedIsLostByAPowerCut(t *testing.T) {
	skip.Root(t, "mounts")
	m, dir := victimMesh(t), t.TempDir()
	image := filepath.Join(dir, "disk")
	require.NoError(t, os.WriteFile(image, nil, 0o600))
	require.NoError(t, os.Truncate(image, diskBytes))
	out, err := exec.Command("mkfs.ext4", "-q", "-F", image).CombinedOutput()
	require.NoError(t, err, "%s", out)
	for round := range 4 {
		said := cutPower(t, image, t.TempDir(), rand.IntN(40)+8)
		left := filepath.Join(dir, fmt.Sprint(round))
		out, err := exec.Command("unshare", "--mount", "sh", "-c",
			`mount -o loop "$1" "$2" && cp -a "$2/store" "$3" && umount "$2"`, "sh", image, t.TempDir(), left).CombinedOutput()
		require.NoError(t, err, "%s", out)
		s := open(t, left, m)
		checkPromised(t, s, said)
		checkChain(t, s, m)
		require.NoError(t, s.Close())
	}
}

// cutPower runs a victim on the disk until it has said so many lines, and stops the file system below it.
func cutPower(t *testing.T, image, mountPoint string, lines int) string {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command("unshare", "--mount", "sh", "-c", victimOnDisk, "sh", image, mountPoint, exe)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	scanner := bufio.NewScanner(stdout)
	require.True(t, scanner.Scan())
	var pid int
	_, err = fmt.Sscanf(scanner.Text(), "pid %d", &pid)
	require.NoError(t, err)
	var said strings.Builder
	for range lines {
		require.True(t, scanner.Scan(), "the victim says more")
		said.WriteString(scanner.Text() + "\n")
	}
	disk, err := os.Open(filepath.Join("/proc", fmt.Sprint(pid), "root", mountPoint))
	require.NoError(t, err)
	require.NoError(t, unix.IoctlSetPointerInt(int(disk.Fd()), ext4Shutdown, shutdownNoLogFlush))
	require.NoError(t, disk.Close())
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		require.ErrorIs(t, err, syscall.ESRCH, "it may have ended by itself: its disk fails")
	}
	for scanner.Scan() { // until the script has ended
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		require.NoError(t, err)
	case <-time.After(time.Minute):
		require.Fail(t, "the file system is not unmounted")
	}
	return said.String()
}
