package runtime

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"os"
	"time"
)

// The shim writes a log as the bytes come, without times. So each pass over the logs appends a record to a file beside
// the log that has grown: the time, and the size that the log had then. LogsSince skips what an older record covers.
// Its answer is exact to one metering interval; where records are missing, it has more than was asked for.
const (
	timesSuffix = ".times"
	// logTimeBytes is the size of a record: nanoseconds since 1970 and a size in bytes, big-endian.
	logTimeBytes = 16
	// maxLogTimes bounds the records of a log; every other one goes when it is reached.
	maxLogTimes = 4096
	// timeSlack is more than the times of a file system are late.
	timeSlack = time.Second
)

type logTime struct {
	at   time.Time
	size int64
}

func (r *Runtime) timesPath(id string) string { return r.logPath(id) + timesSuffix }
func (r *Runtime) rotatedTimesPath(id string) string {
	return r.rotatedPath(id) + timesSuffix
}

// noteLogTime records the size of a log that was written since its last record.
func (r *Runtime) noteLogTime(id string, log fs.FileInfo, now time.Time) error {
	path := r.timesPath(id)
	if last, err := os.Stat(path); err == nil && !last.ModTime().Before(log.ModTime()) {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, err := os.Stat(r.logPath(id)); err != nil {
		return nil // removed since it was listed
	}
	times, err := readLogTimes(path)
	if err != nil {
		return err
	}
	record := logTime{now, log.Size()}
	if len(times) < maxLogTimes {
		return appendLogTime(path, len(times), record)
	}
	kept := times[:0]
	for i := 1; i < len(times); i += 2 {
		kept = append(kept, times[i])
	}
	return writeLogTimes(path, append(kept, record))
}

// startOfLog finds the first line of the rotated and of the current log that may have been written at since or later.
func (r *Runtime) startOfLog(id string, log *os.File, since time.Time) (rotated, current int64, err error) {
	if since.IsZero() {
		return 0, 0, nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	info, err := log.Stat()
	if err != nil {
		return 0, 0, err
	}
	rotated, current = -1, info.Size() // nothing of the rotated one
	if info.ModTime().Add(timeSlack).Before(since) {
		return rotated, current, nil
	}
	times, err := readLogTimes(r.timesPath(id))
	if err != nil {
		return 0, 0, err
	}
	if current = sizeBefore(times, since, info.Size()); current > 0 {
		current, err = lineStart(log, current)
		return rotated, current, err
	}
	if times, err = readLogTimes(r.rotatedTimesPath(id)); err != nil {
		return 0, 0, err
	}
	old, err := os.Open(r.rotatedPath(id))
	if errors.Is(err, fs.ErrNotExist) {
		return -1, 0, nil
	}
	if err != nil {
		return 0, 0, err
	}
	defer func() { _ = old.Close() }()
	if info, err = old.Stat(); err != nil {
		return 0, 0, err
	}
	rotated, err = lineStart(old, sizeBefore(times, since, info.Size()))
	return rotated, 0, err
}

// sizeBefore is how much of a log was there before since.
func sizeBefore(times []logTime, since time.Time, size int64) (before int64) {
	for _, t := range times {
		if t.at.Before(since) && t.size <= size {
			before = t.size
		}
	}
	return before
}

// lineStart is where the line begins that goes on at the offset; the offset itself in a line longer than a block.
func lineStart(f io.ReaderAt, offset int64) (int64, error) {
	part := make([]byte, min(offset, logBlock))
	if _, err := f.ReadAt(part, offset-int64(len(part))); err != nil && !errors.Is(err, io.EOF) {
		return 0, err
	}
	if i := bytes.LastIndexByte(part, '\n'); i >= 0 {
		return offset - int64(len(part)) + int64(i) + 1, nil
	}
	if int64(len(part)) == offset {
		return 0, nil
	}
	return offset, nil
}

// rotateLogTimes copies the records to the rotated log, which begins at the given offset of a log of the given size.
// The caller removes them and then cuts the log: a crash in between leaves none that covers too much.
func (r *Runtime) rotateLogTimes(id string, from, size int64) error {
	times, err := readLogTimes(r.timesPath(id))
	if err != nil {
		return err
	}
	times = append(times, logTime{time.Now(), size})
	kept := times[:0]
	for _, t := range times {
		if t.size >= from {
			kept = append(kept, logTime{t.at, t.size - from})
		}
	}
	return writeLogTimes(r.rotatedTimesPath(id), kept)
}

// readLogTimes reads the records; a torn last one does not count.
func readLogTimes(path string) ([]logTime, error) {
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	times := make([]logTime, 0, len(raw)/logTimeBytes)
	for ; len(raw) >= logTimeBytes; raw = raw[logTimeBytes:] {
		at := time.Unix(0, int64(binary.BigEndian.Uint64(raw)))
		times = append(times, logTime{at, int64(binary.BigEndian.Uint64(raw[8:]))})
	}
	return times, nil
}

func (t logTime) encode(to []byte) []byte {
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(to, uint64(t.at.UnixNano())), uint64(t.size))
}

func appendLogTime(path string, n int, t logTime) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(t.encode(nil), int64(n)*logTimeBytes)
	return errors.Join(err, f.Close())
}

func writeLogTimes(path string, times []logTime) error {
	raw := make([]byte, 0, len(times)*logTimeBytes)
	for _, t := range times {
		raw = t.encode(raw)
	}
	fresh := path + ".new"
	if err := os.WriteFile(fresh, raw, 0o600); err != nil {
		return err
	}
	return os.Rename(fresh, path)
}
