package httpapi

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/periodic"
	"github.com/gpuaas/gpuaas/protocol"
)

// runFor lets a member of the project run for a while on a node, up to now.
func (h *house) runFor(t *testing.T, orgID, projectID string, d time.Duration) (instanceID string) {
	t.Helper()
	now, node := h.clock(), db.NewID()
	s := ledger.Subject{
		ID: db.NewID(), Kind: ledger.Member, OrgID: orgID, ProjectID: projectID, AppInstanceID: db.NewID(), AppSlug: "demo",
		AllocationID: db.NewID(), NodeID: node,
		OperatingMode: "tenant_dedicated", ControlPlaneScope: "project", RuntimeBackend: "launchable_oci",
		CorrelationID: "run-1", OpenedAt: now,
	}
	h.wait(d)
	seg, err := ledger.ReadSegment(billing.Store{NodeID: node, Incarnation: "i"}, &protocol.UsageSegment{
		Number: 1,
		Records: []*protocol.UsageRecord{{
			Sequence: 1, MemberId: s.ID, Meter: protocol.MeterSessionSeconds, Quantity: d.Microseconds(), RunId: "r", LeaseNo: 1,
			StartedAt: timestamppb.New(now), EndedAt: timestamppb.New(now.Add(d)),
		}},
	}, []byte{1})
	require.NoError(t, err)
	_, err = db.RunTx(t.Context(), h.d, func(tx db.Tx) ([]ledger.Posted, error) {
		ctx := t.Context()
		if err := ledger.OpenSubject(ctx, tx, s); err != nil {
			return nil, err
		}
		if _, err := ledger.IssueLease(ctx, tx, ledger.LeaseRequest{
			SubjectID: s.ID, NodeID: node, Now: now,
			Duration: time.Hour,
		}); err != nil {
			return nil, err
		}
		return ledger.PostUsage(ctx, tx, now.Add(d), seg)
	})
	require.NoError(t, err)
	return s.AppInstanceID
}

func TestBillFromPriceToPosting(t *testing.T) {
	h := newHouse(t)
	orgID, projectID, boss := h.tenant(t, "acme")
	_, _, stranger := h.tenant(t, "other")

	price := h.must(t, h.admin, "POST", "/admin/prices", "p1",
		`{"meter":"session_seconds","currency":"EUR","price":"3.6","per":"hour","host_share_percent":70}`, 201)
	require.Equal(t, "3.6", price.text("price"))
	again := h.must(t, h.admin, "POST", "/admin/prices", "p1",
		`{"meter":"session_seconds","currency":"EUR","price":"3.6","per":"hour","host_share_percent":70}`, 201)
	require.Equal(t, price.text("id"), again.text("id"))
	credit := h.must(t, h.admin, "POST", "/admin/credits", "c1", `{"org_id":"`+orgID+
		`","amount":"100","currency":"EUR","description":"welcome"}`, 201)
	require.Equal(t, "credit", credit.text("kind"))
	h.must(t, h.admin, "POST", "/admin/credits", "c1", `{"org_id":"`+orgID+
		`","amount":"100","currency":"EUR","description":"welcome"}`, 201)

	instance := h.runFor(t, orgID, projectID, 100*time.Second)

	usage := h.must(t, boss, "GET", "/billing/usage?app_instance_id="+instance+"&usage_source=app_runtime", "", "", 200)
	require.Len(t, usage.body["items"], 1)
	record, _ := usage.body["items"].([]any)[0].(map[string]any)
	require.Equal(t, "100", record["quantity"])
	require.Equal(t, "seconds", record["usage_unit"])
	require.Equal(t, "session_seconds", record["meter"])
	require.Equal(t, "run-1", record["correlation_id"])
	require.NotEmpty(t, record["posting_id"])

	hours := h.must(t, boss, "GET", "/billing/usage/hourly?app_instance_id="+instance, "", "", 200)
	require.Len(t, hours.body["items"], 1)
	hour, _ := hours.body["items"].([]any)[0].(map[string]any)
	require.Equal(t, "100", hour["quantity"])
	require.Equal(t, "0.1", hour["charged"])
	require.Equal(t, "EUR", hour["currency"])
	require.Equal(t, h.clock().Truncate(time.Hour).Format(time.RFC3339), hour["hour"])

	journal := h.must(t, boss, "GET", "/billing/ledger?kind=usage&app_instance_id="+instance, "", "", 200)
	require.Empty(t, journal.body["items"], "the journal follows later")
	passes := periodic.Passes{DB: h.d, Log: slog.New(slog.DiscardHandler)}
	require.NoError(t, passes.PostPending(t.Context(), time.Hour, h.clock().Add(time.Hour+time.Second)))
	journal = h.must(t, boss, "GET", "/billing/ledger?kind=usage&app_instance_id="+instance, "", "", 200)
	require.Len(t, journal.body["items"], 1)
	posting, _ := journal.body["items"].([]any)[0].(map[string]any)
	require.Equal(t, record["posting_id"], posting["posting_id"])
	amounts := map[string]bool{}
	for _, e := range posting["entries"].([]any) {
		entry, _ := e.(map[string]any)
		amounts[entry["amount"].(string)] = true
	}
	require.Equal(t, map[string]bool{"-0.1": true, "0.03": true, "0.07": true}, amounts)

	wallet := h.must(t, boss, "GET", "/billing/wallet", "", "", 200)
	require.JSONEq(t, `{"org_id":"`+orgID+`","balances":[{"currency":"EUR","available":"95.8","held":"4.1"}]}`, wallet.raw)

	require.Empty(t, h.must(t, stranger, "GET", "/billing/usage?app_instance_id="+instance, "", "", 200).body["items"])
	require.Empty(t, h.must(t, stranger, "GET", "/billing/ledger", "", "", 200).body["items"])
	for _, path := range []string{
		"/billing/usage?project_id=" + projectID, "/billing/usage?org_id=" + orgID,
		"/billing/ledger?org_id=" + orgID, "/billing/wallet?org_id=" + orgID,
	} {
		require.Equal(t, 404, h.ask(t, stranger, "GET", path, "", "").status, path)
	}
	require.Len(t, h.must(t, h.admin, "GET", "/billing/ledger?org_id="+orgID, "", "", 200).body["items"], 3)
	h.must(t, boss, "GET", "/admin/prices", "", "", 200)

	then := h.clock().Add(time.Hour)
	h.wait(2 * hourlyWindow)
	path := "/billing/usage/hourly?org_id=" + orgID
	require.Empty(t, h.must(t, h.admin, "GET", path, "", "", 200).body["items"])
	old := h.must(t, h.admin, "GET", path+"&to="+then.Format(time.RFC3339), "", "", 200)
	require.Equal(t, hours.body["items"], old.body["items"], "the days before the end that was asked for")
}

func TestServiceAccountSeesTheUsageOfItsProjectOnly(t *testing.T) {
	h := newHouse(t)
	orgID, projectID, boss := h.tenant(t, "acme")
	second := h.must(t, boss, "POST", "/projects", "second", `{"slug":"second","display_name":"Second"}`, 201).text("id")
	mine, other := h.runFor(t, orgID, projectID, time.Minute), h.runFor(t, orgID, second, time.Minute)
	sa := h.must(t, boss, "POST", "/projects/"+projectID+"/service-accounts", "sa", `{"name":"CI","slug":"ci"}`, 201)
	robot := h.must(t, "", "POST", "/auth/service-account/token", "", mintBody(sa), 200).text("access_token")
	require.Len(t, h.must(t, robot, "GET", "/billing/usage?app_instance_id="+mine, "", "", 200).body["items"], 1)
	require.Empty(t, h.must(t, robot, "GET", "/billing/usage?app_instance_id="+other, "", "", 200).body["items"])
	require.Equal(t, 404, h.ask(t, robot, "GET", "/billing/usage?project_id="+second, "", "").status)
	require.Equal(t, 403, h.ask(t, robot, "GET", "/billing/ledger", "", "").status)
	require.Equal(t, 403, h.ask(t, robot, "POST", "/admin/credits", "x", `{"org_id":"`+orgID+
		`","amount":"1","currency":"EUR","description":"me"}`).status)
}

func TestMoneyThatMakesNoSenseIsRefused(t *testing.T) {
	h := newHouse(t)
	orgID, _, boss := h.tenant(t, "acme")
	for name, c := range map[string]struct {
		path, body string
		status     int
		code       string
	}{
		"nothing": {"/admin/credits", `{"org_id":"` + orgID +
			`","amount":"0","currency":"EUR","description":"d"}`, 422, "amount_invalid"},
		"negative": {"/admin/credits", `{"org_id":"` + orgID +
			`","amount":"-1","currency":"EUR","description":"d"}`, 400, ""},
		"nobody": {"/admin/credits", `{"org_id":"` + db.NewID() +
			`","amount":"1","currency":"EUR","description":"d"}`, 404, "not_found"},
		"price in the past": {
			"/admin/prices",
			`{"meter":"session_seconds","currency":"EUR","price":"1","per":"hour","from":"2020-01-01T00:00:00Z"}`, 422,
			"price_in_the_past",
		},
		"time by the unit": {
			"/admin/prices", `{"meter":"session_seconds","currency":"EUR","price":"1","per":"unit"}`,
			422, "price_unit_invalid",
		},
		"tokens by the hour": {
			"/admin/prices", `{"meter":"tokens","currency":"EUR","price":"1","per":"hour"}`, 422,
			"price_unit_invalid",
		},
		"beyond any range": {
			"/admin/prices",
			`{"meter":"session_seconds","currency":"EUR","price":"999999999","per":"second"}`, 422, "price_invalid",
		},
		"bytes beyond any range": {
			"/admin/prices",
			`{"meter":"volume_byte_seconds","currency":"EUR","price":"100","per":"hour"}`, 422, "price_invalid",
		},
		"memory beyond any range": {
			"/admin/prices",
			`{"meter":"memory_byte_seconds","currency":"EUR","price":"999999999","per":"second"}`, 422, "price_invalid",
		},
		"host gets all and more": {
			"/admin/prices",
			`{"meter":"session_seconds","currency":"EUR","price":"1","per":"hour","host_share_percent":101}`, 400, "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			a := h.must(t, h.admin, "POST", c.path, strings.ReplaceAll(name, " ", "-"), c.body, c.status)
			if c.code != "" {
				require.Equal(t, c.code, a.text("code"))
			}
		})
	}
	require.Equal(t, 403, h.ask(t, boss, "POST", "/admin/prices", "b",
		`{"meter":"session_seconds","currency":"EUR","price":"1","per":"hour"}`).status)
	empty, err := db.ReadTx(t.Context(), h.d, func(tx db.Tx) (int, error) {
		prices, _, err := ledger.ListPrices(t.Context(), tx, ledger.Filter{}, nil)
		return len(prices), err
	})
	require.NoError(t, err)
	require.Zero(t, empty)
	require.Equal(t, 422, h.ask(t, boss, "GET", "/billing/usage?from=2026-01-02T00:00:00Z&to=2026-01-01T00:00:00Z", "",
		"").status)
	require.Equal(t, 400, h.ask(t, boss, "GET", "/billing/usage?cursor=nonsense", "", "").status)
}

func TestPriceEndsWhereTheNextBegins(t *testing.T) {
	h := newHouse(t)
	body := func(price string, from time.Time) string {
		return `{"meter":"session_seconds","currency":"EUR","price":"` + price + `","per":"hour","from":"` +
			from.Format(time.RFC3339) + `"}`
	}
	tomorrow := h.clock().Add(24 * time.Hour)
	h.must(t, h.admin, "POST", "/admin/prices", "1",
		`{"meter":"session_seconds","currency":"EUR","price":"1","per":"hour"}`, 201)
	h.must(t, h.admin, "POST", "/admin/prices", "2", body("2", tomorrow), 201)
	require.Equal(t, "price_exists", h.must(t, h.admin, "POST", "/admin/prices", "3", body("3", tomorrow),
		409).text("code"))
	list := h.must(t, h.admin, "GET", "/admin/prices?meter=session_seconds", "", "", 200)
	items, _ := list.body["items"].([]any)
	require.Len(t, items, 2)
	newest, _ := items[0].(map[string]any)
	oldest, _ := items[1].(map[string]any)
	require.NotContains(t, newest, "to")
	require.Equal(t, tomorrow.Format(time.RFC3339), oldest["to"])
}

// What an org has in its catalogue is nobody else's to know of.
func TestLaw10PricesOfAnOrgsOwnAppsAreForThatOrg(t *testing.T) {
	y := newYard(t)
	_, _, other := y.tenant(t, "other")
	intent := `{"app_slug":"secret-plan","app_version":"1.0.0","artifact_name":"runtime","channel":"dev"}`
	y.must(t, y.boss, "POST", "/projects/"+y.projectID+"/app-artifacts/publish-intents", "intent", intent, 201)
	price := `{"meter":"session_seconds","currency":"EUR","price":"1","per":"hour"`
	y.must(t, y.admin, "POST", "/admin/prices", "own", price+`,"app_slug":"secret-plan"}`, 201)
	y.must(t, y.admin, "POST", "/admin/prices", "all", price+"}", 201)
	prices := func(token string) (apps []any) {
		items, _ := y.must(t, token, "GET", "/admin/prices", "", "", 200).body["items"].([]any)
		for _, item := range items {
			price, _ := item.(map[string]any)
			apps = append(apps, price["app_slug"])
		}
		return apps
	}
	require.Equal(t, []any{nil, "secret-plan"}, prices(y.boss))
	require.Equal(t, []any{nil}, prices(other))
	require.Equal(t, []any{nil, "secret-plan"}, prices(y.admin))
	owners, err := db.ReadTx(t.Context(), y.d, func(tx db.Tx) (owners []string, err error) {
		return owners, tx.QueryRow(t.Context(), `SELECT array_agg(coalesce(org_id::TEXT, '') ORDER BY id) FROM events
			WHERE type = 'billing.price.created'`).Scan(&owners)
	})
	require.NoError(t, err)
	require.Equal(t, []string{y.orgID, ""}, owners, "so are the events that name them")
}
