package reconcile

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/protocol"
)

// collectImages removes unused images when space is short. Images of the accepted state stay, including those of
// stopped members, of members without a lease, and of fallbacks.
func (r *Reconciler) collectImages(ctx context.Context) error {
	var keep []runtime.ImageRef
	for _, p := range r.store.Accepted().Parts {
		for _, w := range []*protocol.Workload{p.Workload, p.Workload.GetFallback()} {
			for _, s := range w.GetServices() {
				for _, image := range s.Images() {
					if ref, err := runtime.ParseImage(image); err == nil {
						keep = append(keep, ref)
					}
				}
			}
		}
	}
	return errors.Join(r.collectEnvironments(ctx), r.machine.Images.CollectImages(ctx, r.imageSpace.Swap(0), keep...))
}

// collectEnvironments removes what nothing uses. Every container has a run in the journal.
func (r *Reconciler) collectEnvironments(ctx context.Context) error {
	used := r.usedEnvironments()
	return r.machine.Environments.Collect(ctx, used, func(runID string) bool {
		_, exists := r.store.Runs()[runID]
		return exists
	})
}

// guardDisk stops containers that write more than they may. Their exits count as failures with the reason disk_limit,
// and their layers go with them: a restart begins with an empty one.
func (r *Reconciler) guardDisk(ctx context.Context) {
	var stopping sync.Map // the containers that are being stopped: one that does not end delays no other
	for {
		over, pause := r.machine.Disk.OverLimit(ctx)
		for _, x := range over {
			if _, already := stopping.LoadOrStore(x.ID, true); already {
				continue
			}
			r.running.Go(func() {
				defer stopping.Delete(x.ID)
				r.stopOverLimit(ctx, x)
			})
		}
		select {
		case <-ctx.Done():
			return
		case <-r.diskCheck:
		case <-time.After(untilSlot(time.Now(), pause)):
		}
	}
}

func (r *Reconciler) stopOverLimit(ctx context.Context, x runtime.Excess) {
	ctx = r.workContext(ctx, r.store.Runs()[x.ID].MemberID)
	r.log.WarnContext(ctx, "stopping a container that exceeds its disk limit", slog.String("container_id", x.ID),
		slog.String("detail", x.Detail))
	if err := r.store.UpdateRun(x.ID, func(run *state.Run) { run.OverDisk = x.Detail }); err != nil {
		r.log.ErrorContext(ctx, "cannot store why a container is stopped", slog.String("container_id", x.ID),
			slog.Any("error", err))
	}
	if err := r.machine.Containers.Stop(ctx, x.ID, 0); err != nil && ctx.Err() == nil {
		r.log.WarnContext(ctx, "cannot stop a container", slog.String("container_id", x.ID), slog.Any("error", err))
	}
	r.Wake()
}
