package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Conditions are those under which a line was measured.
type Conditions struct {
	// Commit is the tree's; Dirty reports whether it had changes that are in no commit. What bench/ holds does not count.
	Commit string `json:"commit"`
	Dirty  bool   `json:"dirty"`
	// Limits are those of the measuring process, which its children inherit: resource limits and its control group's.
	Limits map[string]string `json:"limits"`
	// Kernel has the settings of the kernel on which a number depends.
	Kernel map[string]string `json:"sysctls"`
	// LoadBefore and LoadAfter are the machine's load averages of one minute around the row.
	LoadBefore float64 `json:"load_before"`
	LoadAfter  float64 `json:"load_after"`
}

// kernelSettings are files below /proc/sys and /sys.
func kernelSettings() []string {
	return []string{
		"/proc/sys/net/core/rmem_max", "/proc/sys/net/core/wmem_max", "/proc/sys/net/core/somaxconn",
		"/proc/sys/net/ipv4/ip_local_port_range", "/proc/sys/net/ipv4/tcp_congestion_control",
		"/proc/sys/vm/swappiness", "/proc/sys/vm/overcommit_memory", "/proc/sys/vm/dirty_ratio",
		"/proc/sys/vm/dirty_background_ratio", "/proc/sys/kernel/pid_max", "/proc/sys/fs/file-max",
		"/sys/kernel/mm/transparent_hugepage/enabled",
		"/sys/devices/system/clocksource/clocksource0/current_clocksource",
		"/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
	}
}

// conditions reads what holds for all rows of a run, without the load.
func conditions(ctx context.Context, source string) (Conditions, error) {
	commit, err := git(ctx, source, "rev-parse", "HEAD")
	if err != nil {
		return Conditions{}, err
	}
	changes, err := git(ctx, source, "status", "--porcelain", "--", ".", ":(exclude)bench")
	if err != nil {
		return Conditions{}, err
	}
	c := Conditions{Commit: commit, Dirty: changes != "", Limits: limits(), Kernel: map[string]string{}}
	for _, path := range kernelSettings() {
		if value, ok := setting(path); ok {
			c.Kernel[path] = value
		}
	}
	return c, nil
}

func git(ctx context.Context, source string, args ...string) (string, error) {
	out, err := exec.CommandContext(ctx, "git", append([]string{"-C", source}, args...)...).Output()
	if err != nil {
		return "", fmt.Errorf("git %s: %w", args[0], err)
	}
	return strings.TrimSpace(string(out)), nil
}

// setting is the content of a file of one line; ok is false where this kernel does not have it.
func setting(path string) (value string, ok bool) {
	raw, err := os.ReadFile(path)
	return strings.Join(strings.Fields(string(raw)), " "), err == nil
}

// limits are the soft resource limits, and those of the control group (version 2) that the process is in.
func limits() map[string]string {
	found := map[string]string{}
	for name, resource := range map[string]int{
		"nofile": unix.RLIMIT_NOFILE, "nproc": unix.RLIMIT_NPROC, "memlock": unix.RLIMIT_MEMLOCK,
		"as": unix.RLIMIT_AS,
	} {
		var limit unix.Rlimit
		if unix.Getrlimit(resource, &limit) != nil {
			continue
		}
		found[name] = "unlimited"
		if limit.Cur != unix.RLIM_INFINITY {
			found[name] = strconv.FormatUint(limit.Cur, 10)
		}
	}
	groups, _ := os.ReadFile("/proc/self/cgroup")
	for line := range strings.Lines(string(groups)) {
		group, unified := strings.CutPrefix(strings.TrimSpace(line), "0::")
		for _, file := range []string{"cpu.max", "memory.max", "pids.max", "io.max"} {
			value, ok := setting(filepath.Join("/sys/fs/cgroup", group, file))
			if unified && ok && value != "" {
				found[file] = value
			}
		}
	}
	return found
}

// loadAverage is the machine's load average of one minute.
func loadAverage() float64 {
	text, _ := setting("/proc/loadavg")
	first, _, _ := strings.Cut(text, " ")
	value, _ := strconv.ParseFloat(first, 64)
	return value
}
