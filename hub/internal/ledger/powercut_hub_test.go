package ledger_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/managed"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/event/eventtest"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/auditchain"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	asHubEnv = "GPUAAS_LEDGER_TEST_HUB"
	// earlyEnv has commits answered before they are on the disk.
	earlyEnv = "GPUAAS_LEDGER_TEST_EARLY"

	cutWriters = 4
	// stepLength is how much usage a step posts; a lease of seven days covers 10,080 steps.
	stepLength = time.Minute
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(asHubEnv); dir != "" {
		hubProcess(dir)
	}
	os.Exit(m.Run())
}

// hubProcess runs a hub's PostgreSQL and works on it until it is killed. It says each thing after its commit was
// answered.
func hubProcess(dir string) {
	t := die{}
	s, err := managed.Start(t.Context(), managed.Config{Dir: dir, Settings: cutSettings()})
	require.NoError(t, err)
	opened, err := db.Open(t.Context(), s.URL())
	require.NoError(t, err)
	require.NoError(t, db.Migrate(t.Context(), opened))
	for writer := range cutWriters {
		w := cutWorld(t, opened, writer)
		w.prepareSteps(writer)
		go func() {
			for n := w.steps(writer) + 1; ; n++ {
				w.step(n)
				say("step of %d = %d", writer, n)
			}
		}()
	}
	for {
		chainTrail(t, opened)
		for writer := range cutWriters {
			w := cutWorld(t, opened, writer)
			if head := w.trailHead(); head.Number > 0 {
				say("hash %s %d = %s", w.org, head.Number, head.Hash)
			}
		}
		time.Sleep(10 * time.Millisecond) // as the hub's own loop pauses
	}
}

// say writes a line in one piece: several writers share the output.
func say(format string, args ...any) { _, _ = fmt.Printf(format+"\n", args...) }

// cutWorld is the world of one writer: an org and a node of its own.
func cutWorld(t testing.TB, d *db.DB, writer int) *world {
	id := func(kind int) string { return fmt.Sprintf("00000000-0000-7000-8000-%04d%08d", kind, writer) }
	return &world{t: t, d: d, org: id(1), proj: id(2), node: id(3), now: noon.Add(6 * 24 * time.Hour)}
}

// cutMember is the member whose usage the writer posts.
func (w *world) cutMember() ledger.Subject {
	s := w.subject(ledger.Member)
	s.ID, s.OpenedAt = strings.Replace(w.org, "-8000-0001", "-8000-0004", 1), noon
	return s
}

// prepareSteps makes what a step needs, in one transaction, unless it is there.
func (w *world) prepareSteps(writer int) {
	s := w.cutMember()
	if number(w, `SELECT count(*) FROM subjects WHERE id = $1`, s.ID) > 0 {
		return
	}
	require.NoError(w.t, do(w, func(ctx context.Context, tx db.Tx) error {
		if err := w.grant(ctx, tx, 0, 100_000*ledger.NanosPerUnit); err != nil {
			return err
		}
		if writer == 0 { // the price book is everybody's
			if _, err := ledger.CreatePrice(ctx, tx, ledger.Price{
				Meter: protocol.MeterSessionSeconds, Currency: "EUR", Per: "hour", Nanos: ledger.NanosPerUnit,
				HostBasisPoints: 7000,
			}, noon.Add(-time.Hour)); err != nil {
				return err
			}
		}
		if err := ledger.OpenSubject(ctx, tx, s); err != nil {
			return err
		}
		_, err := ledger.IssueLease(ctx, tx, ledger.LeaseRequest{
			SubjectID: s.ID, NodeID: s.NodeID, Now: noon, Duration: 7 * 24 * time.Hour, AppSlug: s.AppSlug,
		})
		return err
	}))
}

func (w *world) grant(ctx context.Context, tx db.Tx, n int, nanos int64) error {
	_, err := ledger.GrantCredit(ctx, tx, ledger.Grant{
		OrgID: w.org, Currency: "EUR", Nanos: nanos, Description: "step", Key: fmt.Sprint(w.org, " step ", n),
	}, noon)
	return err
}

// step is one transaction: a segment of usage, a credit and a row of the audit trail, all with its number.
func (w *world) step(n int) {
	s := w.cutMember()
	from := stepLength * time.Duration(n-1)
	r := record(uint64(n), s, protocol.MeterSessionSeconds, from.Seconds(), (from + stepLength).Seconds(),
		stepLength.Microseconds())
	require.NoError(w.t, do(w, func(ctx context.Context, tx db.Tx) error {
		if os.Getenv(earlyEnv) != "" {
			if _, err := tx.Exec(ctx, `SET LOCAL synchronous_commit = off`); err != nil {
				return err
			}
		}
		isNew, err := postUsage(ctx, tx, w.node, incarnation, []*protocol.UsageRecord{r}, w.now)
		if err == nil && !isNew {
			err = fmt.Errorf("segment %d was posted before", n)
		}
		if err != nil {
			return err
		}
		if err := w.grant(ctx, tx, n, 1); err != nil {
			return err
		}
		return event.Audit(ctx, tx, event.AuditRow{
			Actor: principal.Actor{Type: principal.Node, ID: w.node}, Action: "billing.credit.grant", ResourceType: "step",
			ResourceID: fmt.Sprint(n), OrgID: w.org, At: w.now,
		})
	}))
}

// steps is how many steps of a writer are there.
func (w *world) steps(writer int) int {
	return int(number(w, `SELECT count(*) FROM audit_rows WHERE org_id = $1`, cutWorld(w.t, w.d, writer).org))
}

// checkSteps checks that each step is there with all three parts, and none is missing before another.
func (w *world) checkSteps() {
	w.t.Helper()
	for writer := range cutWriters {
		own := cutWorld(w.t, w.d, writer)
		steps := int64(w.steps(writer))
		require.Equal(w.t, steps, number(w, `SELECT coalesce(max(resource_id::int8), 0) FROM audit_rows WHERE org_id = $1`,
			own.org), "a step is missing")
		require.Equal(w.t, steps, number(w, `SELECT count(DISTINCT key) FROM postings WHERE key LIKE '%' || $1 || ' step %'
			AND key NOT LIKE '% step 0'`, own.org), "credits")
		require.Equal(w.t, steps, number(w, `SELECT coalesce(sum(number), 0)::int8 FROM usage_watermarks WHERE node_id = $1`,
			own.node), "segments")
		require.Equal(w.t, steps*stepLength.Microseconds(), number(w,
			`SELECT coalesce(sum(quantity), 0)::int8 FROM usage_hours WHERE subject_id = $1`, own.cutMember().ID), "usage")
	}
}

func chainTrail(t testing.TB, d *db.DB) {
	s := &event.Sequencer{DB: d, Holder: "hub", Now: func() time.Time { return noon }}
	_, err := eventtest.Pass(t.Context(), s)
	require.NoError(t, err)
}

func (w *world) trailHead() auditchain.Head {
	head, err := db.ReadTx(w.t.Context(), w.d, func(tx db.Tx) (auditchain.Head, error) {
		return event.AuditHead(w.t.Context(), tx, w.org)
	})
	require.NoError(w.t, err)
	return head
}

// checkTrail lets the next hub chain what was not chained yet, and checks that each chain is whole and has the hashes
// that were promised.
func (w *world) checkTrail(promised promises) {
	w.t.Helper()
	chainTrail(w.t, w.d)
	for writer := range cutWriters {
		own := cutWorld(w.t, w.d, writer)
		rows := must(own, func(ctx context.Context, tx db.Tx) ([]event.AuditRow, error) {
			return event.ChainedAudit(ctx, tx, event.AuditRange{OrgID: own.org, To: 1e9, Limit: 1e6})
		})
		require.Len(w.t, rows, w.steps(writer))
		v := auditchain.Verifier{Saved: own.trailHead()}
		hashes := map[string]string{}
		for _, r := range rows {
			line, err := r.JSON()
			require.NoError(w.t, err)
			require.NoError(w.t, v.Add(line))
			hashes[fmt.Sprintf("hash %s %d", own.org, r.Number)] = r.Hash
		}
		require.NoError(w.t, v.End())
		for what, hash := range promised {
			if strings.HasPrefix(what, "hash "+own.org) {
				require.Equal(w.t, hash, hashes[what], what)
			}
		}
	}
}
