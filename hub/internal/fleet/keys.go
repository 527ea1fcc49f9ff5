package fleet

import (
	"context"
	"crypto/ed25519"
	"sync"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

const (
	// keysTTL is how long the loaded keys are good for a node that is not among them: unknown ids cost one query in that
	// time.
	keysTTL = 10 * time.Second
	// keysTimeout bounds the query.
	keysTimeout = 5 * time.Second
)

// PublicKeys holds the keys of all nodes that may renew their certificate, loaded when one is asked for, so that a
// proof can be checked without a query. A key may have been banned since: the renewal itself asks the database.
type PublicKeys struct {
	DB *db.DB

	mu       sync.Mutex
	loadedAt time.Time
	keys     map[string]ed25519.PublicKey
}

// Of returns the node's key; nil when there is no such node.
func (k *PublicKeys) Of(ctx context.Context, nodeID string, now time.Time) (ed25519.PublicKey, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if key, ok := k.keys[nodeID]; ok || now.Sub(k.loadedAt) < keysTTL {
		return key, nil
	}
	// What is loaded is for all: a caller that hangs up does not end it.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), keysTimeout)
	defer cancel()
	k.loadedAt = now
	keys, err := db.ReadTx(ctx, k.DB, func(tx db.Tx) (map[string]ed25519.PublicKey, error) {
		rows, err := tx.Query(ctx,
			`SELECT id, public_key FROM nodes WHERE banned_at IS NULL AND (removed_at IS NULL OR lost)`)
		if err != nil {
			return nil, err
		}
		defer rows.Close()
		keys := map[string]ed25519.PublicKey{}
		for rows.Next() {
			var (
				id  string
				key []byte
			)
			if err := rows.Scan(&id, &key); err != nil {
				return nil, err
			}
			if len(key) == ed25519.PublicKeySize {
				keys[id] = key
			}
		}
		return keys, rows.Err()
	})
	if err != nil {
		return nil, err
	}
	k.keys = keys
	return keys[nodeID], nil
}
