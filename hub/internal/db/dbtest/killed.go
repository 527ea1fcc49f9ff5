package dbtest

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// ProcessesIn are the processes that work in a directory or below it; those of a server work in its data directory.
func ProcessesIn(dir string) (pids []int) {
	links, _ := filepath.Glob("/proc/[0-9]*/cwd")
	for _, link := range links {
		var pid int
		at, err := os.Readlink(link)
		if err != nil || at != dir && !strings.HasPrefix(at, dir+"/") {
			continue
		}
		if _, err := fmt.Sscanf(link, "/proc/%d/cwd", &pid); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// RemoveMemory waits for the end of servers that were killed for good, and removes the shared memory that they made: a
// power cut leaves none, and no other server removes it.
func RemoveMemory(t testing.TB, servers []int) {
	t.Helper()
	for _, pid := range servers {
		require.Eventually(t, func() bool { return unix.Kill(pid, 0) != nil || isZombie(pid) }, time.Minute,
			time.Millisecond, "server %d ends", pid)
	}
	table, err := os.ReadFile("/proc/sysvipc/shm")
	require.NoError(t, err)
	for line := range strings.Lines(string(table)) {
		var key, id, perms, size, maker int
		n, _ := fmt.Sscan(line, &key, &id, &perms, &size, &maker)
		if n == 5 && slices.Contains(servers, maker) {
			_, err := unix.SysvShmCtl(id, unix.IPC_RMID, nil)
			require.NoError(t, err)
		}
	}
}

func isZombie(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(stat), ") Z ")
}
