package httpapi

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// customRole makes a role of the org.
func (h *house) customRole(t *testing.T, token, orgID, slug string, permissions ...string) string {
	t.Helper()
	body := `{"slug":"` + slug + `","display_name":"R","permissions":["` + strings.Join(permissions, `","`) + `"]}`
	return h.must(t, token, "POST", "/orgs/"+orgID+"/roles", "role-"+slug, body, 201).text("id")
}

// customOnly is a body that gives a custom role and no other.
func customOnly(id string) string { return `{"roles":[],"custom_roles":["` + id + `"]}` }

func TestAServiceAccountHasACustomRole(t *testing.T) {
	h := newHouse(t)
	orgID, projectID, boss := h.tenant(t, "acme")
	otherID, _, stranger := h.tenant(t, "other")
	role := h.customRole(t, boss, orgID, "reader", "apps.instance.read")
	create := func(who, role, more string, status int) answer {
		return h.must(t, who, "POST", "/projects/"+projectID+"/service-accounts", "sa"+role+fmt.Sprint(status),
			`{"name":"ci","slug":"ci","custom_role":"`+role+`"`+more+`}`, status)
	}
	require.Contains(t, create(boss, role, `,"role":"viewer"`, 422).raw, `"/custom_role"`)
	require.Contains(t, create(boss, h.customRole(t, stranger, otherID, "reader", "apps.instance.read"), "", 422).raw,
		`"/custom_role"`)
	strong := h.customRole(t, boss, orgID, "strong", "iam.role.write")
	_, weak := h.person(t, orgID, "ada@acme.example", `"org_member"`)
	grants := h.customRole(t, boss, orgID, "grants", "iam.service_account.write", "apps.instance.read")
	adaID := h.must(t, weak, "GET", "/auth/whoami", "", "", 200).text("id")
	h.must(t, boss, "PUT", "/projects/"+projectID+"/roles/"+adaID, "", customOnly(grants), 200)
	create(weak, strong, "", 403)
	require.Contains(t, create(boss, strong, "", 422).raw, `"/custom_role"`, "a service account changes no roles")

	made := create(weak, role, "", 201)
	require.Equal(t, role, made.text("custom_role"))
	require.Empty(t, made.text("role"))
	token := h.must(t, "", "POST", "/auth/service-account/token", "", mintBody(made), 200).text("access_token")
	instances, volumes := "/projects/"+projectID+"/app-instances", "/projects/"+projectID+"/volumes"
	require.Equal(t, 200, h.ask(t, token, "GET", instances, "", "").status)
	require.Equal(t, 403, h.ask(t, token, "GET", volumes, "", "").status)
	path := "/orgs/" + orgID + "/roles/" + role
	h.must(t, boss, "PUT", path, "", `{"display_name":"R","permissions":["capacity.volume.read"]}`, 200)
	require.Equal(t, 403, h.ask(t, token, "GET", instances, "", "").status, "from the next request on")
	require.Equal(t, 200, h.ask(t, token, "GET", volumes, "", "").status)
	h.must(t, boss, "PUT", path, "", `{"display_name":"R","permissions":["iam.role.write","iam.role.read"]}`, 200)
	roles := "/projects/" + projectID + "/roles/" + adaID
	require.Equal(t, 403, h.ask(t, token, "PUT", roles, "", `{"roles":[]}`).status)

	require.Equal(t, "role_in_use", h.must(t, boss, "DELETE", path, "", "", 409).text("code"))
	h.must(t, boss, "DELETE", "/projects/"+projectID+"/service-accounts/"+made.text("id"), "", "", 204)
	h.must(t, boss, "DELETE", path, "", "", 204)
}

func TestAUserIsMadeWithCustomRoles(t *testing.T) {
	h := newHouse(t)
	orgID, _, boss := h.tenant(t, "acme")
	otherID, _, stranger := h.tenant(t, "other")
	role := h.customRole(t, boss, orgID, "auditor", "audit.read")
	foreign := h.customRole(t, stranger, otherID, "auditor", "audit.read")
	create := func(org, role string, status int) answer {
		return h.must(t, h.admin, "POST", "/admin/users", "bob"+role, `{"org_id":"`+org+`","email":"bob@acme.example",`+
			`"display_name":"Bob","custom_roles":["`+role+`"]}`, status)
	}
	require.Contains(t, create(orgID, foreign, 422).raw, `"/custom_roles"`)
	require.Contains(t, create(orgID, someID, 422).raw, `"/custom_roles"`)
	bob := create(orgID, role, 201)
	require.Equal(t, []any{role}, bob.body["custom_roles"])
	token := h.must(t, h.admin, "POST", "/admin/users/"+bob.text("id")+"/tokens", "token", `{}`, 201).text("token")
	require.Equal(t, 200, h.ask(t, token, "GET", "/audit", "", "").status)
	require.Equal(t, 403, h.ask(t, token, "POST", "/projects", "p", `{"slug":"p","display_name":"P"}`).status)
}

func TestACustomRoleIsHeldInAProjectOrTheWholeOrg(t *testing.T) {
	h := newHouse(t)
	orgID, projectID, boss := h.tenant(t, "acme")
	second := h.must(t, boss, "POST", "/projects", "p2", `{"slug":"second","display_name":"Second"}`, 201).text("id")
	adaID, ada := h.person(t, orgID, "ada@acme.example", `"org_member"`)
	h.must(t, boss, "PUT", "/users/"+adaID+"/roles", "", `{"roles":[]}`, 200)
	path := "/orgs/" + orgID + "/roles"
	role := h.customRole(t, boss, orgID, "restarter", "apps.instance.stop", "apps.instance.read", "apps.instance.stop")
	made := h.must(t, boss, "GET", path+"/"+role, "", "", 200)
	require.Equal(t, []any{"apps.instance.read", "apps.instance.stop"}, made.body["permissions"])
	require.Equal(t, "restarter", firstItem(t, h.must(t, boss, "GET", path, "", "", 200))["slug"])
	again := `{"slug":"restarter","display_name":"R","permissions":["audit.read"]}`
	require.Equal(t, "already_exists", h.must(t, boss, "POST", path, "again", again, 409).text("code"))

	may := func(permission, project string) int {
		t.Helper()
		a := h.why(t, ada, permission, `,"project_id":"`+project+`"`)
		if a.status == 200 && a.body["allowed"] == true {
			require.Equal(t, []string{"custom_role"}, ruleIDs(a))
			require.Equal(t, []any{role}, a.body["custom_roles"])
			return 200
		}
		return max(a.status, 403)
	}
	require.Equal(t, 404, may("apps.instance.read", projectID))
	inProject, whole := "/projects/"+projectID+"/roles/"+adaID, "/users/"+adaID+"/roles"
	held := h.must(t, boss, "PUT", inProject, "", customOnly(role), 200)
	require.Equal(t, []any{role}, held.body["custom_roles"])
	require.Equal(t, 200, may("apps.instance.stop", projectID))
	require.Equal(t, 403, may("apps.instance.create", projectID))
	require.Equal(t, 404, may("apps.instance.read", second))
	h.must(t, ada, "GET", "/projects/"+projectID+"/app-instances", "", "", 200)
	require.Equal(t, 403, h.ask(t, ada, "GET", "/projects/"+projectID+"/volumes", "", "").status)

	h.must(t, boss, "PUT", path+"/"+role, "", `{"display_name":"R","permissions":["iam.project.read"]}`, 200)
	require.Equal(t, 403, may("apps.instance.stop", projectID), "from the next request on")
	require.Equal(t, projectID, firstItem(t, h.must(t, ada, "GET", "/projects", "", "", 200))["id"])
	h.must(t, boss, "PUT", inProject, "", `{"roles":["viewer"]}`, 200)
	kept := firstItem(t, h.must(t, boss, "GET", "/projects/"+projectID+"/roles", "", "", 200))
	require.Equal(t, []any{role}, kept["custom_roles"], "absent leaves them")

	h.must(t, boss, "PUT", whole, "", customOnly(role), 200)
	require.Len(t, h.must(t, ada, "GET", "/projects", "", "", 200).body["items"], 2)
	require.Equal(t, "role_in_use", h.must(t, boss, "DELETE", path+"/"+role, "", "", 409).text("code"))
	h.must(t, boss, "PUT", whole, "", `{"roles":[],"custom_roles":[]}`, 200)
	h.must(t, boss, "PUT", inProject, "", `{"roles":[],"custom_roles":[]}`, 200)
	require.Equal(t, 404, may("iam.project.read", projectID))
	h.must(t, boss, "DELETE", path+"/"+role, "", "", 204)
	h.must(t, boss, "DELETE", path+"/"+role, "", "", 404)

	types, err := db.ReadTx(t.Context(), h.d, func(tx db.Tx) (types string, err error) {
		return types, tx.QueryRow(t.Context(), `SELECT string_agg(e.type, ' ' ORDER BY e.resource_version) FROM events e
			WHERE EXISTS (SELECT 1 FROM audit_rows a WHERE a.resource_id = e.subject AND a.outcome = 'done'
			AND a.correlation_id = e.correlation_id) AND e.subject = $1`, role).Scan(&types)
	})
	require.NoError(t, err)
	require.Equal(t, "iam.role.created iam.role.changed iam.role.deleted", types)
}

func TestNobodyGrantsWhatHeDoesNotHold(t *testing.T) {
	h := newHouse(t)
	orgID, projectID, boss := h.tenant(t, "acme")
	adaID, ada := h.person(t, orgID, "ada@acme.example", `"org_member"`)
	bobID, _ := h.person(t, orgID, "bob@acme.example", `"org_member"`)
	roles, accounts := "/orgs/"+orgID+"/roles", "/projects/"+projectID+"/service-accounts"
	powers := []string{"iam.role.read", "iam.role.write", "iam.service_account.read", "iam.service_account.write"}
	delegate := h.customRole(t, boss, orgID, "delegate", powers...)
	creator := h.customRole(t, boss, orgID, "creator", "apps.instance.create")
	sa := h.must(t, boss, "POST", accounts, "sa", `{"name":"CI","slug":"ci"}`, 201).text("id")
	h.must(t, boss, "PUT", "/users/"+adaID+"/roles", "", customOnly(delegate), 200)
	more := `"display_name":"D","permissions":["` + strings.Join(powers, `","`) + `","apps.instance.create"]}`

	for name, c := range map[string]struct{ method, path, body string }{
		"a role with more": {"POST", roles, `{"slug":"x",` + more},
		"the own role":     {"PUT", roles + "/" + delegate, `{` + more},
		"another role": {
			"PUT", roles + "/" + creator, `{"display_name":"C","permissions":["apps.instance.create","audit.read"]}`,
		},
		"a named role, to itself":        {"PUT", "/users/" + adaID + "/roles", `{"roles":["org_admin"]}`},
		"a weak role, to itself":         {"PUT", "/users/" + adaID + "/roles", `{"roles":["org_billing"]}`},
		"a named role in a project":      {"PUT", "/projects/" + projectID + "/roles/" + adaID, `{"roles":["viewer"]}`},
		"a custom role, to itself":       {"PUT", "/users/" + adaID + "/roles", customOnly(creator)},
		"a custom role, to another":      {"PUT", "/projects/" + projectID + "/roles/" + bobID, customOnly(creator)},
		"an account that may more":       {"POST", accounts, `{"name":"X","slug":"x"}`},
		"the key of one that may more":   {"POST", accounts + "/" + sa + "/rotate-key", ""},
		"the property of the platform's": {"PUT", "/users/" + adaID + "/roles", `{"roles":[],"platform_admin":true}`},
	} {
		a := h.ask(t, ada, c.method, c.path, fmt.Sprintf("%x", name), c.body)
		require.Equal(t, 403, a.status, "%s: %s", name, a.raw)
	}
	h.must(t, ada, "POST", roles, "less", `{"slug":"less","display_name":"L","permissions":["iam.role.read"]}`, 201)
	fewer := `{"display_name":"D2","permissions":["iam.role.read","iam.role.write"]}`
	h.must(t, ada, "PUT", roles+"/"+delegate, "", fewer, 200)
	h.must(t, ada, "PUT", "/users/"+bobID+"/roles", "", `{"roles":["org_member"],"custom_roles":["`+delegate+`"]}`, 200)

	for _, permission := range []string{"fleet.node.read", "iam.org.create", "know", "apps.instance.fly"} {
		body := `{"slug":"x","display_name":"X","permissions":["` + permission + `"]}`
		require.Equal(t, 422, h.ask(t, h.admin, "POST", roles, "p-"+permission, body).status, permission)
	}
	otherOrg, _, stranger := h.tenant(t, "other")
	for _, method := range []string{"GET", "DELETE"} {
		require.Equal(t, 404, h.ask(t, stranger, method, roles+"/"+creator, "", "").status)
		require.Equal(t, 404, h.ask(t, stranger, method, "/orgs/"+otherOrg+"/roles/"+creator, "", "").status)
	}
	eveID, _ := h.person(t, otherOrg, "eve@other.example", `"org_member"`)
	foreign := h.ask(t, stranger, "PUT", "/users/"+eveID+"/roles", "", customOnly(creator))
	require.Equal(t, 422, foreign.status, foreign.raw)
	require.Contains(t, foreign.raw, "/custom_roles")
}
