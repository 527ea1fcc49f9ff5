package fleet

import (
	"context"
	"sync/atomic"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// DenyList is the set of nodes that are banned or removed, as it was loaded last. TLS asks it for every handshake, and
// the registry for every request of a node, so that neither costs a transaction; the hello asks the database.
type DenyList struct {
	ids atomic.Pointer[map[string]struct{}]
}

// Load reads the set anew.
func (s *DenyList) Load(ctx context.Context, d *db.DB) error {
	ids, err := db.ReadTx(ctx, d, func(tx db.Tx) ([]string, error) {
		// A lost node may come in: it hands over the usage that it owes.
		rows, err := tx.Query(ctx,
			`SELECT id FROM nodes WHERE banned_at IS NOT NULL OR (removed_at IS NOT NULL AND NOT lost)`)
		if err != nil {
			return nil, err
		}
		return pgx.CollectRows(rows, pgx.RowTo[string])
	})
	if err != nil {
		return err
	}
	set := make(map[string]struct{}, len(ids))
	for _, id := range ids {
		set[id] = struct{}{}
	}
	s.ids.Store(&set)
	return nil
}

// Has reports whether the node is in the set.
func (s *DenyList) Has(nodeID string) bool {
	set := s.ids.Load()
	if set == nil {
		return false
	}
	_, is := (*set)[nodeID]
	return is
}
