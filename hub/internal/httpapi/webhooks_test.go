package httpapi

import (
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestLaw10WebhooksBelongToTheAdminsOfAnOrg goes through the life of a webhook, and those who may not take part in it.
func TestLaw10WebhooksBelongToTheAdminsOfAnOrg(t *testing.T) {
	h := newHouse(t)
	orgID, projectID, boss := h.tenant(t, "acme")
	_, otherProject, stranger := h.tenant(t, "other")
	member := h.must(t, h.admin, "POST", "/admin/users", "member", `{"org_id":"`+orgID+
		`","email":"m@acme.example","display_name":"M","roles":["org_member"]}`, 201)
	worker := h.must(t, h.admin, "POST", "/admin/users/"+member.text("id")+"/tokens", "worker", `{}`, 201).text("token")
	path := "/orgs/" + orgID + "/webhooks"
	body := `{"url":"https://hooks.example/x","types":["apps.instance"],"project_id":"` + projectID + `"}`

	made := h.must(t, boss, "POST", path, "make", body, 201)
	require.Regexp(t, `^whsec_[A-Za-z0-9+/]{43}=$`, made.text("secret"))
	require.Equal(t, "active", made.text("status"))
	again := h.must(t, boss, "POST", path, "make", body, 201)
	require.Equal(t, made.text("secret"), again.text("secret"), "a repeated request gets its answer")
	one := path + "/" + made.text("id")
	for _, read := range []string{path, one} {
		require.NotContains(t, h.must(t, boss, "GET", read, "", "", 200).raw, "whsec_")
	}
	rotated := h.must(t, boss, "POST", one+"/rotate-secret", "rotate", `{"overlap_seconds":0}`, 200)
	require.NotEqual(t, made.text("secret"), rotated.text("secret"))
	require.Equal(t, "webhook_active", h.must(t, boss, "POST", one+"/enable", "on", "", 409).text("code"))
	h.must(t, boss, "GET", one+"/dead-letters", "", "", 200)
	h.must(t, boss, "POST", one+"/replay", "replay", "", 202)
	h.must(t, boss, "POST", one+"/replay", "replay-one", `{"event_id":"`+someID+`"}`, 404)

	for n, url := range []string{
		"https://127.0.0.1/x", "https://[::ffff:10.0.0.1]/", "https://user:pass@hooks.example", "https://hooks.example/#a",
	} {
		bad := h.must(t, boss, "POST", path, "bad-"+strconv.Itoa(n), `{"url":"`+url+`"}`, 422)
		require.NotContains(t, bad.raw, url)
	}
	h.must(t, boss, "POST", path, "plain", `{"url":"http://hooks.example/"}`, 400)
	h.must(t, boss, "POST", path, "not-mine", `{"url":"https://hooks.example/","project_id":"`+otherProject+`"}`, 404)
	for caller, status := range map[string]int{worker: 403, stranger: 404} {
		h.must(t, caller, "POST", path, "no", body, status)
		h.must(t, caller, "POST", one+"/rotate-secret", "no", "", status)
		h.must(t, caller, "POST", one+"/replay", "no", "", status)
		h.must(t, caller, "GET", one, "", "", status)
		h.must(t, caller, "GET", one+"/dead-letters", "", "", status)
		h.must(t, caller, "DELETE", one, "", "", status)
	}
	for n := range 19 {
		h.must(t, boss, "POST", path, strings.Repeat("k", n+1), `{"url":"https://hooks.example/"}`, 201)
	}
	require.Equal(t, "too_many_webhooks", h.must(t, boss, "POST", path, "more", body, 409).text("code"))
	h.must(t, boss, "DELETE", one, "", "", 204)
	h.must(t, boss, "GET", one, "", "", 404)
}
