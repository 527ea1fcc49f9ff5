package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	// idleWarmUp passes before a program counts as idle, idleFor is how long it is then measured.
	idleWarmUp = 20 * time.Second
	idleFor    = 60 * time.Second
	// ticksPerSecond is the unit of times in /proc (proc_pid_stat(5)); 100 on every architecture that Linux has today.
	ticksPerSecond = 100
)

// Idle is the memory and CPU use of an idle program.
type Idle struct {
	// RSSMB is resident memory at the end, in millions of bytes.
	RSSMB float64
	// CPUPercent is of one core.
	CPUPercent float64
}

// MeasureIdle measures an idle process. A quick run takes a tenth of the time.
func MeasureIdle(ctx context.Context, e *Env, pid int) (Idle, error) {
	warmUp, watch := idleWarmUp, idleFor
	if e.Quick() {
		warmUp, watch = warmUp/10, watch/10
	}
	if err := pause(ctx, warmUp); err != nil {
		return Idle{}, err
	}
	before, err := cpuTime(pid)
	if err != nil {
		return Idle{}, err
	}
	start := time.Now()
	if err := pause(ctx, watch); err != nil {
		return Idle{}, err
	}
	after, err := cpuTime(pid)
	if err != nil {
		return Idle{}, err
	}
	rss, err := ResidentBytes(pid)
	return Idle{
		RSSMB:      float64(rss) / 1e6,
		CPUPercent: 100 * float64(after-before) / float64(time.Since(start)),
	}, err
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// cpuTime is what a process has used of all cores since it began.
func cpuTime(pid int) (time.Duration, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(data), ") ")
	fields := strings.Fields(rest)
	if len(fields) < 13 {
		return 0, fmt.Errorf("/proc/%d/stat has no times", pid)
	}
	user, err1 := strconv.ParseInt(fields[11], 10, 64)
	system, err2 := strconv.ParseInt(fields[12], 10, 64)
	return time.Duration(user+system) * time.Second / ticksPerSecond, errors.Join(err1, err2)
}

// ResidentBytes is the memory that a process has in RAM, files that it maps included.
func ResidentBytes(pid int) (int64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(data))
	if len(fields) < 2 {
		return 0, fmt.Errorf("/proc/%d/statm has no resident size", pid)
	}
	pages, err := strconv.ParseInt(fields[1], 10, 64)
	return pages * int64(os.Getpagesize()), err
}

// measureIdle measures the agent without workloads, with many, and with many that are probed at the highest rate.
func measureIdle(ctx context.Context, e *Env) ([]Result, error) {
	s, err := e.Testbed(ctx)
	if err != nil {
		return nil, err
	}
	alone, err := MeasureIdle(ctx, e, s.Agent.PID)
	if err != nil {
		return nil, err
	}
	few, err := s.idleWithMany(ctx, e)
	if err != nil {
		return nil, err
	}
	version := s.version
	often := bytes.Replace(appManifest, []byte("period_millis: 5000"), []byte("period_millis: 1000"), 1)
	if err := s.release(ctx, probedVersion, often); err != nil {
		return nil, err
	}
	probed, err := s.idleWithMany(ctx, e)
	s.version = version
	return slices.Concat(
		idleResults("none", "no workload", alone, 48),
		idleResults("many", fmt.Sprintf("%d workloads, each probed every 5 s", manyAtOnce), few, 64),
		idleResults("probed", fmt.Sprintf("%d workloads, each probed every second", manyAtOnce), probed, 64),
	), err
}

// idleWithMany measures the agent with many workloads.
func (s *Testbed) idleWithMany(ctx context.Context, e *Env) (idle Idle, err error) {
	ids, _, err := s.LaunchMany(ctx, manyAtOnce)
	if err == nil {
		idle, err = MeasureIdle(ctx, e, s.Agent.PID)
	}
	return idle, errors.Join(err, s.DecommissionAll(ctx, ids))
}

func idleResults(name, with string, i Idle, maxMB float64) []Result {
	memory := Result{
		Name: "idle." + name + ".memory", What: "agent, idle with " + with + ": RSS", Unit: "MB",
		Target: fmt.Sprintf("≤ %.0f", maxMB), Reached: i.RSSMB <= maxMB,
		Note: "mapped files included",
	}
	cpu := Result{
		Name: "idle." + name + ".cpu", What: "agent, idle with " + with + ": CPU", Unit: "% of a core", Target: "≤ 0.5",
		Reached: i.CPUPercent <= 0.5,
	}
	return []Result{memory.single(i.RSSMB), cpu.single(i.CPUPercent)}
}

// processes names the process of every container of the node and when it started.
func (s *Testbed) processes(_ context.Context) (string, error) {
	files, err := filepath.Glob(filepath.Join(s.Containerd.Dir, "state", "io.containerd.runtime.v2.task",
		s.Agent.Config.ContainerdNamespace, "*", "init.pid"))
	if err != nil {
		return "", err
	}
	var all []string
	for _, f := range files {
		pid, err := os.ReadFile(f)
		if err != nil {
			return "", err
		}
		stat, err := os.ReadFile(filepath.Join("/proc", strings.TrimSpace(string(pid)), "stat"))
		if err != nil {
			return "", err
		}
		_, rest, _ := strings.Cut(string(stat), ") ")
		all = append(all, string(pid)+"@"+strings.Fields(rest)[19])
	}
	slices.Sort(all)
	return strings.Join(all, " "), nil
}

// recognisedPoll is the interval of queries to the agent's socket.
const recognisedPoll = 5 * time.Millisecond

// awaitRecognised polls the agent's socket until it reports n workloads as ready.
func (s *Testbed) awaitRecognised(ctx context.Context, n int) error {
	web := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", s.Agent.Ready.LocalSocket)
	}}}
	defer web.CloseIdleConnections()
	for {
		ready, err := readyWorkloads(ctx, web)
		if err == nil && ready == n {
			return nil
		}
		if pauseErr := pause(ctx, recognisedPoll); pauseErr != nil {
			return fmt.Errorf("%d of %d workloads are ready: %w", ready, n, errors.Join(pauseErr, err))
		}
	}
}

func readyWorkloads(ctx context.Context, web *http.Client) (int, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://agent/v1/workloads", nil)
	if err != nil {
		return 0, err
	}
	res, err := web.Do(req)
	if err != nil {
		return 0, err
	}
	defer func() { _ = res.Body.Close() }()
	var all []struct {
		Status string `json:"status"`
	}
	err = json.NewDecoder(res.Body).Decode(&all)
	ready := 0
	for _, w := range all {
		if w.Status == "ready" {
			ready++
		}
	}
	return ready, err
}
