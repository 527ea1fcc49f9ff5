package query

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
)

// Tasks lists the tasks of an app instance, the oldest first. A waiting read answers as soon as there is one; one of
// pending tasks, as soon as the first may be claimed. A lease that ends is noticed within pollInterval.
func (s *Service) Tasks(ctx context.Context, p iam.Principal, projectID string, f instance.TaskFilter, w Watch,
) ([]instance.Task, error) {
	asked, begun := f.Now, time.Now()
	w.unsignalled = true // the ends of leases, and of the pause after a failure
	return await(ctx, s, f.InstanceID, w, func() ([]instance.Task, int64, error) {
		f.Now = asked.Add(time.Since(begun))
		var version int64
		tasks, err := read(ctx, s, instanceIn(p, iam.InstanceRead, projectID, f.InstanceID), func(tx db.Tx,
			_ instance.Instance,
		) ([]instance.Task, error) {
			tasks, err := instance.Tasks(ctx, tx, f)
			ready := len(tasks) > 0
			if err == nil && ready && f.State == lifecycle.TaskPending {
				ready, err = instance.MayClaim(ctx, tx, tasks[0], f.Now)
			}
			if ready {
				version = 1
			}
			return tasks, err
		})
		return tasks, version, err
	})
}
