package chaos_test

import (
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
)

// projects are the members of apps of several services.
func (s *storm) projects() map[string]bool {
	found := map[string]bool{}
	for _, l := range s.lifecycles {
		if l.app == harness.ProjectSlug {
			found[l.member] = true
		}
	}
	return found
}

// memberRecord is one posted record of a member's running time.
type memberRecord struct {
	from, to time.Time
	micros   int64
}

// requireProjectBills asserts for each member of several services that a second counts once, however many of its
// containers ran: its records do not overlap, and their sum is the time in which at least one of them ran.
func (s *storm) requireProjectBills() {
	s.T.Helper()
	db, processes := s.Database(), s.kernelOracle.Processes()
	var over, under time.Duration
	runs, projects := 0, slices.Sorted(maps.Keys(s.projects()))
	require.NotEmpty(s.T, projects)
	for _, member := range projects {
		var existed, observed []harness.Stretch
		for run, l := range processes {
			if harness.MemberOf(run) == member {
				require.False(s.T, l.EndedAt.IsZero(), "run %s has not ended", run)
				longest, sure := s.observedBounds(run, l)
				// Bounds are lengths from the run's creation and from its start; a member's start lies between them.
				existed = append(existed, harness.Stretch{From: l.CreatedAt, To: l.CreatedAt.Add(longest)})
				observed = append(observed, harness.Stretch{From: s.startOf(run, l), To: s.startOf(run, l).Add(sure)})
			}
		}
		most, _ := harness.Together(existed)
		least, stretches := harness.Together(observed)
		billed := s.billedTo(db, member)
		each := time.Duration(max(stretches, 1))
		over, under = max(over, (billed-most)/each), max(under, (least-billed)/each)
		runs += len(existed)
	}
	s.T.Logf("%d members of several services, %d runs; at most %s too much, at most %s too little in one stretch",
		len(projects), runs, over.Round(time.Millisecond), under.Round(time.Millisecond))
	require.LessOrEqual(s.T, over, resolution, "billed for longer than a container ran")
	require.LessOrEqual(s.T, under, checkpointDelay, "billed for less than the agent observed")
}

// billedTo sums a member's records of running time, which may not overlap.
func (s *storm) billedTo(db *pgx.Conn, member string) (total time.Duration) {
	s.T.Helper()
	rows, err := db.Query(s.Ctx, `SELECT started_at, ended_at, quantity FROM usage_recent
		WHERE meter = 'session_seconds' AND subject_id = $1 ORDER BY started_at, ended_at`, member)
	require.NoError(s.T, err)
	records, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (r memberRecord, err error) {
		err = row.Scan(&r.from, &r.to, &r.micros)
		return r, err
	})
	require.NoError(s.T, err)
	for n, r := range records {
		require.Equal(s.T, r.to.Sub(r.from).Microseconds(), r.micros, "a record of member %s from %s to %s", member, r.from,
			r.to)
		require.False(s.T, n > 0 && r.from.Before(records[n-1].to), "member %s is billed twice from %s", member, r.from)
		total += r.to.Sub(r.from)
	}
	return total
}
