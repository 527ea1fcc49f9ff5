package dispatch

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/protocol"
)

// MayPull reports whether the node's newest state needs an image of the repository.
func (d *Dispatcher) MayPull(ctx context.Context, nodeID, repository string) (bool, error) {
	return db.Query(ctx, d.DB, func(tx db.Tx) (bool, error) { return mayPull(ctx, tx, nodeID, repository) })
}

// mayPull takes one statement, except where the newest state is from before states named their repositories.
func mayPull(ctx context.Context, tx db.Tx, nodeID, repository string) (bool, error) {
	var (
		quarantined  bool
		repositories *[]string
	)
	err := tx.QueryRow(ctx,
		`SELECT n.quarantined_at IS NOT NULL, s.repositories FROM nodes n JOIN node_states s ON s.node_id = n.id
		WHERE n.id = $1 ORDER BY s.epoch DESC, s.generation DESC LIMIT 1`, nodeID).Scan(&quarantined, &repositories)
	switch {
	case db.IsNoRows(err):
		return false, nil
	case err != nil:
		return false, err
	case quarantined:
		return false, protocol.Refuse(protocol.RefusalQuarantined, "the node is quarantined")
	case repositories != nil:
		return slices.Contains(*repositories, repository), nil
	}
	doc, err := selectNewest(ctx, tx, nodeID)
	if err != nil {
		return false, err
	}
	documents, err := selectParts(ctx, tx, doc, math.MaxInt)
	if err != nil {
		return false, err
	}
	named, err := repositoriesOf(documents)
	return slices.Contains(named, repository), err
}

// repositoriesOf are the repositories of the images that workloads and their fallbacks need.
func repositoriesOf(documents [][]byte) ([]string, error) {
	named := map[string]bool{}
	for _, data := range documents {
		w := &protocol.Workload{}
		if err := proto.Unmarshal(data, w); err != nil {
			return nil, fmt.Errorf("a part of a state: %w", err)
		}
		for _, s := range slices.Concat(w.GetServices(), w.GetFallback().GetServices()) {
			name, _, _ := strings.Cut(s.GetImage(), "@")
			named[name] = true
		}
	}
	return slices.AppendSeq(make([]string, 0, len(named)), maps.Keys(named)), nil
}
