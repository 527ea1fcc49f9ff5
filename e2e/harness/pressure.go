package harness

import (
	"os"
	"regexp"
	"sort"
	"strconv"
	"time"
)

// noticeTime bounds how long after the end of a process its shim may notice it.
const noticeTime = 250 * time.Millisecond

// waited is the kernel's total of the time in which some process of the machine waited for a processor.
type waited struct {
	at    time.Time
	total time.Duration
}

// waits are samples in the order of their time.
type waits []waited

// between is by how much the total grew from one moment to another; zero where too little was sampled.
func (w waits) between(from, to time.Time) time.Duration {
	if len(w) == 0 {
		return 0
	}
	first := max(sort.Search(len(w), func(i int) bool { return w[i].at.After(from) })-1, 0)
	last := min(sort.Search(len(w), func(i int) bool { return !w[i].at.Before(to) }), len(w)-1)
	return max(w[last].total-w[first].total, 0)
}

var someWaited = regexp.MustCompile(`(?m)^some .*total=(\d+)$`)

// processorWaits reads the pressure stall information of the processors (Documentation/accounting/psi.rst of Linux). A
// kernel without it gives none.
func processorWaits() (total time.Duration, known bool) {
	text, err := os.ReadFile("/proc/pressure/cpu")
	if err != nil {
		return 0, false
	}
	found := someWaited.FindSubmatch(text)
	if found == nil {
		return 0, false
	}
	micros, err := strconv.ParseInt(string(found[1]), 10, 64)
	return time.Duration(micros) * time.Microsecond, err == nil
}
