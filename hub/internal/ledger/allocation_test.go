package ledger_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// accrue bills all allocations that are due and returns the exhausted ones.
func (w *world) accrue() (exhausted []string) {
	w.t.Helper()
	due := must(w, func(ctx context.Context, tx db.Tx) ([]ledger.Row, error) {
		return ledger.DueAllocations(ctx, tx, "", w.now, 100)
	})
	for _, d := range due {
		if must(w, func(ctx context.Context, tx db.Tx) (ledger.Accrued, error) {
			return ledger.AccrueAllocation(ctx, tx, d.ID, w.now)
		}).Exhausted {
			exhausted = append(exhausted, d.ID)
		}
	}
	return exhausted
}

// settle settles the members for which that is due and returns how many were checked.
func (w *world) settle() int {
	w.t.Helper()
	due := must(w, func(ctx context.Context, tx db.Tx) ([]ledger.Row, error) {
		return ledger.UnsettledMembers(ctx, tx, "", w.now, 100)
	})
	for _, d := range due {
		must(w, func(ctx context.Context, tx db.Tx) (bool, error) { return ledger.SettleDue(ctx, tx, d.ID, w.now) })
	}
	return len(due)
}

func TestAllocationIsBilledFromClaimToRelease(t *testing.T) {
	w := newWorld(t)
	w.credit("100")
	w.price(ledger.Price{Meter: ledger.MeterAllocationSeconds, SKU: "cpu-small", HostBasisPoints: 8000}, "3.6")
	s, err := w.open(w.subject(ledger.Allocation))
	require.NoError(t, err)
	_, held := w.wallet()
	require.Equal(t, "3.6", held, "an hour ahead")

	w.now = at(1000)
	w.price(ledger.Price{Meter: ledger.MeterAllocationSeconds, SKU: "cpu-small", HostBasisPoints: 8000, From: at(4000)},
		"7.2")
	for _, seconds := range []float64{1000, 2500, 3700, 5000} {
		w.now = at(seconds)
		require.Empty(t, w.accrue())
		w.checkBill()
	}
	_, held = w.wallet()
	require.Equal(t, "7.2", held, "an hour ahead at the new price")
	w.now = at(6000)
	w.close(s, at(5500))
	available, held := w.wallet()
	require.Equal(t, "0", held)
	require.Equal(t, "93", available, "4000 s at 3.6 and 1500 s at 7.2")
	require.Equal(t, "5.6", w.accounts()["host:"+w.node])
	require.EqualValues(t, 5500_000_000,
		number(w, `SELECT sum(quantity)::int8 FROM usage_recent WHERE meter = 'allocation_seconds'`))
	require.Empty(t, w.accrue(), "released")
	w.close(s, at(9000))
	w.checkBill()
}

func TestAllocationWithoutAPriceIsMeasuredAndFree(t *testing.T) {
	w := newWorld(t)
	s, err := w.open(w.subject(ledger.Allocation))
	require.NoError(t, err)
	w.now = at(60)
	require.Empty(t, w.accrue())
	w.close(s, at(90))
	require.EqualValues(t, 90_000_000, number(w, `SELECT sum(quantity)::int8 FROM usage_recent`))
	require.Empty(t, w.accounts())
}

func TestAllocationNeedsAnHourInTheWallet(t *testing.T) {
	w := newWorld(t)
	w.price(ledger.Price{Meter: ledger.MeterAllocationSeconds}, "3.6")
	w.credit("3.5")
	s, err := w.open(w.subject(ledger.Allocation))
	require.Equal(t, "insufficient_funds", faultCode(err))
	require.Zero(t, number(w, `SELECT count(*) FROM subjects WHERE id = $1`, s.ID))
}

// TestLaw07ExhaustedAllocationIsNamedAndWrittenOff: it is named while there is time to release it; what it takes beyond
// its hold is nobody's debt.
func TestLaw07ExhaustedAllocationIsNamedAndWrittenOff(t *testing.T) {
	w := newWorld(t)
	w.price(ledger.Price{Meter: ledger.MeterAllocationSeconds}, "3.6")
	w.credit("3.6")
	s, err := w.open(w.subject(ledger.Allocation))
	require.NoError(t, err)
	w.now = at(2900)
	require.Empty(t, w.accrue())
	w.now = at(3100)
	require.Equal(t, []string{s.ID}, w.accrue())
	w.now = at(4600)
	require.Equal(t, []string{s.ID}, w.accrue())
	w.close(s, w.now)
	available, held := w.wallet()
	require.Equal(t, "0", available)
	require.Equal(t, "0", held)
	require.Equal(t, "-1", w.accounts()["platform:write_off"])
	w.checkBill()
}

// The hub bills nothing while it is away, and the allocation goes on: the wallet pays for that time, too.
func TestTheWalletPaysForAnAbsenceOfTheHub(t *testing.T) {
	for name, bill := range map[string]func(*world, ledger.Subject){
		"it goes on":     func(w *world, _ ledger.Subject) { require.Empty(w.t, w.accrue()) },
		"it is released": func(w *world, s ledger.Subject) { w.close(s, w.now) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.price(ledger.Price{Meter: ledger.MeterAllocationSeconds, HostBasisPoints: 5000}, "3.6")
			w.credit("100")
			s, err := w.open(w.subject(ledger.Allocation))
			require.NoError(t, err)
			w.now = at(5 * 3600)
			bill(w, s)
			w.close(s, w.now)
			available, held := w.wallet()
			require.Equal(t, []string{"82", "0"}, []string{available, held})
			require.NotContains(t, w.accounts(), "platform:write_off")
			require.Equal(t, "9", w.accounts()["host:"+w.node])
			w.checkBill()
		})
	}
}

// Credit that comes between two accruals of one moment, or while another hub's clock is ahead, extends the hold.
func TestCreditExtendsTheHoldOfAnAllocationThatIsAccruedAlready(t *testing.T) {
	w := newWorld(t)
	w.price(ledger.Price{Meter: ledger.MeterAllocationSeconds}, "3.6")
	w.credit("4")
	s, err := w.open(w.subject(ledger.Allocation))
	require.NoError(t, err)
	w.now = at(1000)
	accrue := func(want string) {
		t.Helper()
		_, err := run(w, func(ctx context.Context, tx db.Tx) (ledger.Accrued, error) {
			return ledger.AccrueAllocation(ctx, tx, s.ID, w.now)
		})
		require.NoError(t, err)
		_, held := w.wallet()
		require.Equal(t, want, held)
	}
	accrue("3")
	w.credit("0.2")
	accrue("3.2")
	w.credit("1")
	w.now = at(999)
	accrue("3.6")
	w.checkBill()
}

func TestOpeningAgainChangesNothing(t *testing.T) {
	w := newWorld(t)
	w.credit("100")
	w.price(ledger.Price{Meter: ledger.MeterAllocationSeconds}, "3.6")
	s, err := w.open(w.subject(ledger.Allocation))
	require.NoError(t, err)
	w.now = at(time.Minute.Seconds())
	_, err = w.open(s)
	require.NoError(t, err)
	_, held := w.wallet()
	require.Equal(t, "3.6", held)
	w.checkInvariants()
}

func TestOnlyWhatHasAMeterIsASubject(t *testing.T) {
	w := newWorld(t)
	_, err := w.open(w.subject("cluster"))
	require.EqualValues(t, "subject_kind", fault.As(err).Code)
}
