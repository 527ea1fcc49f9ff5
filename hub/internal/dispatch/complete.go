package dispatch

import (
	"bytes"
	"context"
	"maps"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
)

// maxLooked bounds how many nodes one statement asks about.
const maxLooked = 500

// Complete gives those of the nodes that hold all that is wanted of them: the newest state, signed by the key of the
// moment and of the newest intent, the newest bundle, and the latest leases. For the others one has to look (node). A
// fleet of which nothing new is wanted costs a few statements, however large it is.
func (d *Dispatcher) Complete(ctx context.Context, tx db.Tx, nodes []nodelink.Holding) (map[string]bool, error) {
	ids := make([]string, 0, len(nodes))
	for _, n := range nodes {
		ids = append(ids, n.NodeID)
	}
	heads, err := settledHeads(ctx, tx, ids)
	if err != nil {
		return nil, err
	}
	leases, err := ledger.LeasesOf(ctx, tx, ids)
	if err != nil {
		return nil, err
	}
	bundle, keyID, signer := d.Keys.Bundle(), d.Keys.State().KeyID(), d.Keys.Lease()
	complete := map[string]bool{}
	for _, n := range nodes {
		h, ok := heads[n.NodeID]
		_, sum, err := d.leaseBatch(n.NodeID, n.Held, leases[n.NodeID], signer)
		if err != nil {
			return nil, err
		}
		complete[n.NodeID] = ok && bytes.Equal(sum, n.LeasesSHA256) && h.epoch == bundle.Epoch() && h.keyID == keyID &&
			n.Epoch == h.epoch && n.Generation == h.generation && bytes.Equal(n.StateSHA256, h.sha256) &&
			n.BundleVersion >= bundle.Version()
	}
	return complete, nil
}

// settledHeads are the newest states of nodes, as far as they say what is wanted.
func settledHeads(ctx context.Context, tx db.Tx, nodeIDs []string) (map[string]head, error) {
	revs, err := fleet.Revs(ctx, tx, nodeIDs)
	if err != nil {
		return nil, err
	}
	rows, err := tx.Query(ctx, `SELECT `+headColumns+` FROM node_states WHERE node_id = ANY($1::uuid[])`, nodeIDs)
	if err != nil {
		return nil, err
	}
	states, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (head, error) { return scanHead(row) })
	if err != nil {
		return nil, err
	}
	newest := map[string]head{}
	for _, h := range states {
		if have, ok := newest[h.nodeID]; !ok || h.epoch > have.epoch || h.epoch == have.epoch &&
			h.generation > have.generation {
			newest[h.nodeID] = h
		}
	}
	maps.DeleteFunc(newest, func(id string, h head) bool { return h.rev != revs[id] })
	return newest, nil
}

// addLacking adds those of the connected nodes that do not hold all that is wanted of them.
func (d *Dispatcher) addLacking(ctx context.Context, connected []string, all map[string]uint64) error {
	for part := range slices.Chunk(connected, maxLooked) {
		var holdings []nodelink.Holding
		for _, id := range part {
			if held, ok := d.Link.Held(id); ok {
				holdings = append(holdings, nodelink.Holding{NodeID: id, Held: held})
			}
		}
		complete, err := db.ReadTx(ctx, d.DB, func(tx db.Tx) (map[string]bool, error) {
			return d.Complete(ctx, tx, holdings)
		})
		if err != nil {
			return err
		}
		for _, h := range holdings {
			if !complete[h.NodeID] {
				all[h.NodeID] = max(all[h.NodeID], 0)
			}
		}
	}
	return nil
}
