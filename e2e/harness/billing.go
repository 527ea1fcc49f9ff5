package harness

import (
	"math/big"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	api "github.com/gpuaas/gpuaas/pkg/client"
)

// MeteringInterval is that of the agents in these tests: a bill may lack so much of what ran, and exceed it by nothing.
const MeteringInterval = time.Second

// RequireBilledTime compares billed seconds with the time that containerd saw: never more, and at most one metering
// interval less.
func RequireBilledTime(t *testing.T, ran time.Duration, seconds *big.Rat) {
	t.Helper()
	seen := big.NewRat(ran.Microseconds(), 1_000_000)
	// Containerd's start event is written some milliseconds after the process has started.
	slack := big.NewRat(250, 1000)
	least := new(big.Rat).Sub(seen, big.NewRat(MeteringInterval.Microseconds(), 1_000_000))
	require.GreaterOrEqual(t, seconds.Cmp(new(big.Rat).Sub(least, slack)), 0, "billed %s s of %s", seconds.FloatString(3),
		ran)
	require.LessOrEqual(t, seconds.Cmp(new(big.Rat).Add(seen, slack)), 0, "billed %s s of %s", seconds.FloatString(3),
		ran)
}

// Decommission ends an instance and waits until its node has proved it.
func (w *Testbed) Decommission(i api.AppInstance) api.AppInstance {
	w.T.Helper()
	ended, err := w.Tenant.Decommission(w.Ctx, w.Operator, i.ID)
	require.NoError(w.T, err)
	return ended
}

// RequireNoOverlap sums an instance's running time; no second is in two records.
func RequireNoOverlap(t *testing.T, usage []api.UsageRecord) *big.Rat {
	t.Helper()
	mine := slices.DeleteFunc(slices.Clone(usage), func(u api.UsageRecord) bool { return u.Meter != "session_seconds" })
	sortByStart(mine)
	total := new(big.Rat)
	for n, u := range mine {
		q, ok := new(big.Rat).SetString(u.Quantity)
		require.True(t, ok)
		total.Add(total, q)
		if n > 0 {
			require.False(t, u.StartedAt.Before(mine[n-1].EndedAt), "usage from %s overlaps usage to %s", u.StartedAt,
				mine[n-1].EndedAt)
		}
	}
	return total
}

// RunsOf is how long a member's containers ran in all, and how many did; every one must have exited.
func (tr *ContainerdOracle) RunsOf(t *testing.T, member string) (total time.Duration, runs int) {
	t.Helper()
	tr.mu.Lock()
	defer tr.mu.Unlock()
	for id, start := range tr.started {
		if !strings.HasPrefix(id, member+".") {
			continue
		}
		require.Contains(t, tr.exited, id, "the container has not exited")
		total += tr.exited[id].Sub(start)
		runs++
	}
	require.Positive(t, runs)
	return total, runs
}

// MemberOf is the member that a container run belongs to: a run is named <member>.<number>.
func MemberOf(run string) string {
	member, _, _ := strings.Cut(run, ".")
	return member
}
