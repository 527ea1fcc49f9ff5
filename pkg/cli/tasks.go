package cli

import (
	"context"
	"net/http"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/client"
)

// tasksCommand lists what the external worker of an app instance is to do.
func (a *app) tasksCommand() *cobra.Command {
	columns := []column[client.Task]{
		{"ID", func(t client.Task) string { return t.ID }},
		{"KIND", func(t client.Task) string { return string(t.Kind) }},
		{"STATE", func(t client.Task) string { return string(t.State) }},
		{"PHASE", func(t client.Task) string { return t.Phase }},
		{"ATTEMPT", func(t client.Task) string { return strconv.FormatInt(t.Attempt, 10) }},
		{"REASON", func(t client.Task) string { return string(t.Reason) }},
		{"DETAIL", func(t client.Task) string { return t.Detail }},
		{"UPDATED", func(t client.Task) string { return stamp(t.UpdatedAt) }},
	}
	var state string
	c := projectListing(a, "tasks INSTANCE", "What the external worker of an app instance is to do, oldest first",
		cobra.ExactArgs(1), columns,
		func(ctx context.Context, s *session, project string, args []string, cursor string) (*http.Response, error) {
			id, err := s.instanceID(ctx, project, args[0])
			if err != nil {
				return nil, err
			}
			return s.hub.ListAppInstanceTasks(ctx, project, id, &client.ListAppInstanceTasksParams{
				Cursor: cursor, Limit: client.PageSize, State: client.TaskState(state),
			}, s.editors()...)
		})
	c.Flags().StringVar(&state, "state", "", "pending, claimed, succeeded, failed or cancelled (default: all)")
	return c
}
