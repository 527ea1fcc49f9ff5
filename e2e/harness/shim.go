package harness

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// noticeTime is how long after the end of a process the waits of its shim are observed.
const noticeTime = 250 * time.Millisecond

// parentOf returns the process id of a process' parent; 0 where it is not known.
func parentOf(pid int) (parent int) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	var state byte
	if _, err := fmt.Sscanf(string(stat[bytes.LastIndexByte(stat, ')')+1:]), " %c %d", &state, &parent); err != nil {
		return 0
	}
	return parent
}

// waitedForProcessor is how long the threads of a process together were ready and waited for a processor
// (Documentation/scheduler/sched-stats.rst of Linux).
func waitedForProcessor(pid int) (total time.Duration, err error) {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil || len(threads) == 0 {
		return 0, errors.Join(err, os.ErrNotExist)
	}
	for _, t := range threads {
		text, err := os.ReadFile(t)
		if err != nil {
			return 0, err
		}
		fields := bytes.Fields(text)
		if len(fields) < 2 {
			return 0, fmt.Errorf("%s is %q", t, text)
		}
		nanos, err := strconv.ParseInt(string(fields[1]), 10, 64)
		if err != nil {
			return 0, err
		}
		total += time.Duration(nanos)
	}
	return total, nil
}
