package httpapi

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	hubapi "github.com/gpuaas/gpuaas/hub/api"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// save keeps all rows as they are; restore puts them back and returns the tables that had changed.
func (s *stage) save(t *testing.T) (restore func() (changed []string)) {
	t.Helper()
	ctx := t.Context()
	before := fingerprint(t, s.d)
	run := func(statements ...string) {
		t.Helper()
		require.NoError(t, db.WriteTx(ctx, s.d, func(tx db.Tx) error {
			for _, sql := range statements {
				if _, err := tx.Exec(ctx, sql); err != nil {
					return fmt.Errorf("%s: %w", sql, err)
				}
			}
			return nil
		}))
	}
	views := map[string]bool{}
	var columns map[string]string
	s.tx(t, func(ctx context.Context, tx db.Tx) (err error) {
		columns, err = db.CollectMap[string, string](tx.Query(ctx, `SELECT table_name::TEXT,
			string_agg(quote_ident(column_name), ', ') FROM information_schema.columns
			WHERE table_schema = 'public' AND is_generated = 'NEVER' GROUP BY table_name`))
		if err != nil {
			return err
		}
		names, err := db.Select(ctx, tx, pgx.RowTo[string], `SELECT table_name::TEXT FROM information_schema.views
			WHERE table_schema = 'public'`)
		for _, name := range names {
			views[name] = true
		}
		return err
	})
	statements := []string{"CREATE SCHEMA saved"}
	for _, table := range slices.Sorted(maps.Keys(before)) {
		statements = append(statements, fmt.Sprintf("CREATE TABLE saved.%[1]q AS TABLE public.%[1]q", table))
	}
	run(statements...)
	return func() (changed []string) {
		now := fingerprint(t, s.d)
		statements := []string{"SET LOCAL session_replication_role = replica"} // no foreign key asks
		for _, table := range slices.Sorted(maps.Keys(now)) {
			if now[table] != before[table] && !views[table] {
				changed = append(changed, table)
				statements = append(statements, fmt.Sprintf("DELETE FROM public.%q", table),
					fmt.Sprintf("INSERT INTO public.%[1]q (%[2]s) SELECT %[2]s FROM saved.%[1]q", table, columns[table]))
			}
		}
		run(statements...)
		return changed
	}
}

// TestAllowedRequestsThatChangeSomethingRun sends every request that changes something for every actor who may send it,
// each on the same rows and in a state that allows it: all of them succeed.
func TestAllowedRequestsThatChangeSomethingRun(t *testing.T) {
	s := newStage(t)
	actors := s.actors(t)
	a := arrange(t, s)
	actors = append(actors, actor{name: "the cluster", token: s.instanceToken(t, a.cluster)})
	arrangements := a.arrangements(t)
	doc, err := openapi3.NewLoader().LoadFromData(hubapi.OpenAPI)
	require.NoError(t, err)
	operations, err := loadContract(hubapi.OpenAPI)
	require.NoError(t, err)
	restore := s.save(t)
	sent := 0
	for _, key := range slices.Sorted(maps.Keys(operations)) {
		op := operations[key]
		permission, _ := doc.Paths.Value(op.template).Operations()[op.method].Extensions["x-permission"].(string)
		if permission == "" || !op.mutates() {
			continue
		}
		of, before := arrangements[op.id], sent
		delete(arrangements, op.id)
		for _, who := range actors {
			got, changed, allowed := a.try(t, who, op, iam.Permission(permission), of, restore)
			if !allowed {
				continue
			}
			sent++
			require.Less(t, got.status, 300, "%s: %s: %s", who.name, op.id, got.raw)
			unchanged := of.stream != "" || op.id == "transferAppSlug" // to the org that has it
			require.True(t, changed || unchanged, "%s: %s changes nothing", who.name, op.id)
		}
		require.Greater(t, sent, before, "nobody may %s", op.id)
	}
	require.Empty(t, arrangements, "of no operation that changes something")
	t.Logf("%d allowed requests", sent)
}

// try sends a request of an actor who may, and restores the rows. It says whether the request has changed any but those
// of the audit trail.
func (a *arranged) try(t *testing.T, who actor, op *operation, permission iam.Permission, of arrangement,
	restore func() []string,
) (got answer, changed, allowed bool) {
	t.Helper()
	defer func(ids map[string]string) { a.ids = ids }(a.ids)
	a.ids = maps.Clone(a.ids)
	maps.Copy(a.ids, of.ids)
	if want := a.expect(t, who, op, permission); want != 0 && want != http.StatusPreconditionFailed {
		return answer{}, false, false
	}
	a.wait(time.Millisecond)
	tables := func(list []string) []string {
		return slices.DeleteFunc(list, func(table string) bool { return strings.HasPrefix(table, "audit") })
	}
	if of.before == nil {
		got = a.sendArranged(t, who, op, of)
		return got, len(tables(restore())) > 0, true
	}
	maps.Copy(a.ids, of.before(t, who.token))
	a.wait(time.Millisecond)
	before := fingerprint(t, a.d)
	got = a.sendArranged(t, who, op, of)
	after := fingerprint(t, a.d)
	restore()
	for table := range after {
		changed = changed || before[table] != after[table] && !strings.HasPrefix(table, "audit")
	}
	return got, changed, true
}
