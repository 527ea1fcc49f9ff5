package command_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/nodes"
	"github.com/gpuaas/gpuaas/hub/internal/periodic"
	"github.com/gpuaas/gpuaas/protocol"
)

// Whatever changes an app instance raises its version and signals those who watch it, without a call at the change.
func TestEveryChangeOfAnInstanceSignalsItsWatchers(t *testing.T) {
	for name, change := range map[string]func(w *world, i instance.Instance){
		"a command": func(w *world, i instance.Instance) {
			_, err := w.Commands().StopInstance(w.T.Context(), w.Meta("stop"), w.Project.ID, i.ID)
			require.NoError(w.T, err)
		},
		"its settings": func(w *world, i instance.Instance) {
			name := "renamed"
			_, err := w.Commands().ChangeInstance(w.T.Context(), w.Meta(""), w.Project.ID, i.ID,
				command.ChangeInstanceInput{DisplayName: &name})
			require.NoError(w.T, err)
		},
		"a report": func(w *world, i instance.Instance) { w.Report(1, w.Says(i, protocol.WorkloadStatus_FAILED)) },
		"a report of a member alone": func(w *world, i instance.Instance) {
			s := w.Says(i, protocol.WorkloadStatus_READY)
			s.Restarts = 3
			w.Report(1, s)
			require.Equal(w.T, i.Lifecycle, w.Get(i.ID).Lifecycle)
		},
		"lost contact": func(w *world, i instance.Instance) {
			w.Tx(func(ctx context.Context, tx db.Tx) error { return nodes.SetReachable(ctx, tx, w.Node, false, w.Now) })
		},
		"a lost node": func(w *world, i instance.Instance) {
			w.silent()
			require.NoError(w.T, w.Commands().RemoveNode(w.T.Context(), w.Admin("lost"), w.Node,
				command.RemoveNodeInput{Lost: true, Reason: "burnt"}))
		},
		"an unpaid allocation": func(w *world, i instance.Instance) {
			w.Tx(func(ctx context.Context, tx db.Tx) error {
				return periodic.ReleaseUnpaid(ctx, tx, i.Members[0].AllocationID, "corr", w.Now)
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			i := w.Running()
			changed, cancel := w.DB.Changes().Subscribe(i.ID)
			defer cancel()
			change(w, i)
			select {
			case <-changed:
			case <-time.After(time.Minute):
				require.FailNow(t, "no signal")
			}
			require.Greater(t, w.Get(i.ID).ResourceVersion, i.ResourceVersion)
		})
	}
}

func TestATransactionThatEndsWithoutACommitSignalsNothing(t *testing.T) {
	w := newWorld(t)
	i := w.Running()
	changed, cancel := w.DB.Changes().Subscribe(i.ID)
	defer cancel()
	refused := errors.New("refused")
	_, err := db.RunTx(t.Context(), w.DB, func(tx db.Tx) (struct{}, error) {
		tx.Changed(i.ID)
		return struct{}{}, refused
	})
	require.ErrorIs(t, err, refused)
	require.Empty(t, changed)
}
