package leakcheck

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// takeProcesses lists user processes by id and start time, so that a reused id is another process. Kernel threads are
// noise: the kernel starts and ends them as it likes.
func takeProcesses(s *Snapshot) error {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		// A process may end between any two of these reads; then it is not there.
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			continue
		}
		fields, name, ok := statFields(stat)
		if !ok || pid == 2 || fields[1] == "2" {
			continue
		}
		if fields[0] == "Z" && fields[1] == "1" {
			continue // it has ended; init has not reaped it yet
		}
		cmdline, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		parent, _ := os.ReadFile(fmt.Sprintf("/proc/%s/cmdline", fields[1]))
		if name == "postgres" && bytes.Equal(cmdline, parent) {
			continue // a worker that PostgreSQL has just forked and that has not set its own title yet
		}
		cgroup, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		text := strings.TrimSpace(string(bytes.ReplaceAll(cmdline, []byte{0}, []byte{' '})))
		s.add(Process, fmt.Sprintf("%d@%s", pid, fields[19]), fmt.Sprintf("%s %q parent %s", name, text, fields[1])+
			cgroupMark+cgroupText(cgroup))
	}
	return nil
}

// statFields splits /proc/<pid>/stat (proc_pid_stat(5)) behind the name, which may itself hold blanks and brackets:
// fields[0] is the state, fields[1] the parent, fields[19] the start time in clock ticks after boot.
func statFields(stat []byte) (fields []string, name string, ok bool) {
	open, end := bytes.IndexByte(stat, '('), bytes.LastIndexByte(stat, ')')
	if open < 0 || end < open {
		return nil, "", false
	}
	fields = strings.Fields(string(stat[end+1:]))
	return fields, string(stat[open+1 : end]), len(fields) > 19
}

// cgroupMark stands before the cgroup in a process's state.
const cgroupMark = " cgroup "

// cgroupText keeps the longest path: the hierarchies of cgroup v1 mostly repeat each other.
func cgroupText(cgroup []byte) string {
	longest := "/"
	for line := range strings.Lines(string(cgroup)) {
		if parts := strings.SplitN(strings.TrimSpace(line), ":", 3); len(parts) == 3 && len(parts[2]) > len(longest) {
			longest = parts[2]
		}
	}
	return longest
}

// mount is one line of /proc/self/mountinfo (proc_pid_mountinfo(5)).
type mount struct {
	root, point, fstype, source string
}

func readMounts() ([]mount, error) {
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var mounts []mount
	for line := range strings.Lines(string(data)) {
		left, right, ok := strings.Cut(strings.TrimSpace(line), " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if !ok || len(l) < 6 || len(r) < 2 {
			return nil, fmt.Errorf("unexpected line in mountinfo: %q", line)
		}
		mounts = append(mounts, mount{root: unescape(l[3]), point: unescape(l[4]), fstype: r[0], source: unescape(r[1])})
	}
	return mounts, nil
}

// unescape undoes the octal escapes of mountinfo.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// takeMounts counts the mounts of this mount namespace by place, because several may lie on one another.
func takeMounts(s *Snapshot) error {
	mounts, err := readMounts()
	if err != nil {
		return err
	}
	count := map[string]int{}
	for _, m := range mounts {
		if isBelow(m.point, s.scope.IgnoreMounts) {
			continue
		}
		id := fmt.Sprintf("%s (%s of %s, root %s)", m.point, m.fstype, m.source, m.root)
		count[id]++
		s.add(Mount, id, fmt.Sprintf("× %d", count[id]))
	}
	return nil
}

// takeCgroups lists the directories of every mounted cgroup hierarchy, v1 and v2.
func takeCgroups(s *Snapshot) error {
	mounts, err := readMounts()
	if err != nil {
		return err
	}
	for _, m := range mounts {
		if m.fstype != "cgroup" && m.fstype != "cgroup2" {
			continue
		}
		err := filepath.WalkDir(m.point, func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err == nil && d.IsDir() {
				s.add(Cgroup, path, "")
			}
			return err
		})
		if err != nil {
			return fmt.Errorf("walk cgroups: %w", err)
		}
	}
	return nil
}

// takeNetNamespaces lists every network namespace that a process is in or that is mounted somewhere, by inode.
func takeNetNamespaces(s *Snapshot) error {
	names, err := filepath.Glob("/proc/[0-9]*/ns/net")
	if err != nil {
		return err
	}
	// The first thread of this very process may have ended in a namespace that a test has made; it goes with the process.
	self := fmt.Sprintf("/proc/%d/ns/net", os.Getpid())
	for _, name := range names {
		if target, err := os.Readlink(name); err == nil && name != self {
			s.add(NetNS, target, "")
		}
	}
	mounts, err := readMounts()
	if err != nil {
		return err
	}
	for _, m := range mounts {
		if m.fstype == "nsfs" && strings.HasPrefix(m.root, "net:") {
			s.add(NetNS, m.root+" at "+m.point, "")
		}
	}
	return nil
}

// holders are the processes that keep a network namespace now, for people to read.
func holders(ns string) string {
	names, _ := filepath.Glob("/proc/[0-9]*/ns/net")
	var all []string
	for _, name := range names {
		if target, err := os.Readlink(name); err == nil && target == ns {
			dir := strings.TrimSuffix(name, "/ns/net")
			stat, _ := os.ReadFile(dir + "/stat")
			cgroup, _ := os.ReadFile(dir + "/cgroup")
			all = append(all, strings.TrimSpace(string(stat))+cgroupMark+cgroupText(cgroup))
		}
	}
	return strings.Join(all, "; ")
}

// lines splits a command's output.
func lines(out []byte) []string {
	var all []string
	for sc := bufio.NewScanner(bytes.NewReader(out)); sc.Scan(); {
		all = append(all, sc.Text())
	}
	return all
}
