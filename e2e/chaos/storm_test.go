package chaos_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
)

const (
	stormResync  = 5 * time.Second
	stormWorkers = 8
	// stormBound is law 13's: two resync periods and a minute after the last fault everything has converged.
	stormBound = 2*stormResync + time.Minute
	// stormLimit bounds the whole test; it is never reached by one that passes.
	stormLimit = 20 * time.Minute
)

// stormPlan says how many faults are injected. The environment may ask for more.
type stormPlan struct {
	seed uint64
	// kills is how often each program is killed at least, lifecycles how many instances finish at least meanwhile.
	kills, lifecycles int
	// pause is the longest time between two kills, restart the supervisors' pause before a program is started again.
	pause, restart time.Duration
}

func planOfStorm(t *testing.T) stormPlan {
	t.Helper()
	number := func(name string, def int) int {
		text := os.Getenv(name)
		if text == "" {
			return def
		}
		n, err := strconv.Atoi(text)
		require.NoError(t, err, name)
		return n
	}
	p := stormPlan{
		seed: uint64(number("GPUAAS_STORM_SEED", int(rand.Uint32()))), kills: number("GPUAAS_STORM_KILLS", 10),
		lifecycles: number("GPUAAS_STORM_LIFECYCLES", 100),
		pause:      time.Duration(number("GPUAAS_STORM_PAUSE_MILLIS", 4000)) * time.Millisecond,
		restart:    time.Duration(number("GPUAAS_STORM_RESTART_MILLIS", 300)) * time.Millisecond,
	}
	t.Logf("the storm: %+v; again with GPUAAS_STORM_SEED=%d", p, p.seed)
	return p
}

// Law 13: hub, PostgreSQL, containerd and agent are killed in random order while clients take instances, one of them of
// an app of several services, through their lifecycle. Everything converges, each step happens once, and each second
// that the oracles saw is billed once.
func TestLaw13EverythingResumesThroughAStormOfKills(t *testing.T) {
	plan := planOfStorm(t)
	s := newStorm(t, plan)
	s.launchSentinel()
	s.injectFaults()
	s.endSentinel()
	s.awaitFinalBills()
	s.requireBills()
	s.requireProjectBills()
	s.requireNoPanic()
}

// storm is a platform whose programs are killed and restarted while workers use it.
type storm struct {
	*harness.Testbed
	plan             stormPlan
	targets          []*target
	workers          []*client.Hub
	containerdOracle *harness.ContainerdOracle
	kernelOracle     *harness.KernelOracle
	lastKill         time.Time
	supervise        sync.WaitGroup
	// supervision ends the supervisors.
	supervision context.Context
	// sentinel runs through the whole test and no client changes it; sentinelPID is its process.
	sentinel    client.AppInstance
	sentinelPID uint32

	mu         sync.Mutex
	lifecycles []lifecycle
	// unobserved are the intervals in which the node could not sample usage.
	unobserved []outage
}

func newStorm(t *testing.T, plan stormPlan) *storm {
	t.Helper()
	w := harness.New(t)
	ctx, cancel := context.WithTimeout(context.Background(), stormLimit)
	t.Cleanup(cancel)
	w.Ctx = ctx
	w.StartContainerd()
	c := w.HubConfig()
	c.ExtraArgs = []string{"--resync", stormResync.String(), "--lease-duration", "1h"}
	w.StartHub(c)
	s := &storm{Testbed: w, plan: plan}
	supervision, stopSupervision := context.WithCancel(w.Ctx)
	s.supervision = supervision
	var err error
	w.Tenant, err = scenario.NewTenant(w.Ctx, w.Hub, filepath.Join(w.Dir, "tenant-acme"), "acme", "10000")
	require.NoError(t, err)
	w.Tenant.WaitLimit = harness.ConvergenceBound
	for n := range stormWorkers {
		// The hub limits requests by caller, so each worker has an account of its own.
		hub, err := w.Tenant.ServiceAccount(w.Ctx, fmt.Sprintf("worker-%d", n), client.ServiceAccountRoleAppOperator)
		require.NoError(t, err)
		s.workers = append(s.workers, hub)
	}
	w.Operator = s.workers[0]
	conf := w.AgentConfig("node")
	conf.ExtraArgs = []string{
		"--metering-interval", "1s", "--usage-interval", "3s", "--resync", stormResync.String(),
		"--report-interval", "1s", "--dial-retry-max", "1s",
	}
	w.Agent = w.StartAgent(conf)
	w.Explain(harness.Faults{
		Why:      "agent and containerd are killed: requireBills holds each run to its last checkpoint",
		Unbilled: stormLimit,
	})
	shipSmallApp(w)
	w.Allocation, err = w.Tenant.Allocate(w.Ctx, w.Tenant.Admin, w.Agent.Ready.NodeID, 2, 2048)
	require.NoError(t, err)
	// The images are pulled before the first kill: this test is not about registries.
	w.Decommission(w.Launch("first"))
	w.ShipProject(map[string][]string{"1.0.0": nil, "2.0.0": {harness.FirstGreeting, harness.SecondGreeting}})
	w.Decommission(w.LaunchProject("first of several services"))
	s.containerdOracle, s.kernelOracle = w.WatchContainerd(conf.ContainerdNamespace),
		w.WatchKernel(conf.ContainerdNamespace)
	t.Cleanup(func() {
		// The supervisors end before the programs are stopped.
		stopSupervision()
		s.supervise.Wait()
	})
	s.targets = []*target{s.hubTarget(), s.databaseTarget(), s.containerdTarget(), s.agentTarget()}
	return s
}

// shipSmallApp ships two versions of the app with small limits, so that all workers' instances fit.
func shipSmallApp(w *harness.Testbed) {
	w.T.Helper()
	var err error
	w.Publisher, err = w.Tenant.NewPublisher(w.Ctx)
	require.NoError(w.T, err)
	w.ShipVersion("1.0.0", "default: 500", "default: 200")
	w.ShipVersion("2.0.0", "default: 500", "default: 200", harness.FirstGreeting, harness.SecondGreeting)
	require.NoError(w.T, w.Tenant.Entitle(w.Ctx, harness.AppSlug))
	require.NoError(w.T, w.Tenant.Price(w.Ctx, harness.AppSlug, harness.PricePerHour))
}

// target is a program that is killed, and started again by a supervisor.
type target struct {
	name string
	kill func() error
	// isUp reports whether there is a process to kill.
	isUp  func() bool
	kills int
}

// supervised is a program with a supervisor: whenever it ends, it is started again after the pause.
type supervised struct {
	mu     sync.Mutex
	up     bool
	exited <-chan struct{}
}

func (p *supervised) isUp() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.up
}

func (p *supervised) set(up bool, exited <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.up, p.exited = up, exited
}

// startSupervisor starts the supervisor; start returns what is closed when the program ends. away may be nil.
func (s *storm) startSupervisor(name string, exited <-chan struct{}, away func(outage),
	start func() (<-chan struct{}, error),
) *supervised {
	p := &supervised{up: true, exited: exited}
	s.supervise.Go(func() {
		for {
			select {
			case <-s.supervision.Done():
				return
			case <-p.exited:
			}
			from := time.Now()
			p.set(false, nil)
			for !p.isUp() {
				if !pause(s.supervision, s.plan.restart) {
					return
				}
				exited, err := start()
				if err != nil {
					first, _, _ := strings.Cut(err.Error(), "\n")
					s.T.Logf("%s: start again: %s", name, first)
					continue
				}
				if away != nil {
					away(outage{from: from, to: time.Now()})
				}
				p.set(true, exited)
			}
		}
	})
	return p
}

func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

func (s *storm) hubTarget() *target {
	c := s.Hub.Config
	c.Listen, c.SessionListen = strings.TrimPrefix(s.Hub.Ready.APIURL, "https://"), s.Hub.Ready.SessionAddr
	p := s.startSupervisor("hub", s.Hub.Exited(), nil, func() (<-chan struct{}, error) {
		hub, err := devcluster.StartHub(s.supervision, c)
		if err != nil {
			return nil, err
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		hub.RootFingerprint, s.Hub = s.Hub.RootFingerprint, hub
		return hub.Exited(), nil
	})
	return &target{name: "hub", isUp: p.isUp, kill: func() error {
		s.mu.Lock()
		hub := s.Hub
		s.mu.Unlock()
		return hub.Kill9()
	}}
}

func (s *storm) agentTarget() *target {
	a := s.Agent
	p := s.startSupervisor("agent", a.Exited(), s.addUnobserved, func() (<-chan struct{}, error) {
		again, err := devcluster.StartAgent(s.supervision, a.Config)
		if err != nil {
			return nil, err
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		a.Process, a.Ready = again.Process, again.Ready
		return again.Exited(), nil
	})
	return &target{name: "agent", isUp: p.isUp, kill: func() error {
		s.mu.Lock()
		process := a.Process
		s.mu.Unlock()
		return process.Kill9()
	}}
}

func (s *storm) containerdTarget() *target {
	p := s.startSupervisor("containerd", s.Containerd.Exited(), s.addUnobserved, func() (<-chan struct{}, error) {
		err := s.Containerd.Start(s.supervision)
		return s.Containerd.Exited(), err
	})
	return &target{name: "containerd", isUp: p.isUp, kill: s.Containerd.Kill9}
}

// databaseTarget is the hub's private PostgreSQL. The hub itself is its supervisor.
func (s *storm) databaseTarget() *target {
	data := filepath.Join(s.Hub.Config.DataDir(), "postgres", "data")
	find := func() int {
		text, err := os.ReadFile(filepath.Join(data, "postmaster.pid"))
		if err != nil || !strings.Contains(string(text), "ready") {
			return 0
		}
		first, _, _ := strings.Cut(string(text), "\n")
		pid, err := strconv.Atoi(first)
		if err != nil {
			return 0
		}
		// The file of a killed server stays, and its process id may be another's.
		if cwd, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", pid)); err != nil || cwd != data {
			return 0
		}
		return pid
	}
	return &target{name: "postgresql", isUp: func() bool { return find() != 0 }, kill: func() error {
		if pid := find(); pid != 0 {
			return unix.Kill(pid, unix.SIGKILL)
		}
		return nil
	}}
}

// injectFaults runs the workers and kills the targets in random order, until the plan's numbers are reached. It returns
// when every program is up again and the workers have ended their lifecycles.
func (s *storm) injectFaults() {
	s.T.Helper()
	began := time.Now()
	over := make(chan struct{})
	work, ctx := errgroup.WithContext(s.Ctx)
	for n, hub := range s.workers {
		work.Go(func() error { return s.work(ctx, over, n, hub) })
	}
	random := rand.New(rand.NewPCG(s.plan.seed, 1))
	for ctx.Err() == nil && (s.killsLeft() > 0 || s.finished() < s.plan.lifecycles) {
		for _, n := range random.Perm(len(s.targets)) {
			pause(ctx, time.Duration(random.Int64N(int64(s.plan.pause))))
			s.killTarget(ctx, s.targets[n])
		}
	}
	close(over)
	s.lastKill = time.Now()
	meanwhile := s.finished()
	for _, v := range s.targets {
		s.Eventually(v.name+" is up again", func() error { return harness.Pending(nil, v.isUp()) })
	}
	require.NoError(s.T, work.Wait())
	took := time.Since(s.lastKill)
	var counts []string
	for _, v := range s.targets {
		counts = append(counts, fmt.Sprintf("%s %d", v.name, v.kills))
	}
	s.T.Logf("killed %s in %s; %d lifecycles over meanwhile, %d in all, the last %s after the last kill",
		strings.Join(counts, ", "), s.lastKill.Sub(began).Round(time.Second), meanwhile, s.finished(),
		took.Round(100*time.Millisecond))
	require.Less(s.T, took, stormBound, "law 13's bound")
}

// launchSentinel starts the instance that must survive all kills.
func (s *storm) launchSentinel() {
	s.T.Helper()
	s.sentinel = s.Launch("sentinel")
	s.sentinelPID = s.PidOf(s.sentinel)
}

// endSentinel asserts law 4: the sentinel answers, and its process is still the same.
func (s *storm) endSentinel() {
	s.T.Helper()
	s.RequireAnswer(s.sentinel)
	require.Equal(s.T, s.sentinelPID, s.PidOf(s.sentinel), "the sentinel was restarted")
	s.Decommission(s.sentinel)
	s.lifecycles = append(s.lifecycles, lifecycle{
		id: s.sentinel.ID, member: s.sentinel.Members[0].ID, runs: 1, app: harness.AppSlug,
		events: []string{"requested", "deploying", "running", "decommission_requested", "decommissioned"},
	})
}

// killTarget waits until the target is up and enough lifecycles have finished since the last kill: kills without work
// between them test nothing.
func (s *storm) killTarget(ctx context.Context, v *target) {
	for !v.isUp() || s.finished()*s.plan.kills < s.plan.lifecycles*min(v.kills, s.plan.kills) {
		if !pause(ctx, 20*time.Millisecond) {
			return
		}
	}
	// Each worker may have an instance whose start or pull a kill interrupts. The bill of a start whose answer was lost
	// begins with its call.
	s.Explain(harness.Faults{
		Why:        "programs are killed while containers start",
		Restarts:   stormWorkers,
		Overbilled: stormWorkers * resolution,
		Pulls:      true,
	})
	if err := v.kill(); err != nil {
		s.T.Errorf("kill %s: %v", v.name, err)
	}
	v.kills++
	s.T.Logf("%s: %s killed, %d lifecycles over", time.Now().Format(clockFormat), v.name, s.finished())
}

func (s *storm) killsLeft() (left int) {
	for _, v := range s.targets {
		left += max(s.plan.kills-v.kills, 0)
	}
	return left
}

func (s *storm) finished() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.lifecycles)
}

// awaitFinalBills waits until every bill is final, within law 13's bound, and checks the instances and their events.
func (s *storm) awaitFinalBills() {
	s.T.Helper()
	db := s.Database()
	deadline := s.lastKill.Add(stormBound)
	s.Eventually("every bill is final", func() error {
		var open int
		if err := db.QueryRow(s.Ctx, `SELECT count(*) FROM subjects WHERE kind = 'member' AND settled_at IS NULL`).Scan(
			&open); err != nil {
			return err
		}
		if open > 0 && time.Now().After(deadline) {
			s.T.Fatalf("%d bills are not final %s after the last kill", open, stormBound)
		}
		return harness.Pending(nil, open == 0)
	})
	s.T.Logf("every bill was final %s after the last kill", time.Since(s.lastKill).Round(100*time.Millisecond))
	var stuck int
	require.NoError(s.T, db.QueryRow(s.Ctx, `SELECT count(*) FROM app_instances WHERE status <> 'decommissioned'`).Scan(
		&stuck))
	require.Zero(s.T, stuck, "instances that are stuck")
	for _, l := range s.lifecycles {
		require.Equal(s.T, l.events, s.EventTypes(l.id), "each step of %s once", l.id)
	}
}

// requireNoPanic asserts that neither hub nor agent has panicked.
func (s *storm) requireNoPanic() {
	s.T.Helper()
	for _, log := range []string{s.Hub.LogPath, s.Agent.LogPath} {
		text, err := os.ReadFile(log)
		require.NoError(s.T, err)
		for line := range strings.Lines(string(text)) {
			broke := slices.ContainsFunc([]string{"panic: ", "fatal error: ", "goroutine 1 ["}, func(sign string) bool {
				return strings.HasPrefix(line, sign)
			})
			require.False(s.T, broke, "%s: %s", log, line)
		}
	}
}
