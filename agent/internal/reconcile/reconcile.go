// Package reconcile makes the machine what the store says: it looks at containers and networks, asks agent.Diff what to
// do, executes that, probes what runs, and samples the meter. It makes no decisions of its own, and keeps nothing that
// must outlive it: that is in agent/internal/state.
package reconcile

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/clock"
	"github.com/gpuaas/gpuaas/agent/internal/network"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/policy"
	"github.com/gpuaas/gpuaas/pkg/loop"
	"github.com/gpuaas/gpuaas/protocol"
)

// Runtime is what is needed of containers; agent/internal/runtime has it.
type Runtime interface {
	EnsureImage(ctx context.Context, ref runtime.ImageRef, creds runtime.Credentials, tlsConf *tls.Config) error
	HasImage(ctx context.Context, ref runtime.ImageRef) (bool, error)
	Start(ctx context.Context, spec runtime.Spec) (runtime.Run, error)
	List(ctx context.Context) ([]runtime.Container, error)
	Events(ctx context.Context) <-chan struct{}
	Stop(ctx context.Context, id string, grace time.Duration) error
	Remove(ctx context.Context, id string) error
	RemoveMember(ctx context.Context, memberID string) error
	Leftovers(ctx context.Context, memberID string) ([]string, error)
	AllStats(ctx context.Context) (map[string]runtime.Stats, error)
	RotateLogs(ctx context.Context) error
	OverLimit(ctx context.Context) (over []runtime.Excess, pause time.Duration)
	CollectImages(ctx context.Context, need int64, keep ...runtime.ImageRef) error
	Exec(ctx context.Context, id string, argv []string, timeout time.Duration) (code int, err error)
	Conditions() []string
}

// Network is what is needed of networks; agent/internal/network has it.
type Network interface {
	Setup(ctx context.Context, memberID string, ports []network.PortMapping, namespaces func()) (network.Attachment, error)
	Namespaces(memberID string) network.Attachment
	Remove(ctx context.Context, memberID string) error
	List(ctx context.Context) ([]string, error)
	Leftovers(ctx context.Context, memberID string) ([]string, error)
	Guard(ctx context.Context) (restored bool, err error)
	PortFree(memberID string, port uint16) bool
	Conditions() []string
}

// Hub is what only a hub can give. Without one every call fails with a fault of kind Unavailable; nothing waits for it.
type Hub interface {
	// PullCredential lets this node pull from one repository for a while.
	PullCredential(ctx context.Context, repository string) (*protocol.PullCredential, error)
	// RegistryTLS verifies the registry and shows this node's certificate.
	RegistryTLS() (*tls.Config, error)
	// Part fetches a document by its digest.
	Part(ctx context.Context, sha256 [32]byte) ([]byte, error)
}

// Limits of what is done at the same time.
const (
	// maxPulls bounds image pulls: they compete for one uplink and one disk.
	maxPulls = 3
	// firstPassMax bounds how long housekeeping waits for the first pass.
	firstPassMax = 5 * time.Second
	// maxActions bounds everything else.
	maxActions = 32
	// everyone is all shares of Reconciler.steady, more than there are goroutines.
	everyone = 1 << 20
	// releaseRetry is the pause after a release that failed, awayRetry after anything that failed because containerd or
	// the hub was away: to ask again costs nothing.
	releaseRetry = 5 * time.Second
	awayRetry    = time.Second
	// imagesEvery is how often images that nothing uses are looked for.
	imagesEvery = 10 * time.Minute
)

// Defaults of Config.
const (
	DefaultMeteringInterval = 10 * time.Second
	DefaultUsageInterval    = 30 * time.Second
	DefaultResync           = 30 * time.Second
	DefaultCollectEvery     = 10 * time.Minute
)

// Config says how often and where. Zero values take the defaults.
type Config struct {
	MeteringInterval time.Duration
	UsageInterval    time.Duration
	Resync           time.Duration
	// CollectEvery is how often the store gives disk space of overwritten values back, and is measured.
	CollectEvery time.Duration
	// PortFrom and PortTo bound the host ports that this node publishes on.
	PortFrom, PortTo uint16
	// AllowUnbilled is the owner's permission for leases that end with run_unbilled.
	AllowUnbilled bool
	// Policy gives what the owner allows now; with an error, what was allowed before. Nil allows everything.
	Policy func() (policy.Policy, error)
	// WeakIsolation names what this machine lacks to keep containers from each other; empty where it lacks nothing.
	WeakIsolation []string
	Log           *slog.Logger
}

// Report is what one pass found.
type Report struct {
	// Passes counts complete looks; nothing is known before the first.
	Passes     uint64
	Epoch      uint64
	Generation uint64
	Workloads  []*protocol.WorkloadStatus
	Conditions []string
}

// Reconciler is the loop. Make one with New, then call Run once.
type Reconciler struct {
	cfg     Config
	store   *state.Store
	clock   *state.Clock
	runtime Runtime
	network Network
	hub     Hub
	log     *slog.Logger

	loop *loop.Loop
	// imageGC collects images that nothing uses; imageSpace is how many bytes a pull has missed.
	imageGC    *loop.Loop
	imageSpace atomic.Int64
	// alarm is touched by passes only.
	alarm   *time.Timer
	pulls   chan struct{}
	actions chan struct{}
	// more wakes the guard of the disk when there are more containers than in the pass before, which has seen this many.
	more    chan struct{}
	guarded int
	// sampling orders samples, so that the meter never sees an older look after a newer one.
	sampling sync.Mutex
	// steady has a share for whoever brings the clock and times in the store together; all of it is held to set the clock.
	steady *semaphore.Weighted
	// told is the clock that a hub has told and that the next sample sets; setting guards the exchange.
	told    atomic.Pointer[clock.Clock]
	setting sync.Mutex
	running sync.WaitGroup

	// passed is closed when the first pass has ended.
	passed    chan struct{}
	firstPass sync.Once

	mu      sync.Mutex
	busy    map[string]*work
	hold    map[string]time.Time
	probers map[string]*prober
	report  Report
	// later tells the subscribers of what nobody waits for.
	later   *time.Timer
	trouble map[string]string
	subs    []chan struct{}
}

// work is what is under way for one member.
type work struct {
	other   int
	pulling int
	// cancelPulls ends the pulls; set while there are any.
	cancelPulls []context.CancelFunc
}

// New makes a reconciler.
func New(cfg Config, store *state.Store, clock *state.Clock, rt Runtime, nw Network, hub Hub) *Reconciler {
	set := func(d *time.Duration, def time.Duration) {
		if *d <= 0 {
			*d = def
		}
	}
	set(&cfg.MeteringInterval, DefaultMeteringInterval)
	set(&cfg.UsageInterval, DefaultUsageInterval)
	set(&cfg.Resync, DefaultResync)
	set(&cfg.CollectEvery, DefaultCollectEvery)
	if cfg.Policy == nil {
		cfg.Policy = func() (policy.Policy, error) { return policy.Policy{}, nil }
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	r := &Reconciler{
		cfg: cfg, store: store, clock: clock, runtime: rt, network: nw, hub: hub, log: cfg.Log,
		pulls: make(chan struct{}, maxPulls), actions: make(chan struct{}, maxActions), more: make(chan struct{}, 1),
		steady: semaphore.NewWeighted(everyone),
		passed: make(chan struct{}),
		busy:   map[string]*work{}, hold: map[string]time.Time{}, probers: map[string]*prober{}, trouble: map[string]string{},
	}
	r.imageGC = loop.New("images", imagesEvery, r.collectImages, cfg.Log)
	r.loop = loop.New("reconcile", cfg.Resync, r.pass, cfg.Log)
	return r
}

// Subscribe returns a channel that is signalled when the report has changed.
func (r *Reconciler) Subscribe() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := make(chan struct{}, 1)
	r.subs = append(r.subs, c)
	return c
}

// Report is what the last pass found. Callers do not change it.
func (r *Reconciler) Report() Report {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.report
}

// Run works until ctx ends, then waits for what is under way to stop. Containers go on running.
func (r *Reconciler) Run(ctx context.Context) error {
	changed, events := r.store.Subscribe(), r.runtime.Events(ctx)
	r.running.Go(func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-changed:
			case <-events:
			}
			r.Wake()
		}
	})
	r.running.Go(func() { r.meteringLoop(ctx) })
	// Apart from the passes: looking at disks and a firewall takes longer than they may. The first pass has the machine to
	// itself, unless containerd keeps it waiting.
	apart := func(work func()) {
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
	apart(func() { r.guardDisk(ctx) })
	apart(func() { _ = r.imageGC.Run(ctx) })
	apart(func() { _ = loop.New("walls", r.cfg.Resync, r.guard, r.log).Run(ctx) })
	err := r.loop.Run(ctx)
	r.running.Wait()
	return err
}

// Wake asks for a pass soon. It carries nothing.
func (r *Reconciler) Wake() { r.loop.Wake() }

// pass looks, decides and starts what is to be done.
func (r *Reconciler) pass(ctx context.Context) error {
	if r.steady.Acquire(ctx, 1) != nil {
		return nil // the agent is being stopped
	}
	defer r.steady.Release(1)
	defer r.firstPass.Do(func() { close(r.passed) })
	look, err := r.look(ctx)
	if ctx.Err() != nil {
		return nil
	}
	r.note(protocol.ConditionContainerdUnavailable, err)
	if err != nil {
		r.publish(Report{}, false)
		return fmt.Errorf("look at the machine: %w", err)
	}
	now := r.clock.Now()
	for _, a := range agent.Diff(look.desired, look.leases, look.observed, now) {
		r.start(ctx, a)
	}
	r.probe(ctx, look)
	if len(look.observed.Containers) > r.guarded {
		select {
		case r.more <- struct{}{}:
		default:
		}
	}
	r.guarded = len(look.observed.Containers)
	r.publish(Report{
		Epoch: look.desired.Epoch, Generation: look.desired.Generation,
		Workloads: r.statuses(ctx, look, now),
	}, true)
	r.comeBack(soonest(agent.NextChange(look.desired, look.leases, look.observed, now), r.nextRelease(now)), now)
	return nil
}

// statuses are what the node says of its members; that the owner refused one is signed.
func (r *Reconciler) statuses(ctx context.Context, l look, now time.Time) []*protocol.WorkloadStatus {
	all := agent.Statuses(l.desired, l.leases, l.observed, now)
	for _, s := range all {
		if s.GetReason() != agent.ReasonOwnerRefused {
			continue
		}
		if err := r.store.SignRefusal(s); err != nil {
			r.log.ErrorContext(ctx, "cannot sign the owner's refusal", "member", s.GetMemberId(), "error", err)
		}
	}
	return all
}

// guard puts back what someone has taken of the walls around members.
func (r *Reconciler) guard(ctx context.Context) error {
	restored, err := r.network.Guard(ctx)
	if ctx.Err() != nil {
		return nil //nolint:nilerr // the agent is being stopped
	}
	r.note(protocol.ConditionFirewallUnguarded, err)
	if restored {
		r.log.WarnContext(ctx, "someone has changed this agent's firewall table; it is as it was again")
	}
	return err
}

// comeBack sets the alarm for when time alone changes what is to be done.
func (r *Reconciler) comeBack(at, now time.Time) {
	if r.alarm != nil {
		r.alarm.Stop()
		r.alarm = nil
	}
	if !at.IsZero() {
		r.alarm = time.AfterFunc(max(at.Sub(now), 0), r.Wake)
	}
}

// note remembers a trouble of the node as a condition until err is nil again.
func (r *Reconciler) note(condition string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil {
		delete(r.trouble, condition)
		return
	}
	r.trouble[condition] = err.Error()
}

func (r *Reconciler) nextRelease(now time.Time) time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	var next time.Time
	for id, at := range r.hold {
		if !at.After(now) {
			delete(r.hold, id)
			continue
		}
		next = soonest(next, at)
	}
	return next
}

func soonest(a, b time.Time) time.Time {
	if a.IsZero() || (!b.IsZero() && b.Before(a)) {
		return b
	}
	return a
}
