package command_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/nodes"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/protocol"
)

// atomicStep is a change that is one transaction with its event and its audit row.
type atomicStep struct {
	name string
	// table has the changed row.
	table string
	// prepare makes the rows that the change needs.
	prepare func(w *world) func(commandtest.Around) error
}

func requireAtomic(t *testing.T, steps []atomicStep) {
	t.Helper()
	requireAtomicIn(t, steps, "events", "audit_rows")
}

// requireAtomicIn is requireAtomic for changes that belong to other tables beside their own: a login has an audit row
// and no event, its beginning neither.
func requireAtomicIn(t *testing.T, steps []atomicStep, tables ...string) {
	t.Helper()
	for _, s := range steps {
		t.Run(s.name, func(t *testing.T) { proof(t, s, append(tables, s.table)) })
	}
}

// proof is what is required of each step; the tests that walk all of them choose it.
var proof = breakEachStatement

// breakEachStatement proves that a change is one transaction: with any of its statements broken, nothing is left of it.
func breakEachStatement(t *testing.T, s atomicStep, tables []string) {
	w := newWorld(t)
	change := s.prepare(w)
	w.RequireAtomic(func(around commandtest.Around) error {
		return change(func(tx db.Tx, body func(db.Tx) error) error {
			noteCommands()
			return around(tx, body)
		})
	}, tables...)
}

// command is a change by a command.
func (w *world) command(run func(ctx context.Context, s *command.Service) error) func(commandtest.Around) error {
	return func(around commandtest.Around) error { return run(w.T.Context(), w.Commands().WithAround(around)) }
}

// report is a change by a report of the node.
func (w *world) report(r nodes.Report) func(commandtest.Around) error {
	return w.InTx(func(ctx context.Context, tx db.Tx) error { return nodes.ApplyReport(ctx, tx, r, w.Now) })
}

// law08DataEventAndAuditAreOneTransaction breaks every statement of every change of allocations and instances.
func law08DataEventAndAuditAreOneTransaction(t *testing.T) {
	requireAtomic(t, []atomicStep{
		{"create allocation", "allocations", func(w *world) func(commandtest.Around) error {
			m := w.Meta("k")
			return w.command(func(ctx context.Context, s *command.Service) error {
				return second(s.CreateAllocation(ctx, m, w.AllocationInput()))
			})
		}},
		{"release allocation", "allocations", func(w *world) func(commandtest.Around) error {
			a, m := w.Allocation(), w.Meta("k")
			return w.command(func(ctx context.Context, s *command.Service) error {
				return second(s.ReleaseAllocation(ctx, m, w.Project.ID, a.ID))
			})
		}},
		{"create instance", "app_instances", func(w *world) func(commandtest.Around) error {
			w.Allocation()
			m := w.Meta("k")
			return w.command(func(ctx context.Context, s *command.Service) error {
				return second(s.CreateInstance(ctx, m, w.InstanceInput()))
			})
		}},
		{"change instance", "app_instances", func(w *world) func(commandtest.Around) error {
			i, m, name := w.Running(), w.Meta("k"), "renamed"
			in := command.ChangeInstanceInput{DisplayName: &name, Config: map[string]any{}}
			return w.command(func(ctx context.Context, s *command.Service) error {
				return second(s.ChangeInstance(ctx, m, w.Project.ID, i.ID, in))
			})
		}},
		{"first report", "app_instances", func(w *world) func(commandtest.Around) error {
			w.Allocation()
			r := w.NodeReport(1, w.Says(w.Instance(), protocol.WorkloadStatus_READY))
			r.Counter = 1
			return w.report(r)
		}},
		{"last report", "app_instances", func(w *world) func(commandtest.Around) error {
			a, i := w.Allocation(), w.Instance()
			w.decommissioned(i)
			_, err := w.Commands().ReleaseAllocation(w.T.Context(), w.Meta("release"), w.Project.ID, a.ID)
			require.NoError(w.T, err)
			r := w.NodeReport(2, w.Removed(i))
			r.Counter = 1
			return w.report(r)
		}},
		{"report of a node that went back", "app_instances", func(w *world) func(commandtest.Around) error {
			s := w.Says(w.Upgraded(), protocol.WorkloadStatus_READY)
			s.FallbackFromRevision, s.Reason = 2, protocol.WorkloadStatus_CRASH_LOOP
			w.Counter++
			return w.report(w.NodeReport(2, s))
		}},
	})
}

// law08ActionsAreOneTransaction does so for the actions on instances.
func law08ActionsAreOneTransaction(t *testing.T) {
	act := func(prepare func(w *world) instance.Instance, do func(ctx context.Context, s *command.Service, m command.Meta,
		i instance.Instance) (instance.Instance, error),
	) func(w *world) func(commandtest.Around) error {
		return func(w *world) func(commandtest.Around) error {
			i := prepare(w)
			m := w.Meta("k")
			return w.command(func(ctx context.Context, s *command.Service) error { return second(do(ctx, s, m, i)) })
		}
	}
	requireAtomic(t, []atomicStep{
		{"decommission", "app_instances", act((*world).deployed, func(ctx context.Context, s *command.Service,
			m command.Meta, i instance.Instance,
		) (instance.Instance, error) {
			return s.DecommissionInstance(ctx, m, i.ProjectID, i.ID)
		})},
		{"upgrade", "app_instances", act((*world).upgradable, func(ctx context.Context, s *command.Service,
			m command.Meta, i instance.Instance,
		) (instance.Instance, error) {
			return s.UpgradeInstance(ctx, m, command.UpgradeInstanceInput{
				ProjectID: i.ProjectID, InstanceID: i.ID, Version: "2.0.0",
			})
		})},
		{"rollback", "app_instances", act((*world).upgradedAndReady, func(ctx context.Context, s *command.Service,
			m command.Meta, i instance.Instance,
		) (instance.Instance, error) {
			return s.RollbackInstance(ctx, m, i.ProjectID, i.ID, "")
		})},
		{"stop", "app_instances", act((*world).run, func(ctx context.Context, s *command.Service, m command.Meta,
			i instance.Instance,
		) (instance.Instance, error) {
			return s.StopInstance(ctx, m, i.ProjectID, i.ID)
		})},
		{"start", "app_instances", act((*world).stoppedWithoutLease, func(ctx context.Context, s *command.Service,
			m command.Meta, i instance.Instance,
		) (instance.Instance, error) {
			return s.StartInstance(ctx, m, i.ProjectID, i.ID)
		})},
	})
}

func (w *world) run() instance.Instance { return w.Running() }

func (w *world) deployed() instance.Instance {
	w.Allocation()
	return w.Instance()
}

func (w *world) upgradable() instance.Instance {
	i := w.Running()
	w.Release("2.0.0")
	return i
}

func (w *world) upgradedAndReady() instance.Instance {
	i := w.Upgraded()
	s := w.Says(i, protocol.WorkloadStatus_READY)
	s.Revision = 2
	w.Report(2, s)
	return i
}

func (w *world) stoppedWithoutLease() instance.Instance {
	i := w.Stopped()
	w.Now = w.Now.Add(3 * time.Hour)
	return i
}

func (w *world) decommissioned(i instance.Instance) {
	w.T.Helper()
	_, err := w.Commands().DecommissionInstance(w.T.Context(), w.Meta("end"), w.Project.ID, i.ID)
	require.NoError(w.T, err)
}

// TestLaw10AnotherOrgsResourcesAnswerAsIfAbsent compares the answers to a foreign id and to one that never was, word
// for word.
func TestLaw10AnotherOrgsResourcesAnswerAsIfAbsent(t *testing.T) {
	w := newWorld(t)
	a, i := w.Allocation(), w.Instance()
	own, outsider := w.NewTenant("other")
	m := w.Meta("k")
	m.Principal = outsider
	for _, project := range []string{w.Project.ID, own.ID} {
		foreign := []error{
			second(w.Commands().DecommissionInstance(t.Context(), m, project, i.ID)),
			second(w.Commands().UpgradeInstance(t.Context(), m, command.UpgradeInstanceInput{
				ProjectID: project, InstanceID: i.ID, Version: "2.0.0",
			})),
			second(w.Commands().RollbackInstance(t.Context(), m, project, i.ID, "")),
			second(w.Commands().StopInstance(t.Context(), m, project, i.ID)),
			second(w.Commands().StartInstance(t.Context(), m, project, i.ID)),
			second((&command.Service{DB: w.DB}).ChangeInstance(t.Context(), m, project, i.ID, command.ChangeInstanceInput{})),
			second((&command.Service{DB: w.DB}).ReleaseAllocation(t.Context(), m, project, a.ID)),
		}
		absent := []error{
			second(w.Commands().DecommissionInstance(t.Context(), m, project, db.NewID())),
			second(w.Commands().UpgradeInstance(t.Context(), m, command.UpgradeInstanceInput{
				ProjectID: project, InstanceID: db.NewID(), Version: "2.0.0",
			})),
			second(w.Commands().RollbackInstance(t.Context(), m, project, db.NewID(), "")),
			second(w.Commands().StopInstance(t.Context(), m, project, db.NewID())),
			second(w.Commands().StartInstance(t.Context(), m, project, db.NewID())),
			second((&command.Service{DB: w.DB}).ChangeInstance(t.Context(), m, project, db.NewID(),
				command.ChangeInstanceInput{})),
			second((&command.Service{DB: w.DB}).ReleaseAllocation(t.Context(), m, project, db.NewID())),
		}
		for n := range foreign {
			require.Error(t, foreign[n])
			require.Equal(t, absent[n].Error(), foreign[n].Error())
		}
	}
	require.Equal(t, lifecycle.Requested, w.Get(i.ID).Lifecycle.Status)
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		got, err := capacity.Get(ctx, tx, w.Project.ID, a.ID)
		require.Equal(t, capacity.Active, got.Status)
		return err
	})
	require.WithinDuration(t, w.Now, i.CreatedAt, time.Minute)
}

func second[T any](_ T, err error) error { return err }
