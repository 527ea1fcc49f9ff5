package chaos_test

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
)

const (
	// resolution is how far containerd, the kernel and the agent may lie apart, on a busy machine, about when one thing
	// was.
	resolution = 250 * time.Millisecond
	// checkpointDelay is how late an agent on a busy machine may meter, and note a start that containerd has reported.
	checkpointDelay = time.Second
	// reconnectDelay is how long an agent may take until it reaches a containerd that has come back.
	reconnectDelay = time.Second
	// clockFormat shows times as the logs do.
	clockFormat = "15:04:05.000"
)

// outage is a time in which agent or containerd was away.
type outage struct{ from, to time.Time }

func (s *storm) addUnobserved(o outage) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unobserved = append(s.unobserved, o)
}

// lastCheckpoint is the last time before end by which the agent must have metered the containers: it meters once an
// interval while containerd is up too. It is zero where it need not have metered at all.
func lastCheckpoint(blind []outage, end time.Time) (last time.Time) {
	blind = slices.Clone(blind)
	slices.SortFunc(blind, func(a, b outage) int { return a.from.Compare(b.from) })
	var from time.Time
	seeing := func(from, to time.Time) {
		if to.Sub(from) >= reconnectDelay+harness.MeteringInterval+checkpointDelay {
			last = to.Add(-harness.MeteringInterval - checkpointDelay)
		}
	}
	for _, o := range blind {
		if o.from.After(end) {
			break
		}
		seeing(from, o.from)
		if o.to.After(from) {
			from = o.to
		}
	}
	seeing(from, end)
	return last
}

// bill is what the hub posted of one container run.
type bill struct {
	run      string
	from, to time.Time
	micros   int64
	records  int
}

// undisturbed reports whether agent and containerd were up all through a run and until the agent must have noted its
// end.
func undisturbed(blind []outage, l containerProcess) bool {
	noted := l.ended.Add(reconnectDelay + harness.MeteringInterval + checkpointDelay)
	return !slices.ContainsFunc(blind, func(o outage) bool { return o.from.Before(noted) && o.to.After(l.born) })
}

// requireBills compares what was posted with what containerd reported and the kernel saw. No run is billed for longer
// than it lived, or for less than until its last checkpoint; no second is billed twice; the money is exactly the price
// of the seconds.
func (s *storm) requireBills() {
	s.T.Helper()
	db := s.Database()
	rows, err := db.Query(s.Ctx, `SELECT run_id, min(started_at), max(ended_at), sum(quantity)::INT8, count(*)::INT8
		FROM usage_recent WHERE meter = 'session_seconds' GROUP BY run_id`)
	require.NoError(s.T, err)
	bills, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (b bill, err error) {
		err = row.Scan(&b.run, &b.from, &b.to, &b.micros, &b.records)
		return b, err
	})
	require.NoError(s.T, err)
	lives := s.kernelOracle.processes()
	billed := map[string]bill{}
	var over, under time.Duration
	for _, b := range bills {
		billed[b.run] = b
		require.Equal(s.T, b.to.Sub(b.from).Microseconds(), b.micros, "run %s: neither a gap nor an overlap", b.run)
		l, known := lives[b.run]
		if !known {
			continue // before the storm
		}
		require.False(s.T, l.ended.IsZero(), "run %s has not ended", b.run)
		most, least := s.observedBounds(b.run, l)
		over, under = max(over, b.to.Sub(b.from)-most), max(under, least-b.to.Sub(b.from))
	}
	unbilled, missed := s.unbilled(lives, billed)
	s.T.Logf("%d runs seen, %d billed; at most %s more than they lived, at most %s less than was to be seen of them; %d "+
		"runs without a bill",
		len(lives), len(bills), over.Round(time.Millisecond), max(under, missed).Round(time.Millisecond), unbilled)
	require.LessOrEqual(s.T, over, resolution, "billed for longer than it lived")
	require.LessOrEqual(s.T, under, checkpointDelay, "billed for less than was to be seen of it")
	require.LessOrEqual(s.T, missed, checkpointDelay, "not billed at all, though it was to be seen")
	s.requireOneCopy(lives)
	s.requireRuns(lives)
	s.requireMoney(db)
}

// observedBounds is how long a run lived at most, and how long the node must have seen it live at least. Two saw its
// end, and neither too early: the kernel told its oracle, and containerd, where it lived, told what the shim noted as
// it got to it, or when itself it found the shim's process gone after a restart. The bill may reach to the later, and
// must have been made as of the earlier.
func (s *storm) observedBounds(run string, l containerProcess) (most, least time.Duration) {
	start, told := s.containerdOracle.Lifetime(run)
	first, last := l.ended, l.ended
	if start.IsZero() {
		start = l.began
	}
	if !told.IsZero() {
		if apart := told.Sub(l.ended).Abs(); apart > resolution {
			s.T.Logf("the end of %s: %s by containerd, %s by the kernel", run, told.Format(clockFormat),
				l.ended.Format(clockFormat))
		}
		first, last = slices.MinFunc([]time.Time{first, told}, time.Time.Compare), slices.MaxFunc([]time.Time{last, told},
			time.Time.Compare)
	}
	if start.IsZero() {
		return last.Sub(l.born), 0 // made, and taken away before anything ran in it
	}
	if undisturbed(s.unobserved, l) {
		return last.Sub(l.born), first.Sub(start)
	}
	return last.Sub(l.born), lastCheckpoint(s.unobserved, first).Sub(start)
}

// unbilled counts the runs that are on no bill, and how long the node must have seen one of them live.
func (s *storm) unbilled(lives map[string]containerProcess, billed map[string]bill) (n int, missed time.Duration) {
	for run, l := range lives {
		if _, has := billed[run]; !has {
			_, least := s.observedBounds(run, l)
			n, missed = n+1, max(missed, least)
			require.True(s.T, l.began.IsZero() || !undisturbed(s.unobserved, l), "run %s ran and is on no bill, and nothing "+
				"was away",
				run)
			s.T.Logf("run %s is on no bill: made at %s, ran from %s, ended at %s", run, l.born.Format(clockFormat),
				l.began.Format(clockFormat), l.ended.Format(clockFormat))
		}
	}
	return n, missed
}

// requireOneCopy holds law 14: of two containers of a member one was over before the other began.
func (s *storm) requireOneCopy(lives map[string]containerProcess) {
	s.T.Helper()
	byMember := map[string][]containerProcess{}
	for run, l := range lives {
		byMember[harness.MemberOf(run)] = append(byMember[harness.MemberOf(run)], l)
	}
	for member, list := range byMember {
		slices.SortFunc(list, func(a, b containerProcess) int { return a.born.Compare(b.born) })
		for n := 1; n < len(list); n++ {
			// The kernel counts starts in hundredths of a second.
			require.False(s.T, list[n].born.Before(list[n-1].ended.Add(-time.Second/clockTicksPerSecond)),
				"two containers of member %s at once", member)
		}
	}
}

// requireRuns holds that nothing that ran was started anew for no reason.
func (s *storm) requireRuns(lives map[string]containerProcess) {
	s.T.Helper()
	seen := map[string]int{}
	for run := range lives {
		seen[harness.MemberOf(run)]++
	}
	extra := 0
	for _, l := range s.lives {
		require.GreaterOrEqual(s.T, seen[l.member], l.runs, "instance %s", l.id)
		extra += seen[l.member] - l.runs
	}
	s.T.Logf("%d runs more than were asked for: starts that were cut short", extra)
}

// requireMoney holds that the debit is exactly the price of the seconds, which is a billionth of a dollar a
// microsecond, that every posting balances and that the wallet lacks what was debited and nothing else.
func (s *storm) requireMoney(db *pgx.Conn) {
	s.T.Helper()
	sums := func(query string) map[string]int64 {
		rows, err := db.Query(s.Ctx, query)
		require.NoError(s.T, err)
		out := map[string]int64{}
		var id string
		var n int64
		_, err = pgx.ForEachRow(rows, []any{&id, &n}, func() error {
			out[id] = n
			return nil
		})
		require.NoError(s.T, err)
		return out
	}
	used := sums(
		`SELECT subject_id::TEXT, sum(quantity)::INT8 FROM usage_recent WHERE meter = 'session_seconds' GROUP BY subject_id`)
	paid := sums(
		`SELECT p.subject_id::TEXT, -sum(e.amount_nanos)::INT8 FROM postings p JOIN entries e ON e.posting_id = p.id
		WHERE p.kind = 'usage' AND e.account LIKE 'hold:%' GROUP BY p.subject_id`)
	for subject, quantity := range used {
		if paid[subject] != quantity {
			s.showSubject(db, subject)
		}
	}
	require.Equal(s.T, used, paid)
	require.Empty(s.T,
		sums(
			`SELECT posting_id::TEXT, sum(amount_nanos)::INT8 FROM entries GROUP BY posting_id, currency
				HAVING sum(amount_nanos) <> 0`))
	suspense := sums(`SELECT reason, sum(quantity)::INT8 FROM suspense_records GROUP BY reason`)
	s.T.Logf("in suspense, in millionths: %v", suspense)
	var total int64
	for _, n := range slices.Collect(maps.Values(paid)) {
		total += n
	}
	wallet := sums(`SELECT currency, sum(balance_nanos)::INT8 FROM wallets GROUP BY currency`)
	require.Equal(s.T, map[string]int64{"USD": 10_000_000_000_000 - total}, wallet)
}

// showSubject logs all that the hub has of a bill that is wrong.
func (s *storm) showSubject(db *pgx.Conn, subject string) {
	s.T.Helper()
	for _, table := range []string{
		`subjects WHERE id = $1`, `leases WHERE subject_id = $1`, `holds WHERE subject_id = $1`, `usage_recent
			WHERE subject_id = $1`, `suspense_records WHERE member_id = $1`,
		`postings WHERE subject_id =
			$1`, `entries WHERE posting_id IN (SELECT id FROM postings
			WHERE subject_id = $1)`, `instance_members WHERE id = $1`,
	} {
		rows, err := db.Query(s.Ctx, `SELECT row_to_json(x)::TEXT FROM (SELECT * FROM `+table+`) x`, subject)
		require.NoError(s.T, err)
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(s.T, err)
		s.T.Logf("%s:\n  %s", strings.ReplaceAll(table, "$1", subject), strings.Join(lines, "\n  "))
	}
}

// The last checkpoint is an interval before the end, or before an outage that the end follows too closely.
func TestACheckpointIsExpectedOnlyWhileTheNodeObservesItsContainers(t *testing.T) {
	at := func(seconds float64) time.Time {
		return time.Unix(1_000, 0).Add(time.Duration(seconds * float64(time.Second)))
	}
	owed := harness.MeteringInterval + checkpointDelay
	blind := []outage{{at(20), at(25)}, {at(10), at(12)}, {at(11), at(13)}, {at(26), at(27)}}
	require.Equal(t, at(9).Add(-owed), lastCheckpoint(blind, at(9)), "nothing was away")
	require.Equal(t, at(10).Add(-owed), lastCheckpoint(blind, at(11)), "it ended unseen")
	require.Equal(t, at(10).Add(-owed), lastCheckpoint(blind, at(14)), "there was no time to meter yet")
	require.Equal(t, at(19).Add(-owed), lastCheckpoint(blind, at(19)))
	require.Equal(t, at(20).Add(-owed), lastCheckpoint(blind, at(28)), "what is up for a second only is not metered")
	require.True(t, lastCheckpoint([]outage{{time.Time{}, at(1)}}, at(2)).IsZero())
}
