package fleet_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/protocol"
)

// Nothing starts on a quarantined node: a tenant would pay for nothing.
func TestNothingNewGoesToAQuarantinedNode(t *testing.T) {
	d := dbtest.New(t)
	n := node(t, d)
	_, err := connect(t, d, n.ID, &protocol.Hello{Incarnation: "i1"}, 0, now)
	require.NoError(t, err)
	must(t, d, func(ctx context.Context, tx db.Tx) (bool, error) {
		_, done, err := fleet.Quarantine(ctx, tx, n.ID, "used twice", now)
		return done, err
	})
	require.Empty(t, placeable(t, d, now))
	must(t, d, func(ctx context.Context, tx db.Tx) (bool, error) {
		_, done, err := fleet.Release(ctx, tx, n.ID, now)
		return done, err
	})
	require.Len(t, placeable(t, d, now), 1)
}

// What two processes with the node's key have said before its release raises no alarm after it.
func TestAReleasedNodeStartsWithoutSuspicion(t *testing.T) {
	d := dbtest.New(t)
	n := node(t, d)
	detected := func(lastSession uint64) bool {
		c, err := connect(t, d, n.ID, &protocol.Hello{LastSession: lastSession}, 0, now)
		require.NoError(t, err)
		return must(t, d, func(ctx context.Context, tx db.Tx) (fleet.ReportResult, error) {
			return fleet.ApplyReport(ctx, tx, fleet.Report{NodeID: n.ID, SessionNo: c.SessionNo, Counter: 1}, now)
		}).CloneDetected
	}
	require.False(t, detected(0))
	require.False(t, detected(0), "the node, or its clone, has started")
	require.True(t, detected(1), "both live")
	for _, change := range []func(context.Context, db.Tx) (fleet.Node, bool, error){
		func(ctx context.Context, tx db.Tx) (fleet.Node, bool, error) {
			return fleet.Quarantine(ctx, tx, n.ID, "used twice", now)
		},
		func(ctx context.Context, tx db.Tx) (fleet.Node, bool, error) {
			return fleet.Release(ctx, tx, n.ID, now)
		},
	} {
		require.True(t, must(t, d, func(ctx context.Context, tx db.Tx) (bool, error) {
			_, done, err := change(ctx, tx)
			return done, err
		}))
	}
	require.False(t, detected(1), "the one that goes on")
}

// The token that let the node in once gives it no new certificate after the ban.
func TestLaw01ABannedNodeGetsNothingForItsJoinToken(t *testing.T) {
	d := dbtest.New(t)
	secret := token(t, d)
	pub, _ := key(t)
	n, _, err := enroll(t, d, secret, pub, now)
	require.NoError(t, err)
	must(t, d, func(ctx context.Context, tx db.Tx) (bool, error) {
		_, done, err := fleet.Ban(ctx, tx, n.ID, "stolen", now)
		return done, err
	})
	_, _, err = enroll(t, d, secret, pub, now)
	require.Equal(t, "node_banned", codeOf(t, err))
}

// TLS lets a lost node in, as its hello does: it owes usage, and what is left there has to end.
func TestLaw05ALostNodeIsLetInToHandOverWhatItOwes(t *testing.T) {
	d := dbtest.New(t)
	lost, removed := node(t, d), node(t, d)
	for n, isLost := range map[string]bool{lost.ID: true, removed.ID: false} {
		require.True(t, must(t, d, func(ctx context.Context, tx db.Tx) (bool, error) {
			_, done, err := fleet.Remove(ctx, tx, n, isLost, "why", now)
			return done, err
		}))
	}
	var list fleet.DenyList
	require.NoError(t, list.Load(t.Context(), d))
	require.True(t, list.Has(removed.ID))
	require.False(t, list.Has(lost.ID))
}

// A condition that takes the place of another decides whether the node may serve several orgs: a report of it is not
// only a sign of life.
func TestLaw10AReportWithAnotherConditionIsNoQuietOne(t *testing.T) {
	d := dbtest.New(t)
	n := node(t, d)
	before := []string{"cgroup_v1"}
	c, err := connect(t, d, n.ID, &protocol.Hello{
		Incarnation: "i1", Facts: &protocol.NodeFacts{Conditions: before},
	}, 0, now)
	require.NoError(t, err)
	quiet := func(counter uint64, conditions []string) bool {
		t.Helper()
		return must(t, d, func(ctx context.Context, tx db.Tx) ([]bool, error) {
			return fleet.ApplyUnchangedReports(ctx, tx, []fleet.Report{{
				NodeID: n.ID, SessionNo: c.SessionNo, Counter: counter, Conditions: conditions,
			}}, now)
		})[0]
	}
	require.True(t, quiet(1, before))
	require.False(t, quiet(2, protocol.WeakIsolation()[:1]))
}
