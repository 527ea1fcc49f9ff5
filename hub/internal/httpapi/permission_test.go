package httpapi

import (
	"cmp"
	"context"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/stretchr/testify/require"

	hubapi "github.com/gpuaas/gpuaas/hub/api"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
)

// powerless authenticates every caller as a user of the org whose roles have no permission.
type powerless struct{ orgID, projectID string }

func (p powerless) Authenticate(context.Context, string, time.Time) (iam.Principal, error) {
	return iam.Principal{
		Type:     principal.User,
		ID:       someID,
		OrgID:    p.orgID,
		Bindings: []iam.Binding{{Role: "none"}, {Role: "none", ProjectID: p.projectID}},
	}, nil
}

// TestEveryOperationNeedsThePermissionOfTheContract: x-permission of an operation is the permission that a caller
// without any is reported as missing. An operation that has none refuses nobody.
func TestEveryOperationNeedsThePermissionOfTheContract(t *testing.T) {
	s := &theater{house: newHouse(t)}
	orgID, projectID, _ := s.tenant(t, "acme")
	user := `{"org_id":"` + orgID + `","email":"a@acme.example","display_name":"A"}`
	userID := s.must(t, s.admin, "POST", "/admin/users", "user", user, 201).text("id")
	s.open(t)
	api := serverOn(s.d, nil, nil)
	api.NodeStreams = s
	var err error
	s.Handler, err = NewHandler(api, Config{
		Authenticator: powerless{orgID, projectID}, Auditor: &command.Service{DB: s.d},
		Log: jsonLog(t, s.log), Now: s.clock, RequestsPerSecond: 1e6, Burst: 1e6,
	})
	require.NoError(t, err)
	doc, err := openapi3.NewLoader().LoadFromData(hubapi.OpenAPI)
	require.NoError(t, err)
	bodies := samples()
	ids := strings.NewReplacer("{org_id}", orgID, "{project_id}", projectID, "{user_id}", userID,
		`"org_id":"`+someID, `"org_id":"`+orgID, `"project_id":"`+someID, `"project_id":"`+projectID)
	for _, template := range slices.Sorted(maps.Keys(doc.Paths.Map())) {
		for method, op := range doc.Paths.Value(template).Operations() {
			if op.Security != nil {
				continue
			}
			path := regexp.MustCompile(`\{[a-z_]+_id\}`).ReplaceAllString(ids.Replace(template), someID)
			path = regexp.MustCompile(`\{[a-z_]+\}`).ReplaceAllString(path, "a")
			res := s.ask(t, "any", method, path, "key-"+op.OperationID, ids.Replace(bodies[op.OperationID]))
			permission, _ := op.Extensions["x-permission"].(string)
			if permission == "" && op.Responses.Status(http.StatusSwitchingProtocols) != nil {
				require.Equal(t, "upgrade_missing", res.text("code"), op.OperationID)
				continue
			}
			if permission == "" {
				want := map[string]int{
					"unwrap": http.StatusNotFound, "revokeSession": http.StatusNotFound, // neither was ever made
					"logout":         http.StatusConflict,  // the credential belongs to no session
					"changePassword": http.StatusForbidden, // the credential's owner has no password
					"explainAccess":  http.StatusForbidden, // the app instance, for those who may read it
				}[op.OperationID]
				require.Equal(t, cmp.Or(want, http.StatusOK), res.status, "%s: %s", op.OperationID, res.raw)
				continue
			}
			require.Equal(t, http.StatusForbidden, res.status, "%s: %s", op.OperationID, res.raw)
			require.Equal(t, "You may not do this; it needs the permission "+permission+".", res.text("detail"), op.OperationID)
		}
	}
}
