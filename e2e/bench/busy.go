package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// costOfPass is the line that BenchmarkPassWithNothingToDo prints.
var costOfPass = regexp.MustCompile(`(?m)^BenchmarkPassWithNothingToDo\S*\s+(\d+)\s.*?([0-9.]+) cpu-ms/op`)

// passes is how often the benchmark runs a pass.
const passes = 100

// measurePass runs the benchmark of the reconciler, which has no way to ask a running agent for passes.
func measurePass(ctx context.Context, e *Env) ([]Result, error) {
	cmd := exec.CommandContext(ctx, "go", "test", "-run", "^$", "-bench", "^BenchmarkPassWithNothingToDo$",
		"-benchtime", fmt.Sprint(e.Samples(passes), "x"), "./agent/internal/reconcile")
	cmd.Dir = e.Source
	out, err := cmd.CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, out[max(0, len(out)-2000):])
	}
	found := costOfPass.FindSubmatch(out)
	if found == nil {
		return nil, fmt.Errorf("the benchmark printed no cost: %s", out[max(0, len(out)-2000):])
	}
	n, err1 := strconv.Atoi(string(found[1]))
	cost, err2 := strconv.ParseFloat(string(found[2]), 64)
	if err := errors.Join(err1, err2); err != nil {
		return nil, err
	}
	r := Result{
		Name: "pass", What: "one pass beside 100 running workloads, nothing to do: CPU of the agent", Unit: "ms CPU",
		Target: "≤ 50", Reached: cost <= 50,
		Note: "the mean of all passes, with the probes and the metering that fall into them; containerd's own time is not " +
			"in it",
	}.single(cost)
	r.N = n
	return []Result{r}, nil
}

const (
	// logRate and logFor are what one container writes to its log.
	logRate = 50_000_000
	logFor  = 60 * time.Second
	// logSample is how often the agent's memory and the logs' size are read meanwhile.
	logSample = 200 * time.Millisecond
	// logVersion has a core, so that the container is fast enough.
	logVersion = "1.0.2"
)

// measureLogs lets one container write to its log at logRate.
func measureLogs(ctx context.Context, e *Env) (_ []Result, err error) {
	s, err := e.Testbed(ctx)
	if err != nil {
		return nil, err
	}
	version := s.version
	defer func() { s.version = version }()
	core := bytes.Replace(appManifest, []byte("min: 50, default: 100,"), []byte("min: 50, default: 1000,"), 1)
	if err := s.release(ctx, logVersion, core); err != nil {
		return nil, err
	}
	i, _, err := s.Launch(ctx, "logs")
	if err != nil {
		return nil, err
	}
	defer func() {
		_, gone := s.Decommission(ctx, i.ID)
		err = errors.Join(err, gone)
	}()
	watch := logFor
	if e.Quick() {
		watch /= 10
	}
	before, err := MeasureIdle(ctx, e, s.Agent.PID)
	if err != nil {
		return nil, err
	}
	wrote := make(chan error, 1)
	var perSecond float64
	go func() {
		bytes, err := writeLog(ctx, i.Endpoints[0].URL, watch)
		perSecond = bytes / watch.Seconds()
		wrote <- err
	}()
	memory, disk, used, err := s.watchLogs(ctx, wrote)
	if err != nil {
		return nil, err
	}
	return logResults(before.RSSMB, memory, disk, perSecond, 100*used.Seconds()/watch.Seconds()), nil
}

// watchLogs returns the most memory of the agent and the most that its logs took on disk, in millions of bytes, and the
// processor time that the agent used until the container has written.
func (s *Testbed) watchLogs(ctx context.Context, wrote <-chan error) (memory, disk float64, used time.Duration,
	err error,
) {
	began, err := cpuTime(s.Agent.PID)
	if err != nil {
		return 0, 0, 0, err
	}
	tick := time.NewTicker(logSample)
	defer tick.Stop()
	for {
		rss, err := ResidentBytes(s.Agent.PID)
		if err != nil {
			return 0, 0, 0, err
		}
		kept, err := sizeOf(filepath.Join(s.Agent.Config.DataDir(), "logs"))
		if err != nil {
			return 0, 0, 0, err
		}
		memory, disk = max(memory, float64(rss)/1e6), max(disk, float64(kept)/1e6)
		select {
		case err := <-wrote:
			if err == nil && disk == 0 {
				err = errors.New("no log is where the agent keeps them")
			}
			ended, cpuErr := cpuTime(s.Agent.PID)
			return memory, disk, ended - began, errors.Join(err, cpuErr)
		case <-tick.C:
		case <-ctx.Done():
			return 0, 0, 0, ctx.Err()
		}
	}
}

func writeLog(ctx context.Context, url string, d time.Duration) (bytes float64, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost,
		fmt.Sprintf("%s/log?for=%s&bytes_per_second=%d", url, d, logRate), nil)
	if err != nil {
		return 0, err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer func() { _ = res.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(res.Body, 1<<10))
	if err != nil || res.StatusCode != http.StatusOK {
		return 0, errors.Join(err, fmt.Errorf("the app answers %s: %s", res.Status, body))
	}
	return strconv.ParseFloat(strings.TrimSpace(string(body)), 64)
}

// sizeOf is what the files of a directory take on disk. One that vanishes meanwhile counts nothing.
func sizeOf(dir string) (bytes int64, err error) {
	entries, err := os.ReadDir(dir)
	for _, entry := range entries {
		if info, err := entry.Info(); err == nil {
			bytes += info.Size()
		}
	}
	return bytes, err
}

// maxLogsMB bounds what the logs of one container may take: the log, its copy, the next copy while it is made, and
// what is written between two measurements.
const maxLogsMB = 100

func logResults(before, memory, disk, perSecond, cpu float64) []Result {
	what := fmt.Sprintf("one container writing %d MB/s to its log for %s", logRate/1_000_000, logFor)
	enough := perSecond >= 0.95*logRate
	note := fmt.Sprintf("written: %.1f MB/s; sampled every %s", perSecond/1e6, logSample)
	return []Result{
		Result{
			Name: "logs.memory", What: what + ": growth of the agent", Unit: "MB", Target: "≤ 16",
			Reached: enough && memory-before <= 16, Note: note,
			Parts: []Part{{"RSS before", before}, {"largest RSS", memory}, {"CPU in % of a core", cpu}},
		}.single(max(memory-before, 0)),
		Result{
			Name: "logs.disk", What: what + ": most on disk", Unit: "MB", Target: fmt.Sprintf("≤ %d", maxLogsMB),
			Reached: enough && disk <= maxLogsMB, Note: note,
		}.single(disk),
	}
}
