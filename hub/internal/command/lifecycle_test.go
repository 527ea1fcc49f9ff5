package command_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestUpgradeAndRollback(t *testing.T) {
	w := newWorld(t)
	i := w.Upgraded()
	require.Equal(t, lifecycle.Upgrading, i.Lifecycle.Status)
	require.Equal(t, "2.0.0", i.Version)
	require.Equal(t, []string{w.Node, w.Node}, w.Enqueued)
	_, err := w.Commands().UpgradeInstance(t.Context(), w.Meta("again"), command.UpgradeInstanceInput{
		ProjectID: w.Project.ID, InstanceID: i.ID, Version: "2.0.0",
	})
	require.EqualValues(t, "instance_upgrading", fault.As(err).Code)
	_, err = w.Commands().RollbackInstance(t.Context(), w.Meta("early"), w.Project.ID, i.ID, "")
	require.EqualValues(t, "instance_upgrading", fault.As(err).Code)

	ready := w.Says(i, protocol.WorkloadStatus_READY)
	ready.Revision = 2
	require.Equal(t, []string{w.Node}, w.Report(2, ready), "the node learns that it may no longer roll back")
	i, err = w.Commands().RollbackInstance(t.Context(), w.Meta("back"), w.Project.ID, i.ID, "")
	require.NoError(t, err)
	require.Equal(t, "1.0.0", i.Version)
	require.Equal(t, "2.0.0", i.PreviousVersion)
	ready.Revision = 3
	w.Report(3, ready)
	require.Equal(t, []string{
		"apps.instance.requested", "apps.instance.deploying", "apps.instance.running", "apps.instance.upgrade_requested",
		"apps.instance.upgraded",
		"apps.instance.rollback_requested", "apps.instance.rolled_back",
	}, w.EventTypes(i.ID))
}

func TestARollbackRunsADeprecatedVersionButNoneThatIsRetired(t *testing.T) {
	w := newWorld(t)
	i := w.Upgraded()
	ready := w.Says(i, protocol.WorkloadStatus_READY)
	ready.Revision = 2
	w.Report(2, ready)
	status := func(s catalog.Status) {
		w.Tx(func(ctx context.Context, tx db.Tx) error {
			_, _, err := catalog.SetStatus(ctx, tx, "demo", "1.0.0", catalog.Move{To: s}, w.Now)
			return err
		})
	}
	status(catalog.Deprecated)
	status(catalog.Retired)
	_, err := w.Commands().RollbackInstance(t.Context(), w.Meta("a"), w.Project.ID, i.ID, "1.0.0")
	require.Equal(t, catalog.CodeVersionNotActive, fault.As(err).Code)
	require.Equal(t, "/target_version", fault.As(err).Fields[0].Pointer)
}

func TestWhatRefusesAnUpgradeChangesNothing(t *testing.T) {
	w := newWorld(t)
	i := w.Running()
	w.Release("2.0.0")
	cases := []struct {
		name, version, code string
		change              func(*command.Meta)
	}{
		{"unknown version", "9.9.9", "reference_unknown", nil},
		{"the version that runs", "1.0.0", "version_unchanged", nil},
		{"no permission", "2.0.0", "forbidden", func(m *command.Meta) {
			m.Principal = iam.Principal{
				Type: principal.User, ID: db.NewID(), OrgID: w.Project.OrgID,
				Bindings: []iam.Binding{{Role: iam.Viewer}},
			}
		}},
	}
	before := w.Contents()
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			m := w.Meta("k")
			if c.change != nil {
				c.change(&m)
			}
			_, err := w.Commands().UpgradeInstance(t.Context(), m, command.UpgradeInstanceInput{
				ProjectID: w.Project.ID, InstanceID: i.ID, Version: c.version,
			})
			require.EqualValues(t, c.code, fault.As(err).Code, "%v", err)
		})
	}
	require.Equal(t, before, w.Contents())
}

func TestAnAgentThatIsTooOldGetsNeitherAnInstanceNorAnUpgrade(t *testing.T) {
	w := newWorld(t)
	i := w.Running()
	w.Release("2.0.0")
	w.SetFeatures("single_service")
	before := w.Contents()
	_, err := w.Commands().UpgradeInstance(t.Context(), w.Meta("up"), command.UpgradeInstanceInput{
		ProjectID: w.Project.ID, InstanceID: i.ID, Version: "2.0.0",
	})
	require.EqualValues(t, "feature_missing", fault.As(err).Code, "%v", err)
	require.Equal(t, "/target_version", fault.As(err).Fields[0].Pointer)
	for _, named := range [][]string{nil, {i.Members[0].AllocationID}} {
		in := w.InstanceInput()
		in.AllocationIDs = named
		_, err = w.Commands().CreateInstance(t.Context(), w.Meta("new"), in)
		require.EqualValues(t, "feature_missing", fault.As(err).Code, "%v", err)
	}
	require.Equal(t, before, w.Contents())
	w.SetFeatures(append(manifest.KnownFeatures(), "from_tomorrow")...)
	_, err = w.Commands().UpgradeInstance(t.Context(), w.Meta("up"), command.UpgradeInstanceInput{
		ProjectID: w.Project.ID, InstanceID: i.ID, Version: "2.0.0",
	})
	require.NoError(t, err)
}

func TestStopAndStart(t *testing.T) {
	w := newWorld(t)
	i := w.Stopped()
	require.Equal(t, lifecycle.Stopped, i.Lifecycle.Status)
	started, err := w.Commands().StartInstance(t.Context(), w.Meta("start"), w.Project.ID, i.ID)
	require.NoError(t, err)
	require.Equal(t, lifecycle.Deploying, started.Lifecycle.Status)
	require.Equal(t, i.Members[0].AllocationID, started.Members[0].AllocationID)
	ready := w.Says(i, protocol.WorkloadStatus_READY)
	ready.Revision = 2
	w.Report(3, ready)
	require.Equal(t, []string{
		"apps.instance.requested", "apps.instance.deploying", "apps.instance.running", "apps.instance.stop_requested",
		"apps.instance.stopped",
		"apps.instance.start_requested", "apps.instance.running",
	}, w.EventTypes(i.ID))
}

func TestNoMoneyNoStart(t *testing.T) {
	w := newWorld(t)
	i := w.Stopped()
	w.Now = w.Now.Add(3 * time.Hour)
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, err := tx.Exec(ctx, `UPDATE wallets SET balance_nanos = 0`)
		return err
	})
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, err := tx.Exec(ctx, `UPDATE holds SET placed_nanos = posted_nanos`)
		return err
	})
	before := w.Contents()
	_, err := w.Commands().StartInstance(t.Context(), w.Meta("start"), w.Project.ID, i.ID)
	require.EqualValues(t, "insufficient_funds", fault.As(err).Code)
	require.Equal(t, before, w.Contents())
}

func TestConfigIsCheckedAgainstTheVersion(t *testing.T) {
	w := newWorld(t)
	i := w.Running()
	_, err := (&command.Service{DB: w.DB}).ChangeInstance(t.Context(), w.Meta(""), w.Project.ID, i.ID,
		command.ChangeInstanceInput{Config: map[string]any{"x": 1}})
	require.EqualValues(t, "config_invalid", fault.As(err).Code)
}

func TestWhatAnInstanceCostsIsKnownBeforeAndWhileItRuns(t *testing.T) {
	w := newWorld(t)
	var before ledger.Estimate
	w.Tx(func(ctx context.Context, tx db.Tx) (err error) {
		before, err = ledger.EstimateMember(ctx, tx, ledger.Subject{
			Kind: ledger.Member, OrgID: w.Project.OrgID,
			AppSlug: "demo", CPUMillis: 500, MemoryBytes: 128 << 20,
		}, w.Now)
		return err
	})
	require.Equal(t, "EUR", before.Currency)
	require.EqualValues(t, 3_600_000_000, before.PerHourNanos)
	require.Len(t, before.Rates, 1)

	i := w.Running()
	_, held := w.Wallet()
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		cost, err := ledger.CostOf(ctx, tx, i.ID)
		require.Equal(t, ledger.Cost{Currency: "EUR", HeldNanos: held, PerHourNanos: before.PerHourNanos}, cost)
		return err
	})
}

// What was lost with its node has no bill that a lease could be for, and its volumes are lost, too.
func TestAnInstanceStartsWithoutItsLostMember(t *testing.T) {
	w := newWorld(t)
	i := w.Stopped()
	w.Exec(`INSERT INTO instance_members (id, instance_id, allocation_id, node_id, role, status, status_reason, detail,
			observed_revision, unreachable, endpoints, restarts, exit_code, removed_at, created_at, updated_at)
		SELECT $2, instance_id, allocation_id, $2, role, 'failed', 'node_lost', '', 0, false, '[]', 0, 0, $3, $3, $3
		FROM instance_members WHERE id = $1`, i.Members[0].ID, db.NewID(), w.Now)
	require.Len(t, w.Get(i.ID).Members, 2)
	started, err := w.Commands().StartInstance(t.Context(), w.Meta("start"), w.Project.ID, i.ID)
	require.NoError(t, err)
	require.Equal(t, lifecycle.Deploying, started.Lifecycle.Status)
}
