package ledger_test

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/protocol"
)

// BenchmarkPostUsage bills segments of 1,500 records of 500 priced members a node, from four nodes at once, and reports
// records a second.
func BenchmarkPostUsage(b *testing.B) {
	const nodes, members = 4, 500
	w := newWorld(b)
	w.credit("10000000")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds, HostBasisPoints: 7000}, "3.6")
	w.price(ledger.Price{Meter: protocol.MeterCPUSeconds, HostBasisPoints: 7000}, "0.1")
	type machine struct {
		id   string
		subs []ledger.Subject
	}
	var all []machine
	for range nodes {
		w.node = db.NewID()
		m := machine{id: w.node}
		for range members {
			s := w.subject(ledger.Member)
			s.CPUMillis, s.MemoryBytes = 1000, 1<<30
			s, err := w.open(s)
			require.NoError(b, err)
			w.lease(s, ledger.MaxLease)
			m.subs = append(m.subs, s)
		}
		all = append(all, m)
	}
	now := noon.Add(7 * 24 * time.Hour)
	var posted atomic.Int64
	var round atomic.Int64
	b.ResetTimer()
	var wg sync.WaitGroup
	for _, m := range all {
		wg.Go(func() {
			seq := uint64(0)
			for beat := 0; round.Add(1) <= int64(b.N); beat++ {
				var seg []*protocol.UsageRecord
				from, to := float64(30*beat), float64(30*beat+30)
				for _, s := range m.subs {
					for _, meter := range []string{protocol.MeterSessionSeconds, protocol.MeterCPUSeconds, protocol.MeterMemoryByteSeconds} {
						seq++
						seg = append(seg, record(seq, s, meter, from, to, 30_000_000))
					}
				}
				if _, err := db.RunTx(b.Context(), w.d, func(tx db.Tx) (bool, error) {
					return ledger.PostUsage(b.Context(), tx, m.id, incarnation, &protocol.UsageSegment{Records: seg}, now)
				}); err != nil {
					b.Error(err)
					return
				}
				posted.Add(int64(len(seg)))
			}
		})
	}
	wg.Wait()
	b.ReportMetric(float64(posted.Load())/b.Elapsed().Seconds(), "records/s")
}
