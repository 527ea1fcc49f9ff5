package runtime

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	tasktypes "github.com/containerd/containerd/api/types/task"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/pkg/failpoint"
)

// ticksPerSecond is the kernel's USER_HZ, which is 100 on every architecture that containerd serves (proc_pid_stat(5)).
const ticksPerSecond = 100

// process is one process of this machine: a number is given again, a number with a start is not.
type process struct {
	pid uint32
	// start is in ticks since the boot.
	start int64
}

// readProcess reads the process of that number. A zombie is none: it has ended.
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

// startedAt is when the process was made: a moment before the container's own start. Zero when that cannot be told.
func (p process) startedAt() time.Time {
	var now unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) != nil {
		return time.Time{}
	}
	return failpoint.Now().Add(time.Duration(p.start)*time.Second/ticksPerSecond - time.Duration(now.Nano()))
}

// noteRunning remembers the process of a container that is known to run.
func (r *Runtime) noteRunning(id string, pid uint32) {
	p, there := readProcess(pid)
	r.mu.Lock()
	defer r.mu.Unlock()
	if there {
		r.running[id] = p
	}
}

// stillRunning asks the kernel whether the process that a container was last known to run is there. It is a fraction of
// the price of asking the container's shim, which has to be scheduled for its answer. Nil when that is not known:
// containerd must be asked.
func (r *Runtime) stillRunning(id string) *tasktypes.Process {
	r.mu.Lock()
	was, known := r.running[id]
	r.mu.Unlock()
	if !known {
		return nil
	}
	if is, there := readProcess(was.pid); there && is == was {
		return &tasktypes.Process{ID: id, Pid: was.pid, Status: tasktypes.Status_RUNNING}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.running[id] == was {
		delete(r.running, id)
	}
	return nil
}
