package e2e_test

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

// stormPlan is how hard it blows. A longer one is a matter of the environment.
type stormPlan struct {
	seed uint64
	// kills is how often each is killed at least, lifecycles how many finish at least meanwhile.
	kills, lifecycles int
	// pause is the longest time between two kills, restart what a supervisor waits before it starts a program again.
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

// Law 13, under everything that can be killed: hub, its PostgreSQL, containerd's daemon and the agent, in random order,
// while app instances go through their whole lives. All of it converges; each step happened once; every second is
// billed once, and none that containerd and the kernel did not see.
func TestLaw13EverythingResumesThroughAStormOfKills(t *testing.T) {
	plan := planOfStorm(t)
	s := newStorm(t, plan)
	s.launchKeeper()
	s.blow()
	s.endKeeper()
	s.settle()
	s.requireBills()
	s.requireNothingBroke()
}

// storm is a world in which programs are killed and started again while workers use it.
type storm struct {
	*world
	plan      stormPlan
	victims   []*victim
	workers   []*client.Hub
	truth     *truth
	witness   *witness
	lastKill  time.Time
	supervise sync.WaitGroup
	// reign is how long the supervisors work.
	reign context.Context
	// keeper runs all the time, and nobody touches it; keeperPID is its process.
	keeper    client.AppInstance
	keeperPID uint32

	mu    sync.Mutex
	lives []lifecycle
	// blind are the times in which the node could not look at its containers: agent or containerd was away.
	blind []outage
}

func newStorm(t *testing.T, plan stormPlan) *storm {
	t.Helper()
	w := newWorld(t)
	ctx, cancel := context.WithTimeout(context.Background(), stormLimit)
	t.Cleanup(cancel)
	w.ctx = ctx
	w.startContainerd()
	c := w.hubConfig()
	c.ExtraArgs = []string{"--resync", stormResync.String(), "--lease-duration", "1h"}
	w.startHub(c)
	s := &storm{world: w, plan: plan}
	reign, abdicate := context.WithCancel(w.ctx)
	s.reign = reign
	var err error
	w.tenant, err = scenario.NewTenant(w.ctx, w.hub, filepath.Join(w.dir, "tenant-acme"), "acme", "10000")
	require.NoError(t, err)
	for n := range stormWorkers {
		// One account each: the hub bounds how often one may ask.
		hub, err := w.tenant.ServiceAccount(w.ctx, fmt.Sprintf("worker-%d", n), client.ServiceAccountRoleAppOperator)
		require.NoError(t, err)
		s.workers = append(s.workers, hub)
	}
	w.operator = s.workers[0]
	conf := w.agentConfig("node")
	conf.ExtraArgs = []string{
		"--metering-interval", "1s", "--usage-interval", "3s", "--resync", stormResync.String(),
		"--report-interval", "1s", "--dial-retry-max", "1s",
	}
	w.agent = w.startAgent(conf)
	w.shipSmallApp()
	w.allocation, err = w.tenant.Allocate(w.ctx, w.tenant.Admin, w.agent.Ready.NodeID, 2, 2048)
	require.NoError(t, err)
	// The image is fetched before the storm: a registry that is away is not what this is about.
	w.decommission(w.launch("first"))
	s.truth, s.witness = w.listen(conf.ContainerdNamespace), w.watch(conf.ContainerdNamespace)
	t.Cleanup(func() {
		// Before anything is taken down: nobody is to start it again.
		abdicate()
		s.supervise.Wait()
	})
	s.victims = []*victim{s.hubVictim(), s.databaseVictim(), s.containerdVictim(), s.agentVictim()}
	return s
}

// shipSmallApp ships two versions of the app that take little of a node.
func (w *world) shipSmallApp() {
	w.t.Helper()
	var err error
	w.publisher, err = w.tenant.NewPublisher(w.ctx)
	require.NoError(w.t, err)
	w.shipVersion("1.0.0", "default: 500", "default: 200")
	w.shipVersion("2.0.0", "default: 500", "default: 200", firstGreeting, secondGreeting)
	require.NoError(w.t, w.tenant.Entitle(w.ctx, appSlug))
	require.NoError(w.t, w.tenant.Price(w.ctx, appSlug, pricePerHour))
}

// victim is a program that is killed, and started again by a supervisor.
type victim struct {
	name string
	kill func() error
	// isUp says whether there is something to kill; it is asked until then.
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

// keep starts the supervisor; start returns what is closed when the program ends. away may be nil.
func (s *storm) keep(name string, exited <-chan struct{}, away func(outage),
	start func() (<-chan struct{}, error),
) *supervised {
	p := &supervised{up: true, exited: exited}
	s.supervise.Go(func() {
		for {
			select {
			case <-s.reign.Done():
				return
			case <-p.exited:
			}
			from := time.Now()
			p.set(false, nil)
			for !p.isUp() {
				if !pause(s.reign, s.plan.restart) {
					return
				}
				exited, err := start()
				if err != nil {
					first, _, _ := strings.Cut(err.Error(), "\n")
					s.t.Logf("%s: start again: %s", name, first)
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

func (s *storm) hubVictim() *victim {
	c := s.hub.Config
	c.Listen, c.SessionListen = strings.TrimPrefix(s.hub.Ready.APIURL, "https://"), s.hub.Ready.SessionAddr
	p := s.keep("hub", s.hub.Exited(), nil, func() (<-chan struct{}, error) {
		hub, err := devcluster.StartHub(s.reign, c)
		if err != nil {
			return nil, err
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		hub.RootFingerprint, s.hub = s.hub.RootFingerprint, hub
		return hub.Exited(), nil
	})
	return &victim{name: "hub", isUp: p.isUp, kill: func() error {
		s.mu.Lock()
		hub := s.hub
		s.mu.Unlock()
		return hub.Kill9()
	}}
}

func (s *storm) agentVictim() *victim {
	a := s.agent
	p := s.keep("agent", a.Exited(), s.wasBlind, func() (<-chan struct{}, error) {
		again, err := devcluster.StartAgent(s.reign, a.Config)
		if err != nil {
			return nil, err
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		a.Process, a.Ready = again.Process, again.Ready
		return again.Exited(), nil
	})
	return &victim{name: "agent", isUp: p.isUp, kill: func() error {
		s.mu.Lock()
		process := a.Process
		s.mu.Unlock()
		return process.Kill9()
	}}
}

func (s *storm) containerdVictim() *victim {
	p := s.keep("containerd", s.containerd.Exited(), s.wasBlind, func() (<-chan struct{}, error) {
		err := s.containerd.Start(s.reign)
		return s.containerd.Exited(), err
	})
	return &victim{name: "containerd", isUp: p.isUp, kill: s.containerd.Kill9}
}

// databaseVictim is the hub's private PostgreSQL. The hub itself is its supervisor.
func (s *storm) databaseVictim() *victim {
	data := filepath.Join(s.hub.Config.DataDir(), "postgres", "data")
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
		// The file of one that was killed stays; its number may be anyone's.
		if cwd, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", pid)); err != nil || cwd != data {
			return 0
		}
		return pid
	}
	return &victim{name: "postgresql", isUp: func() bool { return find() != 0 }, kill: func() error {
		if pid := find(); pid != 0 {
			return unix.Kill(pid, unix.SIGKILL)
		}
		return nil
	}}
}

// blow kills in random order, round after round, until each was killed often enough and enough lives are over; then
// every program is up again, and the workers end the lives that they are in.
func (s *storm) blow() {
	s.t.Helper()
	began := time.Now()
	over := make(chan struct{})
	work, ctx := errgroup.WithContext(s.ctx)
	for n, hub := range s.workers {
		work.Go(func() error { return s.work(ctx, over, n, hub) })
	}
	random := rand.New(rand.NewPCG(s.plan.seed, 1))
	for ctx.Err() == nil && (s.killsLeft() > 0 || s.finished() < s.plan.lifecycles) {
		for _, n := range random.Perm(len(s.victims)) {
			pause(ctx, time.Duration(random.Int64N(int64(s.plan.pause))))
			s.strike(ctx, s.victims[n])
		}
	}
	close(over)
	s.lastKill = time.Now()
	meanwhile := s.finished()
	for _, v := range s.victims {
		s.eventually(v.name+" is up again", func() error { return orMissing(nil, v.isUp()) })
	}
	require.NoError(s.t, work.Wait())
	took := time.Since(s.lastKill)
	var counts []string
	for _, v := range s.victims {
		counts = append(counts, fmt.Sprintf("%s %d", v.name, v.kills))
	}
	s.t.Logf("killed %s in %s; %d lives over meanwhile, %d in all, the last %s after the last kill",
		strings.Join(counts, ", "), s.lastKill.Sub(began).Round(time.Second), meanwhile, s.finished(),
		took.Round(100*time.Millisecond))
	require.Less(s.t, took, stormBound, "law 13's bound")
}

// launchKeeper starts an instance that is left alone until the storm is over.
func (s *storm) launchKeeper() {
	s.t.Helper()
	s.keeper = s.launch("keeper")
	s.keeperPID = s.pidOf(s.keeper)
}

// endKeeper holds law 4: what nobody touched answers, and is the very same process as before a hundred deaths.
func (s *storm) endKeeper() {
	s.t.Helper()
	s.answers(s.keeper)
	require.Equal(s.t, s.keeperPID, s.pidOf(s.keeper), "what nobody touched is another process")
	s.decommission(s.keeper)
	s.lives = append(s.lives, lifecycle{
		id: s.keeper.ID, member: s.keeper.Members[0].ID, runs: 1,
		events: []string{"requested", "deploying", "running", "decommission_requested", "decommissioned"},
	})
}

// strike kills as soon as there is something to kill, and no sooner than the lives keep up: kills that nothing happens
// between show nothing.
func (s *storm) strike(ctx context.Context, v *victim) {
	for !v.isUp() || s.finished()*s.plan.kills < s.plan.lifecycles*min(v.kills, s.plan.kills) {
		if !pause(ctx, 20*time.Millisecond) {
			return
		}
	}
	if err := v.kill(); err != nil {
		s.t.Errorf("kill %s: %v", v.name, err)
	}
	v.kills++
	s.t.Logf("%s: %s killed, %d lives over", time.Now().Format(clockFormat), v.name, s.finished())
}

func (s *storm) killsLeft() (left int) {
	for _, v := range s.victims {
		left += max(s.plan.kills-v.kills, 0)
	}
	return left
}

func (s *storm) finished() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.lives)
}

// settle waits until every bill is final, within law 13's bound, and holds the instances and their events.
func (s *storm) settle() {
	s.t.Helper()
	db := s.database()
	deadline := s.lastKill.Add(stormBound)
	s.eventually("every bill is final", func() error {
		var open int
		if err := db.QueryRow(s.ctx, `SELECT count(*) FROM subjects WHERE kind = 'member' AND settled_at IS NULL`).Scan(
			&open); err != nil {
			return err
		}
		if open > 0 && time.Now().After(deadline) {
			s.t.Fatalf("%d bills are not final %s after the last kill", open, stormBound)
		}
		return orMissing(nil, open == 0)
	})
	s.t.Logf("every bill was final %s after the last kill", time.Since(s.lastKill).Round(100*time.Millisecond))
	var stuck int
	require.NoError(s.t, db.QueryRow(s.ctx, `SELECT count(*) FROM app_instances WHERE status <> 'decommissioned'`).Scan(
		&stuck))
	require.Zero(s.t, stuck, "instances that are stuck")
	for _, l := range s.lives {
		require.Equal(s.t, l.events, s.eventTypes(l.id), "each step of %s once", l.id)
	}
}

// requireNothingBroke holds that no program ended by a fault of its own.
func (s *storm) requireNothingBroke() {
	s.t.Helper()
	for _, log := range []string{s.hub.LogPath, s.agent.LogPath} {
		text, err := os.ReadFile(log)
		require.NoError(s.t, err)
		for line := range strings.Lines(string(text)) {
			broke := slices.ContainsFunc([]string{"panic: ", "fatal error: ", "goroutine 1 ["}, func(sign string) bool {
				return strings.HasPrefix(line, sign)
			})
			require.False(s.t, broke, "%s: %s", log, line)
		}
	}
}
