package command

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/protocol"
)

// Whatever changes an app instance raises its version and signals those who watch it, without a call at the change.
func TestEveryChangeOfAnInstanceSignalsItsWatchers(t *testing.T) {
	for name, change := range map[string]func(w *world, i instance.Instance){
		"a command": func(w *world, i instance.Instance) {
			_, err := w.commands().StopInstance(w.t.Context(), w.meta("stop"), w.project.ID, i.ID)
			require.NoError(w.t, err)
		},
		"its settings": func(w *world, i instance.Instance) {
			name := "renamed"
			_, err := w.commands().ChangeInstance(w.t.Context(), w.meta(""), w.project.ID, i.ID,
				ChangeInstanceInput{DisplayName: &name})
			require.NoError(w.t, err)
		},
		"a report": func(w *world, i instance.Instance) { w.report(1, w.says(i, protocol.WorkloadStatus_FAILED)) },
		"a report of a member alone": func(w *world, i instance.Instance) {
			s := w.says(i, protocol.WorkloadStatus_READY)
			s.Restarts = 3
			w.report(1, s)
			require.Equal(w.t, i.Lifecycle, w.get(i.ID).Lifecycle)
		},
		"lost contact": func(w *world, i instance.Instance) {
			w.tx(func(ctx context.Context, tx db.Tx) error { return NodeReachable(ctx, tx, w.node, false, w.now) })
		},
		"a lost node": func(w *world, i instance.Instance) {
			w.silent()
			require.NoError(w.t, w.commands().RemoveNode(w.t.Context(), w.admin("lost"), w.node,
				RemoveNodeInput{Lost: true, Reason: "burnt"}))
		},
		"an unpaid allocation": func(w *world, i instance.Instance) {
			require.NoError(w.t, w.commands().ReleaseUnpaid(w.t.Context(), i.Members[0].AllocationID, "corr", w.now))
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			i := w.running()
			changed, cancel := w.d.Changes().Subscribe(i.ID)
			defer cancel()
			change(w, i)
			select {
			case <-changed:
			case <-time.After(time.Minute):
				require.FailNow(t, "no signal")
			}
			require.Greater(t, w.get(i.ID).ResourceVersion, i.ResourceVersion)
		})
	}
}

func TestATransactionThatEndsWithoutACommitSignalsNothing(t *testing.T) {
	w := newWorld(t)
	i := w.running()
	changed, cancel := w.d.Changes().Subscribe(i.ID)
	defer cancel()
	refused := errors.New("refused")
	_, err := db.RunTx(t.Context(), w.d, func(tx db.Tx) (struct{}, error) {
		tx.Changed(i.ID)
		return struct{}{}, refused
	})
	require.ErrorIs(t, err, refused)
	require.Empty(t, changed)
}
