package httpapi

import (
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/event/eventtest"
	"github.com/gpuaas/gpuaas/pkg/auditchain"
)

// Events show their place in the one order of all events once they have it.
func TestEventsShowTheirPosition(t *testing.T) {
	s := &theater{house: newHouse(t)}
	orgID, projectID, boss := s.tenant(t, "acme")
	s.open(t)
	allocation := s.must(t, boss, "POST", "/projects/"+projectID+"/allocations", "a", sliceBody, 201).text("id")
	i := s.instance(t, orgID, projectID, allocation)
	path := "/projects/" + projectID + "/app-instances/" + i.ID + "/events"
	require.NotContains(t, items(s.must(t, boss, "GET", path, "", "", 200))[0], "pos")
	n, err := eventtest.Pass(t.Context(), &event.Sequencer{DB: s.d, Holder: "hub", Now: s.clock})
	require.NoError(t, err)
	require.Positive(t, n)
	require.Positive(t, items(s.must(t, boss, "GET", path, "", "", 200))[0]["pos"])
}

// An org's admin reads what happened in the org, the platform's admin everything, nobody else anything; no row shows a
// secret.
func TestTheAuditTrailIsReadByThoseWhoMay(t *testing.T) {
	h := newHouse(t)
	orgID, projectID, boss := h.tenant(t, "acme")
	_, _, stranger := h.tenant(t, "other")
	sa := h.must(t, boss, "POST", "/projects/"+projectID+"/service-accounts", "sa", `{"name":"CI","slug":"ci"}`, 201)
	key, _ := sa.body["key"].(map[string]any)
	robot := h.must(t, "", "POST", "/auth/service-account/token", "", mintBody(sa), 200).text("access_token")
	require.Equal(t, 403, h.ask(t, robot, "POST", "/projects/"+projectID+"/service-accounts", "sa2",
		`{"name":"Evil","slug":"evil"}`).status)

	made := items(h.must(t, boss, "GET",
		"/audit?resource_type=service_account&outcome=done&action=iam.service_account.write", "", "", 200))
	require.Len(t, made, 1)
	require.Equal(t, "flow-sa", made[0]["correlation_id"])
	require.Equal(t, sa.text("id"), made[0]["resource_id"])
	require.Equal(t, "user", made[0]["actor"].(map[string]any)["type"])
	require.NotContains(t, h.must(t, boss, "GET", "/audit", "", "", 200).raw, "PRIVATE KEY")
	require.NotContains(t, h.must(t, boss, "GET", "/audit", "", "", 200).raw, key["private_key_pem"])

	denied := items(h.must(t, boss, "GET", "/audit?outcome=denied&actor_id="+sa.text("id"), "", "", 200))
	require.Len(t, denied, 1)
	require.NotEmpty(t, denied[0]["reason"])
	require.Len(t, items(h.must(t, boss, "GET", "/audit?correlation_id=flow-sa2", "", "", 200)), 1)

	// Page by page there is what one page shows.
	all := items(h.must(t, boss, "GET", "/audit?limit=200", "", "", 200))
	var paged []map[string]any
	for query := "/audit?limit=1"; query != ""; {
		page := h.must(t, boss, "GET", query, "", "", 200)
		paged, query = append(paged, items(page)...), ""
		if cursor := page.text("next_cursor"); cursor != "" {
			query = "/audit?limit=1&cursor=" + cursor
		}
	}
	require.Equal(t, all, paged)
	for _, row := range all {
		require.Equal(t, orgID, row["org_id"])
	}

	require.Equal(t, 404, h.ask(t, stranger, "GET", "/audit?org_id="+orgID, "", "").status)
	require.Equal(t, 404, h.ask(t, stranger, "GET", "/audit?project_id="+projectID, "", "").status)
	require.Equal(t, 403, h.ask(t, robot, "GET", "/audit", "", "").status)
	require.Equal(t, 401, h.ask(t, "", "GET", "/audit", "", "").status)
	require.Equal(t, 400, h.ask(t, boss, "GET", "/audit?outcome=maybe", "", "").status)
	require.Equal(t, 400, h.ask(t, boss, "GET", "/audit?cursor=nonsense", "", "").status)
	require.Greater(t, len(items(h.must(t, h.admin, "GET", "/audit?limit=200", "", "", 200))), len(all))
}

// export returns the records that a caller exports, which must be a whole run of one chain.
func (h *house) export(t *testing.T, token, query string) (records []map[string]any, v auditchain.Verifier) {
	t.Helper()
	for line := range strings.Lines(h.must(t, token, "GET", "/audit/export"+query, "", "", 200).raw) {
		line = strings.TrimSuffix(line, "\n")
		require.NoError(t, v.Add([]byte(line)))
		var record map[string]any
		require.NoError(t, json.Unmarshal([]byte(line), &record))
		records = append(records, record)
	}
	return records, v
}

// An export can be of a time: it has every record of it, in a run that verifies.
func TestTheAuditTrailIsExportedByTime(t *testing.T) {
	h := newHouse(t)
	_, projectID, boss := h.tenant(t, "acme")
	at := func(hour int) string { return h.begin.Add(time.Duration(hour) * time.Hour).Format(time.RFC3339) }
	for hour, slug := range []string{"a", "b", "c", "d"} {
		h.wait(time.Hour)
		require.Equal(t, at(hour+1), h.clock().Format(time.RFC3339))
		h.must(t, boss, "POST", "/projects/"+projectID+"/service-accounts", slug, `{"name":"N","slug":"`+slug+`"}`, 201)
	}
	_, err := eventtest.Pass(t.Context(), &event.Sequencer{DB: h.d, Holder: "hub", Now: h.clock})
	require.NoError(t, err)
	times := func(query string) (out []any) {
		records, _ := h.export(t, boss, query)
		for _, record := range records {
			out = append(out, record["at"])
		}
		return out
	}
	require.Equal(t, []any{at(2), at(3)}, times("?from="+at(2)+"&to="+at(4)))
	require.Equal(t, []any{at(4)}, times("?from="+at(4)))
	all := times("")
	require.Equal(t, all[:len(all)-3], times("?to="+at(2)))
	require.Equal(t, all[1:len(all)-3], times("?from_number=2&to="+at(2)))
	require.Empty(t, times("?from="+at(5)))
	require.Empty(t, times("?to="+at(-1)))
	require.Equal(t, 400, h.ask(t, boss, "GET", "/audit/export?from=yesterday", "", "").status)
}

// Every org's rows are a chain that its admin can export and verify; nobody exports another org's. The platform's rows
// have a chain of their own.
func TestTheAuditTrailIsAChainForThoseWhoMay(t *testing.T) {
	h := newHouse(t)
	orgID, projectID, boss := h.tenant(t, "acme")
	otherID, _, stranger := h.tenant(t, "other")
	sa := h.must(t, boss, "POST", "/projects/"+projectID+"/service-accounts", "sa", `{"name":"CI","slug":"ci"}`, 201)
	robot := h.must(t, "", "POST", "/auth/service-account/token", "", mintBody(sa), 200).text("access_token")
	require.Equal(t, 403, h.ask(t, robot, "POST", "/projects/"+projectID+"/service-accounts", "sa2",
		`{"name":"Evil","slug":"evil"}`).status)
	require.NotContains(t, items(h.must(t, boss, "GET", "/audit", "", "", 200))[0], "number")
	require.Empty(t, h.must(t, boss, "GET", "/audit/export", "", "", 200).raw, "the sequencer has not been")
	sequence := func() {
		_, err := eventtest.Pass(t.Context(), &event.Sequencer{DB: h.d, Holder: "hub", Now: h.clock})
		require.NoError(t, err)
	}
	sequence()

	records, v := h.export(t, boss, "")
	listed := items(h.must(t, boss, "GET", "/audit?limit=200", "", "", 200))
	require.Len(t, records, len(listed))
	require.Equal(t, int64(len(listed)), v.Head().Number)
	byNumber := map[any]map[string]any{}
	for _, row := range listed {
		byNumber[row["number"]] = row
	}
	for i, record := range records {
		require.InDelta(t, i+1, record["number"], 0)
		require.Equal(t, byNumber[record["number"]], record, "list and export show the same")
		require.Equal(t, orgID, record["org_id"])
		if record["actor"].(map[string]any)["type"] != "system" {
			require.Equal(t, "192.0.2.1", record["source_address"])
		}
	}
	part, pv := h.export(t, boss, "?from_number=2&to_number=3")
	require.Equal(t, records[1:3], part)
	require.Equal(t, int64(2), pv.First().Number)

	platform, _ := h.export(t, h.admin, "")
	require.NotEmpty(t, platform)
	for _, record := range platform {
		require.NotContains(t, record, "org_id")
	}
	ours, _ := h.export(t, h.admin, "?org_id="+orgID)
	require.Equal(t, records, ours)
	theirs, _ := h.export(t, stranger, "")
	require.NotEmpty(t, theirs)
	for _, record := range theirs {
		require.Equal(t, otherID, record["org_id"])
	}

	require.Equal(t, 404, h.ask(t, stranger, "GET", "/audit/export?org_id="+orgID, "", "").status)
	require.Equal(t, 403, h.ask(t, robot, "GET", "/audit/export", "", "").status)
	require.Equal(t, 401, h.ask(t, "", "GET", "/audit/export", "", "").status)
	require.Equal(t, 400, h.ask(t, boss, "GET", "/audit/export?from_number=0", "", "").status)

	// A head that was noted is still in the chain later, while it grows.
	sequence()
	_, grown := h.export(t, boss, "")
	require.Greater(t, grown.Head().Number, v.Head().Number)
	again := auditchain.Verifier{Saved: v.Head()}
	for line := range strings.Lines(h.must(t, boss, "GET", "/audit/export?from_number="+
		strconv.FormatInt(v.Head().Number+1, 10), "", "", 200).raw) {
		require.NoError(t, again.Add([]byte(strings.TrimSuffix(line, "\n"))))
	}
	require.NoError(t, again.End())
}

// Of rows beyond the retention the caller learns before the answer begins.
func TestAnExportOfRowsThatAreGoneIsRefused(t *testing.T) {
	h := newHouse(t)
	orgID, _, boss := h.tenant(t, "acme")
	_, err := eventtest.Pass(t.Context(), &event.Sequencer{DB: h.d, Holder: "hub", Now: h.clock})
	require.NoError(t, err)
	all, _ := h.export(t, boss, "")
	require.Greater(t, len(all), 3)
	forget := func(upTo int) {
		require.NoError(t, db.WriteTx(t.Context(), h.d, func(tx db.Tx) error {
			_, err := tx.Exec(t.Context(), `DELETE FROM audit_rows WHERE chain = $1 AND number <= $2`, orgID, upTo)
			return err
		}))
	}
	forget(3)
	refused := h.ask(t, boss, "GET", "/audit/export?to_number=3", "", "")
	require.Equal(t, 422, refused.status)
	require.Contains(t, refused.raw, "query/to_number")
	require.Contains(t, refused.raw, "number 4")
	kept, _ := h.export(t, boss, "?from_number=2&to_number=4")
	require.Equal(t, all[3:4], kept)
	forget(len(all))
	require.Equal(t, 422, h.ask(t, boss, "GET", "/audit/export?from_number=2&to_number=3", "", "").status)
	kept, _ = h.export(t, boss, "")
	require.Empty(t, kept)
}

// An export that cannot go on breaks the connection, so that no client takes it for whole.
func TestAnExportThatBreaksOffBreaksTheConnection(t *testing.T) {
	rows := func(yield func(event.AuditRow, error) bool) {
		_ = yield(event.AuditRow{ID: someID, Number: 1}, nil) && yield(event.AuditRow{}, errors.New("the database is gone"))
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_ = auditLines{rows, slog.New(slog.DiscardHandler)}.VisitExportAuditResponse(w)
	}))
	defer server.Close()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL, nil)
	require.NoError(t, err)
	res, err := server.Client().Do(request)
	if err == nil {
		defer func() { _ = res.Body.Close() }()
		_, err = io.ReadAll(res.Body)
	}
	require.Error(t, err)
}
