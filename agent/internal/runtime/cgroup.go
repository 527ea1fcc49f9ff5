package runtime

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/pkg/loop"
)

// cgroupPath is the cgroup of a run, below that of its member.
func (r *Runtime) cgroupPath(id string) string {
	if i := strings.LastIndexByte(id, '.'); i > 0 {
		return filepath.Join(r.memberCgroup(id[:i]), id)
	}
	return r.memberCgroup(id)
}

func (r *Runtime) memberCgroup(memberID string) string {
	return filepath.Join(r.cfg.CgroupParent, memberID)
}

// cgroupDirs are the directories of a cgroup path that exist: one in every hierarchy of version 1, one in version 2.
func (r *Runtime) cgroupDirs(path string) []string {
	if r.host.cgroupV2 {
		if _, err := os.Stat(r.host.cgroupRoot + path); err != nil {
			return nil
		}
		return []string{r.host.cgroupRoot + path}
	}
	dirs, _ := filepath.Glob(r.host.cgroupRoot + "/*" + path)
	return dirs
}

// cgroupValue reads a number from a file in the container's cgroup: that of a key, or without one the only number. The
// cgroup stays until the task is deleted. The controller is the name of a hierarchy of version 1.
func (r *Runtime) cgroupValue(id, controller, file, key string) (uint64, error) {
	path := filepath.Join(r.host.cgroupRoot, r.cgroupPath(id), file)
	if !r.host.cgroupV2 {
		path = filepath.Join(r.host.cgroupRoot, controller, r.cgroupPath(id), file)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(data)) {
		name, number, _ := strings.Cut(strings.TrimSpace(line), " ")
		if key == "" {
			number = name
		}
		if key == "" || key == name {
			return strconv.ParseUint(number, 10, 64)
		}
	}
	return 0, fmt.Errorf("%s has no number of %q", path, key)
}

// oomKilled reads whether the kernel killed a process in the container's cgroup.
func (r *Runtime) oomKilled(id string) bool {
	file := "memory.oom_control"
	if r.host.cgroupV2 {
		file = "memory.events"
	}
	n, err := r.cgroupValue(id, "memory", file, "oom_kill")
	return err == nil && n > 0
}

// Stats is the resource use of a container.
type Stats struct {
	// CPUUsageMicros is CPU time since the container was made, in microseconds, of all cores together.
	CPUUsageMicros uint64
	// MemoryBytes is memory in use now, without file cache that the kernel can drop at once.
	MemoryBytes uint64
}

// Stats reads what a container uses, as the kernel counts it. Of a container that has been removed it returns an error.
func (r *Runtime) Stats(id string) (Stats, error) {
	if r.host.cgroupV2 {
		cpu, e1 := r.cgroupValue(id, "", "cpu.stat", "usage_usec")
		memory, e2 := r.cgroupValue(id, "", "memory.current", "")
		cache, e3 := r.cgroupValue(id, "", "memory.stat", "inactive_file")
		return Stats{cpu, difference(memory, cache)}, errors.Join(e1, e2, e3)
	}
	nanos, e1 := r.cgroupValue(id, "cpuacct", "cpuacct.usage", "")
	memory, e2 := r.cgroupValue(id, "memory", "memory.usage_in_bytes", "")
	cache, e3 := r.cgroupValue(id, "memory", "memory.stat", "total_inactive_file")
	return Stats{nanos / 1000, difference(memory, cache)}, errors.Join(e1, e2, e3)
}

// difference is a-b, but not below 0.
func difference(a, b uint64) uint64 { return a - min(a, b) }

// cgroupWait bounds how long killed processes may take to leave their cgroup.
const cgroupWait = 10 * time.Second

// removeCgroup kills what is still in the container's cgroup and removes it, then its parents when they are empty.
func (r *Runtime) removeCgroup(ctx context.Context, id string) error {
	limit, cancel := context.WithTimeout(ctx, cgroupWait)
	defer cancel()
	for {
		left, err := r.tryRemoveCgroup(id)
		if left == 0 {
			return r.removeEmptyCgroup(filepath.Dir(r.cgroupPath(id)))
		}
		if !loop.Pause(limit, 20*time.Millisecond) {
			return errors.Join(err, limit.Err())
		}
	}
}

// tryRemoveCgroup returns how many directories it could not remove.
func (r *Runtime) tryRemoveCgroup(id string) (left int, err error) {
	for _, dir := range slices.Backward(r.cgroupTree(id)) {
		for _, pid := range processesIn(dir) {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		if e := unix.Rmdir(dir); e != nil && !errors.Is(e, unix.ENOENT) {
			left++
			err = e
		}
	}
	return left, err
}

// cgroupTree returns the directories of the container's cgroup, parents first: a container with a cgroup namespace may
// have made children.
func (r *Runtime) cgroupTree(id string) (all []string) {
	for _, dir := range r.cgroupDirs(r.cgroupPath(id)) {
		_ = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				all = append(all, path)
			}
			return nil
		})
	}
	return all
}

// processesIn returns the processes of one directory of a cgroup; one that has ended is in none.
func processesIn(dir string) (pids []int) {
	procs, _ := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	for field := range strings.FieldsSeq(string(procs)) {
		if pid, err := strconv.Atoi(field); err == nil && pid > 1 {
			pids = append(pids, pid)
		}
	}
	return pids
}

// removeEmptyCgroup removes a parent cgroup and its parents as far as they are empty.
func (r *Runtime) removeEmptyCgroup(path string) error {
	if !r.parents.TryLock() {
		return nil // a container is being made below it
	}
	defer r.parents.Unlock()
	for ; path != "/"; path = filepath.Dir(path) {
		for _, dir := range r.cgroupDirs(path) {
			if err := unix.Rmdir(dir); err != nil && !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.ENOTEMPTY) &&
				!errors.Is(err, unix.ENOENT) {
				return err
			}
		}
	}
	return nil
}

// removeMemberCgroups removes those that a removal could not, because a container was being made meanwhile.
func (r *Runtime) removeMemberCgroups() error {
	for _, dir := range r.cgroupDirs(r.cfg.CgroupParent) {
		entries, err := os.ReadDir(dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue // it went with the last member's cgroup of another hierarchy
		}
		if err != nil {
			return err
		}
		for _, e := range entries {
			if e.IsDir() {
				if err := r.removeEmptyCgroup(r.memberCgroup(e.Name())); err != nil {
					return err
				}
			}
		}
	}
	return nil
}
