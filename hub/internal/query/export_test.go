package query

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
)

// StatesTogether reads the costs of instances as one group, and says which are there.
func StatesTogether(ctx context.Context, d *db.DB, ids ...string) (found []bool, costs []ledger.Cost, errs []error) {
	group := make([]*stateRead, len(ids))
	for i, id := range ids {
		group[i] = &stateRead{id: id, done: make(chan struct{})}
	}
	readStates(ctx, d, group)
	for _, r := range group {
		<-r.done
		state, err := r.state()
		found, costs, errs = append(found, state.found), append(costs, state.cost), append(errs, err)
	}
	return found, costs, errs
}

// PollEvery sets how soon waiting reads poll for the first time.
func PollEvery(s *Service, d time.Duration) { s.pollInterval = d }
