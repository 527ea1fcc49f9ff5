package devcluster

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// pauseWithin bounds the wait for a process to stop.
const pauseWithin = time.Minute

// Pause stops a process (SIGSTOP), as if it hung, until resume is called. When it returns, no thread of the process
// runs any more: kill alone does not promise that, and a thread that still runs answers one more request.
func Pause(pid int) (resume func(), err error) {
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		return nil, fmt.Errorf("stop process %d: %w", pid, err)
	}
	resume = func() { _ = unix.Kill(pid, unix.SIGCONT) }
	for deadline := time.Now().Add(pauseWithin); ; time.Sleep(time.Millisecond) {
		running, err := hasRunningThread(pid)
		if err == nil && !running {
			return resume, nil
		}
		if err == nil && time.Now().After(deadline) {
			err = fmt.Errorf("process %d still runs %s after SIGSTOP", pid, pauseWithin)
		}
		if err != nil {
			resume()
			return nil, err
		}
	}
}

// hasRunningThread reports whether a thread of the process is in another state than "stopped" (proc_pid_stat(5)).
func hasRunningThread(pid int) (bool, error) {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil || len(threads) == 0 {
		return false, fmt.Errorf("process %d has no threads: %w", pid, os.ErrNotExist)
	}
	for _, name := range threads {
		stat, err := os.ReadFile(name)
		if err != nil {
			continue // the thread has ended
		}
		// The name of the program is in parentheses and may have any characters.
		if state := stat[bytes.LastIndexByte(stat, ')')+1:]; !bytes.HasPrefix(state, []byte(" T ")) {
			return true, nil
		}
	}
	return false, nil
}
