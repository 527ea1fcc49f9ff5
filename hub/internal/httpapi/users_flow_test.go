package httpapi

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// person makes a user of the org and a token of that user.
func (h *house) person(t *testing.T, orgID, email, roles string) (id, token string) {
	t.Helper()
	body := `{"org_id":"` + orgID + `","email":"` + email + `","display_name":"P","roles":[` + roles + `]}`
	id = h.must(t, h.admin, "POST", "/admin/users", "user-"+email[:3], body, 201).text("id")
	return id, h.must(t, h.admin, "POST", "/admin/users/"+id+"/tokens", "token-"+email[:3], `{"description":"laptop"}`,
		201).text("token")
}

func (h *house) whoami(t *testing.T, token string) int {
	t.Helper()
	return h.ask(t, token, "GET", "/auth/whoami", "", "").status
}

func firstItem(t *testing.T, a answer) map[string]any {
	t.Helper()
	items, _ := a.body["items"].([]any)
	require.Len(t, items, 1, a.raw)
	item, _ := items[0].(map[string]any)
	return item
}

func TestARevokedTokenIsRefusedAtTheNextRequest(t *testing.T) {
	h := newHouse(t)
	orgID, _, boss := h.tenant(t, "acme")
	_, _, stranger := h.tenant(t, "other")
	id, token := h.person(t, orgID, "ada@acme.example", `"org_member"`)
	path := "/users/" + id + "/tokens"

	own := firstItem(t, h.must(t, token, "GET", path, "", "", 200))
	require.Equal(t, "laptop", own["description"])
	require.NotContains(t, h.must(t, boss, "GET", path, "", "", 200).raw, "gpuaas_ut_")
	for _, method := range []string{"GET", "DELETE"} {
		require.Equal(t, 404, h.ask(t, stranger, method, path, "", "").status)
	}
	tokenPath := path + "/" + own["id"].(string)
	require.Equal(t, 404, h.ask(t, stranger, "DELETE", tokenPath, "", "").status)
	require.Equal(t, 200, h.whoami(t, token))

	h.must(t, token, "DELETE", tokenPath, "", "", 204)
	require.Equal(t, 401, h.whoami(t, token))
	h.must(t, boss, "DELETE", tokenPath, "", "", 404)

	again := h.must(t, h.admin, "POST", "/admin/users/"+id+"/tokens", "again", `{}`, 201).text("token")
	h.must(t, boss, "DELETE", path, "", "", 204)
	h.must(t, boss, "DELETE", path, "", "", 204)
	require.Equal(t, 401, h.whoami(t, again))
	require.Empty(t, h.must(t, boss, "GET", path, "", "", 200).body["items"])
}

func TestADisabledUserIsRefusedUntilEnabled(t *testing.T) {
	h := newHouse(t)
	orgID, _, boss := h.tenant(t, "acme")
	_, _, stranger := h.tenant(t, "other")
	id, token := h.person(t, orgID, "ada@acme.example", `"org_member"`)
	path := "/users/" + id

	require.Equal(t, 404, h.ask(t, stranger, "POST", path+"/disable", "s", "").status)
	require.Equal(t, 403, h.ask(t, token, "POST", path+"/disable", "own", "").status)
	require.Equal(t, 400, h.ask(t, boss, "POST", path+"/disable", "", "").status, "without an idempotency key")
	require.Equal(t, "disabled", h.must(t, boss, "POST", path+"/disable", "d1", "", 200).text("status"))
	h.must(t, boss, "POST", path+"/disable", "d2", "", 200)
	require.Equal(t, 401, h.whoami(t, token))
	require.Equal(t, "active", h.must(t, boss, "POST", path+"/enable", "e1", "", 200).text("status"))
	require.Equal(t, 200, h.whoami(t, token))
}

func TestARemovedUserIsGoneAndTheAddressIsFree(t *testing.T) {
	h := newHouse(t)
	orgID, projectID, boss := h.tenant(t, "acme")
	otherID, _, stranger := h.tenant(t, "other")
	id, token := h.person(t, orgID, "ada@acme.example", `"org_member"`)
	h.must(t, boss, "PUT", "/projects/"+projectID+"/roles/"+id, "", `{"roles":["viewer"]}`, 200)

	require.Equal(t, 404, h.ask(t, stranger, "DELETE", "/orgs/"+otherID+"/users/"+id, "", "").status)
	require.Equal(t, 404, h.ask(t, h.admin, "DELETE", "/orgs/"+otherID+"/users/"+id, "", "").status)
	h.must(t, boss, "DELETE", "/orgs/"+orgID+"/users/"+id, "", "", 204)
	require.Equal(t, 401, h.whoami(t, token))
	require.Equal(t, 404, h.ask(t, boss, "GET", "/users/"+id, "", "").status)
	require.Len(t, h.must(t, boss, "GET", "/orgs/"+orgID+"/users", "", "", 200).body["items"], 1)
	require.Empty(t, h.must(t, boss, "GET", "/projects/"+projectID+"/roles", "", "", 200).body["items"])
	h.must(t, boss, "DELETE", "/orgs/"+orgID+"/users/"+id, "", "", 404)
	h.must(t, h.admin, "POST", "/admin/users", "back", `{"org_id":"`+orgID+
		`","email":"ada@acme.example","display_name":"Ada"}`, 201)
}

func TestProjectAdminCanBeGivenToAUserOfTheOrg(t *testing.T) {
	h := newHouse(t)
	orgID, projectID, boss := h.tenant(t, "acme")
	otherOrg, _, _ := h.tenant(t, "other")
	second := h.must(t, boss, "POST", "/projects", "p2", `{"slug":"second","display_name":"Second"}`, 201).text("id")
	id, token := h.person(t, orgID, "ada@acme.example", `"org_member"`)
	foreign, _ := h.person(t, otherOrg, "eve@other.example", `"org_member"`)
	h.must(t, boss, "PUT", "/users/"+id+"/roles", "", `{"roles":[]}`, 200)
	path := "/projects/" + projectID
	require.Equal(t, 404, h.ask(t, token, "GET", path, "", "").status, "no role, no project")

	h.must(t, boss, "PUT", path+"/roles/"+id, "", `{"roles":["project_admin"]}`, 200)
	require.Equal(t, "ada@acme.example", firstItem(t, h.must(t, boss, "GET", path+"/roles", "", "", 200))["email"])
	h.must(t, token, "POST", path+"/service-accounts", "sa", `{"name":"CI","slug":"ci"}`, 201)
	require.Equal(t, 404, h.ask(t, token, "POST", "/projects/"+second+"/service-accounts", "sb",
		`{"name":"CI","slug":"ci"}`).status)
	require.Equal(t, 404, h.ask(t, token, "PUT", "/projects/"+second+"/roles/"+id, "", `{"roles":["project_admin"]}`).
		status)
	require.Equal(t, 403, h.ask(t, token, "PUT", "/users/"+id+"/roles", "", `{"roles":["org_admin"]}`).status)
	require.Equal(t, 404, h.ask(t, boss, "PUT", path+"/roles/"+foreign, "", `{"roles":["viewer"]}`).status,
		"of another org")
	require.Equal(t, 400, h.ask(t, boss, "PUT", path+"/roles/"+id, "", `{"roles":["org_admin"]}`).status)

	h.must(t, boss, "PUT", path+"/roles/"+id, "", `{"roles":[]}`, 200)
	require.Equal(t, 404, h.ask(t, token, "GET", path, "", "").status)
}

func TestTheLastPlatformAdminStays(t *testing.T) {
	h := newHouse(t)
	first := h.must(t, h.admin, "GET", "/auth/whoami", "", "", 200).text("id")
	for name, a := range map[string]answer{
		"disabled": h.ask(t, h.admin, "POST", "/users/"+first+"/disable", "d", ""),
		"demoted":  h.ask(t, h.admin, "PUT", "/users/"+first+"/roles", "", `{"roles":[],"platform_admin":false}`),
	} {
		require.Contains(t, []int{409, 422}, a.status, name)
		require.Equal(t, 200, h.whoami(t, h.admin), name)
	}
	orgID, _, boss := h.tenant(t, "acme")
	id, token := h.person(t, orgID, "ada@acme.example", `"org_member"`)
	require.Equal(t, 403, h.ask(t, boss, "PUT", "/users/"+id+"/roles", "", `{"roles":[],"platform_admin":true}`).status)
	h.must(t, h.admin, "PUT", "/users/"+id+"/roles", "", `{"roles":["org_member"],"platform_admin":true}`, 200)
	for method, path := range map[string]string{"POST": "/users/" + id + "/disable", "DELETE": "/orgs/" + orgID +
		"/users/" + id} {
		require.Equal(t, 403, h.ask(t, boss, method, path, "b", "").status, "an org's admin does not touch a platform admin")
	}
	h.must(t, token, "POST", "/users/"+first+"/disable", "d2", "", 200)
	require.Equal(t, 401, h.whoami(t, h.admin))
	require.Equal(t, "last_platform_admin", h.must(t, token, "PUT", "/users/"+id+"/roles", "",
		`{"roles":[],"platform_admin":false}`, 409).text("code"))
	h.must(t, token, "DELETE", "/orgs/"+orgID+"/users/"+id, "", "", 204)
	require.Equal(t, true, h.must(t, token, "GET", "/auth/whoami", "", "", 200).body["platform_admin"], "without an org")
}

func TestQuotasAreSeenByTheOrgAndSetByThePlatform(t *testing.T) {
	h := newHouse(t)
	orgID, projectID, boss := h.tenant(t, "acme")
	_, _, stranger := h.tenant(t, "other")
	path := "/orgs/" + orgID + "/quota"
	require.Equal(t, 404, h.ask(t, stranger, "GET", path, "", "").status)
	require.Equal(t, 403, h.ask(t, boss, "PUT", "/admin"+path, "", `{"limits":[]}`).status)
	require.Equal(t, 400, h.ask(t, h.admin, "PUT", "/admin"+path, "", `{"limits":[{"name":"moons","limit":1}]}`).status)
	h.must(t, h.admin, "PUT", "/admin"+path, "", `{"limits":[{"name":"service_accounts","limit":0}]}`, 200)

	refused := h.must(t, boss, "POST", "/projects/"+projectID+"/service-accounts", "sa", `{"name":"CI","slug":"ci"}`, 409)
	require.Equal(t, "quota_exceeded", refused.text("code"))
	require.Contains(t, refused.raw, `"pointer":"quota/service_accounts"`)
	require.Contains(t, refused.raw, "limit 0, in use 0")
	require.Contains(t, h.must(t, boss, "GET", path, "", "", 200).raw, `"limit":0,"name":"service_accounts","used":0`)

	h.must(t, h.admin, "PUT", "/admin"+path, "", `{"limits":[]}`, 200)
	h.must(t, boss, "POST", "/projects/"+projectID+"/service-accounts", "sb", `{"name":"CI","slug":"ci"}`, 201)
	require.Contains(t, h.must(t, boss, "GET", path, "", "", 200).raw, `"name":"service_accounts","used":1`)
}

func TestAnOrgsReservedSlugsAreItsOwn(t *testing.T) {
	h := newHouse(t)
	orgID, _, boss := h.tenant(t, "acme")
	_, _, stranger := h.tenant(t, "other")
	_, err := db.RunTx(t.Context(), h.d, func(tx db.Tx) (bool, error) {
		_, made, err := catalog.Reserve(t.Context(), tx, "vllm", orgID, h.clock())
		return made, err
	})
	require.NoError(t, err)
	path := "/orgs/" + orgID + "/app-slugs"
	require.Equal(t, 404, h.ask(t, stranger, "GET", path, "", "").status)
	require.Equal(t, "vllm", firstItem(t, h.must(t, boss, "GET", path, "", "", 200))["slug"])
	require.Equal(t, 404, h.ask(t, stranger, "DELETE", path+"/vllm", "", "").status)
	h.must(t, boss, "DELETE", path+"/vllm", "", "", 204)
	require.Equal(t, 404, h.ask(t, h.admin, "PUT", "/admin/apps/catalog/vllm/owner", "", `{}`).status)
}
