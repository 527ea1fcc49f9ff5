package accelerator

import (
	"errors"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	// maxRecordBytes bounds one record of the kernel's log.
	maxRecordBytes = 8 << 10
	// maxRecords bounds the records of one read; the next read goes on behind them.
	maxRecords = 10_000
	// kernelPriorities are those of the kernel itself; what programs write into its log has higher ones.
	kernelPriorities = 8
)

// kernelLog reads the kernel's log. A record is "priority,number,microseconds,flags;text", and read(2) returns one
// (dev-kmsg in the ABI documentation of Linux).
type kernelLog struct {
	path string
	// fd is 0 before the first read.
	fd int
}

// read returns what drivers have written since the record of the number after, and the number of the last record.
// A machine without a kernel log has no messages.
func (k *kernelLog) read(after uint64) (found []signal, last uint64) {
	last = after
	if k.fd == 0 {
		fd, err := unix.Open(k.path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, last
		}
		k.fd = fd
	}
	buffer := make([]byte, maxRecordBytes)
	for range maxRecords {
		n, err := unix.Read(k.fd, buffer)
		if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.EINTR) {
			continue // records were overwritten before they were read
		}
		if err != nil || n <= 0 {
			return found, last
		}
		for line := range strings.Lines(string(buffer[:n])) {
			number, text, ok := readRecord(line)
			if !ok || number <= after {
				continue
			}
			last = max(last, number)
			if s, ok := readMessage(text); ok {
				found = append(found, s)
			}
		}
	}
	return found, last
}

func (k *kernelLog) close() {
	if k.fd != 0 {
		_ = unix.Close(k.fd)
		k.fd = 0
	}
}

// readRecord splits the first line of a record that the kernel wrote; its other lines begin with a space. Numbers begin
// at 1 here.
func readRecord(line string) (number uint64, text string, ok bool) {
	head, text, found := strings.Cut(line, ";")
	fields := strings.Split(head, ",")
	if !found || len(fields) < 3 {
		return 0, "", false
	}
	priority, err := strconv.ParseUint(fields[0], 10, 32)
	number, errNumber := strconv.ParseUint(fields[1], 10, 63)
	return number + 1, strings.TrimSpace(text), errors.Join(err, errNumber) == nil && priority < kernelPriorities
}
