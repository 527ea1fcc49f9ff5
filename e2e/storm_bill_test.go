package e2e_test

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

const (
	// resolution is how far containerd, the kernel and the agent may lie apart, on a busy machine, about when one thing
	// was.
	resolution = 250 * time.Millisecond
	// lateness is how late an agent on a busy machine may beat, and note a start that containerd has told already.
	lateness = time.Second
	// noticing is how long an agent may take until it reaches a containerd that has come back.
	noticing = time.Second
	// clockFormat shows when something was, for whoever compares it with the logs.
	clockFormat = "15:04:05.000"
)

// outage is a time in which agent or containerd was away.
type outage struct{ from, to time.Time }

func (s *storm) wasBlind(o outage) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.blind = append(s.blind, o)
}

// lookedAt is the last moment not after end at which a beat must have looked at the containers: no beat can look while
// agent or containerd is away, and where both are there one does every beat. It is zero where none need have.
func lookedAt(blind []outage, end time.Time) (last time.Time) {
	blind = slices.Clone(blind)
	slices.SortFunc(blind, func(a, b outage) int { return a.from.Compare(b.from) })
	var from time.Time
	seeing := func(from, to time.Time) {
		if to.Sub(from) >= noticing+beat+lateness {
			last = to.Add(-beat - lateness)
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

// undisturbed reports whether the node could look all through a run's life and long enough after it to note its end.
func undisturbed(blind []outage, l life) bool {
	noted := l.ended.Add(noticing + beat + lateness)
	return !slices.ContainsFunc(blind, func(o outage) bool { return o.from.Before(noted) && o.to.After(l.born) })
}

// requireBills holds what was posted against what containerd told and what the kernel saw: no run is billed for longer
// than it lived, none for less than up to the last beat that could look at it, which is its end where nothing was away,
// no second twice, and the money is exactly the seconds' price.
func (s *storm) requireBills() {
	s.t.Helper()
	db := s.database()
	rows, err := db.Query(s.ctx, `SELECT run_id, min(started_at), max(ended_at), sum(quantity)::INT8, count(*)::INT8
		FROM usage_recent WHERE meter = 'session_seconds' GROUP BY run_id`)
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
	unbilled, missed := s.unbilled(lives, billed)
	s.t.Logf("%d runs seen, %d billed; at most %s more than they lived, at most %s less than was to be seen of them; %d "+
		"runs without a bill",
		len(lives), len(bills), over.Round(time.Millisecond), max(under, missed).Round(time.Millisecond), unbilled)
	require.LessOrEqual(s.t, over, resolution, "billed for longer than it lived")
	require.LessOrEqual(s.t, under, lateness, "billed for less than was to be seen of it")
	require.LessOrEqual(s.t, missed, lateness, "not billed at all, though it was to be seen")
	s.requireOneCopy(lives)
	s.requireRuns(lives)
	s.requireMoney(db)
}

// truthOf is how long a run lived at most, and how long the node must have seen it live at least. Two saw its end, and
// neither too early: the kernel told the witness, and containerd, where it lived, told what the shim noted as it got to
// it, or when itself it found the shim's process gone after a restart. The bill may reach to the later, and must have
// been made as of the earlier.
func (s *storm) truthOf(run string, l life) (most, least time.Duration) {
	start, told := s.truth.lifetime(run)
	first, last := l.ended, l.ended
	if start.IsZero() {
		start = l.began
	}
	if !told.IsZero() {
		if apart := told.Sub(l.ended).Abs(); apart > resolution {
			s.t.Logf("the end of %s: %s by containerd, %s by the kernel", run, told.Format(clockFormat),
				l.ended.Format(clockFormat))
		}
		first, last = slices.MinFunc([]time.Time{first, told}, time.Time.Compare), slices.MaxFunc([]time.Time{last, told},
			time.Time.Compare)
	}
	if start.IsZero() {
		return last.Sub(l.born), 0 // made, and taken away before anything ran in it
	}
	if undisturbed(s.blind, l) {
		return last.Sub(l.born), first.Sub(start)
	}
	return last.Sub(l.born), lookedAt(s.blind, first).Sub(start)
}

// unbilled counts the runs that are on no bill, and how long the node must have seen one of them live.
func (s *storm) unbilled(lives map[string]life, billed map[string]bill) (n int, missed time.Duration) {
	for run, l := range lives {
		if _, has := billed[run]; !has {
			_, least := s.truthOf(run, l)
			n, missed = n+1, max(missed, least)
			require.True(s.t, l.began.IsZero() || !undisturbed(s.blind, l), "run %s ran and is on no bill, and nothing was away",
				run)
			s.t.Logf("run %s is on no bill: made at %s, ran from %s, ended at %s", run, l.born.Format(clockFormat),
				l.began.Format(clockFormat), l.ended.Format(clockFormat))
		}
	}
	return n, missed
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
			require.False(s.t, list[n].born.Before(list[n-1].ended.Add(-time.Second/clockTicksPerSecond)),
				"two containers of member %s at once", member)
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

// requireMoney holds that the debit is exactly the price of the seconds, which is a billionth of a dollar a
// microsecond, that every posting balances and that the wallet lacks what was debited and nothing else.
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
	require.Equal(s.t, used, paid)
	require.Empty(s.t,
		sums(
			`SELECT posting_id::TEXT, sum(amount_nanos)::INT8 FROM entries GROUP BY posting_id, currency
				HAVING sum(amount_nanos) <> 0`))
	suspense := sums(`SELECT reason, sum(quantity)::INT8 FROM suspense_records GROUP BY reason`)
	s.t.Logf("in suspense, in millionths: %v", suspense)
	var total int64
	for _, n := range slices.Collect(maps.Values(paid)) {
		total += n
	}
	wallet := sums(`SELECT currency, sum(balance_nanos)::INT8 FROM wallets GROUP BY currency`)
	require.Equal(s.t, map[string]int64{"USD": 10_000_000_000_000 - total}, wallet)
}

// showSubject logs all that the hub has of a bill that is wrong.
func (s *storm) showSubject(db *pgx.Conn, subject string) {
	s.t.Helper()
	for _, table := range []string{
		`subjects WHERE id = $1`, `leases WHERE subject_id = $1`, `holds WHERE subject_id = $1`, `usage_recent
			WHERE subject_id = $1`, `suspense_records WHERE member_id = $1`,
		`postings WHERE subject_id =
			$1`, `entries WHERE posting_id IN (SELECT id FROM postings
			WHERE subject_id = $1)`, `instance_members WHERE id = $1`,
	} {
		rows, err := db.Query(s.ctx, `SELECT row_to_json(x)::TEXT FROM (SELECT * FROM `+table+`) x`, subject)
		require.NoError(s.t, err)
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(s.t, err)
		s.t.Logf("%s:\n  %s", strings.ReplaceAll(table, "$1", subject), strings.Join(lines, "\n  "))
	}
}

// A look is owed up to a beat before the end, or before an outage that the end follows too closely.
func TestALookIsOwedOnlyWhereItCouldBeTaken(t *testing.T) {
	at := func(seconds float64) time.Time {
		return time.Unix(1_000, 0).Add(time.Duration(seconds * float64(time.Second)))
	}
	owed := beat + lateness
	blind := []outage{{at(20), at(25)}, {at(10), at(12)}, {at(11), at(13)}, {at(26), at(27)}}
	require.Equal(t, at(9).Add(-owed), lookedAt(blind, at(9)), "nothing was away")
	require.Equal(t, at(10).Add(-owed), lookedAt(blind, at(11)), "it ended unseen")
	require.Equal(t, at(10).Add(-owed), lookedAt(blind, at(14)), "there was no time for a beat yet")
	require.Equal(t, at(19).Add(-owed), lookedAt(blind, at(19)))
	require.Equal(t, at(20).Add(-owed), lookedAt(blind, at(28)), "what is seen for a second only is not looked at")
	require.True(t, lookedAt([]outage{{time.Time{}, at(1)}}, at(2)).IsZero())
}
