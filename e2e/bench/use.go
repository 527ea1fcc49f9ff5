package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// Use is what hub, database and machine did during a while: all of it in units of one second, or of one core.
type Use struct {
	Seconds float64
	// Cores is how many the machine has, Busy how many worked, Disk how many had nothing to do but to wait for a disk.
	Cores, Busy, Disk float64
	// Hub, Database, Nodes and Client are the cores that these programs used; Client is the measuring program.
	Hub, Database, Nodes, Client float64
	// Commits are transactions, WALBytes what they wrote to the log.
	Commits, WALBytes float64
	// Waits is how many connections of the database were busy on average, by what they waited for; "" is for nothing.
	Waits map[string]float64
}

// Limit is what keeps a load from growing.
type Limit struct{ What, Next string }

const (
	// fullShare of the cores counts as all of them.
	fullShare = 0.85
	// oneWaits: so many connections that wait on average are a queue.
	oneWaits = 1
	// oneCore of a single program hints at a part of it that one thread does.
	oneCore = 0.9
)

// limit names what was used up.
func (u Use) limit() Limit {
	switch {
	case u.Busy >= fullShare*u.Cores:
		return u.processorLimit()
	case u.Waits["Lock"] >= oneWaits:
		return Limit{
			fmt.Sprintf("locks of rows: %.1f connections wait for one on average", u.Waits["Lock"]),
			"find the row in pg_locks, and let transactions that write it share a commit or write to rows of their own",
		}
	case u.Waits["IO"]+u.Waits["LWLock"] >= oneWaits || u.Disk >= fullShare*u.Cores/2:
		return Limit{
			fmt.Sprintf("commits: %.0f a second, %.1f connections wait for the log or the disk on average", u.Commits,
				u.Waits["IO"]+u.Waits["LWLock"]),
			"a faster disk, or more changes in each commit",
		}
	case u.Hub >= oneCore:
		return Limit{
			fmt.Sprintf("one part of the hub: it uses %.2f cores while %.2f are idle", u.Hub, u.Cores-u.Busy),
			"spread what its profile names over several goroutines",
		}
	default:
		return Limit{
			fmt.Sprintf("neither processors (%.2f of %.0f cores busy), locks nor disk", u.Busy, u.Cores),
			"look at the queues, budgets and timers of the objective that failed",
		}
	}
}

// processorLimit says which program takes the most of a machine that is busy.
func (u Use) processorLimit() Limit {
	// The kernel's own threads are among the others.
	others := max(0, u.Busy-u.Hub-u.Database-u.Nodes-u.Client)
	l := Limit{What: fmt.Sprintf("the processors: %.2f of %.0f cores busy, hub %.2f, PostgreSQL %.2f, simulated nodes "+
		"%.2f, measuring client %.2f, others %.2f", u.Busy, u.Cores, u.Hub, u.Database, u.Nodes, u.Client, others)}
	switch most := max(u.Hub, u.Database, u.Nodes+u.Client, others); most {
	case others:
		l.Next = "take the row again on a quiet machine: other programs take the most"
	case u.Nodes + u.Client:
		l.Next = "simulate nodes and clients on another machine: they take the most"
	case u.Database:
		l.Next = "PostgreSQL on a machine of its own: it takes the most"
	default:
		l.Next = "more cores for the hub, or less work in what its profile names: it takes the most"
	}
	return l
}

func (u Use) parts() []Part {
	parts := []Part{
		{Name: "cores busy", Value: u.Busy},
		{Name: "hub cores", Value: u.Hub},
		{Name: "PostgreSQL cores", Value: u.Database},
		{Name: "simulated nodes cores", Value: u.Nodes},
		{Name: "measuring client cores", Value: u.Client},
		{Name: "commits/s", Value: u.Commits},
		{Name: "WAL MB/s", Value: u.WALBytes / 1e6},
	}
	for _, kind := range slices.Sorted(maps.Keys(u.Waits)) {
		name := "connections that work"
		if kind != "" {
			name = "connections that wait, " + kind
		}
		parts = append(parts, Part{Name: name, Value: u.Waits[kind]})
	}
	return parts
}

// waitSample is the interval at which the database is asked what its connections wait for.
const waitSample = 200 * time.Millisecond

// counters are readings since the machine or the programs began.
type counters struct {
	at                                       time.Time
	hub, database, nodes, client, busy, disk time.Duration
	commits, wal                             int64
}

func (c *LoadTest) counters(ctx context.Context, conn *pgx.Conn) (n counters, err error) {
	programs, err := c.cpu()
	if err != nil {
		return n, err
	}
	n.hub, n.database, n.nodes = programs[0], programs[1], programs[2]
	if n.client, err = cpuTime(os.Getpid()); err != nil {
		return n, err
	}
	if n.busy, n.disk, err = machineTime("/proc/stat"); err != nil {
		return n, err
	}
	n.at = time.Now()
	return n, conn.QueryRow(ctx, `SELECT xact_commit, pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::int8
		FROM pg_stat_database WHERE datname = current_database()`).Scan(&n.commits, &n.wal)
}

// between is the use between two readings.
func between(before, after counters) Use {
	seconds := after.at.Sub(before.at).Seconds()
	per := func(a, b time.Duration) float64 { return (b - a).Seconds() / seconds }
	return Use{
		Seconds: seconds, Cores: float64(runtime.NumCPU()),
		Busy: per(before.busy, after.busy), Disk: per(before.disk, after.disk),
		Hub: per(before.hub, after.hub), Database: per(before.database, after.database),
		Nodes: per(before.nodes, after.nodes), Client: per(before.client, after.client),
		Commits: float64(after.commits-before.commits) / seconds, WALBytes: float64(after.wal-before.wal) / seconds,
	}
}

// machineTime is how long all cores together have worked, and have waited for a disk, since boot (proc_stat(5)).
func machineTime(path string) (busy, disk time.Duration, err error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, 0, err
	}
	line, _, _ := strings.Cut(string(data), "\n")
	fields := strings.Fields(line)
	const user, idle, ioWait, steal = 1, 4, 5, 8
	if len(fields) <= steal {
		return 0, 0, fmt.Errorf("%s has no times", path)
	}
	for i := user; i <= steal; i++ {
		ticks, err := strconv.ParseInt(fields[i], 10, 64)
		if err != nil {
			return 0, 0, err
		}
		took := time.Duration(ticks) * time.Second / ticksPerSecond
		switch i {
		case idle:
		case ioWait:
			disk = took
		default:
			busy += took
		}
	}
	return busy, disk, nil
}

// watchUse measures until stop is called.
func (c *LoadTest) watchUse(ctx context.Context) (stop func() (Use, error), err error) {
	conn, err := pgx.Connect(ctx, c.Hub.Config.DatabaseURL())
	if err != nil {
		return nil, err
	}
	before, err := c.counters(ctx, conn)
	if err != nil {
		return nil, errors.Join(err, conn.Close(ctx))
	}
	stopping := make(chan struct{})
	waits := map[string]float64{}
	samples := 0
	var sampling sync.WaitGroup
	var sampleErr error
	sampling.Go(func() {
		for sampleErr == nil {
			select {
			case <-stopping:
				return
			case <-time.After(waitSample):
			}
			samples++
			sampleErr = addWaits(ctx, conn, waits)
		}
	})
	return func() (Use, error) {
		close(stopping)
		sampling.Wait()
		after, err := c.counters(ctx, conn)
		err = errors.Join(sampleErr, err, conn.Close(context.WithoutCancel(ctx)))
		u := between(before, after)
		u.Waits = waits
		for kind := range waits {
			u.Waits[kind] /= float64(samples)
		}
		return u, err
	}, nil
}

// addWaits counts the connections that have work, by what they wait for.
func addWaits(ctx context.Context, conn *pgx.Conn, waits map[string]float64) error {
	rows, err := conn.Query(ctx, `SELECT coalesce(wait_event_type, ''), count(*)::float8 FROM pg_stat_activity
		WHERE state = 'active' AND backend_type = 'client backend' AND pid <> pg_backend_pid() GROUP BY 1`)
	if err != nil {
		return err
	}
	var kind string
	var n float64
	_, err = pgx.ForEachRow(rows, []any{&kind, &n}, func() error {
		waits[kind] += n
		return nil
	})
	return err
}

const (
	// profileFor is how long the hub's processor time is sampled, profileHertz how often a second.
	profileFor   = 10 * time.Second
	profileHertz = 199
	// profileLines is how many functions a profile names.
	profileLines = 12
)

// profileLine is a line of `perf report`: share, kind and name of a function.
var profileLine = regexp.MustCompile(`(?m)^\s+([0-9.]+%)\s+\[(.)\]\s+(\S.*?)\s*$`)

// recordProfile begins to sample where the hub spends its processor time, by perf(1). The function that it returns says
// in which functions; without perf it says so.
func (c *LoadTest) recordProfile(ctx context.Context) (report func(context.Context) string) {
	file := filepath.Join(c.dir, "perf.data")
	record := exec.CommandContext(ctx, "perf", "record", "-e", "cpu-clock", "-F", strconv.Itoa(profileHertz), "-o", file,
		"-p", strconv.Itoa(c.Hub.PID), "--", "sleep", fmt.Sprint(profileFor.Seconds()))
	var said bytes.Buffer
	record.Stderr = &said
	if err := record.Start(); err != nil {
		return func(context.Context) string { return "no profile: " + err.Error() }
	}
	return func(ctx context.Context) string {
		defer func() { _ = os.Remove(file) }()
		if err := record.Wait(); err != nil {
			return fmt.Sprintf("no profile: perf record: %v: %s", err, lastLine(said.Bytes()))
		}
		out, err := exec.CommandContext(ctx, "perf", "report", "-i", file, "--stdio", "--no-children", "-g", "none", "--sort",
			"symbol").Output()
		if err != nil {
			return fmt.Sprintf("no profile: perf report: %v", err)
		}
		return topFunctions(string(out), profileLines)
	}
}

// topFunctions are the first lines of a report.
func topFunctions(report string, n int) string {
	var out []string
	for _, m := range profileLine.FindAllStringSubmatch(report, n) {
		name := strings.Fields(m[3])[0]
		if m[2] == "k" {
			name += " (kernel)"
		}
		out = append(out, name+" "+m[1])
	}
	return strings.Join(out, ", ")
}

func lastLine(out []byte) string {
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	return lines[len(lines)-1]
}
