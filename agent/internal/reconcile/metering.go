package reconcile

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/protocol"
)

// meteringLoop samples usage, rotates logs and gives disk space back, independently of the passes.
func (r *Reconciler) meteringLoop(ctx context.Context) {
	metering := time.NewTicker(r.cfg.MeteringInterval)
	defer metering.Stop()
	collect := time.NewTicker(r.cfg.CollectEvery)
	defer collect.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.clockDue:
		case <-collect.C:
			if err := r.store.CollectGarbage(); err != nil {
				r.log.WarnContext(ctx, "cannot give disk space back", slog.Any("error", err))
			}
			r.setCondition(protocol.ConditionStoreLarge, r.store.Oversized())
			r.Wake()
		case <-metering.C:
			if err := r.machine.Logs.RotateLogs(ctx); err != nil && ctx.Err() == nil {
				r.log.WarnContext(ctx, "cannot rotate logs", slog.Any("error", err))
			}
		}
		r.sampleNow(ctx)
	}
}

func (r *Reconciler) sampleNow(ctx context.Context) {
	if _, err := r.sample(ctx); err != nil && ctx.Err() == nil {
		r.log.WarnContext(ctx, "usage was not sampled", slog.Any("error", err))
	}
}

// sample passes one complete listing of the containers to the meter and returns it. A listing that failed is no sample;
// the next one extends all that still runs, so nothing is lost. A proposed clock is set right after the listing.
func (r *Reconciler) sample(ctx context.Context) ([]agent.Listed, error) {
	if r.pendingClock.Load() == nil {
		r.clockLock.RLock()
		defer r.clockLock.RUnlock()
		return r.measure(ctx)
	}
	r.clockLock.Lock()
	defer r.clockLock.Unlock()
	containers, err := r.measure(ctx)
	if err == nil {
		err = r.setClock(ctx)
	}
	return containers, err
}

// measure lists the containers and saves the sample. The caller holds clockLock.
func (r *Reconciler) measure(ctx context.Context) ([]agent.Listed, error) {
	r.sampling.Lock()
	defer r.sampling.Unlock()
	stamp := r.clock.Stamp()
	before := r.store.Runs()
	containers, err := r.list(ctx)
	if err != nil {
		return nil, err
	}
	// Busy before the journal: a start that ends in between is in the journal then.
	leases, busy := r.store.Leases(), r.busyMembers(stamp.At)
	devices := r.devicesOf(containers, stamp.At)
	journal := r.store.Runs()
	var used map[string]runtime.Stats
	if slices.ContainsFunc(containers, func(l agent.Listed) bool { return l.Status == agent.Running }) {
		used = r.stats(ctx)
	}
	o := meter.Observation{At: stamp.At, CutEvery: r.cfg.UsageInterval}
	beside := agent.CopiesBeside(containers)
	for _, c := range containers {
		run := c.MeterRun(before[c.ID], journal[c.ID], busy[c.MemberID], r.clock)
		run.LeaseNo = leases[c.MemberID].GetLeaseNo()
		run.NeedsDevice, run.NoDevice = devices.needed[c.MemberID], devices.lacking[c.MemberID]
		run.WorkedAt, run.Beside = devices.workedAt, beside[c.ID]
		if stats, sampled := used[c.ID]; sampled && c.Status == agent.Running {
			run.CPUMicros, run.MemoryBytes, run.Sampled = int64(stats.CPUUsageMicros), int64(stats.MemoryBytes), true
		}
		o.Runs = append(o.Runs, run)
	}
	failpoint.Hit("agent/sample/observed")
	err = r.store.SaveSample(o, stamp)
	failpoint.Hit("agent/sample/saved")
	r.setCondition(protocol.ConditionDiskFull, r.store.Full())
	return containers, err
}

// statsWait bounds how long a sample waits for what the containers use: a shim that does not answer, or a busy machine,
// does not keep the time of all others from being stored.
const statsWait = 500 * time.Millisecond

// stats returns what the running containers use. A late answer serves the next sample. Without one nothing has a sample
// of CPU and memory, which costs the node and not the tenant. The same goes for a container that ends between the
// listing and this question. The caller holds sampling.
func (r *Reconciler) stats(ctx context.Context) map[string]runtime.Stats {
	if !r.statsAsked {
		r.askStats.Send()
		r.statsAsked = true
	}
	wait := time.NewTimer(statsWait)
	defer wait.Stop()
	select {
	case used := <-r.statsFound:
		r.statsAsked = false
		return used
	case <-wait.C:
	case <-ctx.Done():
	}
	return nil
}

// answerStats asks containerd, one question at a time.
func (r *Reconciler) answerStats(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.askStats:
		}
		used, err := r.machine.Stats.AllStats(ctx)
		if err != nil && ctx.Err() == nil {
			r.log.DebugContext(ctx, "cannot read what the containers use", slog.Any("error", err))
		}
		r.statsFound <- used
	}
}

// devices is what the meter has to know of accelerators, by member.
type devices struct {
	needed, lacking map[string]bool
	// workedAt is when the scan began that found all others working.
	workedAt time.Time
}

// devicesOf asks for the last scan first: what a later one finds is then taken for older and not for working.
func (r *Reconciler) devicesOf(containers []agent.Listed, now time.Time) devices {
	d := devices{needed: map[string]bool{}, lacking: map[string]bool{}}
	d.workedAt = now.Add(-time.Since(r.machine.Accelerators.ScannedAt()))
	if found := r.withoutDevices.Load(); found != nil {
		maps.Copy(d.lacking, *found)
	}
	for _, c := range containers {
		for _, id := range c.AcceleratorIDs {
			d.needed[c.MemberID] = true
			if r.machine.Accelerators.State(id) >= agent.AcceleratorFaulty {
				d.lacking[c.MemberID] = true
			}
		}
	}
	return d
}
