package dispatch

import (
	"bytes"
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
)

// UpToDate returns the nodes that hold the latest state, bundle and leases. It takes a few statements however many
// nodes there are.
func (d *Dispatcher) UpToDate(ctx context.Context, tx db.Tx, nodes []nodelink.AckedState) (map[string]bool, error) {
	ids := make([]string, 0, len(nodes))
	for _, n := range nodes {
		ids = append(ids, n.NodeID)
	}
	headers, err := currentHeaders(ctx, tx, ids)
	if err != nil {
		return nil, err
	}
	leases, err := ledger.LeasesOf(ctx, tx, ids)
	if err != nil {
		return nil, err
	}
	bundle, signer := d.Keys.Bundle(), d.Keys.Lease()
	current := map[string]bool{}
	for _, n := range nodes {
		if leases[n.NodeID].Err != nil {
			continue // its own sync says so
		}
		_, sum, err := d.leaseBatch(n, leases[n.NodeID].Leases, signer)
		if err != nil {
			return nil, err
		}
		h, ok := headers[n.NodeID]
		if ok && d.signedByCurrentKey(h) && h.version().Equal(heldBy(n)) && n.BundleVersion >= bundle.Version() &&
			bytes.Equal(sum, n.LeasesSHA256) {
			current[n.NodeID] = true
		}
	}
	return current, nil
}

// currentHeaders returns the newest states of those nodes whose newest state is compiled from the latest intent.
func currentHeaders(ctx context.Context, tx db.Tx, nodeIDs []string) (map[string]stateHeader, error) {
	revs, err := fleet.IntentRevs(ctx, tx, nodeIDs)
	if err != nil {
		return nil, err
	}
	newest, err := db.Select(ctx, tx, scanHeader, `SELECT DISTINCT ON (node_id) `+headerColumns+` FROM node_states
		WHERE node_id = ANY($1::uuid[]) ORDER BY node_id, epoch DESC, generation DESC`, nodeIDs)
	if err != nil {
		return nil, err
	}
	current := map[string]stateHeader{}
	for _, h := range newest {
		if h.rev == revs[h.nodeID] {
			current[h.nodeID] = h
		}
	}
	return current, nil
}
