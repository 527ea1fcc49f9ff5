package runtime

import (
	"context"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/loop"
)

// signalPastShim sends a signal that a container's shim does not pass on: to the container's first process, or to all.
// Killed processes have ended when it returns, but it fails: how and when they ended only the shim will say.
func (r *Runtime) signalPastShim(ctx context.Context, id string, sig syscall.Signal, all bool) error {
	if !all {
		for _, dir := range r.cgroupTree(id) {
			for _, pid := range processesIn(dir) {
				if isFirstProcess(pid) {
					return unix.Kill(pid, sig)
				}
			}
		}
		return nil // it has ended
	}
	limit, cancel := context.WithTimeout(ctx, cgroupWait)
	defer cancel()
	for {
		left := 0
		for _, dir := range r.cgroupTree(id) {
			for _, pid := range processesIn(dir) {
				_ = unix.Kill(pid, sig)
				left++
			}
		}
		if left == 0 {
			return fault.New(fault.Unavailable, codeContainerUnknown, "The container's processes were killed, but its "+
				"shim does not answer. End containerd-shim-runc-v2 of this container, or start the node anew.", nil)
		}
		if !loop.Pause(limit, 20*time.Millisecond) {
			return errHangs()
		}
	}
}

// isFirstProcess is true for process 1 of a PID namespace below this one (NSpid, proc_pid_status(5)).
func isFirstProcess(pid int) bool {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	_, after, _ := strings.Cut(string(status), "\nNSpid:")
	line, _, _ := strings.Cut(after, "\n")
	numbers := strings.Fields(line)
	return len(numbers) == 2 && numbers[1] == "1"
}
