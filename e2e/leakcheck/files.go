package leakcheck

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// maxHashedBytes bounds how much of a file under /etc is read to notice a change.
const maxHashedBytes = 1 << 20

// noise lists paths that no test is responsible for, each with its reason.
var noise = regexp.MustCompile(strings.Join([]string{
	// The Go tool's build directories; it removes them itself.
	`^/tmp/go-(build|link|tool)[^/]*(/|$)`,
	// The lock file of iptables, made by the first user and shared by all.
	`^/run/xtables\.lock$`,
	// Empty directories that every containerd makes and none removes; what lies in them counts.
	`^/run/containerd(/(s|fifo|runc))?$`,
	// The empty directory for named network namespaces; what lies in it counts.
	`^/run/netns$`,
}, "|"))

func isNoise(path string, extra []string) bool {
	return noise.MatchString(path) || isBelow(path, extra)
}

func isBelow(path string, prefixes []string) bool {
	return slices.ContainsFunc(prefixes, func(prefix string) bool {
		return prefix != "" && (path == prefix || strings.HasPrefix(path, strings.TrimSuffix(prefix, "/")+"/"))
	})
}

// snapshotContent is where containerd's snapshotters keep the files of images and containers: the snapshots themselves
// are counted as containerd's objects and as directories, their content is not walked.
var snapshotContent = regexp.MustCompile(`/io\.containerd\.snapshotter\.v1\.[a-z]+/snapshots/[0-9]+/`)

// takeFiles lists names, types and modes; of files under /etc also the content. Sizes and times elsewhere are noise:
// daemons write to their own files. Other file systems' content is not walked where it is a container's root or kernel
// state.
func takeFiles(s *Snapshot) error {
	roots := s.scope.Files
	if len(roots) == 0 {
		roots = []string{"/run", "/var", "/tmp", "/etc"}
	}
	mounts, err := readMounts()
	if err != nil {
		return err
	}
	closed := map[string]bool{}
	for _, m := range mounts {
		switch m.fstype {
		case "overlay", "proc", "sysfs", "nsfs", "cgroup", "cgroup2", "mqueue", "devpts", "fuse", "bpf":
			closed[m.point] = true
		}
		if strings.HasSuffix(m.root, "/snapshots") && strings.Contains(m.root, "/io.containerd.snapshotter.v1.") {
			closed[m.point] = true // an agent's mount of all snapshots
		}
	}
	for _, root := range roots {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) || err != nil && closed[path] {
				return nil
			}
			if err != nil {
				return err
			}
			if snapshotContent.MatchString(path) || isNoise(path, s.scope.IgnoreFiles) {
				if d.IsDir() && !strings.HasPrefix(path, "/run/containerd") && path != "/run/netns" {
					return fs.SkipDir
				}
				return nil
			}
			s.addFile(path, d)
			if d.IsDir() && closed[path] {
				return fs.SkipDir
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("walk %s: %w", root, err)
		}
	}
	return nil
}

func (s *Snapshot) addFile(path string, d fs.DirEntry) {
	if !s.scope.covers(path) {
		return
	}
	info, err := d.Info()
	if err != nil {
		return // gone meanwhile
	}
	state := info.Mode().String()
	switch {
	case info.Mode()&fs.ModeSymlink != 0:
		target, _ := os.Readlink(path)
		state += " to " + target
	case strings.HasPrefix(path, "/etc/") && info.Mode().IsRegular() && info.Size() <= maxHashedBytes:
		data, err := os.ReadFile(path)
		if err != nil {
			return
		}
		state += fmt.Sprintf(" sha256 %x", sha256.Sum256(data))
	}
	s.add(File, path, state)
}
