package ledger_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestThinWalletShortensTheLease(t *testing.T) {
	w := newWorld(t)
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds}, "3.6")
	s := w.member()
	_, err := w.tryLease(s, time.Hour)
	require.Equal(t, "insufficient_funds", faultCode(err))
	w.credit("1.4")
	_, err = w.tryLease(s, time.Hour)
	require.Equal(t, "insufficient_funds", faultCode(err), "1.5 is needed for the shortest lease")
	w.credit("0.4")
	l := w.lease(s, time.Hour)
	require.EqualValues(t, 20*60, l.GetDurationSeconds())
	require.Equal(t, at(20*60), l.GetExpiresAt().AsTime())
	available, held := w.wallet()
	require.Equal(t, "0", available)
	require.Equal(t, "1.8", held)
	_, err = w.tryLease(s, time.Hour)
	require.Equal(t, "insufficient_funds", faultCode(err), "no longer than the one that runs")
	w.checkInvariants()
}

func TestRenewalTopsTheHoldUpAndKeepsWhatMayStillBeReported(t *testing.T) {
	w := newWorld(t)
	w.credit("100")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds}, "3.6")
	s := w.member()
	first := w.lease(s, time.Hour)
	w.now = at(1800)
	w.post(w.session(s, 0, 1000))
	second := w.lease(s, time.Hour)
	require.Equal(t, first.GetHoldId(), second.GetHoldId())
	require.EqualValues(t, 2, second.GetLeaseNo())
	// 1000 s are paid, 800 s may still come, then an hour and ten minutes.
	_, held := w.wallet()
	require.Equal(t, "5", held)
	require.Equal(t, "6", ledger.FormatNanos(second.GetCapNanos()), "cumulative")
	w.checkInvariants()
}

func TestLeaseFreezesThePrice(t *testing.T) {
	w := newWorld(t)
	w.credit("100")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds, From: w.now}, "3.6")
	s := w.member()
	w.lease(s, time.Hour)
	w.now = at(10)
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds}, "7.2")
	w.now = at(200)
	w.post(w.session(s, 0, 100))
	require.Equal(t, "0.1", w.accounts()["platform:revenue"])
	renewed := w.lease(s, time.Hour)
	require.Equal(t, "7.2", ledger.FormatNanos(renewed.GetPrices()[0].GetPriceNanos()))
	w.now = at(400)
	before, after := w.session(s, 100, 200), w.session(s, 200, 300)
	after.LeaseNo = 2
	w.post(before, after)
	require.Equal(t, "0.4", w.accounts()["platform:revenue"])
	w.checkInvariants()
}

func TestParticularPriceGoesFirst(t *testing.T) {
	w := newWorld(t)
	w.credit("1000")
	meter := protocol.MeterSessionSeconds
	w.price(ledger.Price{Meter: meter}, "1")
	w.price(ledger.Price{Meter: meter, SKU: "cpu-small"}, "2")
	price := func() string {
		s := w.member()
		return ledger.FormatNanos(w.lease(s, time.Hour).GetPrices()[0].GetPriceNanos())
	}
	require.Equal(t, "2", price())
	w.price(ledger.Price{Meter: meter, AppSlug: "demo"}, "3")
	require.Equal(t, "3", price())
	w.price(ledger.Price{Meter: meter, AppSlug: "demo", SKU: "cpu-small"}, "4")
	require.Equal(t, "4", price())
	w.price(ledger.Price{Meter: meter, AppSlug: "other", SKU: "cpu-small"}, "5")
	require.Equal(t, "4", price())
}

func TestNothingIsFreeForWantOfAPriceInTheWalletsCurrency(t *testing.T) {
	w := newWorld(t)
	w.credit("100")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds, Currency: "USD"}, "1")
	_, err := w.tryLease(w.member(), time.Hour)
	require.Equal(t, "price_currency_missing", faultCode(err))
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds, Currency: "EUR"}, "1")
	require.Equal(t, "EUR", w.lease(w.member(), time.Hour).GetCurrency())
}

// The first price that an admin writes stops nobody who runs, whatever its currency.
func TestTheFirstPriceInAnotherCurrencyStopsNoMember(t *testing.T) {
	w := newWorld(t)
	w.credit("100")
	s := w.member()
	w.lease(s, time.Minute)
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds, Currency: "USD"}, "1")
	w.now = w.now.Add(time.Minute)
	require.Empty(t, w.lease(s, time.Minute).GetPrices())
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds, Currency: "EUR"}, "1")
	w.now = w.now.Add(time.Minute)
	require.Equal(t, "EUR", w.lease(s, time.Minute).GetCurrency())
}

// That other meters have a price in the wallet's currency makes none free. A member that has its lease goes on, and one
// that uses nothing of the meter is not asked for it.
func TestNoMeterIsFreeForWantOfAPriceInTheWalletsCurrency(t *testing.T) {
	w := newWorld(t)
	w.credit("100")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds, Currency: "EUR"}, "1")
	member := func() ledger.Subject {
		s := w.subject(ledger.Member)
		s.Accelerators = 1
		s, err := w.open(s)
		require.NoError(t, err)
		return s
	}
	before := member()
	w.lease(before, time.Minute)
	w.price(ledger.Price{Meter: protocol.MeterAcceleratorSeconds, Currency: "USD"}, "0")
	w.lease(member(), time.Minute)

	w.now = w.now.Add(time.Second)
	w.price(ledger.Price{Meter: protocol.MeterAcceleratorSeconds, Currency: "USD"}, "2")
	later := member()
	_, err := w.tryLease(later, time.Minute)
	require.Equal(t, "price_currency_missing", faultCode(err))
	require.ErrorContains(t, err, protocol.MeterAcceleratorSeconds)
	require.Len(t, w.lease(w.member(), time.Minute).GetPrices(), 1)
	w.now = w.now.Add(time.Minute)
	require.Len(t, w.lease(before, time.Minute).GetPrices(), 1)
	w.price(ledger.Price{Meter: protocol.MeterAcceleratorSeconds, Currency: "EUR"}, "2")
	require.Len(t, w.lease(later, time.Minute).GetPrices(), 2)
}

// A price in another currency keeps nobody from running before it begins.
func TestAPriceDecidesNothingBeforeItBegins(t *testing.T) {
	w := newWorld(t)
	w.credit("100")
	from := w.now.Add(time.Hour)
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds, Currency: "USD", From: from}, "1")
	s := w.member()
	require.Empty(t, w.lease(s, time.Hour).GetPrices())
	w.now = from
	_, err := w.tryLease(w.member(), time.Hour)
	require.Equal(t, "price_currency_missing", faultCode(err))
}

func TestPaidAllocationPaysForItsMembersTime(t *testing.T) {
	w := newWorld(t)
	w.credit("100")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds}, "1")
	w.price(ledger.Price{Meter: ledger.MeterAllocationSeconds, SKU: "cpu-small"}, "1")
	require.Empty(t, w.lease(w.member(), time.Hour).GetPrices(), "never both for the same thing")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds, AppSlug: "demo"}, "5")
	require.Len(t, w.lease(w.member(), time.Hour).GetPrices(), 1, "the app's own price is for something else")
}

func TestAFreeAllocationPaysForNothing(t *testing.T) {
	w := newWorld(t)
	w.credit("100")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds}, "1")
	w.price(ledger.Price{Meter: ledger.MeterAllocationSeconds, SKU: "cpu-small"}, "0")
	require.Len(t, w.lease(w.member(), time.Hour).GetPrices(), 1)
}

func TestRenewalIsDueAroundHalfLife(t *testing.T) {
	w := newWorld(t)
	a, b := w.member(), w.member()
	w.lease(a, 100*time.Minute)
	w.lease(b, 100*time.Minute)
	due := func() (ids []string) {
		for _, d := range must(w, func(ctx context.Context, tx db.Tx) ([]ledger.Row, error) {
			return ledger.DueForRenewal(ctx, tx, nil, w.now, 10)
		}) {
			require.Equal(t, w.node, d.NodeID)
			ids = append(ids, d.ID)
		}
		return ids
	}
	w.now = noon.Add(39 * time.Minute)
	require.Empty(t, due())
	w.now = noon.Add(61 * time.Minute)
	require.ElementsMatch(t, []string{a.ID, b.ID}, due())
	w.lease(a, 100*time.Minute)
	require.Equal(t, []string{b.ID}, due())
	w.close(b, w.now)
	require.Empty(t, due())
}

func TestNodesBatchHasTheLatestLeaseOfEachOpenMember(t *testing.T) {
	w := newWorld(t)
	a, b, gone := w.member(), w.member(), w.member()
	w.member() // never leased
	w.lease(a, time.Hour)
	want := []*protocol.Lease{w.lease(a, 2*time.Hour), w.lease(b, time.Hour)}
	w.lease(gone, time.Hour)
	w.close(gone, w.now)
	if b.ID < a.ID {
		want[0], want[1] = want[1], want[0]
	}
	got := must(w, func(ctx context.Context, tx db.Tx) ([]*protocol.Lease, error) {
		return ledger.LeasesFor(ctx, tx, w.node)
	})
	require.Len(t, got, 2)
	for i := range want {
		require.Equal(t, want[i].String(), got[i].String())
	}
}

func TestLeaseIsRefusedToTheGoneAndToOtherNodes(t *testing.T) {
	w := newWorld(t)
	s := w.member()
	_, err := run(w, func(ctx context.Context, tx db.Tx) (*protocol.Lease, error) {
		return ledger.IssueLease(ctx, tx, ledger.LeaseRequest{
			SubjectID: s.ID, NodeID: db.NewID(), Now: w.now,
			Duration: time.Hour,
		})
	})
	require.Equal(t, "wrong_node", faultCode(err))
	w.close(s, w.now)
	_, err = w.tryLease(s, time.Hour)
	require.Equal(t, "subject_closed", faultCode(err))
	_, err = w.tryLease(ledger.Subject{ID: db.NewID()}, time.Hour)
	require.Equal(t, "subject_not_found", faultCode(err))
}

func TestHoldOfAMemberThatNeverRanComesBack(t *testing.T) {
	w := newWorld(t)
	w.credit("100")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds}, "3.6")
	s := w.member()
	w.lease(s, time.Hour)
	settle := func() error {
		return do(w, func(ctx context.Context, tx db.Tx) error { return ledger.SettleSubject(ctx, tx, s.ID, w.now) })
	}
	require.Equal(t, "subject_open", faultCode(settle()))
	w.close(s, w.now)
	w.close(s, w.now.Add(time.Hour))
	require.NoError(t, settle())
	require.NoError(t, settle())
	available, held := w.wallet()
	require.Equal(t, "100", available)
	require.Equal(t, "0", held)
	w.checkInvariants()
}

func TestFinalRecordFreesTheHoldOnlyWhenNothingIsMissingBeforeIt(t *testing.T) {
	w := newWorld(t)
	w.credit("100")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds}, "3.6")
	s := w.member()
	w.lease(s, time.Hour)
	w.now = at(100)
	first, last := w.session(s, 0, 50), w.final(s, 50)
	w.post(last)
	w.close(s, at(50))
	_, held := w.wallet()
	require.Equal(t, "4.2", held)
	w.post(first)
	available, held := w.wallet()
	require.Equal(t, "99.95", available)
	require.Equal(t, "0", held)
	w.checkInvariants()
}

// Laws 16 and 17: what a node measured and nobody is billed for counts against its lease on the node. The next lease
// makes up for it, and is due at once.
func TestLaw16UsageInSuspenseDoesNotEndTheLeaseEarly(t *testing.T) {
	w := newWorld(t)
	w.credit("100")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds}, "3.6")
	s := w.member()
	w.lease(s, time.Hour)
	w.now = at(1300)
	w.post(w.session(s, -500, 0), w.session(s, 0, 1000))
	require.Empty(t, w.due(), "the hold's margin covers it")
	w.post(w.session(s, -1200, -500))
	require.Len(t, w.due(), 1)
	_, held := w.wallet()
	require.Equal(t, "3.2", held)
	second := w.lease(s, time.Hour)
	require.Equal(t, "6.7", ledger.FormatNanos(second.GetCapNanos()), "5.5 were held in all, and 1.2 are in suspense")
	_, held = w.wallet()
	require.Equal(t, "4.5", held, "what is in suspense costs nobody anything")
	w.checkInvariants()
}

// What a foreign node says of a member, and more than its own node can have measured, moves neither its lease nor its
// cap.
func TestSuspenseThatTheMembersNodeCannotHaveMeasuredMovesNoLease(t *testing.T) {
	w := newWorld(t)
	w.credit("1000")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds}, "3.6")
	s := w.member()
	w.lease(s, time.Hour)
	w.now = at(300)
	const absurd = int64(1) << 50
	foreign := record(1, s, protocol.MeterSessionSeconds, 0, 300, absurd)
	must(w, func(ctx context.Context, tx db.Tx) (bool, error) {
		return postUsage(ctx, tx, db.NewID(), incarnation, []*protocol.UsageRecord{foreign}, w.now)
	})
	require.Equal(t, []suspended{{billing.SuspenseWrongNode, absurd}}, w.suspense())
	require.Empty(t, w.due())
	require.Equal(t, "4.5", ledger.FormatNanos(w.lease(s, time.Hour).GetCapNanos()), "an hour, ten minutes, and five "+
		"that are not reported")

	w.seq++
	w.post(record(w.seq, s, protocol.MeterSessionSeconds, 0, 300, absurd))
	require.Empty(t, w.due(), "no node measures ten minutes in five")
	require.Equal(t, "4.92", ledger.FormatNanos(w.lease(s, time.Hour).GetCapNanos()), "300 s and the clock's allowance "+
		"of 120 s at most are made up for")
	w.checkInvariants()
}

func TestAMemberIsDueForItsFirstLeaseFromTheMomentItIsOpened(t *testing.T) {
	w := newWorld(t)
	s := w.member()
	require.Equal(t, []string{s.ID}, w.due())
	_, err := w.open(w.subject(ledger.Allocation))
	require.NoError(t, err)
	require.Equal(t, []string{s.ID}, w.due(), "an allocation has no lease")
	w.lease(s, time.Hour)
	require.Empty(t, w.due())
}

// One that the wallet does not cover must not keep the others from their turn.
func TestLaw03ARenewalThatFailsIsSetAside(t *testing.T) {
	w := newWorld(t)
	w.credit("4.2")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds}, "3.6")
	s := w.member()
	w.lease(s, time.Hour)
	w.now = at(2400)
	require.Equal(t, []string{s.ID}, w.due())
	for range 3 {
		before := w.now
		var got ledger.Renewal
		require.NoError(t, do(w, func(ctx context.Context, tx db.Tx) (err error) {
			got, err = ledger.RenewLease(ctx, tx, ledger.LeaseRequest{
				SubjectID: s.ID, NodeID: s.NodeID, Now: w.now, Duration: time.Hour, AppSlug: s.AppSlug,
			})
			return err
		}))
		require.False(t, got.Issued)
		require.Empty(t, w.due())
		for len(w.due()) == 0 && w.now.Before(before.Add(time.Hour)) {
			w.now = w.now.Add(time.Minute)
		}
		require.Equal(t, []string{s.ID}, w.due(), "it is asked again while its lease runs")
	}
}

func (w *world) noteIdle(s ledger.Subject, idle bool) {
	w.t.Helper()
	require.NoError(w.t, do(w, func(ctx context.Context, tx db.Tx) error {
		return ledger.NoteIdle(ctx, tx, s.NodeID, map[string]bool{s.ID: idle}, w.now)
	}))
}

// A member that is to run and does not, because its image cannot be pulled or its owner refuses it, costs one lease's
// hold, however long that lasts.
func TestAMemberThatDoesNotRunHoldsNoMoreThanOneLease(t *testing.T) {
	w := newWorld(t)
	w.credit("1000")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds}, "3.6")
	s := w.member()
	w.lease(s, time.Hour)
	w.now = at(600)
	w.post(w.session(s, 0, 60))
	for range 48 {
		w.now = w.now.Add(30 * time.Minute)
		w.noteIdle(s, true)
		w.lease(s, time.Hour)
	}
	available, held := w.wallet()
	require.Equal(t, "6.54", held, "an hour, ten minutes, and the half hour and nine minutes before the first report")
	require.Equal(t, "993.4", available)
	w.noteIdle(s, false)
	w.now = w.now.Add(30 * time.Minute)
	w.lease(s, time.Hour)
	_, after := w.wallet()
	require.NotEqual(t, held, after, "it runs, and its usage is still to come")
	w.checkInvariants()
}

// A limit does not shrink where another one grows: what ran before the upgrade may be reported after it.
func TestLaw05AnUpgradeThatRaisesOneLimitKeepsTheOther(t *testing.T) {
	w := newWorld(t)
	w.credit("1000")
	w.price(ledger.Price{Meter: protocol.MeterCPUSeconds}, "3.6")
	w.price(ledger.Price{Meter: protocol.MeterMemoryByteSeconds}, "0.36")
	s := w.subject(ledger.Member)
	s.CPUMillis, s.MemoryBytes = 2000, 1<<30
	s, err := w.open(s)
	require.NoError(t, err)
	w.lease(s, time.Hour)
	w.now = at(100)
	require.NoError(t, do(w, func(ctx context.Context, tx db.Tx) error {
		return ledger.RaiseLimits(ctx, tx, ledger.LeaseRequest{
			SubjectID: s.ID, NodeID: s.NodeID, Now: w.now, Duration: time.Hour,
		}, 1000, 4<<30, nil)
	}))
	w.post(
		record(1, s, protocol.MeterCPUSeconds, 0, 100, 200_000_000),
		record(2, s, protocol.MeterMemoryByteSeconds, 0, 100, 1<<30*100),
	)
	w.now = at(200)
	w.post(record(3, s, protocol.MeterMemoryByteSeconds, 100, 200, 4<<30*100))
	require.Empty(t, w.suspense())
	w.checkInvariants()
}

// Law 7: a member that is not to run gives back what its hold has too much once its lease has ended; what comes late is
// paid from what is left, and the wallet stays as it is.
func TestLaw07AReducedHoldPaysForLateUsageAsFarAsItGoes(t *testing.T) {
	w := newWorld(t)
	w.credit("100")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds}, "3.6")
	s := w.member()
	w.lease(s, time.Hour)
	reduce := func() {
		t.Helper()
		require.NoError(t, do(w, func(ctx context.Context, tx db.Tx) error {
			return ledger.ReduceHold(ctx, tx, s.ID, w.now)
		}))
	}
	w.now = at(600)
	w.noteIdle(s, true)
	reduce()
	_, held := w.wallet()
	require.Equal(t, "4.2", held, "the lease may still be used")
	w.now = at(3600 + 600)
	w.noteIdle(s, true)
	reduce()
	available, held := w.wallet()
	require.Equal(t, "1.2", held, "ten minutes before the first report, and the margin")
	require.Equal(t, "98.8", available)
	require.Empty(t, w.due(), "it gets no further lease")

	w.post(w.session(s, 0, 3600))
	available, held = w.wallet()
	require.Equal(t, "0", held)
	require.Equal(t, "98.8", available)
	require.Equal(t, "-2.4", w.accounts()["platform:write_off"])

	require.NoError(t, do(w, func(ctx context.Context, tx db.Tx) error {
		return ledger.ResumeRenewals(ctx, tx, []string{s.ID}, w.now)
	}))
	require.Equal(t, []string{s.ID}, w.due())
	require.Equal(t, "5.4", ledger.FormatNanos(w.lease(s, time.Hour).GetCapNanos()), "1.2 are spent; an hour and ten "+
		"minutes may be")
	w.checkInvariants()
}

// Law 3: a member that was stopped past its half-life, and is started while its lease still runs, is renewed before the
// lease ends.
func TestLaw03AMemberThatRunsAgainIsRenewedWhileItsLeaseRuns(t *testing.T) {
	w := newWorld(t)
	w.credit("1000")
	stopped, other := w.member(), w.member()
	w.lease(stopped, 100*time.Minute)
	w.now = noon.Add(61 * time.Minute)
	w.lease(other, 100*time.Minute)
	require.Equal(t, []string{stopped.ID}, w.due())
	require.NoError(t, do(w, func(ctx context.Context, tx db.Tx) error {
		return ledger.ReduceHold(ctx, tx, stopped.ID, w.now)
	}))
	require.Empty(t, w.due())
	w.now = noon.Add(65 * time.Minute)
	require.NoError(t, do(w, func(ctx context.Context, tx db.Tx) error {
		return ledger.ResumeRenewals(ctx, tx, []string{stopped.ID, other.ID}, w.now)
	}))
	require.Equal(t, []string{stopped.ID}, w.due(), "the other one has its turn at its half-life")
}

func (w *world) due() (ids []string) {
	w.t.Helper()
	for _, d := range must(w, func(ctx context.Context, tx db.Tx) ([]ledger.Row, error) {
		return ledger.DueForRenewal(ctx, tx, nil, w.now, 10)
	}) {
		ids = append(ids, d.ID)
	}
	return ids
}
