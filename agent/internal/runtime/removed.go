package runtime

import (
	"bufio"
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// What kcmp(2) compares.
const (
	kcmpMemory = 1 // KCMP_VM
	kcmpFiles  = 2 // KCMP_FILES
)

// addRemoved counts removed files that the container's threads hold open or mapped: they take space, and no walk finds
// them. It asks each thread, since one may have files of its own, or be left of a process whose first thread has ended.
func (r *Runtime) addRemoved(ctx context.Context, id string, count *use) error {
	dirs := r.cgroupDirs(r.cgroupPath(id))
	if len(dirs) == 0 {
		return nil
	}
	threads := "cgroup.threads"
	if !r.host.cgroupV2 {
		threads = "tasks"
	}
	return filepath.WalkDir(dirs[0], func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.Name() != threads {
			return nil // removed meanwhile
		}
		file, err := os.Open(path) //nolint:gosec // a cgroup file system has no links
		if err != nil {
			return nil // removed meanwhile
		}
		defer func() { _ = file.Close() }()
		for lines := bufio.NewScanner(file); lines.Scan(); {
			thread, err := strconv.Atoi(lines.Text())
			if err != nil {
				return err
			}
			if err := count.addRemovedOf(ctx, thread); err != nil {
				return err
			}
		}
		return nil
	})
}

// addRemovedOf counts the removed files that a thread holds open or mapped, unless it shares them with the thread whose
// files were read last.
func (u *use) addRemovedOf(ctx context.Context, thread int) error {
	proc := fmt.Sprintf("/proc/%d", thread)
	device := u.device
	if device == 0 {
		var root unix.Stat_t
		if err := unix.Stat(proc+"/root", &root); err != nil {
			return nil //nolint:nilerr // it has ended
		}
		device = root.Dev
	}
	if !shared(thread, u.files, kcmpFiles) {
		u.files = thread
		if err := u.addOpen(ctx, proc, device); err != nil {
			return err
		}
	}
	if !shared(thread, u.memory, kcmpMemory) {
		u.memory = thread
		return u.addMapped(ctx, proc, device)
	}
	return nil
}

// shared reports whether two threads have the same open files, or the same memory. A kernel without kcmp cannot tell;
// there, the threads of one process count as sharing them, as almost all do.
func shared(thread, with int, what uintptr) bool {
	if with == 0 {
		return false
	}
	order, _, errno := unix.Syscall6(unix.SYS_KCMP, uintptr(thread), uintptr(with), what, 0, 0, 0)
	if errno == unix.ENOSYS {
		_, err := os.Stat(fmt.Sprintf("/proc/%d/task/%d", with, thread))
		return err == nil
	}
	return errno == 0 && order == 0
}

// addOpen counts the removed files that a thread holds open. Like addDir it holds a few of the descriptors at a time.
func (u *use) addOpen(ctx context.Context, proc string, device uint64) error {
	dir, err := os.Open(proc + "/fd")
	if err != nil {
		return nil // it has ended
	}
	defer func() { _ = dir.Close() }()
	for {
		open, err := dir.Readdirnames(entriesAtOnce)
		if u.openLeft -= len(open); u.openLeft < 0 {
			return errTooManyOpen
		}
		for _, fd := range open {
			if u.bytes > u.limit || ctx.Err() != nil {
				return nil
			}
			u.addIfRemoved(proc+"/fd/"+fd, device)
		}
		if err != nil {
			return nil // its end
		}
	}
}

// addMapped counts the removed files that a thread has mapped: see proc_pid_maps(5) and proc_pid_map_files(5).
func (u *use) addMapped(ctx context.Context, proc string, device uint64) error {
	file, err := os.Open(proc + "/maps")
	if err != nil {
		return nil // it has ended
	}
	defer func() { _ = file.Close() }()
	lines := bufio.NewScanner(file)
	for lines.Scan() && u.bytes <= u.limit && ctx.Err() == nil {
		if u.openLeft--; u.openLeft < 0 {
			return errTooManyOpen
		}
		if !strings.HasSuffix(lines.Text(), " (deleted)") {
			continue
		}
		// map_files has the addresses without leading zeros.
		area, _, _ := strings.Cut(lines.Text(), " ")
		from, to, _ := strings.Cut(area, "-")
		u.addIfRemoved(proc+"/map_files/"+strings.TrimLeft(from, "0")+"-"+strings.TrimLeft(to, "0"), device)
	}
	return nil
}

// addIfRemoved adds the file behind a link of /proc if it has no name. Files of other file systems than the container's
// own do not count here.
func (u *use) addIfRemoved(link string, device uint64) {
	info, err := os.Stat(link)
	if err != nil || !info.Mode().IsRegular() {
		return
	}
	if st, is := info.Sys().(*syscall.Stat_t); is && st.Nlink == 0 && st.Dev == device {
		u.add(info)
	}
}
