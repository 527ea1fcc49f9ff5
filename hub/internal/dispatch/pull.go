package dispatch

import (
	"context"
	"maps"
	"slices"
	"strings"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/protocol"
)

// MayPull reports whether the node's newest state needs an image of the repository.
func (d *Dispatcher) MayPull(ctx context.Context, nodeID, repository string) (bool, error) {
	return db.Query(ctx, d.DB, func(tx db.Tx) (bool, error) { return mayPull(ctx, tx, nodeID, repository) })
}

func mayPull(ctx context.Context, tx db.Tx, nodeID, repository string) (may bool, err error) {
	var quarantined bool
	err = tx.QueryRow(ctx,
		`SELECT n.quarantined_at IS NOT NULL, $2::text = ANY(s.repositories) FROM nodes n JOIN node_states s
			ON s.node_id = n.id
		WHERE n.id = $1 ORDER BY s.epoch DESC, s.generation DESC LIMIT 1`, nodeID, repository).Scan(&quarantined, &may)
	if db.IsNoRows(err) {
		return false, nil
	}
	if err == nil && quarantined {
		return false, protocol.Refuse(protocol.Nack_NODE_QUARANTINED, "the node is quarantined")
	}
	return may, err
}

// repositoriesOf returns the repositories of the images that workloads and their fallbacks need.
func repositoriesOf(parts []plan.Part) []string {
	named := map[string]bool{}
	for _, p := range parts {
		w := p.Workload
		for _, s := range slices.Concat(w.GetServices(), w.GetFallback().GetServices()) {
			for _, image := range s.Images() {
				name, _, _ := strings.Cut(image, "@")
				named[name] = true
			}
		}
	}
	return slices.AppendSeq(make([]string, 0, len(named)), maps.Keys(named)) // not nil: the column is NOT NULL
}
