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
