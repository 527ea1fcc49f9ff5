package instance_test

import (
	"context"
	"crypto/sha256"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

func (w *world) ask() instance.Request {
	return instance.Request{
		OperationID: db.NewID(), By: principal.Actor{Type: principal.User, ID: "u"},
		CorrelationID: "corr-ask",
	}
}

func (w *world) upgrade(version string) instance.Change {
	w.t.Helper()
	i := w.get()
	return w.change(func(ctx context.Context, tx db.Tx) (instance.Change, error) {
		return instance.RequestUpgrade(ctx, tx, i, w.ask(), instance.NewRevision{
			AppVersion: version, ParametersJSON: `{"a":1}`, ManifestEnvelope: []byte(version),
			Services: map[string][]*protocol.Service{w.member: {{Name: "main", Image: version}}},
		}, nil, w.now)
	})
}

func (w *world) change(do func(ctx context.Context, tx db.Tx) (instance.Change, error)) (c instance.Change) {
	w.t.Helper()
	w.do(func(ctx context.Context, tx db.Tx) {
		var err error
		c, err = do(ctx, tx)
		require.NoError(w.t, err)
	})
	return c
}

func (w *world) compiled() plan.Member {
	w.t.Helper()
	var list []plan.Member
	w.do(func(ctx context.Context, tx db.Tx) {
		var err error
		list, err = instance.SnapshotFor(ctx, tx, w.node)
		require.NoError(w.t, err)
	})
	require.Len(w.t, list, 1)
	return list[0]
}

func (w *world) saysOf(revision uint64, status protocol.WorkloadStatus_Status) *protocol.WorkloadStatus {
	s := w.says(status)
	s.Revision = revision
	return s
}

func TestAnUpgradeCarriesItsFallbackUntilItIsReady(t *testing.T) {
	w := newWorld(t)
	w.report(1, w.says(protocol.WorkloadStatus_READY))
	c := w.upgrade("2.0.0")
	require.True(t, c.DesiredChanged)
	require.Equal(t, "apps.instance.upgrade_requested", c.Steps[0].EventType())
	require.Equal(t, lifecycle.Upgrading, c.Instance.Lifecycle.Status)
	require.Equal(t, "2.0.0", c.Instance.Version)
	require.Equal(t, "1.0.0", c.Instance.PreviousVersion)
	m := w.compiled()
	require.EqualValues(t, 2, m.Revision)
	require.Equal(t, "corr-ask", m.CorrelationID)
	require.Equal(t, "2.0.0", m.Services[0].GetImage())
	require.EqualValues(t, 1, m.Fallback.Revision)
	require.Equal(t, "x", m.Fallback.Services[0].GetImage())
	require.Equal(t, []byte{1}, m.Fallback.ManifestEnvelope)

	require.Empty(t, w.report(2, w.says(protocol.WorkloadStatus_READY)), "what is said of the old revision says nothing "+
		"of the new one")
	require.Equal(t, lifecycle.Upgrading, w.get().Lifecycle.Status)
	w.report(2, w.saysOf(2, protocol.WorkloadStatus_STARTING))
	require.Equal(t, lifecycle.Upgrading, w.get().Lifecycle.Status)
	changes := w.report(2, w.saysOf(2, protocol.WorkloadStatus_READY))
	require.Equal(t, "apps.instance.upgraded", changes[0].Steps[0].EventType())
	require.True(t, changes[0].DesiredChanged, "the node no longer goes back by itself")
	require.Nil(t, w.compiled().Fallback)
	require.EqualValues(t, 2, w.compiled().Revision)
}

// TestAFailedUpgradeGoesBackAndSaysSo: the node alone has gone back; the hub follows it without touching the container
// again.
func TestAFailedUpgradeGoesBackAndSaysSo(t *testing.T) {
	w := newWorld(t)
	w.report(1, w.says(protocol.WorkloadStatus_READY))
	w.upgrade("2.0.0")
	w.report(2, w.saysOf(2, protocol.WorkloadStatus_STARTING))
	back := w.saysOf(1, protocol.WorkloadStatus_STARTING)
	back.FallbackFromRevision, back.Reason, back.Detail = 2, protocol.WorkloadStatus_READINESS_TIMEOUT, "no answer"
	changes := w.report(2, back)
	require.Equal(t, []lifecycle.Step{{
		From: lifecycle.Upgrading, To: lifecycle.RollingBack,
		Reason: protocol.WorkloadStatus_READINESS_TIMEOUT,
	}}, changes[0].Steps)
	require.True(t, changes[0].DesiredChanged)
	i := w.get()
	require.EqualValues(t, 1, i.Revision)
	require.Equal(t, "1.0.0", i.Version)
	m := w.compiled()
	require.EqualValues(t, 1, m.Revision, "the very revision that runs: its container is not replaced again")
	require.Nil(t, m.Fallback)

	back.Status = protocol.WorkloadStatus_READY
	changes = w.report(2, back)
	require.Equal(t, "apps.instance.rolled_back", changes[0].Steps[0].EventType())
	require.Equal(t, lifecycle.Lifecycle{Status: lifecycle.Running, Health: lifecycle.HealthHealthy}, w.get().Lifecycle)
	w.report(3, w.says(protocol.WorkloadStatus_READY))
	require.Empty(t, w.get().Members[0].Reason)

	c := w.upgrade("3.0.0")
	require.EqualValues(t, 3, c.Instance.Revision, "a number is never used again")
	require.EqualValues(t, 1, w.compiled().Fallback.Revision)
}

func TestANodeThatWentBackBeforeItCouldSaySoIsSeenInOneReport(t *testing.T) {
	w := newWorld(t)
	w.report(1, w.says(protocol.WorkloadStatus_READY))
	w.upgrade("2.0.0")
	back := w.saysOf(1, protocol.WorkloadStatus_READY)
	back.FallbackFromRevision, back.Reason = 2, protocol.WorkloadStatus_CRASH_LOOP
	changes := w.report(2, back)
	require.Equal(t, []lifecycle.Step{
		{From: lifecycle.Upgrading, To: lifecycle.RollingBack, Reason: protocol.WorkloadStatus_CRASH_LOOP}, {
			From: lifecycle.RollingBack,
			To:   lifecycle.Running,
		},
	}, changes[0].Steps)
	require.Equal(t, changes[0].FirstVersion+1, changes[0].Instance.ResourceVersion)
	require.True(t, changes[0].DesiredChanged)
}

func TestAFallbackThatWillNotStartIsTheEnd(t *testing.T) {
	w := newWorld(t)
	w.report(1, w.says(protocol.WorkloadStatus_READY))
	w.upgrade("2.0.0")
	back := w.saysOf(1, protocol.WorkloadStatus_FAILED)
	back.FallbackFromRevision, back.Reason = 2, protocol.WorkloadStatus_IMAGE_PULL_FAILED
	w.reportTwice(2, back)
	require.Equal(t, lifecycle.Lifecycle{
		Status: lifecycle.Failed, Health: lifecycle.HealthUnhealthy,
		Reason: protocol.WorkloadStatus_IMAGE_PULL_FAILED,
	}, w.get().Lifecycle)
	require.True(t, w.compiled().Stopped)

	c := w.upgrade("3.0.0")
	require.Equal(t, lifecycle.Upgrading, c.Instance.Lifecycle.Status)
	require.EqualValues(t, 1, w.compiled().Fallback.Revision)
}

func TestAfterAFailedFirstDeploymentOnlyStartAndDecommissionAreOpen(t *testing.T) {
	w := newWorld(t)
	failed := w.says(protocol.WorkloadStatus_FAILED)
	failed.Reason = protocol.WorkloadStatus_CRASH_LOOP
	w.reportTwice(1, failed)
	i := w.get()
	w.do(func(ctx context.Context, tx db.Tx) {
		_, err := instance.RequestUpgrade(ctx, tx, i, w.ask(),
			instance.NewRevision{AppVersion: "2.0.0"}, nil, w.now)
		require.EqualValues(t, "instance_failed", fault.As(err).Code)
		_, err = instance.RollbackTarget(ctx, tx, i, "")
		require.EqualValues(t, "instance_failed", fault.As(err).Code)
		_, err = instance.RequestStop(ctx, tx, i, w.ask(), w.now)
		require.EqualValues(t, "instance_failed", fault.As(err).Code)
	})
	c := w.change(func(ctx context.Context, tx db.Tx) (instance.Change, error) {
		return instance.RequestStart(ctx, tx, i, w.ask(), nil, w.now)
	})
	require.Equal(t, "apps.instance.start_requested", c.Steps[0].EventType())
	require.EqualValues(t, 2, w.compiled().Revision, "what failed before does not count against the new revision")
	require.False(t, w.compiled().Stopped)
	w.report(2, failed)
	require.Equal(t, lifecycle.Deploying, w.get().Lifecycle.Status)
	w.report(2, w.saysOf(2, protocol.WorkloadStatus_READY))
	require.Equal(t, lifecycle.Running, w.get().Lifecycle.Status)
	require.Equal(t, lifecycle.Decommissioning, w.decommission().Instance.Lifecycle.Status)
}

func TestRollbackRunsTheOldContentUnderANewNumber(t *testing.T) {
	w := newWorld(t)
	w.report(1, w.says(protocol.WorkloadStatus_READY))
	w.upgrade("2.0.0")
	w.report(2, w.saysOf(2, protocol.WorkloadStatus_READY))
	require.False(t, w.compiled().RollsBack)
	i := w.get()
	c := w.change(func(ctx context.Context, tx db.Tx) (instance.Change, error) {
		target, err := instance.RollbackTarget(ctx, tx, i, "")
		require.NoError(t, err)
		return instance.RequestRollback(ctx, tx, i, w.ask(), target, nil, false, []byte("newer delegation"), w.now)
	})
	require.Equal(t, "apps.instance.rollback_requested", c.Steps[0].EventType())
	require.Equal(t, "1.0.0", c.Instance.Version)
	require.Equal(t, "2.0.0", c.Instance.PreviousVersion)
	m := w.compiled()
	require.EqualValues(t, 3, m.Revision)
	require.True(t, m.RollsBack, "the node restores its volumes")
	require.Equal(t, "x", m.Services[0].GetImage())
	require.Equal(t, []byte("newer delegation"), m.DelegationEnvelope)
	require.Nil(t, m.Fallback)
	changes := w.report(3, w.saysOf(3, protocol.WorkloadStatus_READY))
	require.Equal(t, "apps.instance.rolled_back", changes[0].Steps[0].EventType())
}

func TestStopKeepsTheRevisionAndStartMakesANewOne(t *testing.T) {
	w := newWorld(t)
	w.report(1, w.says(protocol.WorkloadStatus_READY))
	w.upgrade("2.0.0")
	w.report(2, w.saysOf(2, protocol.WorkloadStatus_READY))
	i := w.get()
	c := w.change(func(ctx context.Context, tx db.Tx) (instance.Change, error) {
		return instance.RequestStop(ctx, tx, i, w.ask(), w.now)
	})
	require.Equal(t, lifecycle.Stopping, c.Instance.Lifecycle.Status)
	require.True(t, c.DesiredChanged)
	require.True(t, w.compiled().Stopped)
	require.EqualValues(t, 2, w.compiled().Revision)
	w.report(3, w.saysOf(2, protocol.WorkloadStatus_STOPPING))
	changes := w.report(3, w.saysOf(2, protocol.WorkloadStatus_STOPPED))
	require.Equal(t, "apps.instance.stopped", changes[0].Steps[0].EventType())
	require.False(t, changes[0].DesiredChanged)

	i = w.get()
	c = w.change(func(ctx context.Context, tx db.Tx) (instance.Change, error) {
		return instance.RequestStart(ctx, tx, i, w.ask(), nil, w.now)
	})
	require.Equal(t, "apps.instance.start_requested", c.Steps[0].EventType())
	require.Equal(t, lifecycle.Deploying, c.Instance.Lifecycle.Status)
	require.Equal(t, "2.0.0", c.Instance.Version)
	require.Equal(t, "1.0.0", c.Instance.PreviousVersion)
	require.EqualValues(t, 3, w.compiled().Revision)
	require.False(t, w.compiled().Stopped)
	w.report(4, w.saysOf(2, protocol.WorkloadStatus_STOPPED))
	require.Equal(t, lifecycle.Deploying, w.get().Lifecycle.Status)
	// A start that fails is no first deployment: what once ran can be gone back to.
	failed := w.saysOf(3, protocol.WorkloadStatus_FAILED)
	failed.Reason = protocol.WorkloadStatus_CRASH_LOOP
	w.reportTwice(4, failed)
	require.Equal(t, lifecycle.Failed, w.get().Lifecycle.Status)
	require.Equal(t, lifecycle.Upgrading, w.upgrade("3.0.0").Instance.Lifecycle.Status)
}

func TestANewNameTouchesNoNodeAndANewConfigOnlyThat(t *testing.T) {
	w := newWorld(t)
	before := w.compiled()
	i := w.get()
	name, config := "renamed", `{"b":2}`
	apply := func(s instance.Settings, desiredChanged bool) instance.Instance {
		was := w.get()
		w.do(func(ctx context.Context, tx db.Tx) {
			c, err := instance.UpdateSettings(ctx, tx, was, s, w.now)
			require.NoError(t, err)
			require.Equal(t, was.ResourceVersion+1, c.Instance.ResourceVersion)
			require.Equal(t, desiredChanged, c.DesiredChanged)
		})
		return w.get()
	}
	require.Equal(t, name, apply(instance.Settings{DisplayName: &name}, false).DisplayName)
	require.Equal(t, before, w.compiled())

	after := apply(instance.Settings{ConfigJSON: &config}, true)
	require.Equal(t, config, after.ConfigJSON)
	require.Equal(t, i.Revision, after.Revision, "no revision is made")
	require.Equal(t, config, w.compiled().Services[0].GetConfig().GetJson())
	require.False(t, after.HasConfig(after.Members[0]))
	apply(instance.Settings{ConfigJSON: &config}, false)

	sum := sha256.Sum256([]byte(config))
	s := w.says(protocol.WorkloadStatus_READY)
	s.ConfigSha256 = sum[:]
	w.report(1, s)
	after = w.get()
	require.True(t, after.HasConfig(after.Members[0]))
	s.ConfigSha256 = []byte("a digest that is none")
	w.report(1, s)
	require.Empty(t, w.get().Members[0].ConfigSHA256)

	w.report(1, w.says(protocol.WorkloadStatus_READY))
	w.upgrade("2.0.0")
	require.Equal(t, config, w.compiled().Fallback.Services[0].GetConfig().GetJson(),
		"the node goes back to the config, too")
}

func TestAnUpgradesFallbackCarriesTheDelegationThatHoldsNow(t *testing.T) {
	w := newWorld(t)
	w.report(1, w.says(protocol.WorkloadStatus_READY))
	first := w.compiled()
	require.False(t, first.NamedAt.IsZero())
	i := w.get()
	w.now = w.now.AddDate(1, 0, 0)
	w.change(func(ctx context.Context, tx db.Tx) (instance.Change, error) {
		back, err := instance.Fallback(ctx, tx, i)
		require.NoError(w.t, err)
		require.EqualValues(t, 1, back.No)
		return instance.RequestUpgrade(ctx, tx, i, w.ask(), instance.NewRevision{
			AppVersion: "2.0.0", ParametersJSON: `{}`, ManifestEnvelope: []byte("2"), DelegationEnvelope: []byte("of 2"),
			Services: map[string][]*protocol.Service{w.member: {{Name: "main", Image: "2"}}},
		}, []byte("renewed"), w.now)
	})
	m := w.compiled()
	require.Equal(t, []byte("of 2"), m.DelegationEnvelope)
	require.True(t, m.NamedAt.After(first.NamedAt.AddDate(0, 11, 0)), "the upgrade is judged as of when it was asked for")
	require.Equal(t, []byte("renewed"), m.Fallback.DelegationEnvelope)
	require.Equal(t, first.NamedAt, m.Fallback.NamedAt, "what it goes back to is judged as of when it was first named")

	back := w.saysOf(1, protocol.WorkloadStatus_READY)
	back.FallbackFromRevision = 2
	w.report(2, back)
	require.EqualValues(t, 1, w.compiled().Revision)
	require.Equal(t, first.NamedAt, w.compiled().NamedAt)
}

// However many members a node has had, only those that are there or that it names are read when it is adopted.
func TestAMemberThatIsGoneIsRememberedWhereItsNodeNamesIt(t *testing.T) {
	w := newWorld(t)
	remembered := func(named ...string) (list []plan.RecordedMember) {
		w.do(func(ctx context.Context, tx db.Tx) {
			var err error
			list, err = instance.RecordedOn(ctx, tx, w.node, named)
			require.NoError(t, err)
		})
		return list
	}
	require.Len(t, remembered(), 1)
	require.Len(t, remembered(w.member), 1, "it is there once")
	w.do(func(ctx context.Context, tx db.Tx) {
		_, err := tx.Exec(ctx, `UPDATE instance_members SET removed_at = $1`, w.now)
		require.NoError(t, err)
	})
	require.Empty(t, remembered())
	require.Empty(t, remembered(db.NewID(), "no id"))
	require.True(t, remembered(w.member)[0].Gone)
}
