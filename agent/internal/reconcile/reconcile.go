// Package reconcile makes the machine match the desired state: it observes containers and networks, asks agent.Diff for
// actions, executes them, probes what runs, and samples usage. It makes no decisions of its own, and keeps nothing that
// must outlive the process: agent/internal/state does.
package reconcile

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/agent/policy"
	"github.com/gpuaas/gpuaas/pkg/keylock"
	"github.com/gpuaas/gpuaas/pkg/loop"
	"github.com/gpuaas/gpuaas/pkg/notify"
	"github.com/gpuaas/gpuaas/protocol"
)

// Limits of what is done at the same time.
const (
	// maxPulls bounds image pulls: they compete for one uplink and one disk. maxOrgPulls bounds those of one org.
	maxPulls    = 4
	maxOrgPulls = 3
	// maxActions bounds all other actions but stops, which mostly wait.
	maxActions = 32
	// firstPassMax bounds how long housekeeping waits for the first pass.
	firstPassMax = 5 * time.Second
	// imagesEvery is the interval of image garbage collection.
	imagesEvery = 10 * time.Minute
)

// DefaultCollectEvery is the default of Config.CollectEvery.
const DefaultCollectEvery = 10 * time.Minute

// Config says how often and where. Zero values take the defaults.
type Config struct {
	// MeteringInterval is the time between two samples of usage.
	MeteringInterval time.Duration
	UsageInterval    time.Duration
	Resync           time.Duration
	// CollectEvery is how often the store gives disk space of overwritten values back, and is measured.
	CollectEvery time.Duration
	// DeviceCheckInterval lies between two checks whether a container can open the devices of its accelerators.
	DeviceCheckInterval time.Duration
	// PortFrom and PortTo bound the host ports that this node publishes on.
	PortFrom, PortTo uint16
	// AllowUnbilled is the owner's permission for leases that end with run_unbilled.
	AllowUnbilled bool
	// Policy returns what the owner allows now; with an error, what was allowed before. Nil allows everything.
	Policy func() (policy.Policy, error)
	// Unseal opens a secret parameter of a member.
	Unseal func(memberID, name string, sealed []byte) ([]byte, error)
	// WeakIsolation names what this machine lacks to keep containers from each other; empty where it lacks nothing.
	WeakIsolation []string
	Log           *slog.Logger
}

// Reconciler is the loop. Make one with New, then call Run once.
type Reconciler struct {
	cfg     Config
	store   *state.Store
	clock   *state.Clock
	machine Machine
	hub     Hub
	log     *slog.Logger

	loop *loop.Loop
	// volumeLoop applies the state's volumes of projects; volumeWork is held by project while one is worked on.
	volumeLoop *loop.Loop
	volumeWork keylock.Map
	// imageGC collects images that nothing uses; imageSpace is how many bytes the last failed pull lacked.
	imageGC    *loop.Loop
	imageSpace atomic.Int64
	// nextPass wakes the loop when time alone makes a pass necessary; only passes use it.
	nextPass *time.Timer
	pulls    chan struct{}
	orgPulls keylock.Map
	actions  chan struct{}
	// diskCheck wakes the disk guard when a pass finds more containers than the pass before, which found checkedCount.
	diskCheck    notify.Signal
	checkedCount int
	// watchedSince is when this agent began to probe containers, or when its clock was last set.
	watchedSince atomic.Pointer[time.Time]
	// sampling orders samples: the meter must not see an older listing after a newer one.
	sampling sync.Mutex
	// clockLock is held for reading while node times are compared with stored ones, for writing while the clock is set.
	clockLock sync.RWMutex
	// pendingClock is the hub's time that the next sample sets; proposing guards the exchange.
	pendingClock atomic.Pointer[clockProposal]
	// withoutDevices are the members whose accelerators did not work at the last pass: their time is not counted.
	withoutDevices atomic.Pointer[map[string]bool]
	proposing      sync.Mutex
	clockDue       notify.Signal
	running        sync.WaitGroup
	// passed is closed when the first pass has ended.
	passed    chan struct{}
	firstPass sync.Once

	subscribers notify.Broadcast
	// newRunID gives a member's next run an id that is never used twice.
	newRunID func(memberID string) string

	mu sync.Mutex
	// busy holds the running actions of each member.
	busy map[string]map[*work]bool
	// retryAfter holds services and members back after an action that failed through no fault of the workload.
	retryAfter map[heldWork]time.Time
	probers    map[string]*prober
	report     agent.Report
	// debounced notifies the subscribers of changes that are not urgent.
	debounced  *time.Timer
	conditions map[string]string
	volumes    projectVolumes
	// pulling has the image that a member waits for, by member id.
	pulling map[string]string
}

// work is a running action: the pull of an image, which can be cancelled, or another one, of a service or of the whole
// member.
type work struct {
	image, service string
	cancel         context.CancelFunc
}

// heldWork is what may be done again after a pause; without a service it is the whole member.
type heldWork struct{ memberID, service string }

// New makes a reconciler.
func New(cfg Config, store *state.Store, clock *state.Clock, machine Machine, hub Hub) *Reconciler {
	cfg.MeteringInterval = cmp.Or(max(cfg.MeteringInterval, 0), agent.DefaultMeteringInterval)
	cfg.UsageInterval = cmp.Or(max(cfg.UsageInterval, 0), meter.DefaultCutEvery)
	cfg.Resync = cmp.Or(max(cfg.Resync, 0), agent.DefaultResync)
	cfg.CollectEvery = cmp.Or(max(cfg.CollectEvery, 0), DefaultCollectEvery)
	cfg.DeviceCheckInterval = cmp.Or(max(cfg.DeviceCheckInterval, 0), defaultDeviceCheckInterval)
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	if cfg.Policy == nil {
		cfg.Policy = func() (policy.Policy, error) { return policy.Policy{}, nil }
	}
	r := &Reconciler{
		cfg:        cfg,
		store:      store,
		clock:      clock,
		machine:    machine,
		hub:        hub,
		log:        cfg.Log,
		pulls:      make(chan struct{}, maxPulls),
		actions:    make(chan struct{}, maxActions),
		diskCheck:  notify.NewSignal(),
		clockDue:   notify.NewSignal(),
		passed:     make(chan struct{}),
		busy:       map[string]map[*work]bool{},
		retryAfter: map[heldWork]time.Time{},
		probers:    map[string]*prober{},
		conditions: map[string]string{},
		newRunID:   newRunID,
		pulling:    map[string]string{},
		volumes:    projectVolumes{map[string]bool{}, map[string]*protocol.VolumeStatus{}},
		volumeWork: keylock.Map{Holders: maxVolumeWork},
		orgPulls:   keylock.Map{Holders: maxOrgPulls},
	}
	r.watchedSince.Store(new(clock.Now()))
	r.volumeLoop = loop.New("volumes", cfg.Resync, r.applyVolumes, cfg.Log)
	r.imageGC = loop.New("images", imagesEvery, r.collectImages, cfg.Log)
	r.loop = loop.New("reconcile", cfg.Resync, r.pass, cfg.Log)
	return r
}

// Subscribe returns a channel that is signalled when the report has changed.
func (r *Reconciler) Subscribe() <-chan struct{} { return r.subscribers.Subscribe() }

// Report returns the report of the last pass, with the accelerators and environments as they are now. Callers do not
// change it.
func (r *Reconciler) Report() agent.Report {
	environments := r.installedEnvironments()
	r.mu.Lock()
	defer r.mu.Unlock()
	report := r.report
	report.Accelerators, report.Environments = r.machine.Accelerators.List(), environments
	report.Volumes = r.volumeStatuses()
	return report
}

// Run works until ctx ends, then waits for the running actions to stop. Containers go on running.
func (r *Reconciler) Run(ctx context.Context) error {
	changed, events := r.store.Subscribe(), r.machine.Containers.Events(ctx)
	inventory := r.machine.Accelerators.Subscribe()
	r.running.Go(func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-changed:
				r.volumeLoop.Wake()
			case <-events:
			case <-inventory:
				r.publishInventory()
			}
			r.Wake()
		}
	})
	measured := make(chan struct{})
	r.running.Go(func() {
		r.sampleNow(ctx)
		close(measured)
		r.meteringLoop(ctx)
	})
	r.afterFirstPass(ctx, func() { r.guardDisk(ctx) })
	r.afterFirstPass(ctx, func() { _ = r.imageGC.Run(ctx) })
	r.afterFirstPass(ctx, func() { _ = r.volumeLoop.Run(ctx) })
	r.afterFirstPass(ctx, func() { _ = loop.New("isolation", r.cfg.Resync, r.guardIsolation, r.log).Run(ctx) })
	// A pass may stop containers. How long they ran without an agent is stored first: then several kills in a row cost a
	// bill no more than one.
	<-measured
	err := r.loop.Run(ctx)
	r.running.Wait()
	return err
}

// afterFirstPass runs housekeeping beside the passes: disks and firewall take longer than a pass may. The first pass
// has the machine to itself, unless containerd keeps it waiting.
func (r *Reconciler) afterFirstPass(ctx context.Context, work func()) {
	r.running.Go(func() {
		select {
		case <-ctx.Done():
		case <-r.passed:
			work()
		case <-time.After(firstPassMax):
			work()
		}
	})
}

// Wake asks for a pass soon. It carries no data.
func (r *Reconciler) Wake() { r.loop.Wake() }

// pass observes, decides and starts the actions.
func (r *Reconciler) pass(ctx context.Context) error {
	r.clockLock.RLock()
	defer r.clockLock.RUnlock()
	defer r.firstPass.Do(func() { close(r.passed) })
	s, err := r.observe(ctx)
	if ctx.Err() != nil {
		return nil
	}
	r.setCondition(protocol.ConditionContainerdUnavailable, err)
	if err != nil {
		r.publishConditions()
		return fmt.Errorf("observe the machine: %w", err)
	}
	now := r.clock.Now()
	actions := agent.Diff(s.desired, s.leases, s.observed, now)
	r.forgetStops(ctx, s, actions)
	for _, a := range actions {
		r.start(ctx, a)
	}
	r.probe(ctx, s)
	if len(s.observed.Containers) > r.checkedCount {
		r.diskCheck.Send()
	}
	r.checkedCount = len(s.observed.Containers)
	r.publish(agent.Report{
		Epoch: s.desired.Epoch, Generation: s.desired.Generation, Workloads: r.statuses(ctx, s, now),
	})
	r.scheduleNext(earliest(agent.NextChange(s.desired, s.leases, s.observed, now), r.nextRetry(now)), now)
	return nil
}

// statuses derives the members' statuses and signs the refusals of the machine's owner.
func (r *Reconciler) statuses(ctx context.Context, s snapshot, now time.Time) []*protocol.WorkloadStatus {
	all := agent.Statuses(s.desired, s.leases, s.observed, now)
	for _, status := range all {
		if status.GetReason() != protocol.WorkloadStatus_OWNER_REFUSED {
			continue
		}
		if err := r.store.SignRefusal(status); err != nil {
			r.log.ErrorContext(r.workContext(ctx, status.GetMemberId()), "cannot sign the owner's refusal",
				slog.String("member_id", status.GetMemberId()), slog.Any("error", err))
		}
	}
	return all
}

// guardIsolation restores the isolation rules if another program has changed them.
func (r *Reconciler) guardIsolation(ctx context.Context) error {
	restored, err := r.machine.Network.EnsureRules(ctx)
	if ctx.Err() != nil {
		return nil //nolint:nilerr // the agent is being stopped
	}
	r.setCondition(protocol.ConditionFirewallUnguarded, err)
	if restored {
		r.log.WarnContext(ctx, "another program changed this agent's firewall table; its rules are restored")
	}
	return err
}

// scheduleNext sets the timer for the next pass that time alone makes necessary; zero sets none.
func (r *Reconciler) scheduleNext(at, now time.Time) {
	if r.nextPass != nil {
		r.nextPass.Stop()
		r.nextPass = nil
	}
	if !at.IsZero() {
		r.nextPass = time.AfterFunc(max(at.Sub(now), 0), r.Wake)
	}
}

// setCondition reports a condition of the node until err is nil again.
func (r *Reconciler) setCondition(condition string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil {
		delete(r.conditions, condition)
		return
	}
	r.conditions[condition] = err.Error()
}

func (r *Reconciler) nextRetry(now time.Time) time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	var next time.Time
	for held, at := range r.retryAfter {
		if !at.After(now) {
			delete(r.retryAfter, held)
			continue
		}
		next = earliest(next, at)
	}
	return next
}

func earliest(a, b time.Time) time.Time {
	if a.IsZero() || (!b.IsZero() && b.Before(a)) {
		return b
	}
	return a
}
