package ledger_test

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/protocol"
)

// minute is one minute of a member's running time: what the model of the chain test counts in.
type minute struct {
	member string
	at     int
}

// sealChain goes on with a chain as its store does: records numbered from 1, some in each segment, each segment naming
// the digest of the one before it.
func sealChain(t *testing.T, w *world, rng *rand.Rand, incarnation string, chain []ledger.Segment, minutes []minute,
) []ledger.Segment {
	t.Helper()
	chain = slices.Clone(chain)
	var previous []byte
	sequence := uint64(0)
	if len(chain) > 0 {
		last := chain[len(chain)-1].Link
		previous, sequence = last.SHA256, last.Last
	}
	for len(minutes) > 0 {
		n := min(1+rng.IntN(4), len(minutes))
		seg := &protocol.UsageSegment{
			NodeId: w.node, Incarnation: incarnation, Number: uint64(len(chain) + 1), PreviousSha256: previous,
		}
		for _, m := range minutes[:n] {
			sequence++
			seg.Records = append(seg.Records, record(sequence, ledger.Subject{ID: m.member}, protocol.MeterSessionSeconds,
				float64(60*m.at), float64(60*m.at+60), 60_000_000))
		}
		minutes = minutes[n:]
		raw, err := proto.Marshal(seg)
		require.NoError(t, err)
		sum := sha256.Sum256(raw)
		previous = sum[:]
		read, err := ledger.ReadSegment(billing.Store{NodeID: w.node, Incarnation: incarnation}, seg, previous)
		require.NoError(t, err)
		read.Envelope = raw
		chain = append(chain, read)
	}
	return chain
}

// TestLaw05ReplayedReorderedDoubledAndClonedSegmentsBillEachMinuteOnce sends the chain of a store, of a clone of its
// disk that went on under the same name, and of the new store that either becomes; each segment often, in any order,
// in batches of any size, four at once. A model without chain or coverage says what must come out: a segment counts
// once, whether all of it is billed or not, and a minute is billed once.
func TestLaw05ReplayedReorderedDoubledAndClonedSegmentsBillEachMinuteOnce(t *testing.T) {
	for seed := range uint64(4) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 55))
			w := newWorld(t)
			priced(w)
			var minutes []minute
			for range 3 {
				s := w.member()
				w.lease(s, 24*time.Hour)
				for n := range 40 {
					minutes = append(minutes, minute{s.ID, n})
				}
			}
			slices.SortStableFunc(minutes, func(a, b minute) int { return cmp.Compare(a.at, b.at) })
			w.now = noon.Add(2 * time.Hour)

			// Store and clone have the first minutes in common; the new store seals again what begins in the middle.
			common := sealChain(t, w, rng, "i1", nil, minutes[:50])
			own := sealChain(t, w, rng, "i1", common, minutes[50:80])
			clone := sealChain(t, w, rng, "i1", common, minutes[70:110])
			renamed := sealChain(t, w, rng, "i2", nil, minutes[40:])
			all := slices.Concat(own, own, clone, renamed, renamed)
			rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
			all = append(all, slices.Concat(own, renamed)...)

			posted := w.postAll(t, batchesOf(rng, all))
			sent, want := int64(0), map[minute]bool{}
			for _, seg := range posted {
				for _, m := range seg {
					sent++
					want[m] = true
				}
			}
			require.EqualValues(t, len(want)*60_000_000, number(w, `SELECT sum(quantity)::int8 FROM usage_hours`))
			require.Equal(t, sent*60_000_000, number(w, `SELECT (SELECT sum(quantity) FROM usage_recent)::int8
				+ (SELECT coalesce(sum(quantity), 0) FROM suspense_records)::int8`), "each posted segment counts once")
			require.EqualValues(t, len(posted), number(w, `SELECT count(*) FROM usage_segments_0`))
			for _, m := range minutes {
				require.True(t, want[m], "what the store and the new store have in common, and the rest, is posted")
			}
			w.checkBill()
		})
	}
}

// postAll posts batches from four goroutines and returns the minutes of each segment that was posted. It fails where a
// segment, or two of one number in one store, were posted twice.
func (w *world) postAll(t *testing.T, batches [][]ledger.Segment) map[string][]minute {
	t.Helper()
	type outcome struct {
		segment ledger.Segment
		ledger.Posted
	}
	results := make(chan outcome, 10_000)
	inParallel(t, batches, func(batch []ledger.Segment) error {
		out, err := db.LockTx(t.Context(), w.d, func(tx db.Tx) ([]ledger.Posted, error) {
			return ledger.PostUsage(t.Context(), tx, w.now, batch...)
		})
		for n, r := range out {
			results <- outcome{batch[n], r}
		}
		return err
	})
	close(results)
	posted := map[string][]minute{}
	for r := range results {
		if r.Err != nil {
			// Malformed: its record numbers contradict, and the hub sets it aside.
			require.Contains(t, []protocol.Nack_Reason{protocol.Nack_CHAIN_BROKEN, protocol.Nack_MALFORMED},
				protocol.RefusalOf(r.Err), "%v", r.Err)
			require.Equal(t, "i1", r.segment.Store.Incarnation, "only the clone and what it was cloned from contradict")
		}
		if !r.New {
			continue
		}
		key := fmt.Sprint(r.segment.Store.Incarnation, " ", r.segment.Link.Number)
		require.NotContains(t, slices.Collect(maps.Keys(posted)), key, "posted twice")
		seg := &protocol.UsageSegment{}
		require.NoError(t, proto.Unmarshal(r.segment.Envelope, seg))
		posted[key] = []minute{}
		for _, u := range seg.GetRecords() {
			posted[key] = append(posted[key], minute{u.GetMemberId(), int(u.GetStartedAt().AsTime().Sub(noon) / time.Minute)})
		}
	}
	return posted
}
