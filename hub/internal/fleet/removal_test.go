package fleet_test

import (
	"context"
	"crypto/ed25519"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestWhoMayBeRemoved(t *testing.T) {
	online := fleet.Node{SessionNo: 1, LastSeenAt: now}
	with := func(n fleet.Node, change func(*fleet.Node)) fleet.Node {
		change(&n)
		return n
	}
	cases := []struct {
		name string
		node fleet.Node
		lost bool
		code string
	}{
		{"in use", online, false, "node_not_draining"},
		{"draining", with(online, func(n *fleet.Node) { n.Draining = true }), false, ""},
		{"banned", with(online, func(n *fleet.Node) { n.BannedAt = now }), false, ""},
		{"lost but in contact", online, true, "node_connected"},
		{"lost, draining, in contact", with(online, func(n *fleet.Node) { n.Draining = true }), true, "node_connected"},
		{"lost and banned", with(online, func(n *fleet.Node) { n.BannedAt = now }), true, ""},
		{"lost and silent", with(online, func(n *fleet.Node) { n.LastSeenAt = now.Add(-fleet.OnlineWindow) }), true, ""},
		{"lost and hung up", with(online, func(n *fleet.Node) { n.DisconnectedAt = now }), true, ""},
		{"never there", fleet.Node{}, true, ""},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			err := fleet.CheckRemoval(c.node, c.lost, now)
			if c.code == "" {
				require.NoError(t, err)
				return
			}
			require.Equal(t, c.code, codeOf(t, err))
		})
	}
}

func TestARemovedNodeIsShutOutAndALostOneMayHandOver(t *testing.T) {
	for _, lost := range []bool{false, true} {
		d := dbtest.New(t)
		secret := token(t, d)
		pub, priv := key(t)
		n, _, err := enroll(t, d, secret, pub, now)
		require.NoError(t, err)
		_, err = connect(t, d, n.ID, &protocol.Hello{Incarnation: "i1"}, 0, now)
		require.NoError(t, err)
		n = must(t, d, func(ctx context.Context, tx db.Tx) (fleet.Node, error) {
			n, done, err := fleet.Remove(ctx, tx, n.ID, lost, "why", now)
			require.True(t, done)
			return n, err
		})
		require.Equal(t, map[bool]fleet.Status{false: fleet.Removed, true: fleet.Lost}[lost], n.Status(now))
		require.False(t, n.TakesNew())
		require.Empty(t, placeable(t, d, now))
		_, connectErr := connect(t, d, n.ID, &protocol.Hello{Incarnation: "i1"}, 0, now)
		_, _, enrollErr := enroll(t, d, secret, pub, now)
		message := fleet.RenewalMessage(n.ID, "csr", "now")
		renewErr := fleet.MayRenew(n, pub, message, ed25519.Sign(priv, message))
		for _, err := range []error{connectErr, enrollErr, renewErr} {
			if lost {
				require.NoError(t, err)
			} else {
				require.Equal(t, "node_removed", codeOf(t, err))
			}
		}
	}
}
