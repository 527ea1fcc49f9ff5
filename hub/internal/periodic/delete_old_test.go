package periodic_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/periodic"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/protocol"
)

const day = 24 * time.Hour

// deleteOld runs a pass in batches of two rows.
func (w *world) deleteOld(r periodic.Retention) {
	w.T.Helper()
	c := (&periodic.DeleteOld{Passes: w.passes(), Retention: r}).WithBatches(2, 1, nil)
	require.NoError(w.T, c.Do(w.T.Context(), w.Now))
}

// retention keeps everything but for what a test sets.
func retention(set func(*periodic.Retention)) periodic.Retention {
	const long = 10_000 * day
	r := periodic.Retention{
		Events: long, Audit: long, Suspense: long, Leases: long, History: long, Credentials: long,
		Segments: long,
	}
	set(&r)
	return r
}

// idAt is an id as NewID makes it at a moment.
func idAt(t time.Time) string { return db.FirstID(t)[:15] + db.NewID()[15:] }

// Rows that an id dates go when they are past their retention, in several batches, and younger ones stay.
func TestRowsGoAfterTheirRetentionAndYoungerOnesStay(t *testing.T) {
	w := newWorld(t)
	for _, c := range []struct {
		table, insert string
		keep          func(*periodic.Retention)
	}{
		{"events", `INSERT INTO events (id, pos, type, subject, resource_version, correlation_id, traceparent, data, at)
			VALUES ($1, $3, 't', 's', 1, '', '', '{}', $2)`, func(r *periodic.Retention) { r.Events = 10 * day }},
		{
			"audit_rows",
			`INSERT INTO audit_rows (id, actor_type, actor_id, on_behalf_of_type, on_behalf_of_id, action, resource_type,
				resource_id, correlation_id, source_address, outcome, reason, at, chain, number)
			VALUES ($1, 'user', '', '', '', 'a', '', $3::INT8::TEXT, '', '', 'done', '', $2,
				'00000000-0000-0000-0000-000000000000', 100 - $3)`, func(r *periodic.Retention) {
				r.Audit = 10 * day
			},
		},
		{
			"suspense_records",
			`INSERT INTO suspense_records (id, node_id, incarnation, sequence, member_id, meter, quantity, started_at, ended_at,
				reason, created_at)
			VALUES ($1, $1, '', $3, '', '', 1, $2, $2, '', $2)`, func(r *periodic.Retention) { r.Suspense = 10 * day },
		},
		{"usage_set_aside", `INSERT INTO usage_set_aside (node_id, incarnation, number, envelope, cause, set_aside_at)
			VALUES ($1, '', $3, '', '', $2)`, func(r *periodic.Retention) { r.Suspense = 10 * day }},
		{
			"backups", `INSERT INTO backups (id, taken_at, size_bytes, verified_at) VALUES ($1, $2, $3, $2)`,
			func(r *periodic.Retention) { r.History = 10 * day },
		},
		{"join_tokens", `INSERT INTO join_tokens (id, secret_sha256, site_id, description, created_by, created_at, expires_at)
			VALUES ($1, $3::INT8::TEXT::BYTEA, $1, '', '', $2, $2)`, func(r *periodic.Retention) { r.Credentials = 10 * day }},
		{
			"publish_intents", `INSERT INTO publish_intents (id, org_id, project_id, app_slug, app_version, artifact_name,
				artifact_kind, channel, repository, tag,
			created_by_type, created_by_id, created_at, expires_at)
			VALUES ($1, $1, $1, '', '', '', '', '', '', $3::INT8::TEXT, '', $1, $2, $2)`,
			func(r *periodic.Retention) { r.Credentials = 10 * day },
		},
	} {
		t.Run(c.table, func(t *testing.T) {
			w.Exec(`DELETE FROM ` + c.table)
			for age := range 20 {
				at := w.Now.Add(-time.Duration(age)*day - time.Hour)
				w.Exec(c.insert, idAt(at), at, age+1)
			}
			count := func() int { return w.Count(`SELECT count(*) FROM ` + c.table) }
			w.deleteOld(retention(func(*periodic.Retention) {}))
			require.Equal(t, 20, count(), "nothing is past a long retention")
			for range 2 {
				w.deleteOld(retention(c.keep))
				require.Equal(t, 10, count())
			}
			w.Exec(`DELETE FROM ` + c.table)
		})
	}
}

// An event without a position was not given to those who follow events.
func TestAnEventWithoutAPositionStays(t *testing.T) {
	w := newWorld(t)
	w.Exec(`DELETE FROM events`)
	w.Exec(
		`INSERT INTO events (id, type, subject, resource_version, correlation_id, traceparent, data, at)
			VALUES ($1, 't', 's', 1, '', '', '{}', $2)`,
		idAt(w.Now.Add(-20*day)), w.Now.Add(-20*day))
	w.deleteOld(retention(func(r *periodic.Retention) { r.Events = 10 * day }))
	require.Equal(t, 1, w.Count(`SELECT count(*) FROM events`))
	w.Exec(`DELETE FROM events`)
}

// Of a chain of the audit trail the first rows go, so that the others still follow each other: an old row stays while
// a younger one is before it, and while it has no number.
func TestAChainOfTheAuditTrailLosesOnlyItsFirstRows(t *testing.T) {
	w := newWorld(t)
	w.Exec(`DELETE FROM audit_rows`)
	chain := db.NewID()
	for i, row := range []struct {
		age    int
		number any
	}{{20, 2}, {19, 1}, {18, 3}, {17, 5}, {16, 7}, {5, 6}, {4, 8}, {15, nil}} {
		at := w.Now.Add(-time.Duration(row.age) * day)
		w.Exec(`INSERT INTO audit_rows (id, actor_type, actor_id, on_behalf_of_type, on_behalf_of_id, action, resource_type,
				resource_id, correlation_id, source_address, outcome, reason, at, chain, number)
			VALUES ($1, 'user', '', '', '', 'a', '', '', '', '', 'done', '', $2, $3, $4)`, idAt(at), at, chain, row.number)
		if i == 0 {
			// One of another chain, between them.
			w.Exec(`INSERT INTO audit_rows (id, actor_type, actor_id, on_behalf_of_type, on_behalf_of_id, action,
					resource_type, resource_id, correlation_id, source_address, outcome, reason, at, chain, number)
				VALUES ($1, 'user', '', '', '', 'a', '', '', '', '', 'done', '', $2, $3, 4)`, idAt(at), at, db.NewID())
		}
	}
	for range 2 {
		w.deleteOld(retention(func(r *periodic.Retention) { r.Audit = 10 * day }))
		require.Equal(t, 4, w.Count(`SELECT count(*) FROM audit_rows`))
		require.Equal(t, 3, w.Count(`SELECT count(*) FROM audit_rows WHERE number IN (6, 7, 8)`))
		require.Equal(t, 1, w.Count(`SELECT count(*) FROM audit_rows WHERE number IS NULL`))
	}
	w.Exec(`DELETE FROM audit_rows`)
}

// The hub keeps a private key for as long as its requester may take it, whatever the retentions are.
func TestAPrivateKeyThatNobodyTookIsDestroyed(t *testing.T) {
	w := newWorld(t)
	credential := db.NewID()
	w.Exec(`INSERT INTO access_credentials (id, org_id, project_id, name, public_key, version, status, resource_version,
		created_at, updated_at) VALUES ($1, $1, $1, 'key', '', 1, 'active', 1, $2, $2)`, credential, w.Now)
	for n, ends := range []time.Duration{-time.Hour, -time.Minute, 0, time.Minute, -2 * time.Minute} {
		expires := w.Now.Add(ends)
		w.Exec(`INSERT INTO wrapping_tokens (id, hash, credential_id, requester_type, requester_id, sealed, expires_at)
			VALUES ($1, $2, $3, 'user', '', 'sealed', $4)`, idAt(expires.Add(-10*time.Minute)), []byte{byte(n)}, credential,
			expires)
	}
	w.deleteOld(retention(func(*periodic.Retention) {}))
	require.Equal(t, 5, w.Count(`SELECT count(*) FROM wrapping_tokens`), "a later use is a misuse")
	require.Equal(t, 1, w.Count(`SELECT count(*) FROM wrapping_tokens WHERE sealed <> ''`))
	require.Equal(t, 1, w.Count(`SELECT count(*) FROM wrapping_tokens WHERE sealed <> '' AND expires_at > $1`, w.Now))
}

// A token that is old and still good stays; one that was revoked long ago goes, whenever it would have expired.
func TestUserTokensGoOnceTheyHaveEnded(t *testing.T) {
	w := newWorld(t)
	user := db.NewID()
	w.Exec(
		`INSERT INTO users (id, email, name, platform_admin, created_at, updated_at) VALUES ($1, 'a@b', 'a', true, $2, $2)`,
		user, w.Now)
	old := w.Now.Add(-30 * day)
	for n, ends := range []struct{ expires, revoked any }{
		{w.Now.Add(day), nil},
		{w.Now.Add(-5 * day), nil},
		{w.Now.Add(day), w.Now.Add(-5 * day)},
		{w.Now.Add(-15 * day), nil},
		{w.Now.Add(day), w.Now.Add(-15 * day)},
		{w.Now.Add(-15 * day), nil},
	} {
		w.Exec(
			`INSERT INTO user_tokens (id, user_id, hash, description, expires_at, revoked_at, created_at)
				VALUES ($1, $2, $3, $4, $5, $6, $7)`,
			idAt(old), user, []byte{byte(n)}, fmt.Sprint(n), ends.expires, ends.revoked, old)
	}
	w.deleteOld(retention(func(r *periodic.Retention) { r.Credentials = 10 * day }))
	require.Equal(t, 3, w.Count(`SELECT count(*) FROM user_tokens`))
	require.Equal(t, 3, w.Count(`SELECT count(*) FROM user_tokens WHERE description IN ('0', '1', '2')`))
}

// leased gives a member leases of a day each, one after the other, of which the last ends now.
func (w *world) leased(member string, n int) {
	w.T.Helper()
	for no := range n {
		from := w.Now.Add(-time.Duration(n-no) * day)
		w.Exec(
			`INSERT INTO leases (subject_id, lease_no, node_id, hold_id, currency, cap_nanos, issued_at, expires_at,
				covered_since, duration_seconds, end_policy, prices)
			SELECT id, $2, node_id, id, 'EUR', 0, $3, $4, $3, 86400, 'stop', '[]' FROM subjects WHERE id = $1`,
			member, no+1, from, from.Add(day))
	}
	w.Exec(`UPDATE subjects SET lease_no = $2 WHERE id = $1`, member, n)
}

func (w *world) reported(member string, until time.Time) {
	w.T.Helper()
	w.Exec(`INSERT INTO usage_coverage (node_id, subject_id, meter, run_id, from_at, to_at)
		SELECT node_id, id, $2, '', $3, $4 FROM subjects WHERE id = $1`,
		member, protocol.MeterSessionSeconds, until.Add(-time.Minute), until)
}

func TestLeasesStayWhileUsageMayBeRatedByThem(t *testing.T) {
	w := newWorld(t)
	members := w.Subjects("member", 5)
	for _, m := range members {
		w.leased(m, 20)
	}
	all, behind, silent, settled, lately := members[0], members[1], members[2], members[3], members[4]
	w.reported(all, w.Now)
	// The node reported four days of usage: all leases but the first four may still rate the rest.
	w.reported(behind, w.Now.Add(-16*day))
	w.Exec(`UPDATE subjects SET closed_at = $2, settled_at = $2 WHERE id = $1`, settled, w.Now.Add(-11*day))
	w.Exec(`UPDATE subjects SET closed_at = $2, settled_at = $2 WHERE id = $1`, lately, w.Now.Add(-9*day))
	keep := retention(func(r *periodic.Retention) { r.Leases = 10 * day })
	w.deleteOld(keep)
	left := func() (n []int) {
		for _, m := range members {
			n = append(n, w.Count(`SELECT count(*) FROM leases WHERE subject_id = $1`, m))
		}
		return n
	}
	// Leases that ended less than ten days ago stay, too: eleven of the twenty.
	require.Equal(t, []int{11, 16, 20, 11, 20}, left())
	w.deleteOld(keep)
	require.Equal(t, []int{11, 16, 20, 11, 20}, left())

	w.Now = w.Now.Add(100 * day)
	w.deleteOld(keep)
	require.Equal(t, []int{2, 16, 20, 0, 0}, left(), "all: reported %s, behind: %s, silent: %s", all, behind, silent)
}

func TestTheHistoryOfADecommissionedInstanceGoes(t *testing.T) {
	w := newWorld(t)
	i := w.Upgraded()
	history := func() []int {
		return []int{
			w.Count(`SELECT count(*) FROM instance_operations WHERE instance_id = $1`, i.ID),
			w.Count(`SELECT count(*) FROM instance_revisions WHERE instance_id = $1`, i.ID),
			w.Count(`SELECT count(*) FROM member_revisions WHERE member_id = $1`, i.Members[0].ID),
		}
	}
	for _, c := range []struct {
		status string
		keep   time.Duration
		want   []int
	}{
		{"running", 10 * day, []int{2, 2, 2}},
		{"decommissioned", 12 * day, []int{2, 2, 2}},
		{"decommissioned", 10 * day, []int{1, 1, 0}},
		{"decommissioned", 10 * day, []int{1, 1, 0}},
	} {
		w.Exec(`UPDATE app_instances SET status = $2, updated_at = $3 WHERE id = $1`, i.ID, c.status, w.Now.Add(-11*day))
		w.deleteOld(retention(func(r *periodic.Retention) { r.History = c.keep }))
		require.Equal(t, c.want, history(), "%s, kept for %s", c.status, c.keep)
	}
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		shown, err := instance.Get(ctx, tx, i.ProjectID, i.ID)
		require.Equal(t, "2.0.0", shown.Version)
		return err
	})
}

// An instance that lives goes through many revisions. What nothing goes back to goes once it is past its retention;
// what a rollback needs stays, and no number is given twice.
func TestOldRevisionsOfALivingInstanceGo(t *testing.T) {
	w := newWorld(t)
	i := w.Running()
	keep := retention(func(r *periodic.Retention) { r.History = 10 * day })
	generation := uint64(1)
	ready := func(revision int64) {
		generation++
		says := w.Says(i, protocol.WorkloadStatus_READY)
		says.Revision = uint64(revision)
		w.Report(generation, says)
		require.Equal(t, lifecycle.Running, w.Get(i.ID).Lifecycle.Status)
	}
	for n := range 8 {
		w.Now = w.Now.Add(2 * day)
		version := fmt.Sprintf("2.%d.0", n)
		w.Release(version)
		asked, err := w.Commands().UpgradeInstance(t.Context(), w.Meta(version), command.UpgradeInstanceInput{
			ProjectID: w.Project.ID, InstanceID: i.ID, Version: version,
		})
		require.NoError(t, err)
		ready(asked.Revision)
	}
	rows := func() []int {
		return []int{
			w.Count(`SELECT count(*) FROM instance_revisions WHERE instance_id = $1`, i.ID),
			w.Count(`SELECT count(*) FROM member_revisions WHERE member_id = $1`, i.Members[0].ID),
			w.Count(`SELECT count(*) FROM instance_operations WHERE instance_id = $1`, i.ID),
		}
	}
	w.deleteOld(retention(func(*periodic.Retention) {}))
	require.Equal(t, []int{9, 9, 9}, rows())
	w.deleteOld(keep)
	// Superseded on the days 6, 8, 10, 12, 14 and 16 of 16; the operations on the days 2, 4, 6 ... 16.
	require.Equal(t, []int{8, 8, 6}, rows())

	w.Now = w.Now.Add(100 * day)
	w.deleteOld(keep)
	require.Equal(t, []int{3, 3, 1}, rows())
	back, err := w.Commands().RollbackInstance(t.Context(), w.Meta("back"), w.Project.ID, i.ID, "")
	require.NoError(t, err)
	require.Equal(t, []any{"2.6.0", int64(10)}, []any{back.Version, back.Revision})
	ready(back.Revision)
	again, err := w.Commands().RollbackInstance(t.Context(), w.Meta("forth"), w.Project.ID, i.ID, "")
	require.NoError(t, err)
	require.Equal(t, "2.7.0", again.Version)
	ready(again.Revision)

	// The node leaves an upgrade by itself: its number stays taken.
	asked, err := w.Commands().UpgradeInstance(t.Context(), w.Meta("upgrade"), command.UpgradeInstanceInput{
		ProjectID: w.Project.ID, InstanceID: i.ID, Version: "2.5.0",
	})
	require.NoError(t, err)
	generation++
	says := w.Says(i, protocol.WorkloadStatus_READY)
	says.Revision, says.FallbackFromRevision, says.Reason = uint64(again.Revision), uint64(asked.Revision),
		protocol.WorkloadStatus_READINESS_TIMEOUT
	w.Report(generation, says)
	require.Equal(t, again.Revision, w.Get(i.ID).Revision)
	w.Now = w.Now.Add(100 * day)
	w.deleteOld(keep)
	next, err := w.Commands().UpgradeInstance(t.Context(), w.Meta("next"), command.UpgradeInstanceInput{
		ProjectID: w.Project.ID, InstanceID: i.ID, Version: "2.5.0",
	})
	require.NoError(t, err)
	require.Equal(t, asked.Revision+1, next.Revision)
}

// With a segment that was set aside goes its finding, and no other finding.
func TestASegmentThatWasSetAsideGoesWithItsFinding(t *testing.T) {
	w := newWorld(t)
	at := w.Now.Add(-20 * day)
	for n := range 3 {
		w.Exec(
			`INSERT INTO usage_set_aside (node_id, incarnation, number, envelope, cause, set_aside_at)
				VALUES ($1, 'i1', $2, '', '', $3)`, w.Node, n, at)
	}
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		for _, f := range []finding.Finding{
			{Kind: finding.Usage, ResourceID: "i1/0"},
			{Kind: finding.Usage, ResourceID: "i1/1"},
			{Kind: finding.Usage, ResourceID: "i1/2"},
			{Kind: finding.Usage, ResourceID: "i2/0"},
			{Kind: finding.Renewal, ResourceID: "i1/1"},
		} {
			f.NodeID, f.At = w.Node, at
			if _, err := finding.Add(ctx, tx, f); err != nil {
				return err
			}
		}
		return nil
	})
	w.deleteOld(retention(func(r *periodic.Retention) { r.Suspense = 10 * day }))
	require.Zero(t, w.Count(`SELECT count(*) FROM usage_set_aside`))
	var left []string
	for _, f := range w.Findings() {
		left = append(left, f.Kind+" "+f.ResourceID)
	}
	require.ElementsMatch(t, []string{finding.Usage + " i2/0", finding.Renewal + " i1/1"}, left)
}

// Nodes forget usage by the newest verified backup: its record stays however old it is.
func TestTheNewestVerifiedBackupStays(t *testing.T) {
	w := newWorld(t)
	newest := ""
	for age, verified := range []bool{false, true, true, false} {
		at := w.Now.Add(-time.Duration(20+age) * day)
		id := idAt(at)
		w.Exec(`INSERT INTO backups (id, taken_at, size_bytes) VALUES ($1, $2, 1)`, id, at)
		if verified {
			w.Exec(`UPDATE backups SET verified_at = $2 WHERE id = $1`, id, at)
		}
		if verified && newest == "" {
			newest = id
		}
	}
	w.deleteOld(retention(func(r *periodic.Retention) { r.History = 10 * day }))
	require.Equal(t, 1, w.Count(`SELECT count(*) FROM backups WHERE id = $1`, newest))
	require.Equal(t, 1, w.Count(`SELECT count(*) FROM backups`))
	w.Exec(`DELETE FROM backups`)
}

// A member that ended leaves no reservation: nothing reads one.
func TestAFreedReservationLeavesNoRow(t *testing.T) {
	w := newWorld(t)
	i := w.Running()
	require.Equal(t, 1, w.Count(`SELECT count(*) FROM reservations`))
	_, err := w.Commands().DecommissionInstance(t.Context(), w.Meta("end"), w.Project.ID, i.ID)
	require.NoError(t, err)
	w.Report(2, w.Removed(i))
	require.Zero(t, w.Count(`SELECT count(*) FROM reservations`))
}

// What a node may still draw from its caps is judged by the sums, of which each renewal reads a row a meter: they stay.
func TestTheSumsOfSuspenseOutliveItsRecords(t *testing.T) {
	w := newWorld(t)
	member, at := w.Subjects("member", 1)[0], w.Now.Add(-20*day)
	for n := range 3 {
		w.Exec(
			`INSERT INTO suspense_records (id, node_id, incarnation, sequence, member_id, meter, quantity, started_at, ended_at,
				reason, created_at)
			VALUES ($1, $2, 'i1', $3, $4, 'session_seconds', 5, $5, $5, 'lease_unknown', $5)`, idAt(at), w.Node, n, member, at)
	}
	w.Exec(
		`INSERT INTO suspense_totals (node_id, subject_id, meter, quantity, before_opening, leased_quantity)
		SELECT node_id, id, 'session_seconds', 15, 0, 0 FROM subjects WHERE id = $1`, member)
	w.deleteOld(retention(func(r *periodic.Retention) { r.Suspense = 10 * day }))
	require.Zero(t, w.Count(`SELECT count(*) FROM suspense_records`))
	require.Equal(t, 15, w.Count(`SELECT quantity FROM suspense_totals WHERE subject_id = $1`, member))
}

// explainingTx requires of each query that it reads by an index.
type explainingTx struct {
	db.Tx
	t    *testing.T
	seen map[string]bool
}

func (e explainingTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	e.seen[sql] = true
	requireIndexScan(ctx, e.t, e.Tx, sql, args...)
	return e.Tx.Query(ctx, sql, args...)
}

// requireIndexScan fails where a query would read a table from its beginning, however large it is. A table of a few
// rows is read that way in any case, unless that is made expensive.
func requireIndexScan(ctx context.Context, t *testing.T, tx db.Tx, sql string, args ...any) {
	t.Helper()
	_, err := tx.Exec(ctx, `SET LOCAL enable_seqscan = off`)
	require.NoError(t, err)
	rows, err := tx.Query(ctx, `EXPLAIN `+sql, args...)
	require.NoError(t, err)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	plan := strings.Join(lines, "\n")
	require.NotContains(t, plan, "Seq Scan", "%s\n%s", sql, plan)
	require.Contains(t, plan, "Index Cond", "a range, not the whole index: %s\n%s", sql, plan)
}

// ADR 26 rests on it: what is due is found by a range of an index, in each table.
func TestWhatIsDueIsFoundByARangeOfAnIndex(t *testing.T) {
	w := newWorld(t)
	e := explainingTx{t: t, seen: map[string]bool{}}
	c := (&periodic.DeleteOld{Passes: w.passes(), Retention: periodic.DefaultRetention()}).
		WithBatches(0, 0, func(tx db.Tx) db.Tx {
			e.Tx = tx
			return e
		})
	require.NoError(t, c.Do(t.Context(), w.Now))
	require.GreaterOrEqual(t, len(e.seen), 12, "one query a table")
}
