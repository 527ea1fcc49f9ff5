package harness

import (
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	api "github.com/gpuaas/gpuaas/pkg/client"
)

// Faults are what a test did that explains findings of its audit: more starts of a service than the tenant's requests,
// usage in suspense, time that is not billed, or more calls of nodes than starts of agents and hubs do.
type Faults struct {
	// Why names the fault that the test injects.
	Why      string
	Restarts int
	// Suspense are the reasons for which usage may be in suspense.
	Suspense []string
	// Sessions and Enrolments are those of all nodes together.
	Sessions, Enrolments int
	// Unbilled bounds what the members together ran without a bill, Overbilled what they are billed and did not run.
	Unbilled, Overbilled time.Duration
	// Pulls: a node may pull an image more than once.
	Pulls bool
}

// plus adds the faults of a test up.
func (f Faults) plus(more Faults) Faults {
	if !strings.Contains(f.Why, more.Why) {
		f.Why = strings.TrimPrefix(f.Why+"; "+more.Why, "; ")
	}
	return Faults{
		Why:        f.Why,
		Restarts:   f.Restarts + more.Restarts,
		Suspense:   append(slices.Clone(f.Suspense), more.Suspense...),
		Sessions:   f.Sessions + more.Sessions,
		Enrolments: f.Enrolments + more.Enrolments,
		Unbilled:   f.Unbilled + more.Unbilled,
		Overbilled: f.Overbilled + more.Overbilled,
		Pulls:      f.Pulls || more.Pulls,
	}
}

// UnconfirmedMax bounds the time of an app with accelerators that is not billed when they fail, or the app or its node
// crashes. The agent scans every 5 s: one scan may find the loss just before the next, another may be needed to end a
// container, and a sample before the first of them may be missing.
const UnconfirmedMax = 15 * time.Second

// ExplainUnconfirmed says that so many apps lose time that no scan of their accelerators has confirmed.
func (w *Testbed) ExplainUnconfirmed(apps int) {
	w.T.Helper()
	w.Explain(Faults{
		Why:      "time that no scan of the accelerators has confirmed is not billed",
		Unbilled: time.Duration(apps) * UnconfirmedMax,
	})
}

// audit is what is watched of a test's nodes until its end.
type audit struct {
	mu      sync.Mutex
	kernels map[string]*KernelOracle
	agents  []devcluster.AgentConfig
	faults  Faults
	done    bool
}

func newAudit() *audit { return &audit{kernels: map[string]*KernelOracle{}} }

func (a *audit) explain(f Faults) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.faults = a.faults.plus(f)
}

func (a *audit) kernel(namespace string) *KernelOracle {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.kernels[namespace]
}

// Explain tells the audit at the end of the test of a fault that the test injects.
func (w *Testbed) Explain(f Faults) {
	w.T.Helper()
	require.NotEmpty(w.T, f.Why, "a fault has a name")
	w.audit.explain(f)
}

// cutPower ends the containers of a node whose agent the caller has ended at a time, or end ends. The audit hears that
// each will be started again, and that nothing has measured those that outlived their agent.
func (w *Testbed) cutPower(a *devcluster.Agent, from time.Time, end func()) {
	kernel, running := w.audit.kernel(a.Config.ContainerdNamespace), 0
	if kernel != nil { // else it is not audited
		for _, p := range kernel.Processes() {
			if p.EndedAt.IsZero() {
				running++
			}
		}
	}
	end()
	if running > 0 {
		w.audit.explain(Faults{
			Why:      "a power cut",
			Restarts: running,
			Unbilled: time.Duration(running) * time.Since(from),
		})
	}
}

// WatchForAudit starts to watch what the kernel runs for an agent, which has not started yet.
func (w *Testbed) WatchForAudit(c devcluster.AgentConfig) {
	w.T.Helper()
	a := w.audit
	a.mu.Lock()
	defer a.mu.Unlock()
	a.agents = append(a.agents, c)
	if a.kernels[c.ContainerdNamespace] == nil {
		a.kernels[c.ContainerdNamespace] = w.WatchKernel(c.ContainerdNamespace)
	}
}

// AuditAtEnd has the test audited at its end, and before what the test has made so far is taken down. StartAgent calls
// it: a test fails whose hub has billed what did not run, or too much or too little of what ran, whose services were
// restarted more often than its tenants and faults explain, whose usage is in suspense without a fault, or whose nodes
// have called the hub more often than starts and faults explain.
func (w *Testbed) AuditAtEnd() {
	t := w.T
	t.Cleanup(func() {
		if w.audit.done || t.Failed() || t.Skipped() {
			return
		}
		w.audit.done = true
		o, err := w.observe()
		require.NoError(t, err)
		t.Logf("the audit sees %s", o)
		require.NoError(t, DifferenceError(o.Findings(w.audit.faults)), "explained is: %s", cmp.Or(w.audit.faults.Why,
			"nothing"))
	})
}

// Observed is what an audit compares.
type Observed struct {
	// Billed is the running time that the hub has billed, by container run.
	Billed map[string]time.Duration
	// Processes are those that the kernel ran, by container run.
	Processes map[string]ContainerProcess
	// Final are the members of whose usage the hub awaits no more.
	Final map[string]bool
	// Requested is how often a tenant's requests restart each service of a member.
	Requested map[string]int
	// Suspense are the reasons why usage is in suspense.
	Suspense []string
	// Nodes are the calls of the nodes to the hub, Pulls those to its registry.
	Nodes []NodeCalls
	Pulls Pulls
	// At is when it was observed.
	At time.Time
}

// String tells how much was observed.
func (o Observed) String() string {
	return fmt.Sprintf("%d runs billed, %d processes, %d members final, %d in suspense, %d of %d bytes pulled, calls %v",
		len(o.Billed), len(o.Processes), len(o.Final), len(o.Suspense), o.Pulls.SentBytes, o.Pulls.StoredBytes, o.Nodes)
}

// Findings lists what the faults do not explain.
func (o Observed) Findings(f Faults) (lines []string) {
	for run := range o.Billed {
		if _, ran := o.Processes[run]; !ran {
			lines = append(lines, "phantom bill: no process of run "+run+" ever was")
		}
	}
	if n := o.restarts(); n > f.Restarts {
		lines = append(lines, fmt.Sprintf("needless restarts: %d, the faults explain %d", n, f.Restarts))
	}
	for _, reason := range o.Suspense {
		if !slices.Contains(f.Suspense, reason) {
			lines = append(lines, "suspense without a fault: "+reason)
		}
	}
	lines = append(lines, o.wrongBills(f)...)
	sessions, enrolments := 0, 0
	for _, n := range o.Nodes {
		sessions += max(n.Sessions-n.Starts, 0)
		enrolments += max(n.Enrolled-1, 0)
		lines = append(lines, n.findings()...)
	}
	if enrolments > f.Enrolments {
		lines = append(lines, fmt.Sprintf("needless enrolments: %d beyond the first of each node, the faults explain %d",
			enrolments, f.Enrolments))
	}
	if sessions > f.Sessions {
		lines = append(lines, fmt.Sprintf("needless sessions: %d beyond the starts of agents and hubs, the faults explain %d",
			sessions, f.Sessions))
	}
	if p := o.Pulls; !f.Pulls && p.SentBytes > p.StoredBytes*int64(len(o.Nodes)) {
		lines = append(lines, fmt.Sprintf("needless pulls: %d nodes have pulled %d bytes of %d", len(o.Nodes), p.SentBytes,
			p.StoredBytes))
	}
	slices.Sort(lines)
	return lines
}

// restarts counts the starts of each service beyond the first and those that a tenant requested.
func (o Observed) restarts() (n int) {
	type service struct{ member, hostname string }
	starts := map[service]int{}
	for run, p := range o.Processes {
		starts[service{MemberOf(run), p.Hostname}]++
	}
	for s, started := range starts {
		n += max(started-1-o.Requested[s.member], 0)
	}
	return n
}

// wrongBills compares the bill of each member with the kernel's times: at most billResolution above the longest that
// each stretch may have been, and, once it is final, at most an interval below the shortest.
func (o Observed) wrongBills(f Faults) (lines []string) {
	billed, surely, possibly := map[string]time.Duration{}, map[string][]Stretch{}, map[string][]Stretch{}
	for run, d := range o.Billed {
		billed[MemberOf(run)] += d
	}
	for run, p := range o.Processes {
		m, end := MemberOf(run), p.EndedAt
		if end.IsZero() {
			end = o.At
		}
		possibly[m] = append(possibly[m], Stretch{p.NotStartedAt, end.Add(p.Waited)})
		if !p.StartedAt.IsZero() {
			surely[m] = append(surely[m], Stretch{p.StartedAt, end})
		}
	}
	var unbilled, overbilled time.Duration
	for _, m := range slices.Sorted(maps.Keys(possibly)) {
		most, n := Together(possibly[m])
		least, runs := Together(surely[m])
		if over := billed[m] - most - time.Duration(n)*billResolution; over > 0 {
			overbilled += over
			if overbilled > f.Overbilled {
				lines = append(lines, fmt.Sprintf("member %s is billed %s, its %d runs took %s at most%s", m, billed[m], n, most,
					o.runsOf(m)))
			}
		}
		if lacks := least - billed[m] - time.Duration(runs)*MeteringInterval; o.Final[m] && lacks > 0 {
			unbilled += lacks
			if unbilled > f.Unbilled {
				lines = append(lines, fmt.Sprintf("member %s is billed %s, its %d runs took %s at least%s", m, billed[m], runs,
					least, o.runsOf(m)))
			}
		}
	}
	return lines
}

// runsOf lists the runs of a member, each in a line.
func (o Observed) runsOf(member string) (lines string) {
	const clock = "15:04:05.000"
	for _, run := range slices.Sorted(maps.Keys(o.Processes)) {
		if p := o.Processes[run]; MemberOf(run) == member {
			lines += fmt.Sprintf("\n    %s (%s) created %s, waited until %s, ran from %s to %s and %s later: billed %s",
				run, p.Hostname, p.CreatedAt.Format(clock), p.NotStartedAt.Format(clock), p.StartedAt.Format(clock),
				p.EndedAt.Format(clock), p.Waited, o.Billed[run])
		}
	}
	return lines
}

// The queries of an audit. Operations and changes of the config are requests that replace each container; an operation
// that fails is undone with another.
const (
	billedQuery = `SELECT run_id, sum(quantity)::INT8 FROM usage_recent WHERE meter = 'session_seconds' GROUP BY run_id`
	finalQuery  = `SELECT id::TEXT FROM subjects WHERE kind = 'member' AND final_sequence IS NOT NULL`
	// requestedQuery counts each part by itself: a join would multiply them.
	requestedQuery = `SELECT m.id::TEXT, (
			SELECT count(*) + count(*) FILTER (WHERE status = 'failed') FROM instance_operations o
			WHERE o.instance_id = m.instance_id AND kind IN ('upgrade', 'rollback', 'start')
		) + (
			SELECT count(*) FROM audit_rows a WHERE a.resource_id = m.instance_id::TEXT
				AND a.action = 'apps.instance.change' AND a.after->>'config_changed' = 'true'
		) FROM instance_members m`
	suspenseQuery = `SELECT DISTINCT reason FROM suspense_records`
)

// observe reads what the hub has billed before it reads the processes: what is billed then has run.
func (w *Testbed) observe() (o Observed, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(w.Ctx), ConvergenceBound)
	defer cancel()
	if err := w.observeHub(ctx, &o); err != nil {
		return o, err
	}
	o.Processes, o.At = map[string]ContainerProcess{}, time.Now()
	for _, k := range w.audit.kernels {
		maps.Copy(o.Processes, k.Processes())
	}
	for _, c := range w.audit.agents {
		calls, err := callsOf(c, w.Hub.Config)
		if err != nil {
			return o, err
		}
		o.Nodes = append(o.Nodes, calls)
	}
	o.Pulls, err = pullsOf(w.Hub.Config)
	return o, err
}

// observeHub reads the hub's rows as they are at one moment: nodes go on sending, and a bill that becomes final between
// two readings would lack what came with its last record.
func (w *Testbed) observeHub(ctx context.Context, o *Observed) error {
	db, err := pgx.Connect(ctx, w.Hub.Config.DatabaseURL())
	if err != nil {
		return err
	}
	defer func() { _ = db.Close(ctx) }()
	tx, err := db.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(ctx) }()
	o.Billed, o.Final, o.Requested = map[string]time.Duration{}, map[string]bool{}, map[string]int{}
	var id, reason string
	var n int64
	for query, row := range map[string]struct {
		into []any
		add  func() error
	}{
		billedQuery:    {[]any{&id, &n}, func() error { o.Billed[id] = time.Duration(n) * time.Microsecond; return nil }},
		finalQuery:     {[]any{&id}, func() error { o.Final[id] = true; return nil }},
		requestedQuery: {[]any{&id, &n}, func() error { o.Requested[id] = int(n); return nil }},
		suspenseQuery:  {[]any{&reason}, func() error { o.Suspense = append(o.Suspense, reason); return nil }},
	} {
		rows, err := tx.Query(ctx, query)
		if err != nil {
			return err
		}
		if _, err := pgx.ForEachRow(rows, row.into, row.add); err != nil {
			return fmt.Errorf("%s: %w", query, err)
		}
	}
	return nil
}

// RequireNoFilesOf checks that no file below the directories of the node bears the name of an ended member.
func (w *Testbed) RequireNoFilesOf(i api.AppInstance) {
	w.T.Helper()
	w.Eventually("no file of "+i.DisplayName+" is left", func() error {
		found, seen := []string(nil), 0
		for _, dir := range []string{w.Agent.Config.Dir, w.Agent.Config.RunDir} {
			err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
				seen++
				for _, m := range i.Members {
					if err == nil && strings.Contains(filepath.Base(path), m.ID) {
						found = append(found, path)
					}
				}
				return nil // what disappears meanwhile is not left
			})
			require.NoError(w.T, err)
		}
		require.Greater(w.T, seen, len(found)+2, "the node has directories")
		return DifferenceError(found)
	})
}
