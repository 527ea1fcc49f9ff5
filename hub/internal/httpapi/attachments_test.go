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
