package runtime

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"math"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// A container may write to its own file system and to its log. The runtime measures both, because a quota would need a
// file system that is mounted with quotas, and names containers that exceed their limit: see docs/adr/0019-*.

const (
	// GuardEvery is how often OverLimit is called while containers write, guardQuiet while they do not, guardIdle while
	// none runs.
	GuardEvery = 250 * time.Millisecond
	guardQuiet = time.Second
	guardIdle  = 10 * time.Second
	// quietLog and quietDisk bound the growth of a log and of the file system between two calls that counts as quiet.
	quietLog  = 64 << 10
	quietDisk = 4 << 20
	// DefaultDiskBytes is the default of Config.DiskBytes.
	DefaultDiskBytes = 10 << 30
	// bytesPerFile is the least that a file or directory counts; so the limit also bounds their number.
	bytesPerFile = 4 << 10
	// maxDepth bounds nested directories: the time to measure them grows with the square of the depth.
	maxDepth = 1000
	// maxOpenFiles bounds what all threads of a container hold open or mapped: reading a million takes seconds, in which
	// no other container is measured.
	maxOpenFiles = 1 << 20
	// entriesAtOnce of a directory are read at once.
	entriesAtOnce = 256
	// logBurst times MaxLogBytes bounds what a container writes to its log within GuardEvery.
	logBurst = 4
	// growth is how much the file system must have filled before a layer is measured again; at most a growthPart of the
	// layer's limit.
	growth     = 64 << 20
	growthPart = 4
	// writingPart of that, and more, between two measurements of a layer: its container is writing, so that it is measured
	// again however little the file system fills.
	writingPart = 64
	// restAge is the age at which a layer is measured again although the file system has not filled.
	restAge = 5 * time.Minute
	// Measuring may take one part in measureShare of a processor, or one in scarceShare once less than one part in scarce
	// of the file system is free. What it waits for a processor does not count: it would be rare when much is written.
	measureShare = 20
	scarceShare  = 2
	scarce       = 20
)

// Excess is a container that takes more of the disk than it may.
type Excess struct {
	ID string
	// Detail is for people.
	Detail string
}

// layer is a container's own file system, and when it was measured.
type layer struct {
	dir   string
	limit int64
	// device is that of the mount in which the container sees its files; zero where it is not known.
	device     uint64
	measuredAt time.Time
	// filled is that of the diskWatch at that time.
	filled int64
	// used is what was counted then, writing whether that was notably more than the time before.
	used     int64
	writing  bool
	logBytes int64
}

// step is how much the file system must have filled before the layer is measured again.
func (l *layer) step() int64 { return min(growth, l.limit/growthPart) }

// diskWatch is the state of OverLimit between two calls.
type diskWatch struct {
	layers map[string]*layer
	// restUntil is when layers may be measured again.
	restUntil time.Time
	// calledAt is the time of the last call, fullness how much of the file system was in use then.
	calledAt time.Time
	fullness int64
	// filled adds up by how much the file system has filled from one call to the next: what others remove between other
	// calls does not hide what a layer has grown.
	filled int64
}

// OverLimit measures what running containers have written, cuts logs over their size, and returns the containers that
// the caller must end. The caller calls it again after the pause, from the same goroutine.
func (r *Runtime) OverLimit(ctx context.Context) (over []Excess, pause time.Duration) {
	running := map[string]bool{}
	r.running.Range(func(id, _ any) bool {
		name, _ := id.(string)
		running[name] = true
		return true
	})
	w := &r.disk
	now := time.Now()
	// A longer time between two calls allows a larger burst.
	burst := logBurst * r.cfg.MaxLogBytes * max(1, int64(min(now.Sub(w.calledAt), guardIdle)/GuardEvery))
	w.calledAt = now
	quiet := true
	maps.DeleteFunc(w.layers, func(id string, _ *layer) bool { return !running[id] })
	for id := range running {
		l, known := w.layers[id]
		if !known {
			var err error
			if l, err = r.layerOf(r.ns(ctx), id); err != nil {
				continue // it has ended, or containerd does not answer: the next call tries again
			}
			w.layers[id] = l
			if info, err := os.Stat(r.logPath(id)); err == nil {
				l.logBytes = info.Size() // output before the first call is no burst
			}
		}
		grown := r.boundLog(id, l)
		quiet = quiet && grown <= quietLog
		if grown > burst {
			over = append(over, Excess{id, fmt.Sprintf("the container wrote %d MiB of output at once", grown>>20)})
		}
	}
	if len(running) == 0 {
		return nil, guardIdle
	}
	full, still := r.fullLayers(ctx)
	if quiet && still {
		return append(over, full...), guardQuiet
	}
	return append(over, full...), GuardEvery
}

// boundLog cuts a log over its size and returns how much the log has grown since the last call.
func (r *Runtime) boundLog(id string, l *layer) (grown int64) {
	info, err := os.Stat(r.logPath(id))
	if err != nil {
		return 0
	}
	grown, l.logBytes = info.Size()-l.logBytes, info.Size()
	if info.Size() <= r.cfg.MaxLogBytes {
		return grown
	}
	if err := r.rotate(id); err != nil {
		r.cfg.Log.Warn("cannot rotate a log", slog.String("container_id", id), slog.Any("error", err))
	}
	l.logBytes = 0
	return grown
}

// fullLayers measures the layers that may have grown, the longest unmeasured first. quiet reports that the file system
// has hardly filled since the last call.
func (r *Runtime) fullLayers(ctx context.Context) (over []Excess, quiet bool) {
	goruntime.LockOSThread()
	defer goruntime.UnlockOSThread()
	var st unix.Statfs_t
	began, busy := time.Now(), threadTime()
	if unix.Statfs(r.host.contentRoot, &st) != nil {
		return nil, false
	}
	fullness := int64(st.Blocks-st.Bfree) * st.Bsize
	grown := fullness - r.disk.fullness
	quiet = grown <= quietDisk
	r.disk.fullness = fullness
	r.disk.filled += max(0, grown)
	if began.Before(r.disk.restUntil) {
		return nil, quiet
	}
	due := slices.DeleteFunc(slices.Collect(maps.Keys(r.disk.layers)), func(id string) bool {
		l := r.disk.layers[id]
		return !l.measuredAt.IsZero() && !l.writing && r.disk.filled-l.filled < l.step() &&
			began.Sub(l.measuredAt) < restAge
	})
	slices.SortFunc(due, func(a, b string) int {
		return cmp.Or(r.disk.layers[a].measuredAt.Compare(r.disk.layers[b].measuredAt), cmp.Compare(a, b))
	})
	for _, id := range due {
		l := r.disk.layers[id]
		used, err := r.layerUse(ctx, id, l)
		l.measuredAt, l.filled = time.Now(), r.disk.filled
		l.used, l.writing = used, used-l.used > l.step()/writingPart
		switch {
		case errors.As(err, new(unmeasurable)):
			over = append(over, Excess{id, err.Error()})
		case err == nil && used > l.limit:
			over = append(over, Excess{id, fmt.Sprintf("the container wrote more than %d MiB to its file system", l.limit>>20)})
		}
		if time.Since(began) > GuardEvery {
			break
		}
	}
	share := time.Duration(measureShare)
	if st.Bavail < st.Blocks/scarce {
		share = scarceShare
	}
	r.disk.restUntil = time.Now().Add((threadTime() - busy) * (share - 1))
	return over, quiet
}

// threadTime is the processor time of this thread.
func threadTime() time.Duration {
	var used unix.Rusage
	if unix.Getrusage(unix.RUSAGE_THREAD, &used) != nil {
		return 0
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

// layerOf finds the directory in which containerd keeps the container's layer.
func (r *Runtime) layerOf(ctx context.Context, id string) (*layer, error) {
	record, err := r.client.ContainerService().Get(ctx, id)
	if err != nil {
		return nil, err
	}
	mounts, err := r.client.SnapshotService(snapshotter).Mounts(ctx, id)
	if err != nil {
		return nil, err
	}
	l := &layer{limit: r.cfg.DiskBytes}
	if label := record.Labels[labelDiskBytes]; label != "" {
		if l.limit, err = strconv.ParseInt(label, 10, 64); err != nil {
			return nil, err
		}
	}
	for _, m := range mounts {
		l.dir = m.Source // of snapshotters that copy or clone
		for _, option := range m.Options {
			if upper, is := strings.CutPrefix(option, "upperdir="); is {
				l.dir = upper
			}
		}
	}
	l.device = deviceOf(l.dir)
	return l, nil
}

// deviceOf is the device of the mount that has the directory as its upper layer; zero where there is none. A process of
// the container cannot be asked: it may have changed its root.
func deviceOf(upper string) uint64 {
	option := "upperdir=" + upper
	found, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		is := slices.Contains(strings.Split(m.VFSOptions, ","), option)
		return !is, is
	})
	if err != nil || len(found) == 0 {
		return 0
	}
	return unix.Mkdev(uint32(found[0].Major), uint32(found[0].Minor))
}

// diskLimit is how many bytes the run's container may write.
func (r *Runtime) diskLimit(spec Spec) int64 {
	return cmp.Or(int64(min(spec.Service.GetResources().GetDiskBytes(), math.MaxInt64)), r.cfg.DiskBytes)
}

// unmeasurable says what a container made that takes too long to measure: it is ended.
type unmeasurable string

func (u unmeasurable) Error() string { return string(u) }

var (
	errTooDeep error = unmeasurable(
		fmt.Sprintf("the container made more than %d directories in one another", maxDepth))
	errTooManyOpen error = unmeasurable(
		fmt.Sprintf("the processes of the container hold more than %d files open or mapped", maxOpenFiles))
)

// layerUse counts the blocks of all files in a container's layer, and of removed files that the container holds open or
// mapped. It stops above the limit.
func (r *Runtime) layerUse(ctx context.Context, id string, l *layer) (int64, error) {
	root, err := os.OpenRoot(l.dir) // the container may put links into it while it is read
	if err != nil {
		return 0, err
	}
	defer func() { _ = root.Close() }()
	count := use{root: root, device: l.device, limit: l.limit, seen: map[uint64]bool{}, openLeft: maxOpenFiles}
	err = count.addDir(ctx, ".", 0)
	if err == nil && count.bytes <= l.limit {
		err = r.addRemoved(ctx, id, &count)
	}
	return count.bytes, errors.Join(err, ctx.Err())
}

// use adds up files, each once however many names it has, until they are above the limit.
type use struct {
	root   *os.Root
	device uint64
	limit  int64
	bytes  int64
	seen   map[uint64]bool
	// openLeft is how many more open files and mappings may be read.
	openLeft int
	// files and memory are the last threads whose open files, and whose mappings, were read.
	files, memory int
}

// addDir adds a directory with all that it has. It holds a few of the names at a time: one directory may have millions.
func (u *use) addDir(ctx context.Context, path string, depth int) error {
	if depth > maxDepth {
		return errTooDeep
	}
	// The container may have put a pipe in its place, on which another open would wait for ever.
	dir, err := u.root.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil // removed or replaced meanwhile
	}
	defer func() { _ = dir.Close() }()
	if info, err := dir.Stat(); err == nil {
		u.add(info)
	}
	for {
		entries, err := dir.ReadDir(entriesAtOnce)
		for _, entry := range entries {
			if u.bytes > u.limit || ctx.Err() != nil {
				return nil
			}
			if entry.IsDir() {
				if err := u.addDir(ctx, filepath.Join(path, entry.Name()), depth+1); err != nil {
					return err
				}
			} else if info, err := entry.Info(); err == nil {
				u.add(info)
			}
		}
		if err != nil {
			return nil // its end, or removed meanwhile
		}
	}
}

func (u *use) add(info fs.FileInfo) {
	st, is := info.Sys().(*syscall.Stat_t)
	if !is || u.seen[st.Ino] {
		return
	}
	if st.Nlink != 1 && !info.IsDir() {
		u.seen[st.Ino] = true
	}
	const blockBytes = 512
	u.bytes += max(st.Blocks*blockBytes, bytesPerFile)
}
