package runtime

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/loop"
)

// ticksPerSecond is the kernel's USER_HZ, which is 100 on every architecture that containerd serves (proc_pid_stat(5)).
const ticksPerSecond = 100

// process is one process of this machine: the kernel reuses a number, but not a number with a start.
type process struct {
	pid uint32
	// start is in ticks since the boot.
	start int64
}

// readProcess returns the process with that number; false for a zombie, which has ended.
func readProcess(pid uint32) (process, bool) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return process{}, false
	}
	const state, start = 0, 19 // proc_pid_stat(5), counted from behind the name
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) <= start || fields[state] == "Z" || fields[state] == "X" {
		return process{}, false
	}
	ticks, err := strconv.ParseInt(fields[start], 10, 64)
	return process{pid, ticks}, err == nil
}

// startedAt is when the process was created, just before the container's own start; zero if the clock cannot be read.
func (p process) startedAt() time.Time {
	var now unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) != nil {
		return time.Time{}
	}
	return failpoint.Now().Add(time.Duration(p.start)*time.Second/ticksPerSecond - time.Duration(now.Nano()))
}

// noteRunning remembers the process of a container that runs; false where the process has ended.
func (r *Runtime) noteRunning(id string, pid uint32) (runs bool) {
	p, exists := readProcess(pid)
	if exists {
		r.running.Store(id, p)
	}
	return exists
}

// stillRunning returns the container's process if it is the one that was last known to run, and nil if containerd must
// be asked. Reading /proc costs a fraction of a call to the shim, which has to be scheduled for its answer.
func (r *Runtime) stillRunning(id string) *tasktypes.Process {
	last, known := r.running.Load(id)
	if !known {
		return nil
	}
	p, _ := last.(process)
	if now, exists := readProcess(p.pid); exists && now == p {
		return &tasktypes.Process{ID: id, Pid: p.pid, Status: tasktypes.Status_RUNNING}
	}
	r.running.CompareAndDelete(id, last)
	return nil
}

// A shim notices the end of its process within milliseconds, unless it is stopped or starved.
const (
	reapTries = 20
	reapPause = 10 * time.Millisecond
)

// askShim returns the container's process as its shim knows it. Of a process that has ended the shim is asked until it
// has noticed; while it has not, the status is unknown: one that was silent would count the time until it went on.
func (r *Runtime) askShim(ctx context.Context, id string) (*tasktypes.Process, error) {
	for try := 1; ; try++ {
		response, err := r.client.TaskService().Get(ctx, &tasks.GetRequest{ContainerID: id})
		if err != nil {
			return nil, errgrpc.ToNative(err)
		}
		p := response.GetProcess()
		if p.GetStatus() != tasktypes.Status_RUNNING || r.noteRunning(id, p.GetPid()) {
			return p, nil
		}
		if try == reapTries || !loop.Pause(ctx, reapPause) {
			return &tasktypes.Process{ID: id, Pid: p.GetPid(), Status: tasktypes.Status_UNKNOWN}, nil
		}
	}
}
