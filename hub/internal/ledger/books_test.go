package ledger_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/sim/books"
	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/rating"
	"github.com/gpuaas/gpuaas/protocol"
)

// twin is a ledger in PostgreSQL beside the one in memory that the simulation bills with.
type twin struct {
	*world
	books *books.Books
	rng   *rand.Rand
	live  []ledger.Subject
	// reserved are open attachments, attached the prices of their time.
	reserved []ledger.Subject
	attached []rating.Price
}

// TestTheSimulationsBooksAreTheLedgers does the same at random to the ledger and to the books of e2e/sim: whatever one
// says of a lease, an account, an hour or usage in suspense, the other must say.
func TestTheSimulationsBooksAreTheLedgers(t *testing.T) {
	for seed := range uint64(4) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			w := newTwin(t, seed)
			for range 120 {
				w.now = w.now.Add(time.Duration(w.rng.IntN(1200)) * time.Second)
				switch dice := w.rng.IntN(12); {
				case dice > 9 && len(w.reserved) == 0:
					w.reserve()
				case dice > 9:
					w.accrueOrRelease()
				case dice < 2 && len(w.live) < 5:
					w.openMember()
				case dice < 4:
					w.renew()
				case dice < 5 && len(w.live) > 2:
					w.closeMember()
				default:
					w.use()
				}
				w.compare()
			}
			require.NotZero(t, number(w.world, `SELECT count(*) FROM suspense_totals`), "no usage went into suspense")
			for _, kind := range []string{ledger.Member, ledger.Attachment} {
				require.NotZero(t, number(w.world, `SELECT count(*) FROM subjects WHERE settled_at IS NOT NULL AND kind = $1`,
					kind), "no bill of a %s is final", kind)
			}
		})
	}
}

func newTwin(t *testing.T, seed uint64) *twin {
	w := &twin{world: newWorld(t), rng: rand.New(rand.NewPCG(seed, 4))}
	w.credit("4")
	config := books.Config{Currency: "EUR"}
	for meter, amount := range map[string]string{protocol.MeterSessionSeconds: "0.7", protocol.MeterCPUSeconds: "0.1"} {
		p := w.price(ledger.Price{Meter: meter, HostBasisPoints: 7000}, amount)
		config.Prices = append(config.Prices, billing.FrozenPrice{
			Meter: p.Meter, PriceID: p.ID, Nanos: p.Nanos, PerQuantity: p.PerQuantity, HostBasisPoints: p.HostBasisPoints,
		})
	}
	p := w.price(ledger.Price{Meter: ledger.MeterAttachmentSeconds, HostBasisPoints: 7000}, "0.2")
	w.attached = []rating.Price{{
		ID: p.ID, Meter: p.Meter, Currency: p.Currency, Nanos: p.Nanos, PerQuantity: p.PerQuantity,
		HostBasisPoints: p.HostBasisPoints,
	}}
	w.books = books.New(config)
	require.NoError(t, w.books.Grant(w.org, 4*ledger.NanosPerUnit))
	return w
}

// reserve makes an attachment; the wallet may not cover it.
func (w *twin) reserve() {
	s, err := w.open(w.subject(ledger.Attachment))
	gotErr := w.books.Reserve(w.org, s.NodeID, billing.Reserved{
		ID: s.ID, Meter: ledger.MeterAttachmentSeconds, Prices: w.attached, Until: s.OpenedAt,
	})
	if err != nil {
		require.Equal(w.t, "insufficient_funds", faultCode(err))
		require.ErrorIs(w.t, gotErr, books.ErrUnaffordable)
		return
	}
	require.NoError(w.t, gotErr)
	w.reserved = append(w.reserved, s)
}

func (w *twin) accrueOrRelease() {
	if len(w.reserved) == 0 {
		return
	}
	n := w.rng.IntN(len(w.reserved))
	s := w.reserved[n]
	if w.rng.IntN(3) == 0 {
		w.reserved = slices.Delete(w.reserved, n, n+1)
		at := w.now.Add(-time.Duration(w.rng.IntN(300)) * time.Second)
		w.close(s, at)
		require.NoError(w.t, w.books.Release(s.ID, at, w.now))
		return
	}
	want := must(w.world, func(ctx context.Context, tx db.Tx) (ledger.Accrued, error) {
		return ledger.AccrueAllocation(ctx, tx, s.ID, w.now)
	})
	exhausted, err := w.books.Accrue(s.ID, w.now)
	require.NoError(w.t, err)
	require.Equal(w.t, want.Exhausted, exhausted)
}

func (w *twin) openMember() {
	s := w.subject(ledger.Member)
	s.CPUMillis, s.MemoryBytes = 1500, 1<<30
	_, err := w.open(s)
	require.NoError(w.t, err)
	w.books.Open(w.org, billing.Member{
		ID: s.ID, NodeID: s.NodeID, CPUMillis: s.CPUMillis, MemoryBytes: s.MemoryBytes, OpenedAt: s.OpenedAt,
	})
	w.live = append(w.live, s)
	w.lease(s)
}

func (w *twin) renew() {
	if len(w.live) > 0 {
		w.lease(w.live[w.rng.IntN(len(w.live))])
	}
}

func (w *twin) lease(s ledger.Subject) {
	wish := time.Duration(w.rng.IntN(8*3600)) * time.Second
	want, err := w.tryLease(s, wish)
	got, gotErr := w.books.IssueLease(s.ID, w.now, wish)
	if err != nil {
		require.Equal(w.t, "insufficient_funds", faultCode(err))
		require.ErrorIs(w.t, gotErr, books.ErrUnaffordable)
		return
	}
	require.NoError(w.t, gotErr)
	require.Equal(w.t, []any{want.GetLeaseNo(), want.GetExpiresAt().AsTime(), want.GetCapNanos()},
		[]any{uint64(got.No), got.ExpiresAt, got.CapNanos})
}

// use posts a segment of random records, some of them of time that is covered, unleased, to come or another member's.
func (w *twin) use() {
	if len(w.live) == 0 {
		return
	}
	var records []*protocol.UsageRecord
	for range 1 + w.rng.IntN(4) {
		s := w.live[w.rng.IntN(len(w.live))]
		to := w.now.Sub(noon).Seconds() + float64(w.rng.IntN(900)-600)
		from := to - float64(w.rng.IntN(1800))
		if w.rng.IntN(2) == 0 {
			records = append(records, w.session(s, from, to))
			continue
		}
		w.seq++
		quantity := w.rng.Int64N(4_000_000_000)
		records = append(records, record(w.seq, s, protocol.MeterCPUSeconds, from, to, quantity))
	}
	for _, r := range records {
		r.LeaseNo = uint64(1 + w.rng.IntN(3))
	}
	w.send(records...)
}

func (w *twin) send(records ...*protocol.UsageRecord) {
	w.post(records...)
	_, err := w.books.Post(w.node, incarnation, &protocol.UsageSegment{Records: records}, w.now)
	require.NoError(w.t, err)
	w.settleBooks()
}

func (w *twin) settleBooks() {
	for id := range w.books.Members {
		require.NoError(w.t, w.books.SettleFinal(id, int64(w.seq)))
	}
}

// closeMember ends a member's claim before or after its final record.
func (w *twin) closeMember() {
	n := w.rng.IntN(len(w.live))
	s := w.live[n]
	w.live = append(w.live[:n:n], w.live[n+1:]...)
	final := w.final(s, w.now.Sub(noon).Seconds())
	at := w.now.Add(time.Duration(w.rng.IntN(7200)-5400) * time.Second)
	end := func() {
		w.close(s, at)
		require.NoError(w.t, w.books.Close(s.ID, at, w.now))
		w.settleBooks()
	}
	if w.rng.IntN(2) == 0 {
		end()
		w.send(final)
		return
	}
	w.send(final)
	end()
}

func (w *twin) compare() {
	w.t.Helper()
	w.checkInvariants()
	holds := map[string]string{}
	for _, pair := range query(w.world, `SELECT id::text, subject_id::text FROM holds`, scanPair) {
		holds["hold:"+pair[0]] = "hold:" + pair[1]
	}
	accounts := w.accounts()
	for account, nanos := range accounts {
		if hold, ok := holds[account]; ok {
			delete(accounts, account)
			accounts[hold] = nanos
		}
	}
	inMemory := map[string]string{}
	for account, nanos := range w.books.Balances {
		if nanos != 0 {
			inMemory[account] = ledger.FormatNanos(nanos)
		}
	}
	require.Equal(w.t, accounts, inMemory)
	w.compareHours()
	w.compareSuspense()
}

func (w *twin) compareHours() {
	w.t.Helper()
	stored := query(w.world, `SELECT subject_id::text, meter, price_id::text, hour, quantity, records, charged_nanos,
		host_nanos FROM usage_hours`, func(scan func(...any) error) (row string, err error) {
		var member, meter, price string
		var hour time.Time
		var quantity, records, charged, host int64
		err = scan(&member, &meter, &price, &hour, &quantity, &records, &charged, &host)
		return fmt.Sprint(member, meter, price, hour.UTC(), quantity, records, charged, host), err
	})
	var kept []string
	for _, hours := range w.books.Book.Hours {
		for _, h := range hours {
			price := h.PriceID
			if price == "" {
				price = "00000000-0000-0000-0000-000000000000"
			}
			kept = append(kept, fmt.Sprint(h.MemberID, h.Meter, price, h.Hour.UTC(), h.Quantity, h.Records, h.ChargedNanos,
				h.HostNanos))
		}
	}
	require.ElementsMatch(w.t, stored, kept)
}

func (w *twin) compareSuspense() {
	w.t.Helper()
	stored := query(w.world, `SELECT subject_id::text || meter, quantity::text || ' ' || before_opening
		FROM suspense_totals`, scanPair)
	var kept [][2]string
	for id, a := range w.books.Members {
		for meter, total := range a.Suspended {
			kept = append(kept, [2]string{id + meter, fmt.Sprint(total.Quantity, total.Before)})
		}
	}
	require.ElementsMatch(w.t, stored, kept)
	for _, pair := range query(w.world, `SELECT id::text, (settled_at IS NOT NULL)::text FROM subjects
		WHERE kind = 'member'`, scanPair) {
		require.Equal(w.t, strings.HasPrefix(pair[1], "t"), w.books.Members[pair[0]].Settled, "settled")
	}
}

func scanPair(scan func(...any) error) (pair [2]string, err error) {
	err = scan(&pair[0], &pair[1])
	return pair, err
}
