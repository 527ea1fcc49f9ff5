package fleet

import (
	"context"
	"sync/atomic"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// DenyList is the set of banned and removed nodes as of the last Load. TLS checks it at every handshake, and the
// registry at every request of a node, without a transaction; the hello checks the database.
type DenyList struct {
	ids atomic.Pointer[map[string]bool]
}

// Load reads the set anew.
func (s *DenyList) Load(ctx context.Context, d *db.DB) error {
	ids, err := db.ReadTx(ctx, d, func(tx db.Tx) ([]string, error) {
		// The condition of Node.admissionError.
		return db.CollectColumn[string](tx.Query(ctx,
			`SELECT id FROM nodes WHERE banned_at IS NOT NULL OR (removed_at IS NOT NULL AND NOT lost)`))
	})
	if err != nil {
		return err
	}
	set := make(map[string]bool, len(ids))
	for _, id := range ids {
		set[id] = true
	}
	s.ids.Store(&set)
	return nil
}

// Has reports whether the node is in the set.
func (s *DenyList) Has(nodeID string) bool {
	set := s.ids.Load()
	return set != nil && (*set)[nodeID]
}
