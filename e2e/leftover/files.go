package leftover

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

// IgnoreEnv names an environment variable with more path prefixes to ignore, separated by colons: for whatever else keeps
// files on the machine that runs the tests.
const IgnoreEnv = "GPUAAS_LEFTOVER_IGNORE"

// maxHashedBytes bounds how much of a file under /etc is read to notice a change.
const maxHashedBytes = 1 << 20

// noise is what comes and goes without anybody's doing, or that is nobody's remainder. Each has its reason.
var noise = regexp.MustCompile(strings.Join([]string{
	// The Go tool that runs the tests works there.
	`^/tmp/go-(build|link|tool)[^/]*(/|$)`,
	// The Go linters and language server work there.
	`^/tmp/(gopath|golangci-lint|gopls)[^/]*(/|$)`,
	// The package manager and its timers; packages are installed before a test.
	`^/var/(cache|backups|lib/(apt|dpkg|ucf|man-db|systemd/(timers|coredump)))(/|$)`,
	// Other programs' logs are rotated at any time.
	`^/var/log/(journal|apt|sysstat)(/|$)`,
	// Rotated logs.
	`^/var/log/.*\.(gz|[0-9]+)$`,
	// Systemd, udev and logins.
	`^/run/(systemd|udev|user|log|dbus|utmp)(/|$)`,
	// The lock file of iptables, made by whoever uses it first and shared by all.
	`^/run/xtables\.lock$`,
	// Empty directories that every containerd makes and none removes; what lies in them counts.
	`^/run/containerd(/(s|fifo|runc))?$`,
	// The empty directory for named network namespaces; what lies in it counts.
	`^/run/netns$`,
	// Private directories of systemd services.
	`^/(run|tmp|var/tmp)/systemd-private-[^/]*(/|$)`,
	// Derived files.
	`^/etc/(mtab|ld\.so\.cache|\.pwd\.lock)$`,
}, "|"))

func isNoise(path string, extra []string) bool {
	return noise.MatchString(path) || slices.ContainsFunc(extra, func(prefix string) bool {
		return prefix != "" && (path == prefix || strings.HasPrefix(path, strings.TrimSuffix(prefix, "/")+"/"))
	})
}

// snapshotContent is where containerd's snapshotters keep the files of images and containers: the snapshots themselves are
// counted as containerd's objects and as directories, their content is not walked.
var snapshotContent = regexp.MustCompile(`/io\.containerd\.snapshotter\.v1\.[a-z]+/snapshots/[0-9]+/`)

// takeFiles lists names, types and modes; of files under /etc also the content. Sizes and times elsewhere are noise: daemons
// write to their own files. Other file systems' content is not walked where it is a container's root or kernel state.
func takeFiles(s *Snapshot) error {
	roots := s.scope.Files
	if len(roots) == 0 {
		roots = []string{"/run", "/var", "/tmp", "/etc"}
	}
	ignore := append(slices.Clone(s.scope.IgnoreFiles), filepath.SplitList(os.Getenv(IgnoreEnv))...)
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
	}
	for _, root := range roots {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) || err != nil && closed[path] {
				return nil
			}
			if err != nil {
				return err
			}
			if snapshotContent.MatchString(path) || isNoise(path, ignore) {
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
