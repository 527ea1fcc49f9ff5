package reconcile

import (
	"context"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/protocol"
)

// meteringLoop samples the meter, rotates logs and gives disk space back, whatever the loop of decisions is doing.
func (r *Reconciler) meteringLoop(ctx context.Context) {
	sample := time.NewTicker(r.cfg.MeteringInterval)
	defer sample.Stop()
	collect := time.NewTicker(r.cfg.CollectEvery)
	defer collect.Stop()
	for {
		if _, err := r.sample(ctx); err != nil && ctx.Err() == nil {
			r.log.WarnContext(ctx, "no sample", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-collect.C:
			if err := r.store.CollectGarbage(); err != nil {
				r.log.WarnContext(ctx, "cannot give disk space back", "error", err)
			}
			r.note(protocol.ConditionStoreLarge, r.store.Oversized())
			r.Wake()
		case <-sample.C:
			if err := r.runtime.RotateLogs(ctx); err != nil && ctx.Err() == nil {
				r.log.WarnContext(ctx, "cannot rotate logs", "error", err)
			}
		}
	}
}

// sample takes one complete look at the containers into the meter and returns it. A look that failed is no sample: the
// next one extends all that still runs, so nothing is lost. Where a hub has told another time, the clock is set right
// after the look.
func (r *Reconciler) sample(ctx context.Context) ([]runtime.Container, error) {
	share := int64(1)
	if r.told.Load() != nil {
		share = everyone
	}
	if err := r.steady.Acquire(ctx, share); err != nil {
		return nil, err
	}
	defer r.steady.Release(share)
	r.sampling.Lock()
	defer r.sampling.Unlock()
	containers, err := r.observe(ctx)
	if err == nil && share == everyone {
		err = r.setClock(ctx)
	}
	return containers, err
}

func (r *Reconciler) observe(ctx context.Context) ([]runtime.Container, error) {
	stamp := r.clock.Stamp()
	before := r.store.Runs()
	containers, err := r.list(ctx)
	if err != nil {
		return nil, err
	}
	// Busy before the journal: a start that has ended by now is noted there.
	leases, busy := r.store.Leases(), r.busyMembers(stamp.At)
	journal := r.store.Runs()
	var used map[string]runtime.Stats
	if slices.ContainsFunc(containers, func(c runtime.Container) bool { return c.State == runtime.StateRunning }) {
		// Without an answer nothing has a sample, which costs the node and not the tenant. The same goes for a container that
		// ends between the two looks.
		used, _ = r.runtime.AllStats(ctx)
	}
	o := meter.Observation{At: stamp.At, CutEvery: r.cfg.UsageInterval}
	for _, c := range containers {
		run := meter.Run{
			RunID: c.ID, MemberID: c.MemberID, Revision: c.Revision, LeaseNo: leases[c.MemberID].GetLeaseNo(),
			StartedAt: journal[c.ID].StartedAt, ExitedAt: r.clock.Exited(c.ExitedAt),
			// One that does not answer was up at the last look, and has no exit: it counts on until something is known.
			Up: c.State == runtime.StateRunning || (c.State == runtime.StateUnknown && !journal[c.ID].ExitRecorded),
		}
		// A look may show a start half done that is noted by now; that is no end.
		halfDone := before[c.ID].StartedAt.IsZero() && (c.State == runtime.StateCreated || c.State == runtime.StateLost)
		switch {
		case halfDone && !run.StartedAt.IsZero(), run.StartedAt.IsZero() && busy[c.MemberID].Other:
			// Its start is under way: it counts from when that is noted, in a later sample.
			run.Up, run.StartedAt, run.ExitedAt = false, time.Time{}, time.Time{}
		case !run.StartedAt.IsZero():
		default:
			run.StartedAt = r.clock.Happened(c.StartedAt, journal[c.ID].OpenedAt)
		}
		if stats, sampled := used[c.ID]; sampled && c.State == runtime.StateRunning {
			run.CPUMicros, run.MemoryBytes, run.Sampled = int64(stats.CPUUsageMicros), int64(stats.MemoryBytes), true
		}
		o.Runs = append(o.Runs, run)
	}
	failpoint.Hit("agent/sample/observed")
	err = r.store.SaveSample(o, stamp)
	failpoint.Hit("agent/sample/saved")
	r.note(protocol.ConditionDiskFull, r.store.Full())
	return containers, err
}

// syncWait bounds how long a session waits until the clock is set; a machine that does not answer sets it with a later
// sample.
const syncWait = 5 * time.Second

// SyncClock takes over the time that a hub told in an answer that took so long.
func (r *Reconciler) SyncClock(ctx context.Context, hub time.Time, took time.Duration) {
	if !r.tell(hub, took) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, syncWait)
	defer cancel()
	if _, err := r.sample(ctx); err != nil {
		r.log.WarnContext(ctx, "the clock is wrong and cannot be set yet", "error", err)
	}
}

// tell reports whether the hub's time is another one: then the clock is set at a sample, so that all that has passed by
// the old time is measured, and nothing of the leap.
func (r *Reconciler) tell(hub time.Time, took time.Duration) (leaps bool) {
	defer r.Wake()
	r.setting.Lock()
	defer r.setting.Unlock()
	next, leaps := r.clock.Told(hub, took)
	if leaps {
		r.told.Store(&next)
		return true
	}
	r.told.Store(nil)
	r.clock.Set(next)
	return false
}

// setClock follows a sample with nothing in between.
func (r *Reconciler) setClock(ctx context.Context) error {
	r.setting.Lock()
	defer r.setting.Unlock()
	next := r.told.Load()
	if next == nil {
		return nil
	}
	from, to := r.clock.Compare(*next)
	if err := r.store.SetClock(from, to); err != nil {
		return err
	}
	r.clock.Set(*next)
	r.told.Store(nil)
	r.log.WarnContext(ctx, "the clock is set by the hub", "from", from, "to", to.At)
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.hold) // pauses until a time that may never come
	r.Wake()
	return nil
}

// timed runs what writes a time of the node into the store; the clock is not set meanwhile.
func (r *Reconciler) timed(ctx context.Context, do func(now time.Time) error) error {
	// What has happened is written down even while the agent is being stopped. Nobody sets the clock for long.
	if err := r.steady.Acquire(context.WithoutCancel(ctx), 1); err != nil {
		return err
	}
	defer r.steady.Release(1)
	return do(r.clock.Now())
}
