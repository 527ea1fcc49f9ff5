package harness

import (
	"math/big"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	api "github.com/gpuaas/gpuaas/pkg/client"
)

// MeteringInterval is that of the agents in these tests: a bill may lack so much of what ran, and exceed it by nothing.
const MeteringInterval = time.Second

// RequireBilledTime compares the billed seconds of a member, or of all where the id is empty, with the time that
// containerd saw: never more, and at most one metering interval less.
func (tr *ContainerdOracle) RequireBilledTime(t *testing.T, memberID string, seconds *big.Rat) {
	t.Helper()
	tr.RequireBilledRuns(t, memberID, 1, seconds)
}

// billResolution is what a bill may exceed the kernel's times of a run by: two of the kernel's clock ticks.
const billResolution = 20 * time.Millisecond

// RequireBill compares the billed seconds of a member with the times that the kernel started and ended its processes.
// The empty id stands for all members.
func (tr *ContainerdOracle) RequireBill(t *testing.T, memberID string, seconds *big.Rat) {
	t.Helper()
	sure, possible, runs := tr.Kernel.RunningTimeOf(t, memberID)
	requireKernelBill(t, seconds, sure, possible, runs)
}

func requireKernelBill(t *testing.T, seconds *big.Rat, sure, possible time.Duration, runs int) {
	t.Helper()
	billed, _ := seconds.Float64()
	t.Logf("billed %s s in %d runs: %.1f ms over the longest, %.1f ms under the shortest time by the kernel",
		seconds.FloatString(3), runs, (billed-possible.Seconds())*1e3, (sure.Seconds()-billed)*1e3)
	n := time.Duration(runs)
	RequireBilledBetween(t, seconds, sure-n*MeteringInterval, possible+n*billResolution)
}

// EventDelay bounds how late containerd writes the event of a container's start, where the machine is not busy.
const EventDelay = 250 * time.Millisecond

// RequireBilledRuns is RequireBilledTime for several runs: each may lack up to one metering interval.
func (tr *ContainerdOracle) RequireBilledRuns(t *testing.T, memberID string, runs int, seconds *big.Rat) {
	t.Helper()
	slack := time.Duration(runs) * EventDelay
	RequireBilledBetween(t, seconds, tr.RunningTimeOf(t, memberID)-time.Duration(runs)*MeteringInterval-slack,
		tr.LongestOf(t, memberID)+slack)
}

// RequireBilledBetween checks that the billed seconds are within bounds.
func RequireBilledBetween(t *testing.T, seconds *big.Rat, least, most time.Duration) {
	t.Helper()
	inSeconds := func(d time.Duration) *big.Rat { return big.NewRat(d.Microseconds(), 1_000_000) }
	require.GreaterOrEqual(t, seconds.Cmp(inSeconds(least)), 0, "billed %s s, at least %s ran", seconds.FloatString(3),
		least)
	require.LessOrEqual(t, seconds.Cmp(inSeconds(most)), 0, "billed %s s, at most %s ran", seconds.FloatString(3), most)
}

// RequireCost checks that the postings charge a tenth of a cent for each billed second, rounded to a billionth once for
// each of the roundings.
func RequireCost(t *testing.T, postings []api.Posting, seconds *big.Rat, roundings int64) {
	t.Helper()
	paid := UsageCost(t, postings)
	off := new(big.Rat).Sub(paid, new(big.Rat).Mul(seconds, big.NewRat(1, 1000)))
	require.LessOrEqual(t, off.Abs(off).Cmp(big.NewRat(roundings, 1_000_000_000)), 0, "paid %s for %s s",
		paid.FloatString(9), seconds.FloatString(6))
}

// FinalPostings waits until nothing more can be billed for an instance: its hold is closed after the node's last record
// is posted.
func (w *Testbed) FinalPostings(i api.AppInstance) (postings []api.Posting) {
	w.T.Helper()
	w.Eventually("the bill of "+i.DisplayName+" is final", func() (err error) {
		postings, err = w.Tenant.Postings(w.Ctx, i.ID)
		return Pending(err, HasKind(postings, api.PostingKindHoldClosed))
	})
	return postings
}

// GrantCredit gives the tenant money for long leases: a lease of a week holds some 600 dollars.
func (w *Testbed) GrantCredit() {
	w.T.Helper()
	_, err := api.Read[api.Posting](w.Tenant.Admin.GrantCredit(w.Ctx, api.CreditGrant{
		OrgID: w.Tenant.Org.ID, Amount: "9000", Currency: scenario.Currency, Description: "long leases",
	}))
	require.NoError(w.T, err)
}

// Decommission ends an instance and waits until its node has proved it.
func (w *Testbed) Decommission(i api.AppInstance) api.AppInstance {
	w.T.Helper()
	ended, err := w.Tenant.Decommission(w.Ctx, w.Operator, i.ID)
	require.NoError(w.T, err)
	return ended
}

// UsageCost is what usage took from the tenant, as a positive amount.
func UsageCost(t *testing.T, postings []api.Posting) *big.Rat {
	t.Helper()
	total := new(big.Rat)
	for _, p := range postings {
		sums, err := scenario.Sums(p)
		require.NoError(t, err)
		for currency, sum := range sums {
			require.Zero(t, sum.Sign(), "posting %s is off by %s %s", p.PostingID, sum.RatString(), currency)
		}
		if p.Kind != api.PostingKindUsage {
			continue
		}
		for _, e := range p.Entries {
			amount, ok := new(big.Rat).SetString(e.Amount)
			require.True(t, ok)
			if amount.Sign() > 0 {
				total.Add(total, amount)
			}
		}
	}
	return total
}

// sessionRecords are the records of running time, in order of their start.
func sessionRecords(usage []api.UsageRecord) []api.UsageRecord {
	mine := slices.DeleteFunc(slices.Clone(usage), func(u api.UsageRecord) bool { return u.Meter != "session_seconds" })
	slices.SortStableFunc(mine, func(a, b api.UsageRecord) int { return a.StartedAt.Compare(b.StartedAt) })
	return mine
}

// SessionSeconds sums an instance's running time.
func SessionSeconds(t *testing.T, usage []api.UsageRecord) *big.Rat {
	t.Helper()
	total := new(big.Rat)
	for _, u := range sessionRecords(usage) {
		q, ok := new(big.Rat).SetString(u.Quantity)
		require.True(t, ok)
		total.Add(total, q)
	}
	return total
}

// RequireNoOverlap sums an instance's running time; no second may be in two records.
func RequireNoOverlap(t *testing.T, usage []api.UsageRecord) *big.Rat {
	t.Helper()
	countGaps(t, sessionRecords(usage))
	return SessionSeconds(t, usage)
}

// RequireContiguous sums an instance's running time; its records may neither overlap nor leave a gap.
func RequireContiguous(t *testing.T, usage []api.UsageRecord) *big.Rat {
	t.Helper()
	records := sessionRecords(usage)
	require.NotEmpty(t, records)
	require.Zero(t, countGaps(t, records), "the records leave gaps")
	return SessionSeconds(t, usage)
}

// countGaps counts the gaps between records in order, which may not overlap.
func countGaps(t *testing.T, records []api.UsageRecord) (gaps int) {
	t.Helper()
	for n := 1; n < len(records); n++ {
		end, start := records[n-1].EndedAt, records[n].StartedAt
		require.False(t, start.Before(end), "usage from %s overlaps usage to %s", start, end)
		if start.After(end) {
			gaps++
		}
	}
	return gaps
}
