package harness

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
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

// signalSenders returns the runc processes by which a shim sends signals now.
func signalSenders(shim int) (pids []int) {
	lists, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", shim))
	if err != nil {
		return nil
	}
	for _, list := range lists {
		text, err := os.ReadFile(list)
		if err != nil {
			continue // the thread has ended
		}
		for child := range strings.FieldsSeq(string(text)) {
			command, _ := os.ReadFile("/proc/" + child + "/cmdline")
			if pid, err := strconv.Atoi(child); err == nil && slices.Contains(strings.Split(string(command), "\x00"), "kill") {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// waitsForProcessor is how long each thread of a process was ready and waited for a processor
// (Documentation/scheduler/sched-stats.rst of Linux). A thread that ends meanwhile is left out.
func waitsForProcessor(pid int) (map[string]time.Duration, error) {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil {
		return nil, err
	}
	waits := map[string]time.Duration{}
	for _, thread := range threads {
		text, err := os.ReadFile(thread)
		if err != nil {
			continue
		}
		fields := bytes.Fields(text)
		if len(fields) < 2 {
			return nil, fmt.Errorf("%s is %q", thread, text)
		}
		nanos, err := strconv.ParseInt(string(fields[1]), 10, 64)
		if err != nil {
			return nil, err
		}
		waits[thread] = time.Duration(nanos)
	}
	if len(waits) == 0 {
		return nil, fmt.Errorf("process %d: %w", pid, os.ErrNotExist)
	}
	return waits, nil
}
