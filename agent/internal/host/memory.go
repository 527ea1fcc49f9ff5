package host

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// GiveBack returns the memory to the machine that this process does not need while it does nothing: what the collector keeps for
// the next burst, and the pages of mapped files, the program's own code among them. What is used again is mapped again from the page
// cache, as long as the machine has not needed that for something else.
func GiveBack() error {
	debug.FreeOSMemory()
	maps, err := os.Open("/proc/self/maps")
	if err != nil {
		return err
	}
	defer func() { _ = maps.Close() }()
	var errs []error
	lines := bufio.NewScanner(maps)
	for lines.Scan() {
		m, ok := parseMapping(lines.Text())
		if !ok || !m.isCopyOfFile() {
			continue
		}
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, m.start, m.end-m.start, unix.MADV_DONTNEED); errno != 0 {
			errs = append(errs, fmt.Errorf("unmap pages of %s: %w", m.path, errno))
		}
	}
	return errors.Join(append(errs, lines.Err())...)
}

// mapping is one line of /proc/self/maps, see proc_pid_maps(5).
type mapping struct {
	start, end  uintptr
	permissions string
	path        string
}

func parseMapping(line string) (m mapping, ok bool) {
	const columns = 6
	fields := strings.Fields(line)
	if len(fields) < columns || len(fields[1]) != len("rwxp") {
		return mapping{}, false // memory without a file has no path
	}
	from, to, _ := strings.Cut(fields[0], "-")
	start, err1 := strconv.ParseUint(from, 16, 64)
	end, err2 := strconv.ParseUint(to, 16, 64)
	return mapping{uintptr(start), uintptr(end), fields[1], fields[5]}, err1 == nil && err2 == nil
}

// isCopyOfFile reports whether the mapping holds nothing but what its file does: it is shared with the file, or it is code. Private
// data may have been changed since it was read, and would be lost.
func (m mapping) isCopyOfFile() bool {
	shared, code := m.permissions[3] == 's', m.permissions == "r-xp"
	return strings.HasPrefix(m.path, "/") && (shared || code)
}
