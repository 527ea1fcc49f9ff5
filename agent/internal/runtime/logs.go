package runtime

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/loop"
)

const (
	logSuffix     = ".log"
	rotatedSuffix = ".log.1"
	// MaxTailLines bounds the lines of a log that Logs reads back.
	MaxTailLines = 10_000
	// followEvery is how often a followed log is read.
	followEvery = 250 * time.Millisecond
	logBlock    = 64 << 10
)

func (r *Runtime) logPath(id string) string { return filepath.Join(r.cfg.LogDir, id+logSuffix) }
func (r *Runtime) rotatedPath(id string) string {
	return filepath.Join(r.cfg.LogDir, id+rotatedSuffix)
}

// makeLog makes the log of a run and returns two paths of it. The shim of containerd 1.6 that gets one path for both
// outputs closes it at the end of the first: what it has not copied of the second by then would be lost.
func (r *Runtime) makeLog(id string) (stdout, stderr string, err error) {
	log, err := os.OpenFile(r.logPath(id), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return "", "", err
	}
	return r.logPath(id), r.cfg.LogDir + "/./" + id + logSuffix, log.Close()
}

func (r *Runtime) removeLogs(id string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, path := range []string{
		r.logPath(id), r.rotatedPath(id), r.rotatedPath(id) + ".new",
		r.timesPath(id), r.timesPath(id) + ".new", r.rotatedTimesPath(id), r.rotatedTimesPath(id) + ".new",
	} {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove log: %w", err)
		}
	}
	delete(r.rotations, id)
	return nil
}

// RotateLogs bounds the disk that logs take: a log over the limit is copied beside itself, replacing the copy before,
// and cut to nothing. The shim that writes it appends, so it goes on at the new end; what it writes between copy and
// cut is lost. It notes when each log grew, for LogsSince. Call it often: between two calls a log may grow without
// limit.
func (r *Runtime) RotateLogs(ctx context.Context) error {
	entries, err := os.ReadDir(r.cfg.LogDir)
	if err != nil {
		return fmt.Errorf("list logs: %w", err)
	}
	var errs []error
	for _, e := range entries {
		id, isLog := strings.CutSuffix(e.Name(), logSuffix)
		if !isLog {
			continue
		}
		info, err := e.Info()
		if err != nil {
			continue
		}
		if info.Size() <= r.cfg.MaxLogBytes {
			errs = append(errs, r.noteLogTime(id, info, time.Now())) // all of that size is older
			continue
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		errs = append(errs, r.rotate(id))
	}
	return errors.Join(errs...)
}

func (r *Runtime) rotate(id string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	log, err := os.OpenFile(r.logPath(id), os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open log: %w", err)
	}
	defer func() { _ = log.Close() }()
	size, err := log.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	from := max(0, size-r.cfg.MaxLogBytes)
	err = r.keepNewest(id, log, from, size)
	rotation := logRotation{r.rotations[id].number + 1, from, err == nil}
	// The times are those of the log before the cut.
	if gone := os.Remove(r.timesPath(id)); !errors.Is(gone, fs.ErrNotExist) {
		err = errors.Join(err, gone)
	}
	// Cut it even when the disk is too full for a copy: bounding the log comes first.
	cut := log.Truncate(0)
	if cut == nil {
		if r.rotations == nil {
			r.rotations = map[string]logRotation{}
		}
		r.rotations[id] = rotation
	}
	return errors.Join(err, cut)
}

// keepNewest copies a log of this size beside itself, from an offset: after a burst only its newest part.
func (r *Runtime) keepNewest(id string, log io.ReadSeeker, from, size int64) error {
	if _, err := log.Seek(from, io.SeekStart); err != nil {
		return err
	}
	fresh := r.rotatedPath(id) + ".new"
	copied, err := os.OpenFile(fresh, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("rotate log: %w", err)
	}
	_, err = io.CopyN(copied, log, 2*r.cfg.MaxLogBytes)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	// The records of the log before must not stand beside this one.
	if gone := os.Remove(r.rotatedTimesPath(id)); !errors.Is(gone, fs.ErrNotExist) {
		err = errors.Join(err, gone)
	}
	if err = errors.Join(err, copied.Close()); err == nil {
		err = os.Rename(fresh, r.rotatedPath(id))
	}
	if err != nil {
		err = errors.Join(err, os.Remove(fresh))
	}
	if err == nil {
		err = r.rotateLogTimes(id, from, size)
	}
	return err
}

// Logs reads what the container wrote to its standard output and error, in the order it was written: the last tailLines
// lines first (0 means all that is kept, at most MaxTailLines). With follow it goes on with what is written, until the
// container has ended and all of its output is read, or the reader is closed.
func (r *Runtime) Logs(ctx context.Context, id string, tailLines int, follow bool) (io.ReadCloser, error) {
	return r.LogsSince(ctx, id, tailLines, time.Time{}, follow)
}

// LogsSince is Logs without the lines that were written before since; the zero time means all.
func (r *Runtime) LogsSince(ctx context.Context, id string, tailLines int, since time.Time, follow bool,
) (io.ReadCloser, error) {
	if !idPattern.MatchString(id) {
		return nil, badSpec("The run has no usable id.")
	}
	if tailLines <= 0 || tailLines > MaxTailLines {
		tailLines = MaxTailLines
	}
	log, err := os.Open(r.logPath(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fault.New(fault.NotFound, codeLogMissing, "There is no log of this container on the node.", err)
	}
	if err != nil {
		return nil, fmt.Errorf("open log: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	pr, pw := io.Pipe()
	go func() {
		defer func() { _ = log.Close() }()
		pw.CloseWithError(r.copyLog(ctx, pw, log, id, tailLines, since, follow))
	}()
	return &logReader{PipeReader: pr, cancel: cancel}, nil
}

// logReader ends the copying when it is closed.
type logReader struct {
	*io.PipeReader
	cancel context.CancelFunc
}

func (l *logReader) Close() error {
	l.cancel()
	return l.PipeReader.Close()
}

func (r *Runtime) copyLog(ctx context.Context, w io.Writer, log *os.File, id string, tailLines int, since time.Time,
	follow bool,
) error {
	cursor := &logCursor{r: r, id: id, log: log, rotations: r.rotationsOf(id)}
	defer cursor.close()
	rotated, current, err := r.startOfLog(id, log, since)
	if err != nil {
		return err
	}
	at, lines, err := tail(log, tailLines)
	if err != nil {
		return err
	}
	cursor.at = max(at, current)
	info, err := log.Stat()
	if err != nil {
		return err
	}
	end := info.Size() // a rotation may cut the log while the reader reads
	if lines < tailLines && rotated >= 0 {
		if err := copyRotated(w, r.rotatedPath(id), tailLines-lines, rotated); err != nil {
			return err
		}
	}
	for {
		// Checked before reading: what was written before the end is then read after it.
		more := follow && (r.isRunning(ctx, id) || isWritten(log))
		var unread io.Reader = cursor
		if !follow {
			unread = io.LimitReader(cursor, end-cursor.at)
		}
		if _, err = io.Copy(w, unread); err != nil || !more {
			return err
		}
		if !loop.Pause(ctx, followEvery) {
			return ctx.Err()
		}
	}
}

func (r *Runtime) isRunning(ctx context.Context, id string) bool {
	c, err := r.Get(ctx, id)
	return err == nil && (c.State == StateRunning || c.State == StateUnknown)
}

// isWritten reports whether a process has the log open for writing. The shim has until it has copied the container's
// output, which may be after the container's exit is known. The kernel grants a read lease (fcntl(2), F_SETLEASE) only
// on a file without writers; on a file system without leases isWritten is false.
func isWritten(log *os.File) bool {
	_, err := unix.FcntlInt(log.Fd(), unix.F_SETLEASE, unix.F_RDLCK)
	if err == nil {
		_, _ = unix.FcntlInt(log.Fd(), unix.F_SETLEASE, unix.F_UNLCK)
	}
	return errors.Is(err, unix.EAGAIN)
}

// copyRotated copies the last lines of a rotated log, none of them from before the given offset.
func copyRotated(w io.Writer, path string, lines int, from int64) error {
	old, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = old.Close() }()
	at, _, err := tail(old, lines)
	if err != nil {
		return err
	}
	if _, err := old.Seek(max(at, from), io.SeekStart); err != nil {
		return err
	}
	_, err = io.Copy(w, old)
	return err
}

// tail finds where the last n lines begin, and how many lines there are from there on.
func tail(f *os.File, n int) (offset int64, lines int, err error) {
	info, err := f.Stat()
	if err != nil {
		return 0, 0, err
	}
	end := info.Size()
	block := make([]byte, logBlock)
	for pos := end; pos > 0; {
		size := min(int64(len(block)), pos)
		pos -= size
		part := block[:size]
		if _, err := f.ReadAt(part, pos); err != nil && !errors.Is(err, io.EOF) {
			return 0, 0, err
		}
		for i := bytes.LastIndexByte(part, '\n'); i >= 0; i = bytes.LastIndexByte(part[:i], '\n') {
			at := pos + int64(i) + 1
			if at == end {
				continue // the end of the last line begins no line
			}
			if lines++; lines == n {
				return at, lines, nil
			}
		}
	}
	if end > 0 {
		lines++ // the first line begins without a line end before it
	}
	return 0, lines, nil
}
