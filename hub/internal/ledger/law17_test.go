package ledger_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/protocol"
)

// TestLaw17PostedAcceleratorSecondsNeverExceedPhysicalTime lets a node claim whatever it likes for one accelerator that
// goes from member to member: any span around now, of any run and incarnation, exaggerated and repeated. What is posted
// is never more than the time that has passed, member by member and in all, but for the allowance for a clock that is
// ahead.
func TestLaw17PostedAcceleratorSecondsNeverExceedPhysicalTime(t *testing.T) {
	const ahead, members, checks = 2 * time.Minute, 3, 8
	for seed := range uint64(3) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 17))
			w := newWorld(t)
			priced(w)
			posted := func(s ledger.Subject) time.Duration {
				return time.Duration(
					number(w,
						`SELECT coalesce(sum(quantity), 0)::int8 FROM usage_hours WHERE subject_id = $1 AND meter = 'session_seconds'`,
						s.ID)) * time.Microsecond
			}
			var all []ledger.Subject
			for range members {
				s := w.member()
				all = append(all, s)
				w.lease(s, 24*time.Hour)
				for range checks {
					w.now = w.now.Add(time.Duration(rng.IntN(600)) * time.Second)
					w.claimAnything(rng, all)
					require.LessOrEqual(t, posted(s), w.now.Sub(s.OpenedAt)+ahead)
				}
				w.close(s, w.now)
				w.claimAnything(rng, all)
			}
			var sum time.Duration
			for _, s := range all {
				sum += posted(s)
			}
			require.LessOrEqual(t, sum, w.now.Sub(noon)+members*ahead)
			require.Greater(t, sum, w.now.Sub(noon)/2, "and what is in order is posted")
			w.checkBill()
		})
	}
}

// claimAnything posts a segment of records for any of the members, hours around now.
func (w *world) claimAnything(rng *rand.Rand, of []ledger.Subject) {
	w.t.Helper()
	now := w.now.Sub(noon).Seconds()
	incarnation := fmt.Sprint("i", rng.IntN(3))
	sequence := uint64(number(w, `SELECT coalesce(max(last_record), 0) FROM usage_watermarks WHERE incarnation = $1`,
		incarnation))
	var records []*protocol.UsageRecord
	for range 6 {
		s := of[rng.IntN(len(of))]
		from := now - float64(rng.IntN(7200)) + float64(rng.IntN(600))
		to := from + float64(rng.IntN(10_800))
		r := w.session(s, from, to)
		r.Quantity *= int64(1 + rng.IntN(3))
		sequence++
		r.Sequence = sequence
		r.RunId = fmt.Sprint("r", rng.IntN(3))
		records = append(records, r)
	}
	must(w, func(ctx context.Context, tx db.Tx) (bool, error) {
		return postUsage(ctx, tx, w.node, incarnation, records, w.now)
	})
}
