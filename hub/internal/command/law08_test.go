package command

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/protocol"
)

// TestLaw08DataEventAndAuditAreOneTransaction breaks every statement of every command on capacity and instances, one at
// a time: nothing at all must be left of it, and no error may be swallowed on the way. Unbroken, the change has its
// event and its audit row.
func TestLaw08DataEventAndAuditAreOneTransaction(t *testing.T) {
	type step struct {
		name string
		// prepare brings the world to where the command can run.
		prepare func(w *world) func(ctx context.Context, tx db.Tx) error
		subject string
	}
	steps := []step{
		{"create allocation", func(w *world) func(context.Context, db.Tx) error {
			m := w.meta("k")
			return func(ctx context.Context, tx db.Tx) error {
				_, err := (&Service{}).createAllocation(ctx, tx, m, w.allocationInput(), []string{w.node})
				return err
			}
		}, "allocation"},
		{"release allocation", func(w *world) func(context.Context, db.Tx) error {
			a, m := w.allocation(), w.meta("k")
			return func(ctx context.Context, tx db.Tx) error {
				_, err := (&Service{}).releaseAllocation(ctx, tx, m, w.project.ID, a.ID)
				return err
			}
		}, "allocation"},
		{"create instance", func(w *world) func(context.Context, db.Tx) error {
			w.allocation()
			m := w.meta("k")
			return func(ctx context.Context, tx db.Tx) error {
				_, err := w.commands().createInstance(ctx, tx, m, w.instanceInput())
				return err
			}
		}, "app_instance"},
		{"decommission instance", func(w *world) func(context.Context, db.Tx) error {
			w.allocation()
			i, m := w.instance(), w.meta("k")
			return func(ctx context.Context, tx db.Tx) error {
				_, err := m.act(ctx, tx, w.project.ID, i.ID, decommissionAction(m))
				return err
			}
		}, "app_instance"},
		{"release unpaid", func(w *world) func(context.Context, db.Tx) error {
			a := w.allocation()
			w.instance()
			return func(ctx context.Context, tx db.Tx) error {
				_, err := (&Service{}).releaseUnpaid(ctx, tx, a.ID, "corr", w.now)
				return err
			}
		}, "app_instance"},
		{"upgrade instance", func(w *world) func(context.Context, db.Tx) error {
			i := w.running()
			w.release("2.0.0")
			m := w.meta("k")
			return func(ctx context.Context, tx db.Tx) error {
				_, err := m.act(ctx, tx, w.project.ID, i.ID, w.commands().upgradeAction(m, "2.0.0"))
				return err
			}
		}, "app_instance"},
		{"report of a node that went back", func(w *world) func(context.Context, db.Tx) error {
			i := w.upgraded()
			s := w.says(i, protocol.WorkloadStatus_READY)
			s.FallbackFromRevision, s.Reason = 2, protocol.WorkloadStatus_CRASH_LOOP
			w.counter++
			r := w.nodeReport(2, s)
			return func(ctx context.Context, tx db.Tx) error {
				_, err := Observe(ctx, tx, r, w.now)
				return err
			}
		}, "app_instance"},
		{"rollback instance", func(w *world) func(context.Context, db.Tx) error {
			i := w.upgraded()
			s := w.says(i, protocol.WorkloadStatus_READY)
			s.Revision = 2
			w.report(2, s)
			m := w.meta("k")
			return func(ctx context.Context, tx db.Tx) error {
				_, err := m.act(ctx, tx, w.project.ID, i.ID, w.commands().rollbackAction(m, ""))
				return err
			}
		}, "app_instance"},
		{"stop instance", func(w *world) func(context.Context, db.Tx) error {
			i, m := w.running(), w.meta("k")
			return func(ctx context.Context, tx db.Tx) error {
				_, err := m.act(ctx, tx, w.project.ID, i.ID, stopAction(m))
				return err
			}
		}, "app_instance"},
		{"start instance", func(w *world) func(context.Context, db.Tx) error {
			i := w.stopped()
			// The lease has run out meanwhile.
			w.now = w.now.Add(3 * time.Hour)
			m := w.meta("k")
			return func(ctx context.Context, tx db.Tx) error {
				_, err := m.act(ctx, tx, w.project.ID, i.ID, w.commands().startAction(m))
				return err
			}
		}, "app_instance"},
		{"change instance", func(w *world) func(context.Context, db.Tx) error {
			i, m, name := w.running(), w.meta("k"), "renamed"
			return func(ctx context.Context, tx db.Tx) error {
				_, err := (&Service{}).changeInstance(ctx, tx, m, w.project.ID, i.ID, ChangeInstanceInput{
					DisplayName: &name,
					Config:      map[string]any{},
				})
				return err
			}
		}, "app_instance"},
		{"first report", func(w *world) func(context.Context, db.Tx) error {
			w.allocation()
			r := w.nodeReport(1, w.says(w.instance(), protocol.WorkloadStatus_READY))
			r.Counter = 1
			return func(ctx context.Context, tx db.Tx) error {
				_, err := Observe(ctx, tx, r, w.now)
				return err
			}
		}, "app_instance"},
		{"last report", func(w *world) func(context.Context, db.Tx) error {
			a, i := w.allocation(), w.instance()
			w.decommissioned(i)
			_, err := (&Service{DB: w.d}).ReleaseAllocation(w.t.Context(), w.meta("release"), w.project.ID, a.ID)
			require.NoError(w.t, err)
			r := w.nodeReport(2, w.removed(i))
			r.Counter = 1
			return func(ctx context.Context, tx db.Tx) error {
				_, err := Observe(ctx, tx, r, w.now)
				return err
			}
		}, "app_instance"},
	}
	for _, s := range steps {
		t.Run(s.name, func(t *testing.T) {
			w := newWorld(t)
			run := s.prepare(w)
			before := w.contents()
			statements := w.brokenAt(0, run, false)
			require.Equal(t, before, w.contents(), "counting rolls back")
			for n := 1; n <= statements; n++ {
				w.brokenAt(n, run, false)
			}
			require.Equal(t, before, w.contents(), "nothing is left of %d broken attempts", statements)

			w.brokenAt(0, run, true)
			after := w.contents()
			require.NotEqual(t, before["events"], after["events"])
			require.NotEqual(t, before["audit_rows"], after["audit_rows"])
			require.NotEmpty(t, after["audit_rows"])
			table := map[string]string{"allocation": "allocations", "app_instance": "app_instances"}[s.subject]
			require.NotEqual(t, before[table], after[table])
		})
	}
}

func (w *world) decommissioned(i instance.Instance) {
	w.t.Helper()
	_, err := w.commands().DecommissionInstance(w.t.Context(), w.meta("end"), w.project.ID, i.ID)
	require.NoError(w.t, err)
}

// brokenAt runs with its nth statement failing and checks that the failure came out; with n = 0 nothing fails, and keep
// says whether to commit. It returns how many statements there were.
func (w *world) brokenAt(n int, run func(context.Context, db.Tx) error, keep bool) int {
	w.t.Helper()
	rolledBack := errors.New("rolled back")
	seen := 0
	_, err := db.RunTx(w.t.Context(), w.d, func(tx db.Tx) (struct{}, error) {
		b := &breakingTx{Tx: tx, n: n}
		err := run(w.t.Context(), b)
		seen = b.seen
		if err == nil && !keep && n == 0 {
			err = rolledBack
		}
		return struct{}{}, err
	})
	switch {
	case n > 0:
		require.ErrorIs(w.t, err, errInjected, "statement %d", n)
	case keep:
		require.NoError(w.t, err)
	default:
		require.ErrorIs(w.t, err, rolledBack)
	}
	return seen
}

// TestLaw10AnotherOrgsResourcesAnswerAsIfAbsent compares the answers to a foreign id and to one that never was, word
// for word.
func TestLaw10AnotherOrgsResourcesAnswerAsIfAbsent(t *testing.T) {
	w := newWorld(t)
	a, i := w.allocation(), w.instance()
	own, outsider := w.tenant("other")
	m := w.meta("k")
	m.Principal = outsider
	for _, project := range []string{w.project.ID, own.ID} {
		foreign := []error{
			second(w.commands().DecommissionInstance(t.Context(), m, project, i.ID)),
			second(w.commands().UpgradeInstance(t.Context(), m, project, i.ID, "2.0.0")),
			second(w.commands().RollbackInstance(t.Context(), m, project, i.ID, "")),
			second(w.commands().StopInstance(t.Context(), m, project, i.ID)),
			second(w.commands().StartInstance(t.Context(), m, project, i.ID)),
			second((&Service{DB: w.d}).ChangeInstance(t.Context(), m, project, i.ID, ChangeInstanceInput{})),
			second((&Service{DB: w.d}).ReleaseAllocation(t.Context(), m, project, a.ID)),
		}
		absent := []error{
			second(w.commands().DecommissionInstance(t.Context(), m, project, db.NewID())),
			second(w.commands().UpgradeInstance(t.Context(), m, project, db.NewID(), "2.0.0")),
			second(w.commands().RollbackInstance(t.Context(), m, project, db.NewID(), "")),
			second(w.commands().StopInstance(t.Context(), m, project, db.NewID())),
			second(w.commands().StartInstance(t.Context(), m, project, db.NewID())),
			second((&Service{DB: w.d}).ChangeInstance(t.Context(), m, project, db.NewID(), ChangeInstanceInput{})),
			second((&Service{DB: w.d}).ReleaseAllocation(t.Context(), m, project, db.NewID())),
		}
		for n := range foreign {
			require.Error(t, foreign[n])
			require.Equal(t, absent[n].Error(), foreign[n].Error())
		}
	}
	require.Equal(t, instance.Requested, w.get(i.ID).Lifecycle.Status)
	w.tx(func(ctx context.Context, tx db.Tx) error {
		got, err := capacity.Get(ctx, tx, w.project.ID, a.ID)
		require.Equal(t, capacity.Active, got.Status)
		return err
	})
	require.WithinDuration(t, w.now, i.CreatedAt, time.Minute)
}

func second[T any](_ T, err error) error { return err }
