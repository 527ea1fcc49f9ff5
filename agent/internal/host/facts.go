// Package host inspects the machine that the agent runs on: its facts, and whether it has what a node needs. It changes
// nothing.
package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/protocol"
)

// Config names the root to inspect. The zero value is this machine.
type Config struct {
	// Root is a directory with the machine's /etc, /proc and /sys; empty means /.
	Root string
}

func (c Config) read(path string) (string, error) {
	data, err := os.ReadFile(filepath.Join("/", c.Root, path))
	return strings.ToValidUTF8(string(data), "?"), err // else no hello could be encoded
}

// Facts describes the machine, without the versions of containerd and runc, which agent/internal/runtime reads. The
// error names the facts that could not be read; the others are returned with it.
func Facts(_ context.Context, cfg Config) (*protocol.NodeFacts, error) {
	f := &protocol.NodeFacts{Architecture: runtime.GOARCH, CpuCores: uint32(runtime.NumCPU())}
	var errs []error
	note := func(err error, what string) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", what, err))
		}
	}
	name, err := os.Hostname()
	f.Hostname = strings.ToValidUTF8(name, "?")
	note(err, "hostname")
	f.Os, err = cfg.osName()
	note(err, "operating system")
	f.Kernel, err = kernel()
	note(err, "kernel")
	f.MemoryBytes, err = cfg.memoryBytes()
	note(err, "memory")
	boot, err := cfg.bootTime()
	note(err, "boot time")
	if err == nil {
		f.BootTime = timestamppb.New(boot)
	}
	if _, err := os.Stat(filepath.Join("/", cfg.Root, "sys/fs/cgroup/cgroup.controllers")); err != nil {
		f.Conditions = append(f.Conditions, protocol.ConditionCgroupV1)
	}
	return f, errors.Join(errs...)
}

func kernel() (string, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "", err
	}
	return unix.ByteSliceToString(u.Release[:]), nil
}

// osName is PRETTY_NAME of os-release(5).
func (c Config) osName() (string, error) {
	text, err := c.read("etc/os-release")
	if err != nil {
		if text, err = c.read("usr/lib/os-release"); err != nil {
			return "", err
		}
	}
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), "PRETTY_NAME="); ok {
			return strings.Trim(value, `"'`), nil
		}
	}
	return "", errors.New("os-release names no PRETTY_NAME")
}

// memoryBytes is MemTotal of /proc/meminfo, which counts in KiB.
func (c Config) memoryBytes() (uint64, error) {
	text, err := c.read("proc/meminfo")
	if err != nil {
		return 0, err
	}
	kib, err := number(text, "MemTotal:")
	return kib << 10, err
}

// bootTime is btime of /proc/stat, in seconds since 1970.
func (c Config) bootTime() (time.Time, error) {
	text, err := c.read("proc/stat")
	if err != nil {
		return time.Time{}, err
	}
	seconds, err := number(text, "btime")
	return time.Unix(int64(seconds), 0), err
}

// number finds the line that begins with key and returns its second word.
func number(text, key string) (uint64, error) {
	for line := range strings.Lines(text) {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == key {
			return strconv.ParseUint(f[1], 10, 64)
		}
	}
	return 0, fmt.Errorf("no %s", key)
}

// RuncConditions returns a condition for a runc version, as `runc --version` prints it, without the fixes of 1.2.8,
// 1.3.3 and 1.4.0-rc.3. A version that cannot be read counts as old.
func RuncConditions(version string) []string {
	var major, minor, patch int
	version = strings.TrimPrefix(version, "v")
	n, _ := fmt.Sscanf(version, "%d.%d.%d", &major, &minor, &patch)
	fixed := n == 3 && (major > 1 || major == 1 && (minor > 3 || minor == 3 && patch >= 3 || minor == 2 && patch >= 8))
	candidate := 0
	if n, _ := fmt.Sscanf(version, "1.4.0-rc.%d", &candidate); n == 1 {
		fixed = candidate >= 3
	}
	if fixed {
		return nil
	}
	return []string{protocol.ConditionRuncVulnerable}
}
