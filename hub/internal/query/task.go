package query

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
)

// Tasks lists the tasks of an app instance, the oldest first. A waiting read answers as soon as there is one; a lease
// that ends is noticed within pollInterval.
func (s *Service) Tasks(ctx context.Context, p iam.Principal, projectID string, f instance.TaskFilter, w Watch,
) ([]instance.Task, error) {
	asked, begun := f.Now, time.Now()
	return await(ctx, s, f.InstanceID, w, func() ([]instance.Task, int64, error) {
		f.Now = asked.Add(time.Since(begun))
		tasks, err := read(ctx, s, instanceIn(p, iam.InstanceRead, projectID, f.InstanceID), func(tx db.Tx,
			_ instance.Instance,
		) ([]instance.Task, error) {
			return instance.Tasks(ctx, tx, f)
		})
		return tasks, int64(len(tasks)), err
	})
}
