package ledger_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/protocol"
)

// runTx is db.LockTx or db.RunTx.
type runTx func(context.Context, *db.DB, func(db.Tx) ([]ledger.Posted, error)) ([]ledger.Posted, error)

// TestTwoPostersAbortNoTransaction: two hub processes that post at once, one the usage of each node or both the usage
// of the same, wait for each other's rows at most: PostgreSQL makes neither start a transaction afresh.
func TestTwoPostersAbortNoTransaction(t *testing.T) {
	t.Run("each its own nodes", func(t *testing.T) {
		attempts, batches := postTwice(t, db.LockTx[[]ledger.Posted], false)
		require.Equal(t, batches, attempts)
	})
	t.Run("the same nodes", func(t *testing.T) {
		attempts, batches := postTwice(t, db.LockTx[[]ledger.Posted], true)
		require.Equal(t, batches, attempts)
	})
	t.Run("serializable", func(t *testing.T) {
		attempts, batches := postTwice(t, db.RunTx[[]ledger.Posted], false)
		t.Logf("of %d transactions %d were aborted: %.0f %%", attempts, attempts-batches,
			100*float64(attempts-batches)/float64(attempts))
	})
}

// postTwice lets two posters post 40 batches each, of 8 nodes with 5 members and two prices, and returns how often a
// transaction was attempted.
func postTwice(t *testing.T, run runTx, sameNodes bool) (attempts, batches int64) {
	t.Helper()
	const nodes, members, rounds = 16, 5, 40
	w := newWorld(t)
	w.credit("10000000")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds, HostBasisPoints: 7000}, "3.6")
	w.price(ledger.Price{Meter: protocol.MeterCPUSeconds, HostBasisPoints: 7000}, "0.1")
	subjects := make([][]ledger.Subject, nodes)
	for n := range subjects {
		w.node = db.NewID()
		for range members {
			s := w.subject(ledger.Member)
			s.CPUMillis = 1000
			s, err := w.open(s)
			require.NoError(t, err)
			w.lease(s, billing.MaxLease)
			subjects[n] = append(subjects[n], s)
		}
	}
	w.now = noon.Add(2 * time.Hour)
	batchOf := func(poster, round int) (batch []ledger.Segment) {
		for n, of := range subjects {
			if !sameNodes && n%2 != poster {
				continue
			}
			var records []*protocol.UsageRecord
			for _, s := range of {
				for _, meter := range []string{protocol.MeterSessionSeconds, protocol.MeterCPUSeconds} {
					records = append(records, record(uint64(2*members*round+len(records)+1), s, meter, float64(30*round),
						float64(30*round+30), 30_000_000))
				}
			}
			seg, err := segmentOf(of[0].NodeID, incarnation, uint64(round+1), records...)
			require.NoError(t, err)
			batch = append(batch, seg)
		}
		return batch
	}
	var count atomic.Int64
	var wg sync.WaitGroup
	for poster := range 2 {
		wg.Go(func() {
			for round := range rounds {
				_, err := run(t.Context(), w.d, func(tx db.Tx) ([]ledger.Posted, error) {
					count.Add(1)
					return ledger.PostUsage(t.Context(), tx, w.now, batchOf(poster, round)...)
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, nodes*members*rounds*30*1_000_000,
		number(w, `SELECT sum(quantity)::int8 FROM usage_hours WHERE meter = 'session_seconds'`))
	require.Empty(t, w.suspense())
	w.checkBill()
	return count.Load(), 2 * rounds
}
