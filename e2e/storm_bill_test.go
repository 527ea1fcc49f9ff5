package e2e_test

import (
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// measurementSlack is by how much clocks read at different places may differ on a loaded machine: the shim notes an exit when
// it gets to it, the witness when the kernel wakes it, and a process is older than what runs in it.
const measurementSlack = 500 * time.Millisecond

// bill is what the hub posted of one container run.
type bill struct {
	run      string
	from, to time.Time
	micros   int64
	records  int
}

// requireBills holds what was posted against what containerd told and what the kernel saw: no run is billed for longer than it
// lived, none for less than its life but one beat, no second twice, and the money is exactly the seconds' price.
func (s *storm) requireBills() {
	s.t.Helper()
	db := s.database()
	rows, err := db.Query(s.ctx, `SELECT run_id, min(started_at), max(ended_at), sum(quantity)::INT8, count(*)::INT8
		FROM usage_records WHERE meter = 'session_seconds' GROUP BY run_id`)
	require.NoError(s.t, err)
	bills, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (b bill, err error) {
		err = row.Scan(&b.run, &b.from, &b.to, &b.micros, &b.records)
		return b, err
	})
	require.NoError(s.t, err)
	lives := s.witness.seen()
	billed := map[string]bill{}
	var over, under time.Duration
	for _, b := range bills {
		billed[b.run] = b
		require.Equal(s.t, b.to.Sub(b.from).Microseconds(), b.micros, "run %s: neither a gap nor an overlap", b.run)
		l, known := lives[b.run]
		if !known {
			continue // before the storm
		}
		require.False(s.t, l.ended.IsZero(), "run %s has not ended", b.run)
		most, least := s.truthOf(b.run, l)
		over, under = max(over, b.to.Sub(b.from)-most), max(under, least-b.to.Sub(b.from))
	}
	unbilled, unbilledTime := s.unbilled(lives, billed)
	s.t.Logf("%d runs seen, %d billed; at most %s more than they lived, at most %s less; %d runs without a bill, the longest lived %s",
		len(lives), len(bills), over.Round(time.Millisecond), under.Round(time.Millisecond), unbilled, unbilledTime.Round(time.Millisecond))
	require.LessOrEqual(s.t, over, measurementSlack, "billed for longer than it lived")
	require.LessOrEqual(s.t, under, beat+measurementSlack, "billed for less than its life but one beat")
	s.requireOneCopy(lives)
	s.requireRuns(lives)
	s.requireMoney(db)
}

// truthOf is how long a run lived at most and at least. Containerd's own times count where it told them; where it was dead, the
// kernel's do.
func (s *storm) truthOf(run string, l life) (most, least time.Duration) {
	s.truth.mu.Lock()
	defer s.truth.mu.Unlock()
	start, end := s.truth.started[run], s.truth.exited[run]
	if start.IsZero() {
		start = l.born
	}
	if end.IsZero() {
		end = l.ended
	} else {
		require.WithinDuration(s.t, l.ended, end, measurementSlack, "containerd and the kernel disagree about the end of %s", run)
	}
	return end.Sub(l.born), end.Sub(start)
}

// unbilled counts the runs that the node never saw running, and how long the oldest of them lived.
func (s *storm) unbilled(lives map[string]life, billed map[string]bill) (n int, longest time.Duration) {
	for run, l := range lives {
		if _, has := billed[run]; !has {
			n++
			longest = max(longest, l.ended.Sub(l.born))
			s.t.Logf("run %s of %s is on no bill", run, l.ended.Sub(l.born).Round(time.Millisecond))
		}
	}
	return n, longest
}

func memberOf(run string) string {
	member, _, _ := strings.Cut(run, ".")
	return member
}

// requireOneCopy holds law 14: of two containers of a member one was over before the other began.
func (s *storm) requireOneCopy(lives map[string]life) {
	s.t.Helper()
	byMember := map[string][]life{}
	for run, l := range lives {
		byMember[memberOf(run)] = append(byMember[memberOf(run)], l)
	}
	for member, list := range byMember {
		slices.SortFunc(list, func(a, b life) int { return a.born.Compare(b.born) })
		for n := 1; n < len(list); n++ {
			// The kernel counts starts in hundredths of a second.
			require.False(s.t, list[n].born.Before(list[n-1].ended.Add(-time.Second/clockTicksPerSecond)), "two containers of member %s at once", member)
		}
	}
}

// requireRuns holds that nothing that ran was started anew for no reason.
func (s *storm) requireRuns(lives map[string]life) {
	s.t.Helper()
	seen := map[string]int{}
	for run := range lives {
		seen[memberOf(run)]++
	}
	extra := 0
	for _, l := range s.lives {
		require.GreaterOrEqual(s.t, seen[l.member], l.runs, "instance %s", l.id)
		extra += seen[l.member] - l.runs
	}
	s.t.Logf("%d runs more than were asked for: starts that were cut short", extra)
}

// requireMoney holds that the debit is exactly the price of the seconds, which is a billionth of a dollar a microsecond, that
// every posting balances and that the wallet lacks what was debited and nothing else.
func (s *storm) requireMoney(db *pgx.Conn) {
	s.t.Helper()
	sums := func(query string) map[string]int64 {
		rows, err := db.Query(s.ctx, query)
		require.NoError(s.t, err)
		out := map[string]int64{}
		var id string
		var n int64
		_, err = pgx.ForEachRow(rows, []any{&id, &n}, func() error {
			out[id] = n
			return nil
		})
		require.NoError(s.t, err)
		return out
	}
	used := sums(`SELECT subject_id::TEXT, sum(quantity)::INT8 FROM usage_records WHERE meter = 'session_seconds' GROUP BY subject_id`)
	paid := sums(`SELECT p.subject_id::TEXT, -sum(e.amount_nanos)::INT8 FROM postings p JOIN entries e ON e.posting_id = p.id
		WHERE p.kind = 'usage' AND e.account LIKE 'hold:%' GROUP BY p.subject_id`)
	require.Equal(s.t, used, paid)
	require.Empty(s.t, sums(`SELECT posting_id::TEXT, sum(amount_nanos)::INT8 FROM entries GROUP BY posting_id, currency HAVING sum(amount_nanos) <> 0`))
	suspense := sums(`SELECT reason, sum(quantity)::INT8 FROM suspense_records GROUP BY reason`)
	s.t.Logf("in suspense, in millionths: %v", suspense)
	var total int64
	for _, n := range slices.Collect(maps.Values(paid)) {
		total += n
	}
	wallet := sums(`SELECT currency, sum(balance_nanos)::INT8 FROM wallets GROUP BY currency`)
	require.Equal(s.t, map[string]int64{"USD": 10_000_000_000_000 - total}, wallet)
}
