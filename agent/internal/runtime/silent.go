package runtime

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/pkg/loop"
)

// signalPastShim sends a signal that a container's shim does not pass on: to the container's first process, or to all
// until none is left. How and when they ended only the shim can say.
func (r *Runtime) signalPastShim(ctx context.Context, id string, sig syscall.Signal, all bool) error {
	r.cfg.Log.WarnContext(ctx, "a container's shim does not answer: signalling its processes", slog.String("container_id",
		id), slog.String("signal", sig.String()))
	limit, cancel := context.WithTimeout(ctx, cgroupWait)
	defer cancel()
	for {
		left := false
		for _, dir := range r.cgroupTree(id) {
			for _, pid := range processesIn(dir) {
				if all || isFirstProcess(pid) {
					_ = unix.Kill(pid, sig)
					left = all
				}
			}
		}
		if !left || !loop.Pause(limit, 20*time.Millisecond) {
			return ctx.Err()
		}
	}
}

// hasProcesses reports whether a process of the container has not ended.
func (r *Runtime) hasProcesses(id string) bool {
	return slices.ContainsFunc(r.cgroupTree(id), func(dir string) bool { return len(processesIn(dir)) > 0 })
}

// killShim ends the shim of a container without processes. containerd notices, and cleans up what it left.
func (r *Runtime) killShim(ctx context.Context, id string) {
	of := []byte("\x00-namespace\x00" + r.cfg.Namespace + "\x00")
	its := []byte("\x00-id\x00" + id + "\x00")
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range lines {
		line, err := os.ReadFile(path)
		if err != nil || !bytes.Contains(line, []byte("containerd-shim")) || !bytes.Contains(line, of) ||
			!bytes.Contains(line, its) {
			continue
		}
		var pid int
		if _, err := fmt.Sscanf(path, "/proc/%d/cmdline", &pid); err == nil {
			r.cfg.Log.WarnContext(ctx, "killing the shim of a stopped container, which does not answer",
				slog.String("container_id", id), slog.Int("pid", pid))
			_ = unix.Kill(pid, unix.SIGKILL)
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
