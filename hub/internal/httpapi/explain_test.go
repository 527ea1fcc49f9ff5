package httpapi

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// why asks for an explanation; where is what follows the permission in the body.
func (h *house) why(t *testing.T, token, permission, where string) answer {
	t.Helper()
	return h.ask(t, token, "POST", "/auth/explain", "", `{"permission":"`+permission+`"`+where+`}`)
}

func ruleIDs(a answer) (ids []string) {
	rules, _ := a.body["rules"].([]any)
	for _, r := range rules {
		ids = append(ids, r.(map[string]any)["id"].(string))
	}
	return ids
}

func TestAnExplanationNamesTheRule(t *testing.T) {
	h := newHouse(t)
	orgID, projectID, boss := h.tenant(t, "acme")
	_, otherProject, _ := h.tenant(t, "other")
	adaID, ada := h.person(t, orgID, "ada@acme.example", `"org_billing"`)
	inOrg, inProject := `,"org_id":"`+orgID+`"`, `,"project_id":"`+projectID+`"`
	aboutAda := `,"principal":{"type":"user","id":"` + adaID + `"}`
	sa := h.must(t, boss, "POST", "/projects/"+projectID+"/service-accounts", "sa", `{"name":"CI","slug":"ci"}`, 201)
	aboutRobot := `,"principal":{"type":"service_account","id":"` + sa.text("id") + `"}`

	for name, c := range map[string]struct {
		token, permission, where, reason string
		rules                            []string
	}{
		"own role":          {boss, "apps.instance.create", inProject, "permitted", []string{"org_admin"}},
		"the platform's":    {ada, "capacity.sku.read", "", "permitted", []string{"org_billing"}},
		"no such role":      {ada, "iam.user.read", inOrg, "role_missing", nil},
		"another user":      {boss, "apps.instance.create", inProject + aboutAda, "role_missing", nil},
		"another user may":  {boss, "apps.instance.logs", inProject + aboutAda, "permitted", []string{"org_billing"}},
		"a service account": {boss, "apps.instance.exec", inProject + aboutRobot, "permitted", []string{"app_operator"}},
		"oneself, named":    {ada, "billing.wallet.read", inOrg + aboutAda, "permitted", []string{"org_billing"}},
		"platform admin":    {h.admin, "fleet.node.write", "", "permitted", []string{"platform_admin"}},
		"across orgs, by one": {
			h.admin, "apps.instance.read", `,"project_id":"` + otherProject + `"` + aboutAda, "other_org",
			[]string{"tenant_boundary"},
		},
	} {
		a := h.why(t, c.token, c.permission, c.where)
		require.Equal(t, 200, a.status, "%s: %s", name, a.raw)
		require.Equal(t, c.reason, a.text("reason"), name)
		require.Equal(t, c.reason == "permitted", a.body["allowed"], name)
		require.Equal(t, c.rules, ruleIDs(a), name)
	}
	require.Equal(t, []any{"org_admin"}, h.why(t, ada, "iam.user.read", inOrg).body["roles_with_permission"])
	require.Empty(t, h.why(t, ada, "fleet.node.read", "").body["roles_with_permission"])
	require.Equal(t, orgID, h.why(t, ada, "iam.user.read", inProject).text("org_id"))

	h.must(t, boss, "POST", "/users/"+adaID+"/disable", "off", "", 200)
	h.must(t, boss, "POST", "/projects/"+projectID+"/service-accounts/"+sa.text("id")+"/disable", "off-sa", "", 200)
	for _, about := range []string{aboutAda, aboutRobot} {
		a := h.why(t, boss, "apps.instance.logs", inProject+about)
		require.Equal(t, "disabled", a.text("reason"), a.raw)
		require.Equal(t, []string{"disabled"}, ruleIDs(a))
	}
}

func TestLaw10AnExplanationOfWhatOneMayNotKnowAnswersAsIfItWereAbsent(t *testing.T) {
	h := newHouse(t)
	orgID, projectID, boss := h.tenant(t, "acme")
	otherOrg, otherProject, stranger := h.tenant(t, "other")
	second := h.must(t, boss, "POST", "/projects", "p2", `{"slug":"second","display_name":"Second"}`, 201).text("id")
	adaID, ada := h.person(t, orgID, "ada@acme.example", `"org_member"`)
	_, bob := h.person(t, orgID, "bob@acme.example", `"org_member"`)
	h.must(t, boss, "PUT", "/users/"+adaID+"/roles", "", `{"roles":[]}`, 200)
	h.must(t, boss, "PUT", "/projects/"+projectID+"/roles/"+adaID, "", `{"roles":["viewer"]}`, 200)
	sa := h.must(t, boss, "POST", "/projects/"+second+"/service-accounts", "sa", `{"name":"CI","slug":"ci"}`, 201)
	about := func(kind, id string) string { return fmt.Sprintf(`,"principal":{"type":%q,"id":%q}`, kind, id) }
	mine := `,"project_id":"` + projectID + `"`

	absent := h.why(t, ada, "apps.instance.read", `,"project_id":"`+someID+`"`)
	require.Equal(t, 404, absent.status)
	for name, c := range map[string]struct{ token, where string }{
		"project of another org":         {ada, `,"project_id":"` + otherProject + `"`},
		"another org":                    {ada, `,"org_id":"` + otherOrg + `"`},
		"absent org":                     {ada, `,"org_id":"` + someID + `"`},
		"project without a role there":   {ada, `,"project_id":"` + second + `"`},
		"project of an org it is not in": {boss, mine + `,"org_id":"` + otherOrg + `"`},
		"user of another org":            {stranger, about("user", adaID)},
		"absent user":                    {stranger, about("user", someID)},
		"account of another org":         {stranger, about("service_account", sa.text("id"))},
		"account of an unknown project":  {ada, mine + about("service_account", sa.text("id"))},
		"absent account":                 {ada, mine + about("service_account", someID)},
	} {
		a := h.why(t, c.token, "apps.instance.read", c.where)
		require.Equal(t, 404, a.status, "%s: %s", name, a.raw)
		require.Equal(t, absent.raw, a.raw, name)
	}
	require.Equal(t, 403, h.why(t, bob, "apps.instance.read", about("user", adaID)).status, "needs iam.role.read")
	bad := h.why(t, ada, "apps.instance.fly", mine)
	require.Equal(t, 422, bad.status)
	require.Contains(t, bad.raw, "/permission")
	require.Equal(t, 422, h.why(t, ada, "know", mine).status)
	require.Equal(t, 401, h.why(t, "", "apps.instance.read", mine).status)
}
