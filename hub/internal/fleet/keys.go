package fleet

import (
	"context"
	"crypto/ed25519"
	"sync"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

const (
	// keysTTL is how long no second load follows for a node that is not among the keys: unknown ids cost one query in that
	// time.
	keysTTL = 10 * time.Second
	// keysTimeout bounds the query.
	keysTimeout = 5 * time.Second
)

// PublicKeys caches the keys of all nodes that may renew their certificate, so that a proof is checked without a query.
// A node may have been banned since; the renewal itself reads the database.
type PublicKeys struct {
	DB *db.DB

	mu       sync.Mutex
	loadedAt time.Time
	failed   error // of the last load
	keys     map[string]ed25519.PublicKey
}

// Of returns the node's key; nil when there is no such node.
func (k *PublicKeys) Of(ctx context.Context, nodeID string, now time.Time) (ed25519.PublicKey, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if key, ok := k.keys[nodeID]; ok {
		return key, nil
	}
	if now.Sub(k.loadedAt) < keysTTL {
		return nil, k.failed
	}
	// The keys serve all callers: one that hangs up does not end the load.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), keysTimeout)
	defer cancel()
	k.loadedAt = now
	keys, err := db.ReadTx(ctx, k.DB, func(tx db.Tx) (map[string]ed25519.PublicKey, error) {
		return db.CollectMap[string, ed25519.PublicKey](tx.Query(ctx,
			`SELECT id, public_key FROM nodes WHERE banned_at IS NULL AND (removed_at IS NULL OR lost)`))
	})
	if k.failed = err; err != nil {
		return nil, err
	}
	k.keys = keys
	return keys[nodeID], nil
}
