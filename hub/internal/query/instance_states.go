package query

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/pkg/groupcommit"
)

const (
	// maxInstanceStates bounds the instances whose states are read together.
	maxInstanceStates = 256
	// stateTimeout bounds such a read, which belongs to no caller alone.
	stateTimeout = 30 * time.Second
)

// instanceStates reads the states of instances. Callers that come while one read is under way wait for its end and are
// answered together by the next: many at once cost the database little more than one, and each gets what was true after
// it had asked.
type instanceStates struct {
	queue *groupcommit.Queue[*stateRead]
}

// instanceState is what a read of a cached instance asks the database for.
type instanceState struct {
	version instance.Version
	cost    ledger.Cost
	// found is whether there is such an instance.
	found bool
}

// stateRead is one caller's part of a read; it is complete once done is closed.
type stateRead struct {
	id   string
	done chan struct{}

	version  instance.Version
	found    bool
	accounts ledger.Accounts
	err      error
}

func newInstanceStates(d *db.DB) instanceStates {
	split := groupcommit.AtMost[*stateRead](maxInstanceStates)
	return instanceStates{groupcommit.New(split, func(ctx context.Context, group []*stateRead) {
		readStates(ctx, d, group)
	})}
}

func (r instanceStates) read(ctx context.Context, id string) (instanceState, error) {
	own := &stateRead{id: id, done: make(chan struct{})}
	r.queue.Put(ctx, own)
	select {
	case <-own.done:
		return own.state()
	case <-ctx.Done():
		return instanceState{}, db.Cancelled(ctx.Err())
	}
}

// state returns what was read. Prices that cannot be read fail the callers of their own instance alone.
func (r *stateRead) state() (instanceState, error) {
	if r.err != nil {
		return instanceState{}, r.err
	}
	cost, err := r.accounts.Cost(r.id)
	return instanceState{version: r.version, cost: cost, found: r.found}, err
}

func readStates(ctx context.Context, d *db.DB, group []*stateRead) {
	ctx, cancel := context.WithTimeout(ctx, stateTimeout)
	defer cancel()
	ids := make([]string, len(group))
	for i, r := range group {
		ids[i] = r.id
	}
	var accounts ledger.Accounts
	versions, err := db.Query(ctx, d, func(tx db.Tx) (versions map[string]instance.Version, err error) {
		err = db.Together(ctx, tx, func(tx db.Tx) (err error) {
			versions, err = instance.Versions(ctx, tx, ids)
			return err
		}, func(tx db.Tx) (err error) {
			accounts, err = ledger.ReadAccounts(ctx, tx, ids)
			return err
		})
		return versions, err
	})
	for _, r := range group {
		r.version, r.found = versions[r.id]
		r.accounts, r.err = accounts, err
		close(r.done)
	}
}
