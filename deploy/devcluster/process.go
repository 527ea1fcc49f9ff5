// Package devcluster starts the real programs — hub, agents, containerd — each with its own directories, ports and
// names, so that several run side by side on one machine and any of them may be killed. The demo and the end-to-end
// tests use it; it asserts nothing.
package devcluster

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// startLimit bounds how long a program may take until it says that it is ready.
const startLimit = 90 * time.Second

// Process is one running program. It outlives the starter unless it is stopped.
type Process struct {
	Name string
	PID  int
	// LogPath holds what the program wrote to its standard error.
	LogPath string
	cmd     *exec.Cmd
	exited  chan struct{}
	err     error
	once    sync.Once
}

// command describes a program to start.
type command struct {
	name string
	path string
	args []string
	env  []string
	// netns is the path of a network namespace to run in; empty for the caller's.
	netns  string
	logDir string
	// ready receives the first JSON object line on standard output; nil when the program prints none.
	ready any
}

// start runs the program and, where it prints one, waits for its ready line.
func start(ctx context.Context, c command) (*Process, error) {
	if err := os.MkdirAll(c.logDir, 0o700); err != nil {
		return nil, err
	}
	logPath := filepath.Join(c.logDir, c.name+".log")
	logFile, err := os.OpenFile(logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() { _ = logFile.Close() }()

	path, args := c.path, c.args
	if c.netns != "" {
		// nsenter, not ip netns exec: that one mounts /sys anew and hides the cgroups.
		path, args = "nsenter", append([]string{"--net=" + c.netns, "--", c.path}, c.args...)
	}
	cmd := exec.Command(path, args...)
	cmd.Env = append(os.Environ(), c.env...)
	cmd.Stderr = logFile
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	var lines *os.File
	if c.ready != nil {
		r, w, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		cmd.Stdout, lines = w, r
		defer func() { _ = w.Close() }()
	} else {
		cmd.Stdout = logFile
	}
	if err := noteStart(logFile); err != nil {
		return nil, fmt.Errorf("start %s: %w", c.name, err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", c.name, err)
	}
	p := &Process{Name: c.name, PID: cmd.Process.Pid, LogPath: logPath, cmd: cmd, exited: make(chan struct{})}
	go func() {
		p.err = cmd.Wait()
		close(p.exited)
	}()
	if c.ready == nil {
		return p, nil
	}
	if w, ok := cmd.Stdout.(*os.File); ok {
		_ = w.Close()
	}
	if err := p.awaitReady(ctx, lines, c.ready); err != nil {
		_ = p.Kill9()
		return nil, fmt.Errorf("%s did not become ready: %w\n%s", c.name, err, p.LogTail(20))
	}
	return p, nil
}

// StartMessage is a line in a program's log at each of its starts.
const StartMessage = "devcluster starts the program"

func noteStart(log io.Writer) error {
	return json.NewEncoder(log).Encode(map[string]any{"time": time.Now(), "level": "INFO", "msg": StartMessage})
}

func (p *Process) awaitReady(ctx context.Context, lines *os.File, ready any) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	got := make(chan error, 1)
	go func() {
		r := bufio.NewReader(lines)
		for {
			line, err := r.ReadBytes('\n')
			if bytes.HasPrefix(bytes.TrimSpace(line), []byte(`{`)) && bytes.Contains(line, []byte(`"ready"`)) {
				got <- json.Unmarshal(line, ready)
				// Keep draining: a full pipe would stop the program.
				_, _ = io.Copy(io.Discard, r)
				_ = lines.Close()
				return
			}
			if err != nil {
				got <- fmt.Errorf("it ended before its ready line: %w", err)
				_ = lines.Close()
				return
			}
		}
	}()
	select {
	case err := <-got:
		return err
	case <-p.exited:
		return fmt.Errorf("it exited: %w", errOr(p.err, errors.New("status 0")))
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Kill9 ends the program as a power cut would, and waits until it is gone.
func (p *Process) Kill9() error { return p.end(syscall.SIGKILL) }

// Stop asks the program to end (SIGTERM) and waits until it is gone; after a minute it is killed.
func (p *Process) Stop() error { return p.end(syscall.SIGTERM) }

func (p *Process) end(sig syscall.Signal) error {
	select {
	case <-p.exited:
		return nil
	default:
	}
	if err := syscall.Kill(p.PID, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	select {
	case <-p.exited:
		return nil
	case <-time.After(time.Minute):
		p.once.Do(func() { _ = syscall.Kill(p.PID, syscall.SIGKILL) })
		<-p.exited
		return fmt.Errorf("%s did not end within a minute and was killed", p.Name)
	}
}

// Exited is closed when the program has ended.
func (p *Process) Exited() <-chan struct{} { return p.exited }

// LogTail returns the last lines of what the program wrote.
func (p *Process) LogTail(lines int) string {
	data, err := os.ReadFile(p.LogPath)
	if err != nil {
		return ""
	}
	all := strings.Split(strings.TrimRight(string(data), "\n"), "\n")
	if len(all) > lines {
		all = all[len(all)-lines:]
	}
	return strings.Join(all, "\n")
}

// StartTicks returns when the process started, in clock ticks since boot (proc(5), field 22): with the pid it names one
// process for ever, so that a pid that was given anew is never signalled.
func StartTicks(pid int) (uint64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	_, rest, ok := bytes.Cut(data, []byte(") "))
	fields := bytes.Fields(rest)
	if !ok || len(fields) < 20 {
		return 0, fmt.Errorf("/proc/%d/stat has no start time", pid)
	}
	return strconv.ParseUint(string(fields[19]), 10, 64)
}

// EndProcess ends a process that an earlier program started, if the process of this id is still the same one: SIGTERM,
// and SIGKILL after the grace period. Its locks are free when EndProcess returns.
func EndProcess(pid int, startTicks uint64, grace time.Duration) error {
	if pid <= 1 {
		return nil
	}
	pidfd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open process %d: %w", pid, err)
	}
	defer func() { _ = unix.Close(pidfd) }()
	if ticks, err := StartTicks(pid); err != nil || ticks != startTicks {
		return nil // the process has ended; the id may be another's
	}
	if exited, err := signalAndWait(pidfd, unix.SIGTERM, grace); err != nil || exited {
		return err
	}
	return killAndWait(pid, pidfd)
}

// killAndWait ends a process with SIGKILL.
func killAndWait(pid, pidfd int) error {
	exited, err := signalAndWait(pidfd, unix.SIGKILL, endWithin)
	if err == nil && !exited {
		err = fmt.Errorf("process %d does not end", pid)
	}
	return err
}

// signalAndWait signals the process of a pidfd and waits until all of its threads have ended (pidfd_open(2)); the
// kernel has closed its files then. A first thread that ends earlier is a zombie meanwhile, and proves nothing.
func signalAndWait(pidfd int, signal unix.Signal, limit time.Duration) (exited bool, err error) {
	if err := unix.PidfdSendSignal(pidfd, signal, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return false, err
	}
	for deadline := time.Now().Add(limit); ; {
		fds := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, int(max(time.Until(deadline), 0).Milliseconds()))
		if !errors.Is(err, unix.EINTR) {
			return n > 0, err
		}
	}
}

func errOr(err, other error) error {
	if err != nil {
		return err
	}
	return other
}
