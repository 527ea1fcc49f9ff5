package httpapi

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/stretchr/testify/require"

	hubapi "github.com/gpuaas/gpuaas/hub/api"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// actor is who sends a request: with a token, or without one from a connection that shows a node's certificate.
type actor struct {
	name, token string
	node        bool
}

// actors are one of each kind: of every role, and those who may do nothing.
func (s *stage) actors(t *testing.T) []actor {
	t.Helper()
	list := []actor{
		{name: "anonymous"},
		{name: "node", node: true},
		{name: "platform_admin", token: s.admin},
		{name: "admin of another org", token: s.stranger},
	}
	user := func(name, orgRole, projectRole string) actor {
		id := s.must(t, s.admin, "POST", "/admin/users", name, `{"org_id":"`+s.ids["org_id"]+`","email":"`+name+
			`@acme.example","display_name":"`+name+`","roles":[`+orgRole+`]}`, 201).text("id")
		if orgRole == "" { // without a role a new user is a member
			s.must(t, s.boss, "PUT", "/users/"+id+"/roles", "", `{"roles":[]}`, 200)
		}
		if projectRole != "" {
			s.must(t, s.boss, "PUT", "/projects/"+s.ids["project_id"]+"/roles/"+id, "", `{"roles":[`+projectRole+`]}`, 200)
		}
		token := s.must(t, s.admin, "POST", "/admin/users/"+id+"/tokens", name+"-token", `{}`, 201)
		if name == "revoked" {
			s.must(t, s.admin, "DELETE", "/users/"+id+"/tokens/"+token.text("id"), "", "", 204)
		}
		return actor{name: name, token: token.text("token")}
	}
	list = append(list, user("revoked", `"org_admin"`, ""), user("nobody", "", ""))
	for _, role := range []string{"org_admin", "org_billing", "org_member", "app_publisher"} {
		list = append(list, user(role, `"`+role+`"`, ""))
	}
	for _, role := range []string{"project_admin", "app_operator", "viewer"} {
		list = append(list, user(role, "", `"`+role+`"`))
	}
	for _, role := range []string{"app_operator", "app_publisher", "viewer"} {
		slug := "sa-" + strings.ReplaceAll(role, "_", "-")
		account := s.must(t, s.boss, "POST", "/projects/"+s.ids["project_id"]+"/service-accounts", slug,
			`{"name":"`+slug+`","slug":"`+slug+`","role":"`+role+`"}`, 201)
		token := s.must(t, "", "POST", "/auth/service-account/token", "", mintBody(account), 200).text("access_token")
		list = append(list, actor{name: slug, token: token})
	}
	return append(list, actor{name: "the app instance", token: s.instanceToken(t, s.ids["app_instance_id"])},
		actor{name: "another app instance", token: s.instanceToken(t, db.NewID())})
}

// instanceToken is a token of an app instance's own service account, in the project of the stage.
func (s *stage) instanceToken(t *testing.T, instanceID string) string {
	t.Helper()
	key, err := iam.NewKey(db.NewID(), s.clock())
	require.NoError(t, err)
	sa := iam.ServiceAccount{
		ID: db.NewID(), OrgID: s.ids["org_id"], ProjectID: s.ids["project_id"], AppInstanceID: instanceID,
	}
	require.NoError(t, db.WriteTx(t.Context(), s.d, func(tx db.Tx) error {
		_, _, err := iam.RenewInstanceAccount(t.Context(), tx, sa, key, 0)
		return err
	}))
	body, err := json.Marshal(map[string]string{
		"service_account_id": sa.ID, "key_id": key.ID, "private_key_pem": key.PrivateKeyPEM,
	})
	require.NoError(t, err)
	return s.must(t, "", "POST", "/auth/service-account/token", "", string(body), 200).text("access_token")
}

// Of all operations, the account of an app instance may only those that read that instance or do its work.
func TestAnAppInstanceMayOnlyWhatIsItsOwn(t *testing.T) {
	s := newStage(t)
	own := actor{token: s.instanceToken(t, s.ids["app_instance_id"])}
	operations, err := loadContract(hubapi.OpenAPI)
	require.NoError(t, err)
	doc, err := openapi3.NewLoader().LoadFromData(hubapi.OpenAPI)
	require.NoError(t, err)
	var allowed []string
	for _, op := range operations {
		permission, _ := doc.Paths.Value(op.template).Operations()[op.method].Extensions["x-permission"].(string)
		if permission == "" {
			continue
		}
		if want := s.expect(t, own, op, permission); want < 300 || want == http.StatusPreconditionFailed {
			allowed = append(allowed, op.id)
		}
	}
	require.ElementsMatch(t, []string{
		"getAppInstance", "listAppInstanceEvents", "listAppInstanceTasks", "claimAppInstanceTask",
		"heartbeatAppInstanceTask", "progressAppInstanceTask", "completeAppInstanceTask", "failAppInstanceTask",
		"reportAppInstanceMember",
	}, allowed)

	get := func(project, instance string) int {
		return s.ask(t, own.token, "GET", "/projects/"+project+"/app-instances/"+instance, "", "").status
	}
	project := s.ids["project_id"]
	require.Equal(t, http.StatusOK, get(project, s.ids["app_instance_id"]))
	require.Equal(t, http.StatusForbidden, get(project, db.NewID()), "another instance of its project, there or not")
	other := s.must(t, s.boss, "POST", "/projects", "other", `{"slug":"other",`+
		`"org_id":"`+s.ids["org_id"]+`","display_name":"Other"}`, 201).text("id")
	for _, elsewhere := range []string{other, db.NewID()} {
		require.Equal(t, http.StatusNotFound, get(elsewhere, s.ids["app_instance_id"]))
	}
}

// TestEveryActorMayDoWhatTheContractAndThePoliciesSay walks every actor and every operation that needs a permission:
// who lacks it gets 403, who may not know of the resource 404, who has no credential 401; and nothing changes. What is
// allowed and changes something is sent for a version that is not there, so that it gets 412.
func TestEveryActorMayDoWhatTheContractAndThePoliciesSay(t *testing.T) {
	s := newStage(t)
	actors := s.actors(t)
	doc, err := openapi3.NewLoader().LoadFromData(hubapi.OpenAPI)
	require.NoError(t, err)
	operations, err := loadContract(hubapi.OpenAPI)
	require.NoError(t, err)
	before := fingerprint(t, s.d)
	asked := map[int]int{}
	for _, key := range slices.Sorted(maps.Keys(operations)) {
		op := operations[key]
		permission, _ := doc.Paths.Value(op.template).Operations()[op.method].Extensions["x-permission"].(string)
		if permission == "" {
			continue // TestEveryOperationNeedsThePermissionOfTheContract: it refuses nobody who has a credential
		}
		s.wait(time.Second) // those without a credential share the budget of an address
		for _, who := range actors {
			want := s.expect(t, who, op, iam.Permission(permission))
			if want == 0 {
				continue
			}
			got := s.as(t, who, op)
			asked[got.status]++
			if want == http.StatusOK {
				require.NotContains(t, []int{401, 403, 412}, got.status, "%s: %s: %s", who.name, op.id, got.raw)
				continue
			}
			require.Equal(t, want, got.status, "%s: %s: %s", who.name, op.id, got.raw)
			require.True(t, want == http.StatusPreconditionFailed || got.header.Get("ETag") == "", op.id)
		}
	}
	t.Logf("answers by status: %v", asked)
	for _, status := range []int{200, 401, 403, 404, 412} {
		require.Greater(t, asked[status], 50, status)
	}
	after := fingerprint(t, s.d)
	delete(before, "audit_rows")
	delete(after, "audit_rows")
	require.Equal(t, before, after)
}

// expect returns the status that follows from the policies; 200 for any answer to an allowed read, 0 where an allowed
// request would change something.
func (s *stage) expect(t *testing.T, who actor, op *operation, permission iam.Permission) int {
	t.Helper()
	if who.token == "" {
		return http.StatusUnauthorized
	}
	p, err := TokenAuthenticator{DB: s.d}.Authenticate(t.Context(), who.token, s.clock())
	if err != nil {
		require.True(t, fault.Is(err, fault.Unauthenticated), who.name)
		return http.StatusUnauthorized
	}
	orgID, projectID := s.scope(p, op)
	instanceID := ""
	if strings.Contains(op.template, "{app_instance_id}") {
		instanceID = s.ids["app_instance_id"]
	}
	err = iam.AuthorizeOn(p, permission, orgID, projectID, instanceID)
	switch {
	case fault.Is(err, fault.Forbidden):
		return http.StatusForbidden
	case fault.Is(err, fault.NotFound):
		return http.StatusNotFound
	}
	require.NoError(t, err)
	switch {
	case !op.mutates():
		return http.StatusOK
	case op.resource != "":
		return http.StatusPreconditionFailed
	default:
		return 0
	}
}

// scope is where an operation needs its permission: in the project or org of its path, in that of its body (the stage
// sends acme's), in the caller's own, or, for what is the platform's, nowhere.
func (s *stage) scope(p iam.Principal, op *operation) (orgID, projectID string) {
	has := func(name string) bool { return strings.Contains(op.template, "{"+name+"}") }
	switch {
	case strings.HasPrefix(op.template, "/admin/"):
		return "", ""
	case has("project_id"):
		return s.ids["org_id"], s.ids["project_id"]
	case has("org_id"), has("user_id"), op.id == "createProject":
		return s.ids["org_id"], ""
	case strings.HasPrefix(op.template, "/billing/"), strings.HasPrefix(op.template, "/audit"):
		return p.OrgID, p.ProjectID
	default:
		return "", ""
	}
}

// as sends the request of an actor, for a version that is not there where it would change something.
func (s *stage) as(t *testing.T, who actor, op *operation) answer {
	t.Helper()
	header := http.Header{}
	if op.resource != "" && op.mutates() {
		header.Set(ifMatchHeader, `"another"`)
	}
	if who.node {
		return s.sendOver(t, nodeConnection(), who.token, op, header)
	}
	return s.send(t, who.token, op, header)
}

func nodeConnection() *tls.ConnectionState {
	leaf := &x509.Certificate{URIs: []*url.URL{protocol.NodeSPIFFE("gpuaas.test", someID)}}
	return &tls.ConnectionState{
		PeerCertificates: []*x509.Certificate{leaf}, VerifiedChains: [][]*x509.Certificate{{leaf}},
	}
}
