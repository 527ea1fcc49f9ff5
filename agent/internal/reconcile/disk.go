package reconcile

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/protocol"
)

// collectImages removes images that nothing uses where there is too little space. Those of the accepted state stay,
// also of members that are stopped or wait for a lease, and those that a node would fall back to.
func (r *Reconciler) collectImages(ctx context.Context) error {
	var keep []runtime.ImageRef
	for _, p := range r.store.Accepted().Parts {
		for _, w := range []*protocol.Workload{p.Workload, p.Workload.GetFallback()} {
			for _, s := range w.GetServices() {
				if ref, err := runtime.ParseImage(s.GetImage()); err == nil {
					keep = append(keep, ref)
				}
			}
		}
	}
	return r.runtime.CollectImages(ctx, r.imageSpace.Swap(0), keep...)
}

// guardDisk ends containers that take more of the disk than they may. Their exits count as failures, with the reason
// disk_limit, and their layers go with them: a restart begins with an empty one.
func (r *Reconciler) guardDisk(ctx context.Context) {
	for {
		over, pause := r.runtime.OverLimit(ctx)
		for _, x := range over {
			r.log.WarnContext(ctx, "a container takes too much of the disk and is ended", "container", x.ID, "why", x.Detail)
			if err := r.store.UpdateRun(x.ID, func(run *state.Run) { run.OverDisk = x.Detail }); err != nil {
				r.log.ErrorContext(ctx, "cannot keep why a container is ended", "container", x.ID, "error", err)
			}
			if err := r.runtime.Stop(ctx, x.ID, 0); err != nil && ctx.Err() == nil {
				r.log.WarnContext(ctx, "cannot end a container", "container", x.ID, "error", err)
			}
			r.Wake()
		}
		select {
		case <-ctx.Done():
			return
		case <-r.more:
		case <-time.After(untilSlot(time.Now(), pause)):
		}
	}
}
