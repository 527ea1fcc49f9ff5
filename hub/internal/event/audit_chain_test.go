package event_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/event/eventtest"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/auditchain"
)

// audited writes n audit rows of an org; empty is the platform.
func audited(t *testing.T, d *db.DB, orgID string, n int) {
	t.Helper()
	require.NoError(t, db.WriteTx(t.Context(), d, func(tx db.Tx) error {
		for i := range n {
			if err := event.Audit(t.Context(), tx, auditRow(orgID, i)); err != nil {
				return err
			}
		}
		return nil
	}))
}

func auditRow(orgID string, i int) event.AuditRow {
	return event.AuditRow{
		Actor:      principal.Actor{Type: principal.Node, ID: db.NewID()},
		OnBehalfOf: principal.Actor{Type: principal.User, ID: "u"},
		Action:     "apps.instance.create", ResourceType: "app_instance", ResourceID: "i", OrgID: orgID, CorrelationID: "c",
		SourceAddress: "2001:db8::1", Reason: "wegen <Änderung>",
		Before: map[string]any{"nanos": int64(9007199254740993), "share": 0.5, "empty": []string{}},
		After:  map[string]any{"revision": i, "name": "\u2028\u0001"}, At: at(i),
	}
}

// chained returns a chain's rows and requires that they are whole, from its first number on.
func chained(t *testing.T, d *db.DB, orgID string) []event.AuditRow {
	t.Helper()
	var out []event.AuditRow
	v := auditchain.Verifier{}
	head, err := db.ReadTx(t.Context(), d, func(tx db.Tx) (head auditchain.Head, err error) {
		out, err = event.ChainedAudit(t.Context(), tx, event.AuditRange{OrgID: orgID, To: 1e9, Limit: 1e6})
		if err != nil {
			return head, err
		}
		return event.AuditHead(t.Context(), tx, orgID)
	})
	require.NoError(t, err)
	v.Saved = head
	if len(out) > 0 && out[0].Number > 1 {
		v.Saved = auditchain.Head{}
	}
	for _, r := range out {
		line, err := r.JSON()
		require.NoError(t, err)
		require.NoError(t, v.Add(line))
	}
	require.NoError(t, v.End())
	if len(out) > 0 {
		require.Equal(t, head, v.Head())
	}
	return out
}

func chain(t *testing.T, d *db.DB) {
	t.Helper()
	s := &event.Sequencer{DB: d, Holder: "hub-1", Now: func() time.Time { return at(0) }}
	_, err := eventtest.Pass(t.Context(), s)
	require.NoError(t, err)
}

// Each org has a chain of its own, and the platform one; the rows of a chain have numbers without gaps, also over
// several batches.
func TestLaw08EachOrgHasOneAuditChainWithoutGaps(t *testing.T) {
	d := dbtest.New(t)
	one, two := db.NewID(), db.NewID()
	audited(t, d, one, 450)
	audited(t, d, two, 3)
	audited(t, d, "", 2)
	chain(t, d)
	audited(t, d, one, 1)
	chain(t, d)
	for org, want := range map[string]int{one: 451, two: 3, "": 2, db.NewID(): 0} {
		rows := chained(t, d, org)
		require.Len(t, rows, want)
		for i, r := range rows {
			require.Equal(t, int64(i+1), r.Number)
			require.Equal(t, org, r.OrgID)
		}
	}
}

// Whatever of a stored row changes, or a row that goes or comes, the chain shows it.
func TestLaw08AChangeOfAnyAuditColumnIsNoticed(t *testing.T) {
	d := dbtest.New(t)
	org := db.NewID()
	audited(t, d, org, 3)
	chain(t, d)
	for _, statement := range []string{
		`UPDATE audit_rows SET id = '0192f0c0-0000-7000-8000-000000000001' WHERE number = 2`,
		`UPDATE audit_rows SET actor_type = 'user' WHERE number = 2`,
		`UPDATE audit_rows SET actor_id = 'x' WHERE number = 2`,
		`UPDATE audit_rows SET on_behalf_of_type = 'system' WHERE number = 2`,
		`UPDATE audit_rows SET on_behalf_of_id = 'x' WHERE number = 2`,
		`UPDATE audit_rows SET action = 'x' WHERE number = 2`,
		`UPDATE audit_rows SET resource_type = 'x' WHERE number = 2`,
		`UPDATE audit_rows SET resource_id = 'x' WHERE number = 2`,
		`UPDATE audit_rows SET org_id = NULL WHERE number = 2`,
		`UPDATE audit_rows SET project_id = id WHERE number = 2`,
		`UPDATE audit_rows SET correlation_id = 'x' WHERE number = 2`,
		`UPDATE audit_rows SET source_address = '' WHERE number = 2`,
		`UPDATE audit_rows SET outcome = 'denied' WHERE number = 2`,
		`UPDATE audit_rows SET reason = '' WHERE number = 2`,
		`UPDATE audit_rows SET before = NULL WHERE number = 2`,
		`UPDATE audit_rows SET after = '{"revision": 7}' WHERE number = 2`,
		`UPDATE audit_rows SET at = at + '1 microsecond' WHERE number = 2`,
		`UPDATE audit_rows SET previous_hash = hash WHERE number = 2`,
		`UPDATE audit_rows SET hash = previous_hash WHERE number = 2`,
		`UPDATE audit_rows SET number = 4 WHERE number = 2`,
		`DELETE FROM audit_rows WHERE number = 2`,
		`DELETE FROM audit_rows WHERE number = 3`,
	} {
		undo := errors.New("undo")
		err := db.WriteTx(t.Context(), d, func(tx db.Tx) error {
			tag, err := tx.Exec(t.Context(), statement)
			require.NoError(t, err)
			require.Equal(t, int64(1), tag.RowsAffected())
			rows, err := event.ChainedAudit(t.Context(), tx, event.AuditRange{OrgID: org, To: 9, Limit: 9})
			require.NoError(t, err)
			head, err := event.AuditHead(t.Context(), tx, org)
			require.NoError(t, err)
			require.Error(t, verifyRows(t, rows, head), statement)
			return undo
		})
		require.ErrorIs(t, err, undo)
	}
	require.Len(t, chained(t, d, org), 3)
}

// An export may be bounded by numbers and by times at once: the narrower bound counts.
func TestBoundsByNumbersAndByTimesBothCount(t *testing.T) {
	d := dbtest.New(t)
	audited(t, d, "", 10)
	chain(t, d)
	for name, bounds := range map[string]struct {
		numbers, times [2]int64
		want           [2]int64
	}{
		"numbers within the times": {[2]int64{3, 5}, [2]int64{1, 9}, [2]int64{3, 5}},
		"times within the numbers": {[2]int64{1, 9}, [2]int64{3, 5}, [2]int64{3, 5}},
		"one of each":              {[2]int64{2, 7}, [2]int64{4, 9}, [2]int64{4, 7}},
	} {
		t.Run(name, func(t *testing.T) {
			// Record n is of the time n-1.
			r, err := db.ReadTx(t.Context(), d, func(tx db.Tx) (event.AuditRange, error) {
				return event.Bounded(t.Context(), tx, event.AuditRange{
					After: bounds.numbers[0], To: bounds.numbers[1],
					Since: at(int(bounds.times[0])), Until: at(int(bounds.times[1])),
				})
			})
			require.NoError(t, err)
			require.Equal(t, bounds.want, [2]int64{r.After, r.To})
		})
	}
}

func verifyRows(t *testing.T, rows []event.AuditRow, saved auditchain.Head) error {
	t.Helper()
	v := auditchain.Verifier{Saved: saved}
	for _, r := range rows {
		line, err := r.JSON()
		require.NoError(t, err)
		if err := v.Add(line); err != nil {
			return err
		}
	}
	return v.End()
}

// sequencer is a hub's; its nth statement fails in each of its transactions, as if the hub was killed there.
func sequencer(d *db.DB, holder string, now, n int) (*event.Sequencer, *commandtest.BreakingTx) {
	breaking := &commandtest.BreakingTx{N: n}
	s := &event.Sequencer{DB: d, Holder: holder, Now: func() time.Time { return at(now) }}
	return s.WithTx(func(tx db.Tx) db.Tx {
		breaking.Tx, breaking.Seen = tx, 0
		return breaking
	}), breaking
}

// A hub that is killed at any step of a pass leaves nothing of the step's transaction; the next one goes on.
func TestASequencerKilledAtAnyStepLeavesOneChain(t *testing.T) {
	d := dbtest.New(t)
	org := db.NewID()
	chain(t, d)
	rows := 0
	for n := 1; ; n++ {
		audited(t, d, org, 2)
		rows += 2
		s, broken := sequencer(d, "hub-1", 0, n)
		_, err := eventtest.Pass(t.Context(), s)
		if broken.Seen < n {
			require.NoError(t, err)
			require.Greater(t, n, 4, "a pass reads its lease, the rows and the heads, and writes both")
			break
		}
		require.ErrorIs(t, err, commandtest.ErrInjected)
		chain(t, d)
		require.Len(t, chained(t, d, org), rows)
	}
	require.Len(t, chained(t, d, org), rows)
}

// Hubs that take over from each other and die at any step, while many write, leave one chain of each org.
func TestManyWritersAndDyingSequencersLeaveOneChain(t *testing.T) {
	d := dbtest.New(t)
	orgs := []string{db.NewID(), db.NewID(), ""}
	const writers, each = 4, 40
	ctx, cancel := context.WithCancel(t.Context())
	var sequencing, writing sync.WaitGroup
	for _, holder := range []string{"hub-1", "hub-1", "hub-2"} {
		sequencing.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				// Leases end while others have them: the clocks of the hubs jump.
				s, _ := sequencer(d, holder, i*7%100, i%9)
				_, _ = eventtest.Pass(ctx, s)
			}
		})
	}
	for w := range writers {
		writing.Go(func() {
			for i := range each {
				if err := db.WriteTx(ctx, d, func(tx db.Tx) error {
					return event.Audit(ctx, tx, auditRow(orgs[(w+i)%len(orgs)], i))
				}); err != nil {
					t.Errorf("writer %d: %v", w, err)
				}
			}
		})
	}
	writing.Wait()
	cancel()
	sequencing.Wait()
	last, _ := sequencer(d, "hub-3", 3600, 0)
	_, err := eventtest.Pass(t.Context(), last)
	require.NoError(t, err)
	total := 0
	for _, org := range orgs {
		total += len(chained(t, d, org))
	}
	require.Equal(t, writers*each, total)
}
