package httpapi

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// TestAnAttachedProjectUsesAnInstanceAndDoesNotOperateIt: its members see health and endpoints and connect to them; all
// else is the owner's, and ends with the attachment.
func TestAnAttachedProjectUsesAnInstanceAndDoesNotOperateIt(t *testing.T) {
	s := &theater{house: newHouse(t), logCheckEvery: time.Millisecond}
	orgID, projectID, boss := s.tenant(t, "acme")
	second := s.must(t, boss, "POST", "/projects", "p2", `{"slug":"second","display_name":"Second"}`, 201).text("id")
	user := func(name, role string) string {
		id, token := s.person(t, orgID, name+"@acme.example", `"org_member"`)
		s.must(t, boss, "PUT", "/users/"+id+"/roles", "", `{"roles":[]}`, 200)
		s.must(t, boss, "PUT", "/projects/"+second+"/roles/"+id, "", `{"roles":["`+role+`"]}`, 200)
		return token
	}
	operator, viewer := user("operator", "app_operator"), user("viewer", "viewer")
	hub, i, stranger := s.forward(t, orgID, projectID, boss)
	s.tx(t, func(ctx context.Context, tx db.Tx) error {
		_, err := tx.Exec(ctx, `UPDATE app_instances SET control_plane_scope = 'tenant',
			tenant_boundary_mode = 'tenant_shared' WHERE id = $1`, i.ID)
		return err
	})
	owner := "/projects/" + projectID + "/app-instances/" + i.ID
	used := "/projects/" + second + "/app-instances/" + i.ID
	require.Equal(t, 403, s.ask(t, viewer, "POST", used+"/attachments", "a0", "").status)
	require.Equal(t, 404, s.ask(t, operator, "POST", owner+"/attachments", "a0", "").status, "no role in that project")
	made := s.must(t, operator, "POST", used+"/attachments", "a1", "", 201)
	again := s.must(t, operator, "POST", used+"/attachments", "a1", "", 201)
	require.Equal(t, "true", again.header.Get("Idempotency-Replayed"))
	one := "/attachments/" + made.text("id")

	for _, token := range []string{operator, viewer} {
		shown := s.must(t, token, "GET", used+one, "", "", 200)
		require.Equal(t, "running", shown.text("status"))
		require.Equal(t, "healthy", shown.text("health"))
		require.NotEmpty(t, shown.body["endpoints"])
		require.Len(t, items(s.must(t, token, "GET", used+"/attachments", "", "", 200)), 1)
		require.Len(t, items(s.must(t, token, "GET", "/projects/"+second+"/attachments", "", "", 200)), 1)
		require.Equal(t, 404, s.ask(t, token, "GET", used, "", "").status, "the instance stays its owner's")
		for _, action := range []string{"stop", "start", "rollback", "decommission"} {
			require.GreaterOrEqual(t, s.ask(t, token, "POST", used+"/"+action, action, "").status, 403, action)
		}
		require.Equal(t, 403, s.ask(t, token, "GET", used+"/logs", "", "").status)
	}
	require.Len(t, items(s.must(t, boss, "GET", owner+"/attachments", "", "", 200)), 1)
	require.Equal(t, 404, s.ask(t, stranger, "GET", used+one, "", "").status)
	require.Equal(t, 403, s.ask(t, viewer, "DELETE", used+one, "", "").status)

	through := i
	through.ProjectID = second
	_, _, res := openPort(t, hub, viewer, through, "http")
	require.Equal(t, http.StatusForbidden, res.StatusCode, "needs apps.instance.connect")
	_, _, res = openStream(t, hub, operator, through, "exec", `{"command":["sh"]}`)
	require.Equal(t, http.StatusForbidden, res.StatusCode, "another project's containers")
	conn, r, res := openPort(t, hub, operator, through, "http")
	require.Equal(t, http.StatusSwitchingProtocols, res.StatusCode)
	_, err := io.WriteString(conn, "hello")
	require.NoError(t, err)
	require.NoError(t, conn.CloseWrite())
	text, err := io.ReadAll(r)
	require.NoError(t, err)
	require.Equal(t, "HELLO", string(text))
	row, err := json.Marshal(s.rowsOf(t, i, 2)[0].After)
	require.NoError(t, err)
	require.Contains(t, string(row), second, "the audit trail says for which project")

	open, _, res := openPort(t, hub, operator, through, "http")
	require.Equal(t, http.StatusSwitchingProtocols, res.StatusCode)
	require.Equal(t, 409, s.ask(t, boss, "POST", owner+"/decommission", "d1", "").status)
	s.must(t, boss, "DELETE", owner+one, "", "", 204)
	_, err = io.ReadAll(open)
	require.Error(t, err, "an open connection ends with the attachment")
	_, _, res = openPort(t, hub, operator, through, "http")
	require.Equal(t, http.StatusNotFound, res.StatusCode)
	require.Equal(t, 404, s.ask(t, operator, "GET", used+one, "", "").status)
}

// TestAnExplanationAboutAnInstanceNamesWhatItsEffectiveValuesForbid: the same permission in the same project, and what
// the platform does differently for each value.
func TestAnExplanationAboutAnInstanceNamesWhatItsEffectiveValuesForbid(t *testing.T) {
	s, _, i, boss, stranger := forwarded(t)
	second := s.must(t, boss, "POST", "/projects", "p2", `{"slug":"second","display_name":"Second"}`, 201).text("id")
	set := func(mode, scope, boundary string) {
		s.tx(t, func(ctx context.Context, tx db.Tx) error {
			_, err := tx.Exec(ctx, `UPDATE app_instances SET operating_mode = $2, control_plane_scope = $3,
				tenant_boundary_mode = $4 WHERE id = $1`, i.ID, mode, scope, boundary)
			return err
		})
	}
	why := func(token, permission, project string) answer {
		return s.why(t, token, permission, `,"project_id":"`+project+`","app_instance_id":"`+i.ID+`"`)
	}
	for name, c := range map[string]struct{ token, mode, scope, boundary, permission, reason string }{
		"own":            {boss, "tenant_dedicated", "project", "project_isolated", "apps.instance.stop", "permitted"},
		"own, shared":    {boss, "tenant_dedicated", "tenant", "tenant_shared", "apps.instance.stop", "permitted"},
		"managed":        {boss, "platform_managed", "platform", "platform_shared", "apps.instance.stop", "platform_managed"},
		"managed, read":  {boss, "platform_managed", "platform", "platform_shared", "apps.instance.read", "permitted"},
		"managed, admin": {s.admin, "platform_managed", "platform", "platform_shared", "apps.instance.stop", "permitted"},
	} {
		set(c.mode, c.scope, c.boundary)
		a := why(c.token, c.permission, i.ProjectID)
		require.Equal(t, 200, a.status, "%s: %s", name, a.raw)
		require.Equal(t, c.reason, a.text("reason"), name)
		require.Equal(t, i.ID, a.text("app_instance_id"), name)
	}
	set("tenant_dedicated", "tenant", "tenant_shared")
	require.Equal(t, 404, why(boss, "apps.instance.stop", second).status, "not attached yet")
	s.must(t, boss, "POST", "/projects/"+second+"/app-instances/"+i.ID+"/attachments", "a1", "", 201)
	require.Equal(t, "attached", why(boss, "apps.instance.stop", second).text("reason"))
	require.Equal(t, []string{"attached"}, ruleIDs(why(boss, "apps.instance.stop", second)))
	require.Equal(t, "permitted", why(boss, "apps.instance.connect", second).text("reason"))
	require.Equal(t, 404, why(stranger, "apps.instance.stop", i.ProjectID).status)
	require.Equal(t, 404, s.why(t, boss, "apps.instance.stop", `,"app_instance_id":"`+i.ID+`"`).status, "in no project")
}
