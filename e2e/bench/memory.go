package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	// memoryNodes is the largest of the three sizes; the others are a tenth and a third of it.
	memoryNodes = 10_000
	// maxNodeKB is what a node with workloads may cost the hub.
	maxNodeKB = 150
	// churnFor is how long nodes leave and come back, churnSample how often memory is read meanwhile.
	churnFor    = 5 * time.Minute
	churnSample = time.Second
	// maxPeak is how much more than idle the hub may take under churn.
	maxPeak = 2
	// idleNodesFor is how long the row memory-idle lasts, memorySample how often it reads.
	idleNodesFor = 6 * time.Hour
	memorySample = time.Minute
	// maxGrowthPercent of its memory an hour is what an idle program may grow by.
	maxGrowthPercent = 1
)

// memoryRows measure the proportional set size (PSS): of pages that several processes share, each counts its share.
func memoryRows() []Row {
	return []Row{
		{Name: "memory-nodes", Long: true, Measure: measureMemory},
		{Name: "memory-idle", Long: true, Measure: measureIdleMemory},
	}
}

// pssLine is a line of /proc/<pid>/smaps_rollup (proc_pid_smaps(5)).
var pssLine = regexp.MustCompile(`(?m)^Pss:\s+(\d+) kB$`)

// ProportionalBytes is the memory of a process, and its share of what it shares with others.
func ProportionalBytes(pid int) (int64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return 0, err
	}
	return parsePSS(data)
}

func parsePSS(rollup []byte) (int64, error) {
	m := pssLine.FindSubmatch(rollup)
	if m == nil {
		return 0, errors.New("no proportional set size")
	}
	kb, err := strconv.ParseInt(string(m[1]), 10, 64)
	return kb << 10, err
}

// databaseBytes is the memory of all processes of the hub's PostgreSQL.
func (c *LoadTest) databaseBytes() (total int64, err error) {
	pids, err := c.databasePIDs()
	if err != nil {
		return 0, err
	}
	for _, pid := range pids {
		// A process that has ended since is left out.
		if bytes, err := ProportionalBytes(pid); err == nil {
			total += bytes
		}
	}
	return total, nil
}

// line is the straight line through points with the least squares.
type line struct{ slope, intercept float64 }

func fit(x, y []float64) line {
	n := float64(len(x))
	var sx, sy, sxx, sxy float64
	for i := range x {
		sx, sy, sxx, sxy = sx+x[i], sy+y[i], sxx+x[i]*x[i], sxy+x[i]*y[i]
	}
	if d := n*sxx - sx*sx; d != 0 {
		slope := (n*sxy - sx*sy) / d
		return line{slope, (sy - slope*sx) / n}
	}
	return line{0, sy / max(n, 1)}
}

// memoryAt is what hub and database take with so many nodes.
type memoryAt struct{ nodes, hubMB, databaseMB float64 }

// measureMemory takes the slope of memory over three numbers of nodes, and the peak while nodes leave and come back.
func measureMemory(ctx context.Context, e *Env) (_ []Result, err error) {
	most, workloads := or(e.Params.Nodes, memoryNodes), or(e.Params.Workloads, workloadsPerNode)
	sizes := []int{max(most/10, 1), max(most/3, 2), max(most, 3)}
	c, err := startLoaded(ctx, e, e.Bin, "memory-nodes", sizes[0], workloads)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.end()) }()
	var points []memoryAt
	for _, n := range sizes {
		p, err := c.memoryWith(ctx, e, n, workloads)
		if err != nil {
			return nil, err
		}
		points = append(points, p)
		e.Say("%d nodes: hub %s MB, PostgreSQL %s MB", n, number(p.hubMB), number(p.databaseMB))
	}
	lasts := or(e.Params.For, churnFor)
	peakMB, rounds, err := c.churn(ctx, sizes[2], workloads, lasts)
	if err != nil {
		return nil, err
	}
	results := slopes(points, workloads)
	peak := Result{
		Name: "memory-nodes.peak", What: fmt.Sprintf("hub with %d nodes, half of which leave and come back again and "+
			"again: most memory", sizes[2]), Unit: "MB", Target: fmt.Sprintf("≤ %d × baseline", maxPeak),
		Parts: []Part{{Name: "times that half of the nodes came back", Value: float64(rounds)}},
		Note:  fmt.Sprintf("PSS, read every %s for %s; all nodes report; baseline: the same hub idle", churnSample, lasts),
	}.single(peakMB).against(points[2].hubMB)
	peak.Reached = peak.Ratio <= maxPeak
	return append(results, peak), nil
}

// slopes are the lines of hub and database.
func slopes(points []memoryAt, workloads int) []Result {
	var x, hub, database []float64
	var sizes []string
	for _, p := range points {
		x, hub, database = append(x, p.nodes), append(hub, p.hubMB), append(database, p.databaseMB)
		sizes = append(sizes, strconv.Itoa(int(p.nodes)))
	}
	result := func(name, what string, y []float64) Result {
		l := fit(x, y)
		r := Result{
			Name: name, What: fmt.Sprintf("memory of %s for each node with %d workloads", what, workloads), Unit: "KB",
			Target: "none",
			Parts:  []Part{{Name: "without nodes, MB", Value: l.intercept}},
			Note: "PSS; the slope of the straight line through " + strings.Join(sizes, ", ") + " nodes, each after a restart " +
				"of the hub and a minute of rest",
			Reached: true,
		}
		for i := range x {
			r.Parts = append(r.Parts, Part{Name: "with " + sizes[i] + " nodes, MB", Value: y[i]})
		}
		return r.single(l.slope * 1000)
	}
	h := result("memory-nodes.hub", "the hub", hub)
	h.Target, h.Reached = fmt.Sprintf("≤ %d", maxNodeKB), h.P50 <= maxNodeKB
	return []Result{h, result("memory-nodes.database", "PostgreSQL", database)}
}

// memoryWith measures an idle hub with n nodes, enrolling those that are missing.
func (c *LoadTest) memoryWith(ctx context.Context, e *Env, n, workloads int) (memoryAt, error) {
	if have := len(c.Nodes); n > have {
		if err := c.enroll(ctx, n-have); err != nil {
			return memoryAt{}, err
		}
		if err := c.load(ctx, c.Nodes[have:], workloads); err != nil {
			return memoryAt{}, err
		}
		if _, err := c.connectLoaded(ctx, n, workloads, 0); err != nil {
			return memoryAt{}, err
		}
		if err := c.awaitSequenced(ctx); err != nil {
			return memoryAt{}, err
		}
	}
	// What enrollment and the first states took is not what a node costs.
	if err := c.restartHub(ctx); err != nil {
		return memoryAt{}, err
	}
	if _, err := c.connectLoaded(ctx, n, workloads, 0); err != nil {
		return memoryAt{}, err
	}
	if _, err := MeasureIdle(ctx, e, c.Hub.PID); err != nil {
		return memoryAt{}, err
	}
	hub, err1 := ProportionalBytes(c.Hub.PID)
	database, err2 := c.databaseBytes()
	return memoryAt{float64(n), float64(hub) / 1e6, float64(database) / 1e6}, errors.Join(err1, err2)
}

// churn has half of the nodes leave and come back, and returns the most memory of the hub meanwhile.
func (c *LoadTest) churn(ctx context.Context, nodes, workloads int, lasts time.Duration) (peakMB float64, rounds int,
	err error,
) {
	stopping := make(chan struct{})
	var sampling sync.WaitGroup
	var sampleErr error
	var peak int64
	sampling.Go(func() {
		for sampleErr == nil {
			var bytes int64
			bytes, sampleErr = ProportionalBytes(c.Hub.PID)
			peak = max(peak, bytes)
			select {
			case <-stopping:
				return
			case <-time.After(churnSample):
			}
		}
	})
	for wait := stopwatch(); wait() < lasts && err == nil; rounds++ {
		if _, err = c.connectLoaded(ctx, nodes/2, workloads, 0); err == nil {
			_, err = c.connectLoaded(ctx, nodes, workloads, 0)
		}
	}
	close(stopping)
	sampling.Wait()
	return float64(peak) / 1e6, rounds, errors.Join(err, sampleErr)
}

// growth is what samples of memory, one each memorySample, say about a program that is idle.
type growth struct{ MB []float64 }

// perHour is the slope, without the first sixth of the time, in which a program grows into its caches.
func (g growth) perHour(every time.Duration) float64 {
	settled := g.MB[len(g.MB)/6:]
	x := make([]float64, len(settled))
	for i := range x {
		x[i] = float64(i) * every.Hours()
	}
	return fit(x, settled).slope
}

func (g growth) result(name, what string, every time.Duration) Result {
	s := Samples(g.MB)
	perHour := g.perHour(every)
	r := s.Into(Result{
		Name: name, What: what, Unit: "MB", Target: fmt.Sprintf("grows by ≤ %d %% an hour", maxGrowthPercent),
		Parts: []Part{
			{Name: "grows by, MB an hour", Value: perHour},
			{Name: "first", Value: g.MB[0]},
			{Name: "last", Value: g.MB[len(g.MB)-1]},
			{Name: "most", Value: s.P(100)},
		},
		Note: fmt.Sprintf("PSS, read every %s; the growth is the slope without the first sixth of the time", every),
	})
	r.Reached = perHour <= r.P50*maxGrowthPercent/100
	return r
}

// measureIdleMemory watches an idle hub with loaded nodes, and an idle agent with running workloads.
func measureIdleMemory(ctx context.Context, e *Env) (_ []Result, err error) {
	nodes, workloads := or(e.Params.Nodes, loadedNodes), or(e.Params.Workloads, workloadsPerNode)
	c, err := startLoaded(ctx, e, e.Bin, "memory-idle", nodes, workloads)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.end()) }()
	s, err := e.Testbed(ctx)
	if err != nil {
		return nil, err
	}
	ids, _, err := s.LaunchMany(ctx, manyAtOnce)
	defer func() { err = errors.Join(err, s.DecommissionAll(context.WithoutCancel(ctx), ids)) }()
	if err != nil {
		return nil, err
	}
	lasts := or(e.Params.For, idleNodesFor)
	every := min(memorySample, lasts/60)
	var hub, database, agent growth
	for wait := stopwatch(); wait() < lasts; {
		bytes, err1 := ProportionalBytes(c.Hub.PID)
		ofDatabase, err2 := c.databaseBytes()
		ofAgent, err3 := ProportionalBytes(s.Agent.PID)
		if err := errors.Join(err1, err2, err3, pause(ctx, every)); err != nil {
			return nil, err
		}
		hub.MB = append(hub.MB, float64(bytes)/1e6)
		database.MB = append(database.MB, float64(ofDatabase)/1e6)
		agent.MB = append(agent.MB, float64(ofAgent)/1e6)
	}
	with := fmt.Sprintf(" for %s with %d nodes of %d workloads, idle", lasts, nodes, workloads)
	return []Result{
		hub.result("memory-idle.hub", "hub"+with, every),
		database.result("memory-idle.database", "PostgreSQL of a hub"+with, every),
		agent.result("memory-idle.agent", fmt.Sprintf("agent for %s with %d running workloads, idle", lasts, manyAtOnce),
			every),
	}, nil
}

// databasePIDs are the main process of the hub's PostgreSQL and its children.
func (c *LoadTest) databasePIDs() ([]int, error) {
	pid, err := os.ReadFile(filepath.Join(c.Hub.Config.DataDir(), "postgres", "data", "postmaster.pid"))
	if err != nil {
		return nil, err
	}
	first, _, _ := strings.Cut(string(pid), "\n")
	main, err := strconv.Atoi(first)
	if err != nil {
		return nil, err
	}
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", main, main))
	if err != nil {
		return nil, err
	}
	pids := []int{main}
	for child := range strings.FieldsSeq(string(children)) {
		if pid, err := strconv.Atoi(child); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}
