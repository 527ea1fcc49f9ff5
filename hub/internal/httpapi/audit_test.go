package httpapi

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/event"
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
	n, err := (&event.Sequencer{DB: s.d, Holder: "hub", Now: s.clock}).Pass(t.Context())
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
