package ledger_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/protocol"
)

// BenchmarkPostUsage bills batches as the hub makes them when nodes catch up, eight segments of each of 34 nodes with
// 20 members and two prices, and reports records a second.
func BenchmarkPostUsage(b *testing.B) {
	const nodes, members, segments = 34, 20, 8
	w := newWorld(b)
	w.credit("10000000")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds, HostBasisPoints: 7000}, "3.6")
	w.price(ledger.Price{Meter: protocol.MeterCPUSeconds, HostBasisPoints: 7000}, "0.1")
	type machine struct {
		id   string
		subs []ledger.Subject
		seq  uint64
		segs uint64
	}
	var all []*machine
	for range nodes {
		w.node = db.NewID()
		m := &machine{id: w.node}
		for range members {
			s := w.subject(ledger.Member)
			s.CPUMillis, s.MemoryBytes = 1000, 1<<30
			s, err := w.open(s)
			require.NoError(b, err)
			w.lease(s, billing.MaxLease)
			m.subs = append(m.subs, s)
		}
		all = append(all, m)
	}
	now := noon.Add(7 * 24 * time.Hour)
	posted, interval := 0, 0
	for b.Loop() {
		var batch []ledger.Segment
		for n := range segments {
			from, to := float64(30*(interval+n)), float64(30*(interval+n)+30)
			for _, m := range all {
				var records []*protocol.UsageRecord
				for _, s := range m.subs {
					for _, meter := range []string{
						protocol.MeterSessionSeconds, protocol.MeterCPUSeconds,
						protocol.MeterMemoryByteSeconds,
					} {
						m.seq++
						records = append(records, record(m.seq, s, meter, from, to, 30_000_000))
					}
				}
				m.segs++
				read, err := segmentOf(m.id, incarnation, m.segs, records...)
				require.NoError(b, err)
				batch = append(batch, read)
			}
		}
		interval += segments
		_, err := db.LockTx(b.Context(), w.d, func(tx db.Tx) ([]ledger.Posted, error) {
			return ledger.PostUsage(b.Context(), tx, now, batch...)
		})
		require.NoError(b, err)
		posted += nodes * members * segments * 3
	}
	b.ReportMetric(float64(posted)/b.Elapsed().Seconds(), "records/s")
}
