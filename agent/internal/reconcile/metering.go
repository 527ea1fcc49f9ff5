package reconcile

import (
	"context"
	"log/slog"
	"maps"
	"time"

	"github.com/gpuaas/gpuaas/agent"
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
	o := meter.Observation{At: stamp.At, CutEvery: r.cfg.UsageInterval}
	beside := agent.CopiesBeside(containers)
	for _, c := range containers {
		run := c.MeterRun(before[c.ID], journal[c.ID], busy[c.MemberID], r.clock)
		run.LeaseNo = leases[c.MemberID].GetLeaseNo()
		run.NeedsDevice, run.NoDevice = devices.needed[c.MemberID], devices.lacking[c.MemberID]
		run.WorkedAt, run.Beside = devices.workedAt, beside[c.ID]
		if c.Status == agent.Running {
			r.addStats(ctx, &run, c.ID)
		}
		o.Runs = append(o.Runs, run)
	}
	failpoint.Hit("agent/sample/observed")
	err = r.store.SaveSample(o, stamp)
	failpoint.Hit("agent/sample/saved")
	r.setCondition(protocol.ConditionDiskFull, r.store.Full())
	return containers, err
}

// addStats adds to a sample what a running container uses. Without it the interval has no sample of CPU and memory,
// which costs the node and not the tenant: so it is for a container that has ended and is gone since it was listed.
func (r *Reconciler) addStats(ctx context.Context, run *meter.Run, id string) {
	stats, err := r.machine.Stats.Stats(id)
	if err != nil {
		r.log.DebugContext(ctx, "cannot read what a container uses", slog.String("container_id", id), slog.Any("error", err))
		return
	}
	run.CPUMicros, run.MemoryBytes, run.Sampled = int64(stats.CPUUsageMicros), int64(stats.MemoryBytes), true
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
