package command

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// upgraded is a running instance whose upgrade to 2.0.0 was asked for.
func (w *world) upgraded() instance.Instance {
	w.t.Helper()
	i := w.running()
	w.release("2.0.0")
	i, err := w.commands().UpgradeInstance(w.t.Context(), w.meta("upgrade"+db.NewID()), w.project.ID, i.ID, "2.0.0")
	require.NoError(w.t, err)
	return i
}

func (w *world) stopped() instance.Instance {
	w.t.Helper()
	i := w.running()
	_, err := w.commands().StopInstance(w.t.Context(), w.meta("stop"+db.NewID()), w.project.ID, i.ID)
	require.NoError(w.t, err)
	w.report(2, w.says(i, protocol.WorkloadStatus_STOPPED))
	return w.get(i.ID)
}

func TestUpgradeAndRollback(t *testing.T) {
	w := newWorld(t)
	i := w.upgraded()
	require.Equal(t, instance.Upgrading, i.Lifecycle.Status)
	require.Equal(t, "2.0.0", i.Version)
	require.Equal(t, []string{w.node, w.node}, w.poked)
	_, err := w.commands().UpgradeInstance(t.Context(), w.meta("again"), w.project.ID, i.ID, "2.0.0")
	require.EqualValues(t, "instance_upgrading", fault.As(err).Code)
	_, err = w.commands().RollbackInstance(t.Context(), w.meta("early"), w.project.ID, i.ID, "")
	require.EqualValues(t, "instance_upgrading", fault.As(err).Code)

	ready := w.says(i, protocol.WorkloadStatus_READY)
	ready.Revision = 2
	require.Equal(t, []string{w.node}, w.report(2, ready), "the node is told that it may no longer go back")
	i, err = w.commands().RollbackInstance(t.Context(), w.meta("back"), w.project.ID, i.ID, "")
	require.NoError(t, err)
	require.Equal(t, "1.0.0", i.Version)
	require.Equal(t, "2.0.0", i.PreviousVersion)
	ready.Revision = 3
	w.report(3, ready)
	require.Equal(t, []string{
		"apps.instance.requested", "apps.instance.deploying", "apps.instance.running", "apps.instance.upgrade_requested",
		"apps.instance.upgraded",
		"apps.instance.rollback_requested", "apps.instance.rolled_back",
	}, w.eventTypes(i.ID))
}

func TestARollbackRunsADeprecatedVersionButNoneThatIsRetired(t *testing.T) {
	w := newWorld(t)
	i := w.upgraded()
	ready := w.says(i, protocol.WorkloadStatus_READY)
	ready.Revision = 2
	w.report(2, ready)
	status := func(s catalog.Status) {
		w.tx(func(ctx context.Context, tx db.Tx) error {
			_, _, err := catalog.SetStatus(ctx, tx, "demo", "1.0.0", s, w.now)
			return err
		})
	}
	status(catalog.Deprecated)
	status(catalog.Retired)
	_, err := w.commands().RollbackInstance(t.Context(), w.meta("a"), w.project.ID, i.ID, "1.0.0")
	require.Equal(t, catalog.CodeVersionNotActive, fault.As(err).Code)
	require.Equal(t, "/target_version", fault.As(err).Fields[0].Pointer)
}

func TestWhatRefusesAnUpgradeChangesNothing(t *testing.T) {
	w := newWorld(t)
	i := w.running()
	w.release("2.0.0")
	cases := []struct {
		name, version, code string
		change              func(*Meta)
	}{
		{"unknown version", "9.9.9", "reference_unknown", nil},
		{"the version that runs", "1.0.0", "version_unchanged", nil},
		{"no permission", "2.0.0", "forbidden", func(m *Meta) {
			m.Principal = iam.Principal{
				Type: principal.User, ID: db.NewID(), OrgID: w.project.OrgID,
				Bindings: []iam.Binding{{Role: iam.Viewer}},
			}
		}},
	}
	before := w.contents()
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			m := w.meta("k")
			if c.change != nil {
				c.change(&m)
			}
			_, err := w.commands().UpgradeInstance(t.Context(), m, w.project.ID, i.ID, c.version)
			require.EqualValues(t, c.code, fault.As(err).Code, "%v", err)
		})
	}
	require.Equal(t, before, w.contents())
}

func TestStopAndStart(t *testing.T) {
	w := newWorld(t)
	i := w.stopped()
	require.Equal(t, instance.Stopped, i.Lifecycle.Status)
	started, err := w.commands().StartInstance(t.Context(), w.meta("start"), w.project.ID, i.ID)
	require.NoError(t, err)
	require.Equal(t, instance.Deploying, started.Lifecycle.Status)
	require.Equal(t, i.Members[0].AllocationID, started.Members[0].AllocationID)
	ready := w.says(i, protocol.WorkloadStatus_READY)
	ready.Revision = 2
	w.report(3, ready)
	require.Equal(t, []string{
		"apps.instance.requested", "apps.instance.deploying", "apps.instance.running", "apps.instance.stop_requested",
		"apps.instance.stopped",
		"apps.instance.start_requested", "apps.instance.running",
	}, w.eventTypes(i.ID))
}

func TestNoMoneyNoStart(t *testing.T) {
	w := newWorld(t)
	i := w.stopped()
	w.now = w.now.Add(3 * time.Hour)
	w.tx(func(ctx context.Context, tx db.Tx) error {
		_, err := tx.Exec(ctx, `UPDATE wallets SET balance_nanos = 0`)
		return err
	})
	w.tx(func(ctx context.Context, tx db.Tx) error {
		_, err := tx.Exec(ctx, `UPDATE holds SET placed_nanos = posted_nanos`)
		return err
	})
	before := w.contents()
	_, err := w.commands().StartInstance(t.Context(), w.meta("start"), w.project.ID, i.ID)
	require.EqualValues(t, "insufficient_funds", fault.As(err).Code)
	require.Equal(t, before, w.contents())
}

func TestConfigIsCheckedAgainstTheVersion(t *testing.T) {
	w := newWorld(t)
	i := w.running()
	_, err := (&Service{DB: w.d}).ChangeInstance(t.Context(), w.meta(""), w.project.ID, i.ID,
		ChangeInstanceInput{Config: map[string]any{"x": 1}})
	require.EqualValues(t, "config_invalid", fault.As(err).Code)
}

func TestWhatAnInstanceCostsIsKnownBeforeAndWhileItRuns(t *testing.T) {
	w := newWorld(t)
	var before ledger.Estimate
	w.tx(func(ctx context.Context, tx db.Tx) (err error) {
		before, err = ledger.EstimateMember(ctx, tx, ledger.Subject{
			Kind: ledger.Member, OrgID: w.project.OrgID,
			AppSlug: "demo", CPUMillis: 500, MemoryBytes: 128 << 20,
		}, w.now)
		return err
	})
	require.Equal(t, "EUR", before.Currency)
	require.EqualValues(t, 3_600_000_000, before.PerHourNanos)
	require.Len(t, before.Rates, 1)

	i := w.running()
	_, held := w.wallet()
	w.tx(func(ctx context.Context, tx db.Tx) error {
		cost, err := ledger.CostOf(ctx, tx, []string{i.Members[0].ID})
		require.Equal(t, ledger.Cost{Currency: "EUR", HeldNanos: held, PerHourNanos: before.PerHourNanos}, cost)
		return err
	})
}
