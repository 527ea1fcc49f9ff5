package chaos_test

import (
	"fmt"
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
	// resolution bounds the differences between the times that containerd, the kernel and the agent note for one event.
	resolution = 250 * time.Millisecond
	// checkpointDelay bounds how late an agent on a busy machine samples usage, or notes a start.
	checkpointDelay = time.Second
	// reconnectDelay bounds how long an agent takes to reach a restarted containerd.
	reconnectDelay = time.Second
	// clockFormat shows times as the logs do.
	clockFormat = "15:04:05.000"
)

// outage is an interval in which the agent or containerd was down.
type outage struct{ from, to time.Time }

func (s *storm) addUnobserved(o outage) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unobserved = append(s.unobserved, o)
}

// lastCheckpoint is the last time before end at which the agent must have sampled usage: it samples once an interval
// while containerd is up as well. It is zero where the agent need not have sampled at all.
func lastCheckpoint(unobserved []outage, end time.Time) (last time.Time) {
	unobserved = slices.Clone(unobserved)
	slices.SortFunc(unobserved, func(a, b outage) int { return a.from.Compare(b.from) })
	var from time.Time
	observed := func(from, to time.Time) {
		if to.Sub(from) >= reconnectDelay+harness.MeteringInterval+checkpointDelay {
			last = to.Add(-harness.MeteringInterval - checkpointDelay)
		}
	}
	for _, o := range unobserved {
		if o.from.After(end) {
			break
		}
		observed(from, o.from)
		if o.to.After(from) {
			from = o.to
		}
	}
	observed(from, end)
	return last
}

// bill is the usage that the hub posted for one container run.
type bill struct {
	run      string
	from, to time.Time
	micros   int64
	records  int
}

// recordsOf lists what was measured of a member, posted or in suspense, a line each.
func (s *storm) recordsOf(member string) (lines string) {
	rows, err := s.Database().Query(s.Ctx, `SELECT meter, started_at, ended_at, quantity, run_id
		FROM usage_recent WHERE run_id LIKE $1 || '.%'
		UNION ALL SELECT meter, started_at, ended_at, quantity, 'suspense: ' || reason
		FROM suspense_records WHERE member_id = $1 ORDER BY 1, 2`, member)
	require.NoError(s.T, err)
	defer rows.Close()
	for rows.Next() {
		var meter, of string
		var from, to time.Time
		var quantity int64
		require.NoError(s.T, rows.Scan(&meter, &from, &to, &quantity, &of))
		lines += fmt.Sprintf("%s %s–%s %d %s\n", meter, from.Format(clockFormat), to.Format(clockFormat), quantity, of)
	}
	require.NoError(s.T, rows.Err())
	return lines
}

// undisturbed reports whether agent and containerd were up from the start of a run until the agent must have noted its
// end.
func undisturbed(unobserved []outage, l harness.ContainerProcess) bool {
	noted := l.EndedAt.Add(reconnectDelay + harness.MeteringInterval + checkpointDelay)
	return !slices.ContainsFunc(unobserved, func(o outage) bool { return o.from.Before(noted) && o.to.After(l.CreatedAt) })
}

// requireBills compares posted usage with the oracles. No run is billed for longer than it existed or for less than
// until its last checkpoint, no second is billed twice, and the debit is exactly the price of the seconds. Members of
// several services, whose runs share their time, are left to requireProjectBills.
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
	all, processes := s.kernelOracle.Processes(), map[string]harness.ContainerProcess{}
	projects := s.projects()
	for run, l := range all {
		if !projects[harness.MemberOf(run)] {
			processes[run] = l
		}
	}
	billed := map[string]bill{}
	var over, under time.Duration
	for _, b := range bills {
		if projects[harness.MemberOf(b.run)] {
			continue
		}
		billed[b.run] = b
		l, known := processes[b.run]
		if !known {
			continue // before the storm, also of a member of several services
		}
		if b.to.Sub(b.from).Microseconds() != b.micros {
			require.Fail(s.T, "a run has a gap or an overlap", "%s\n%s", b.run, s.recordsOf(harness.MemberOf(b.run)))
		}
		require.False(s.T, l.EndedAt.IsZero(), "run %s has not ended", b.run)
		most, least := s.observedBounds(b.run, l)
		if billed := b.to.Sub(b.from); billed-most > resolution || least-billed > resolution {
			s.T.Logf("run %s is billed from %s to %s, which should be %s to %s long; it was created at %s, "+
				"started at %s, ended at %s", b.run, b.from.Format(clockFormat), b.to.Format(clockFormat), least, most,
				l.CreatedAt.Format(clockFormat), l.StartedAt.Format(clockFormat), l.EndedAt.Format(clockFormat))
		}
		over, under = max(over, b.to.Sub(b.from)-most), max(under, least-b.to.Sub(b.from))
	}
	unbilled, missed := s.unbilled(processes, billed)
	s.T.Logf("%d runs, %d billed; at most %s too much, at most %s too little; %d runs without a bill",
		len(processes), len(bills), over.Round(time.Millisecond), max(under, missed).Round(time.Millisecond), unbilled)
	require.LessOrEqual(s.T, over, resolution, "billed for longer than the run")
	require.LessOrEqual(s.T, under, checkpointDelay, "billed for less than the agent observed")
	require.LessOrEqual(s.T, missed, checkpointDelay, "observed and not billed at all")
	s.requireOneCopy(all)
	s.requireRuns(all)
	s.requireMoney(db)
}

// observedBounds returns the longest and the shortest time that a run may be billed for. Kernel and containerd may note
// different ends: a bill may reach to the later one and must reach to the last checkpoint before the earlier one.
func (s *storm) observedBounds(run string, l harness.ContainerProcess) (most, least time.Duration) {
	_, reported := s.containerdOracle.Lifetime(run)
	start, first, last := s.startOf(run, l), l.EndedAt, l.EndedAt
	if !reported.IsZero() {
		if apart := reported.Sub(l.EndedAt).Abs(); apart > resolution {
			s.T.Logf("the end of %s: %s by containerd, %s by the kernel", run, reported.Format(clockFormat),
				l.EndedAt.Format(clockFormat))
		}
		if reported.Before(first) {
			first = reported
		}
		if reported.After(last) {
			last = reported
		}
	}
	if start.IsZero() {
		return last.Sub(l.CreatedAt), 0 // removed before its process was started
	}
	if undisturbed(s.unobserved, l) {
		return last.Sub(l.CreatedAt), first.Sub(start)
	}
	return last.Sub(l.CreatedAt), lastCheckpoint(s.unobserved, first).Sub(start)
}

// startOf is when a run had started for both oracles, as far as they saw it: on a busy machine containerd's answer
// takes as long to reach the agent, whose bill begins with it, as its event takes to reach this process.
func (s *storm) startOf(run string, l harness.ContainerProcess) time.Time {
	if reported := s.containerdOracle.Reported(run); reported.After(l.StartedAt) {
		return reported
	}
	return l.StartedAt
}

// unbilled counts the runs without a bill; missed is the longest time that such a run must have been observed.
func (s *storm) unbilled(processes map[string]harness.ContainerProcess, billed map[string]bill) (
	n int, missed time.Duration,
) {
	for run, l := range processes {
		if _, has := billed[run]; !has {
			_, least := s.observedBounds(run, l)
			n, missed = n+1, max(missed, least)
			require.True(s.T, l.StartedAt.IsZero() || !undisturbed(s.unobserved, l), "run %s has no bill, and there was no "+
				"outage",
				run)
			s.T.Logf("run %s has no bill: created at %s, started at %s, ended at %s", run, l.CreatedAt.Format(clockFormat),
				l.StartedAt.Format(clockFormat), l.EndedAt.Format(clockFormat))
		}
	}
	return n, missed
}

// requireOneCopy asserts law 14: the containers of a member's service never overlap.
func (s *storm) requireOneCopy(processes map[string]harness.ContainerProcess) {
	s.T.Helper()
	byService := map[string][]harness.ContainerProcess{}
	for run, l := range processes {
		service := harness.MemberOf(run) + " " + l.Hostname
		byService[service] = append(byService[service], l)
	}
	for service, list := range byService {
		slices.SortFunc(list, func(a, b harness.ContainerProcess) int { return a.CreatedAt.Compare(b.CreatedAt) })
		for n := 1; n < len(list); n++ {
			// The kernel counts starts in hundredths of a second.
			require.False(s.T, list[n].CreatedAt.Before(list[n-1].EndedAt.Add(-time.Second/harness.ClockTicksPerSecond)),
				"two containers of %s at once", service)
		}
	}
}

// requireRuns asserts that each member ran at least as often as its client asked for, and logs the other starts.
func (s *storm) requireRuns(processes map[string]harness.ContainerProcess) {
	s.T.Helper()
	seen := map[string]int{}
	for run := range processes {
		seen[harness.MemberOf(run)]++
	}
	extra := 0
	for _, l := range s.lifecycles {
		require.GreaterOrEqual(s.T, seen[l.member], l.runs, "instance %s", l.id)
		extra += seen[l.member] - l.runs
	}
	s.T.Logf("%d more runs than requested: starts that a kill interrupted", extra)
}

// requireMoney asserts that the debit is exactly the price of the usage, a billionth of a dollar a microsecond, that
// each posting balances, and that the wallet lacks the debit and nothing else.
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

// showSubject logs the hub's rows of a wrong bill.
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

func TestACheckpointIsExpectedOnlyWhileTheNodeObservesItsContainers(t *testing.T) {
	at := func(seconds float64) time.Time {
		return time.Unix(1_000, 0).Add(time.Duration(seconds * float64(time.Second)))
	}
	owed := harness.MeteringInterval + checkpointDelay
	unobserved := []outage{{at(20), at(25)}, {at(10), at(12)}, {at(11), at(13)}, {at(26), at(27)}}
	require.Equal(t, at(9).Add(-owed), lastCheckpoint(unobserved, at(9)), "nothing was away")
	require.Equal(t, at(10).Add(-owed), lastCheckpoint(unobserved, at(11)), "it ended in an outage")
	require.Equal(t, at(10).Add(-owed), lastCheckpoint(unobserved, at(14)), "there was no time to meter yet")
	require.Equal(t, at(19).Add(-owed), lastCheckpoint(unobserved, at(19)))
	require.Equal(t, at(20).Add(-owed), lastCheckpoint(unobserved, at(28)), "a second between outages is too short to "+
		"sample")
	require.True(t, lastCheckpoint([]outage{{time.Time{}, at(1)}}, at(2)).IsZero())
}
