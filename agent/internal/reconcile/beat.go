package reconcile

import (
	"context"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// beatLoop beats the meter, rotates logs and gives disk space back, whatever the loop of decisions is doing.
func (r *Reconciler) beatLoop(ctx context.Context) {
	beat := time.NewTicker(r.cfg.Beat)
	defer beat.Stop()
	collect := time.NewTicker(time.Hour)
	defer collect.Stop()
	for {
		if _, err := r.beat(ctx); err != nil && ctx.Err() == nil {
			r.log.WarnContext(ctx, "no beat", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-collect.C:
			if err := r.store.CollectGarbage(); err != nil {
				r.log.WarnContext(ctx, "cannot give disk space back", "error", err)
			}
		case <-beat.C:
			if err := r.runtime.RotateLogs(ctx); err != nil && ctx.Err() == nil {
				r.log.WarnContext(ctx, "cannot rotate logs", "error", err)
			}
		}
	}
}

// beat takes one complete look at the containers into the meter and returns it. A look that failed is no beat: the next one
// extends all that still runs, so nothing is lost.
func (r *Reconciler) beat(ctx context.Context) ([]runtime.Container, error) {
	r.beating.Lock()
	defer r.beating.Unlock()
	at := r.clock.Now()
	containers, err := r.list(ctx)
	if err != nil {
		return nil, err
	}
	leases, journal := r.store.Leases(), r.store.Runs()
	var used map[string]runtime.Stats
	if slices.ContainsFunc(containers, func(c runtime.Container) bool { return c.State == runtime.StateRunning }) {
		// Without an answer nothing has a sample, which costs the node and not the tenant. The same goes for a container that ends
		// between the two looks.
		used, _ = r.runtime.AllStats(ctx)
	}
	o := meter.Observation{At: at, CutEvery: r.cfg.UsageInterval}
	for _, c := range containers {
		run := meter.Run{
			RunID: c.ID, MemberID: c.MemberID, Revision: c.Revision, LeaseNo: leases[c.MemberID].GetLeaseNo(),
			StartedAt: journal[c.ID].StartedAt, ExitedAt: r.clock.FromMachine(c.ExitedAt),
			// One that does not answer was up at the last look, and has no exit: it counts on until something is known.
			Up: c.State == runtime.StateRunning || (c.State == runtime.StateUnknown && !journal[c.ID].ExitRecorded),
		}
		if run.StartedAt.IsZero() {
			run.StartedAt = r.clock.FromMachine(c.StartedAt)
		}
		if stats, sampled := used[c.ID]; sampled && c.State == runtime.StateRunning {
			run.CPUMicros, run.MemoryBytes, run.Sampled = int64(stats.CPUUsageMicros), int64(stats.MemoryBytes), true
		}
		o.Runs = append(o.Runs, run)
	}
	failpoint.Hit("agent/beat/looked")
	err = r.store.Beat(o, r.clock.Stamp())
	failpoint.Hit("agent/beat/kept")
	switch {
	case fault.Is(err, fault.Unavailable):
		r.note("disk_full", err)
	case err == nil:
		r.note("disk_full", nil)
	}
	return containers, err
}
