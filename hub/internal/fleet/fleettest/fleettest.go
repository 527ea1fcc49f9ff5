// Package fleettest connects nodes to a hub's rows in tests.
package fleettest

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
)

// Connect is fleet.ConnectAll for one node; a refusal is its error.
func Connect(ctx context.Context, tx db.Tx, c fleet.Connection, now time.Time) (fleet.ConnectResult, error) {
	n, err := fleet.Get(ctx, tx, c.NodeID)
	if err != nil {
		return fleet.ConnectResult{}, err
	}
	all, err := fleet.ConnectAll(ctx, tx, map[string]fleet.Node{n.ID: n}, []fleet.Connection{c}, now)
	if err != nil {
		return fleet.ConnectResult{}, err
	}
	return all[0], all[0].Refused
}
