package query_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/query"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/manifest/manifesttest"
)

// A worker that waits beside another one, or for a task that has just failed, is answered once it may claim: answered
// before, it would be refused and ask again and again.
func TestAWaitForPendingTasksEndsOnceTheFirstMayBeClaimed(t *testing.T) {
	w := commandtest.New(t)
	w.PublishWorker(manifesttest.External("cluster"))
	i, err := w.Commands().CreateInstance(t.Context(), w.Meta("create"), command.CreateInstanceInput{
		ProjectID: w.Project.ID, AppSlug: "cluster", Version: "1.0.0", DisplayName: "c",
		Parameters: map[string]any{"partition": "main"}, AllocationIDs: []string{w.Allocation().ID},
	})
	require.NoError(t, err)
	service := &query.Service{DB: w.DB}
	query.PollEvery(service, time.Millisecond)
	const soon = 300 * time.Millisecond
	// next waits for a task from shortly before it may be claimed, and claims it at once.
	next := func(mayBegin time.Time) instance.Task {
		t.Helper()
		asked, begun := mayBegin.Add(-soon), time.Now()
		tasks, err := service.Tasks(t.Context(), w.User, w.Project.ID, instance.TaskFilter{
			InstanceID: i.ID, State: lifecycle.TaskPending, Limit: 1, Now: asked,
		}, query.Watch{Wait: time.Minute})
		require.NoError(t, err)
		require.Len(t, tasks, 1)
		w.Now = asked.Add(time.Since(begun))
		claimed, err := w.Commands().ClaimTask(t.Context(), w.Meta(""), command.TaskRef{
			ProjectID: w.Project.ID, InstanceID: i.ID, TaskID: tasks[0].ID,
		}, "a", time.Minute)
		require.NoError(t, err)
		return claimed
	}
	deploy := next(w.Now)
	_, err = w.Commands().DecommissionInstance(t.Context(), w.Meta("end"), w.Project.ID, i.ID)
	require.NoError(t, err)
	end := next(deploy.LeaseExpiresAt)
	require.Equal(t, "decommission", end.Kind)
	failed, err := w.Commands().FailTask(t.Context(), w.Meta(""), command.TaskRef{
		ProjectID: w.Project.ID, InstanceID: i.ID, TaskID: end.ID,
	}, end.Attempt, "internal", "no route")
	require.NoError(t, err)
	require.EqualValues(t, 2, next(failed.NotBefore).Attempt)
}
