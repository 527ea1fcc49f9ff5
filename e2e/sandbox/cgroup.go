package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// hierarchy is one mounted cgroup hierarchy, and this process's cgroup in it.
type hierarchy struct {
	// mountPoint is below /sys/fs/cgroup, or that directory itself where only version 2 is mounted.
	mountPoint string
	// controllers mount a hierarchy of version 1, like "cpu,cpuacct" or "name=systemd"; empty for version 2.
	controllers string
	// dir is the directory of the process's own cgroup.
	dir string
}

func (h hierarchy) v2() bool { return h.controllers == "" }

// hierarchies reads /proc/self/cgroup (cgroups(7)) and /proc/self/mountinfo. A hierarchy that is not mounted is left
// out.
func hierarchies() ([]hierarchy, error) {
	data, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	points, err := cgroupMounts()
	if err != nil {
		return nil, err
	}
	var all []hierarchy
	for line := range strings.Lines(string(data)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 {
			return nil, fmt.Errorf("unexpected line in /proc/self/cgroup: %q", line)
		}
		if point, ok := points[parts[1]]; ok {
			all = append(all, hierarchy{mountPoint: point, controllers: parts[1], dir: filepath.Join(point, parts[2])})
		}
	}
	// Version 2 at /sys/fs/cgroup itself is mounted before anything below it.
	slices.SortFunc(all, func(a, b hierarchy) int { return strings.Compare(a.mountPoint, b.mountPoint) })
	return all, nil
}

// cgroupMounts gives the mount point by controllers, as /proc/self/cgroup names them; version 2 has the empty name.
func cgroupMounts() (map[string]string, error) {
	known, err := controllers()
	if err != nil {
		return nil, err
	}
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	points := map[string]string{}
	for line := range strings.Lines(string(data)) {
		left, right, ok := strings.Cut(strings.TrimSpace(line), " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if !ok || len(l) < 5 || len(r) < 3 {
			return nil, fmt.Errorf("unexpected line in mountinfo: %q", line)
		}
		switch r[0] {
		case "cgroup2":
			points[""] = l[4]
		case "cgroup":
			for _, name := range known {
				if containsAll(strings.Split(r[2], ","), strings.Split(name, ",")) {
					points[name] = l[4]
				}
			}
		}
	}
	return points, nil
}

// controllers are the names of the hierarchies of version 1, as /proc/self/cgroup has them.
func controllers() ([]string, error) {
	data, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	var names []string
	for line := range strings.Lines(string(data)) {
		if parts := strings.SplitN(line, ":", 3); len(parts) == 3 && parts[1] != "" {
			names = append(names, parts[1])
		}
	}
	return names, nil
}

func containsAll(have, want []string) bool {
	return !slices.ContainsFunc(want, func(w string) bool { return !slices.Contains(have, w) })
}

// makeCgroups makes a cgroup of this name below the process's own in each hierarchy.
func makeCgroups(name string) error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	for _, h := range all {
		dir := filepath.Join(h.dir, name)
		if err := os.Mkdir(dir, 0o755); err != nil {
			return fmt.Errorf("make a cgroup: %w", err)
		}
		if h.v2() {
			// A controller that the parent cannot pass on is missing inside as it is outside.
			_ = passControllers(h.dir)
			continue
		}
		// A cgroup with no processors or memory nodes takes no process.
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			value, err := os.ReadFile(filepath.Join(h.dir, file))
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err == nil {
				err = os.WriteFile(filepath.Join(dir, file), value, 0o600)
			}
			if err != nil {
				return fmt.Errorf("make a cgroup: %w", err)
			}
		}
	}
	return nil
}

// passControllers lets the children of a cgroup of version 2 have the controllers that it has itself.
func passControllers(dir string) error {
	have, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return err
	}
	var errs []error
	for c := range strings.FieldsSeq(string(have)) {
		errs = append(errs, os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+c), 0o600))
	}
	return errors.Join(errs...)
}

// joinCgroups moves the process into the cgroups that makeCgroups made.
func joinCgroups(all []hierarchy, name string) error {
	for _, h := range all {
		if err := os.WriteFile(filepath.Join(h.dir, name, "cgroup.procs"), []byte("0"), 0o600); err != nil {
			return fmt.Errorf("join the cgroup of %s: %w", h.mountPoint, err)
		}
	}
	return nil
}

// mountCgroups mounts the hierarchies anew, so that the sandbox's cgroup is the root of each.
func mountCgroups(all []hierarchy) error {
	const root = "/sys/fs/cgroup"
	if !slices.ContainsFunc(all, func(h hierarchy) bool { return h.mountPoint == root }) {
		if err := unix.Mount("none", root, "tmpfs", 0, "mode=755"); err != nil {
			return err
		}
	}
	for _, h := range all {
		if err := os.MkdirAll(h.mountPoint, 0o755); err != nil {
			return err
		}
		var err error
		switch {
		case h.v2():
			if err = unix.Mount("none", h.mountPoint, "cgroup2", 0, ""); err == nil {
				err = leaveRootOfV2(h.mountPoint)
			}
		case strings.HasPrefix(h.controllers, "name="):
			err = unix.Mount("none", h.mountPoint, "cgroup", 0, "none,"+h.controllers)
		default:
			err = unix.Mount("none", h.mountPoint, "cgroup", 0, h.controllers)
		}
		if err != nil {
			return fmt.Errorf("mount cgroups at %s: %w", h.mountPoint, err)
		}
	}
	return nil
}

// leaveRootOfV2 moves the process into a leaf: a cgroup with processes cannot pass controllers to its children.
func leaveRootOfV2(point string) error {
	leaf := filepath.Join(point, "main")
	if err := os.Mkdir(leaf, 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(leaf, "cgroup.procs"), []byte("0"), 0o600)
}

// removeCgroups removes the sandbox's cgroups with all below them; their processes have ended.
func removeCgroups(name string) error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	var errs []error
	for _, h := range all {
		var dirs []string
		err := filepath.WalkDir(filepath.Join(h.dir, name), func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs = append(dirs, path)
			}
			return err
		})
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
		for _, dir := range slices.Backward(dirs) {
			if err := unix.Rmdir(dir); err != nil && !errors.Is(err, unix.ENOENT) {
				errs = append(errs, fmt.Errorf("remove cgroup %s: %w", dir, err))
			}
		}
	}
	return errors.Join(errs...)
}
