package guide_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/appkit"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// quickstart is the shell of a user who follows the platform's quickstart: curl, jq and exported variables, nothing
// else.
type quickstart struct {
	*harness.Shell
}

// prelude is what the quickstart writes out each time: the headers, and the status code kept apart from the body.
const prelude = `
set -euo pipefail
new_id() { uuidgen | tr '[:upper:]' '[:lower:]'; }
call() { # METHOD PATH TOKEN [curl arguments]
  local method="$1" path="$2" token="$3"; shift 3
  curl -sS --cacert "$CA_FILE" -X "$method" "$API_BASE_URL/api/v1$path" ${token:+-H "Authorization: Bearer $token"} \
    -H "X-Request-ID: $(new_id)" -w '\n%{http_code}' "$@"
}
post() { call POST "$1" "$2" -H "Content-Type: application/json" -H "X-Idempotency-Key: $(new_id)" "${@:3}"; }
`

// sh runs a script after the prelude; the hub must answer with this status. The answer is read into v.
func (q *quickstart) sh(status, script string, v any) {
	q.Testbed.T.Helper()
	r := q.Run("bash", "-c", prelude+script)
	require.Zero(q.Testbed.T, r.Code, "%s\n%s", script, r.Err)
	at := strings.LastIndex(r.Out, "\n")
	require.NotEqual(q.Testbed.T, -1, at, r.Out)
	require.Equal(q.Testbed.T, status, r.Out[at+1:], "%s\n%s", script, r.Out)
	if v != nil {
		require.NoError(q.Testbed.T, json.Unmarshal([]byte(r.Out[:at]), v), "%s", r.Out)
	}
}

func (q *quickstart) export(name, value string) { q.Env = append(q.Env, name+"="+value) }

// The quickstart's requests in their order, as far as their paths exist: account, token, catalogue, entitlement,
// artifact, instance, lifecycle, billing.
func TestQuickstartWorksWithCurl(t *testing.T) {
	w := harness.NewPlatform(t)
	q := &quickstart{w.Shell("quickstart")}
	q.export("API_BASE_URL", w.Hub.Ready.APIURL)
	q.export("CA_FILE", w.Hub.Ready.CAFile)
	q.export("PROJECT_ID", w.Tenant.Project.ID)
	q.export("APP_SLUG", harness.AppSlug)
	q.export("APP_VERSION", "1.0.0")
	q.export("SA_NAME", "app-operator")
	q.export("SA_SLUG", "app-operator")
	q.export("HUMAN_TOKEN", w.AdminToken())

	q.account()
	var apps client.AppList
	q.sh("200", `call GET /apps/catalog "$HUMAN_TOKEN"`, &apps)
	require.Equal(t, harness.AppSlug, apps.Items[0].Slug)
	var versions client.AppVersionList
	q.sh("200", `call GET "/apps/catalog/$APP_SLUG/versions" "$HUMAN_TOKEN"`, &versions)
	require.Equal(t, client.AppVersionStatusActive, versions.Items[0].Status)
	var registry client.Registry
	q.sh("200", `call GET /apps/registry "$HUMAN_TOKEN"`, &registry)
	require.True(t, registry.DigestOnly)
	q.entitle()
	q.publish()
	q.operate()
}

// account makes the service account and mints its token: the key goes into the body with jq, never between quotes.
func (q *quickstart) account() {
	t := q.Testbed.T
	t.Helper()
	var account client.ServiceAccount
	q.sh("201", `post "/projects/$PROJECT_ID/service-accounts" "$HUMAN_TOKEN" -d '{
"name": "'"$SA_NAME"'",
"slug": "'"$SA_SLUG"'",
"description": "Operator for app lifecycle automation"
}'`, &account)
	q.export("SERVICE_ACCOUNT_ID", account.ID)
	q.export("SERVICE_ACCOUNT_KEY_ID", account.Key.KeyID)
	q.export("SERVICE_ACCOUNT_PRIVATE_KEY_PEM", account.Key.PrivateKeyPem)
	// As the quickstart once had it: the key's line breaks end up inside a JSON string.
	var problem client.Problem
	q.sh("400", `call POST /auth/service-account/token "" -H "Content-Type: application/json" -d '{
"service_account_id": "'"$SERVICE_ACCOUNT_ID"'",
"key_id": "'"$SERVICE_ACCOUNT_KEY_ID"'",
"private_key_pem": "'"$SERVICE_ACCOUNT_PRIVATE_KEY_PEM"'"
}'`, &problem)
	require.NotEmpty(t, problem.CorrelationID)
	require.Len(t, problem.Errors, 1)
	require.Contains(t, problem.Errors[0].Reason, "not JSON at line 4")
	require.Contains(t, problem.Errors[0].Hint, "jq -n --arg")
	var token client.Token
	q.sh("200", `call POST /auth/service-account/token "" -H "Content-Type: application/json" -d "$(jq -n \
  --arg service_account_id "$SERVICE_ACCOUNT_ID" --arg key_id "$SERVICE_ACCOUNT_KEY_ID" --arg private_key_pem `+
		`"$SERVICE_ACCOUNT_PRIVATE_KEY_PEM" \
  '{service_account_id: $service_account_id, key_id: $key_id, private_key_pem: $private_key_pem}')"`, &token)
	require.Equal(t, "Bearer", string(token.TokenType))
	q.export("SA_TOKEN", token.AccessToken)
}

// entitle is the human's; an account of the project may not.
func (q *quickstart) entitle() {
	q.Testbed.T.Helper()
	put := func(token string) string {
		return `call PUT "/projects/$PROJECT_ID/apps/entitlements/$APP_SLUG" "` + token +
			`" -H "Content-Type: application/json" -d '{
"enabled": true,
"policy_overrides": {
"allowed_operating_modes": ["tenant_dedicated"],
"allowed_control_plane_scopes": ["project"]
}
}'`
	}
	q.sh("403", put("$SA_TOKEN"), nil)
	var e client.Entitlement
	q.sh("200", put("$HUMAN_TOKEN"), &e)
	require.True(q.Testbed.T, e.Enabled)
}

// publish gets a publish intent, pushes straight to the registry and registers the digest.
func (q *quickstart) publish() {
	t := q.Testbed.T
	t.Helper()
	var intent client.PublishIntent
	q.sh("201", `post "/projects/$PROJECT_ID/app-artifacts/publish-intents" "$SA_TOKEN" -d '{
"app_slug": "'"$APP_SLUG"'",
"app_version": "'"$APP_VERSION"'",
"artifact_name": "sidecar",
"channel": "dev"
}'`, &intent)
	require.True(t, intent.SignatureRequired)
	ca := q.Testbed.Hub.Ready.CAFile
	pushed, err := appkit.Push(q.Testbed.Ctx, q.Testbed.Release("1.0.0").Image, appkit.Target{
		RegistryHost: intent.RegistryHost, Repository: intent.Repository, Tag: intent.Tag,
		Username: intent.Credentials.Username, Password: intent.Credentials.Password, CAFile: ca,
	}, q.Testbed.Publisher.Signer, nil)
	require.NoError(t, err)
	q.export("REPOSITORY", pushed.Repository)
	q.export("DIGEST", pushed.Digest)
	var a client.Artifact
	q.sh("201", `post "/projects/$PROJECT_ID/app-artifacts" "$SA_TOKEN" -d '{
"app_slug": "'"$APP_SLUG"'",
"app_version": "'"$APP_VERSION"'",
"artifact_name": "sidecar",
"repository": "'"$REPOSITORY"'",
"digest": "'"$DIGEST"'",
"tag": "dev-latest",
"media_type": "application/vnd.oci.image.manifest.v1+json"
}'`, &a)
	require.Equal(t, client.ArtifactTrustStateVerified, a.TrustState)
	// An image that was not pushed.
	q.export("NO_DIGEST", "sha256:"+strings.Repeat("0", 64))
	var problem client.Problem
	q.sh("422",
		`post "/projects/$PROJECT_ID/app-artifacts" "$SA_TOKEN" -d "$(jq -n --arg a "$APP_SLUG" --arg v "$APP_VERSION" `+
			`--arg r "$REPOSITORY" --arg d "$NO_DIGEST" \
  '{app_slug: $a, app_version: $v, artifact_name: "sidecar", repository: $r, digest: $d, media_type: `+
			`"application/vnd.oci.image.manifest.v1+json"}')"`, &problem)
	require.NotEmpty(t, problem.CorrelationID)
}

// operate creates the instance, polls it, asks for its bill and decommissions it, all as the service account.
func (q *quickstart) operate() {
	t := q.Testbed.T
	t.Helper()
	var i client.AppInstance
	q.sh("201", `post "/projects/$PROJECT_ID/app-instances" "$SA_TOKEN" -d '{
"app_slug": "'"$APP_SLUG"'",
"version": "'"$APP_VERSION"'",
"display_name": "my-first-app-instance",
"operating_mode": "tenant_dedicated",
"control_plane_scope": "project",
"config": {}
}'`, &i)
	require.Equal(t, client.OperatingModeTenantDedicated, i.OperatingMode)
	require.NotEmpty(t, i.RuntimeBackend)
	require.NotEmpty(t, i.TenantBoundaryMode)
	q.export("APP_INSTANCE_ID", i.ID)
	var list client.AppInstanceList
	q.sh("200", `call GET "/projects/$PROJECT_ID/app-instances" "$SA_TOKEN"`, &list)
	require.Len(t, list.Items, 1)
	q.until(client.AppInstanceStatusRunning)
	q.Testbed.Eventually("usage is on the bill", func() error {
		var usage client.UsageRecordList
		q.sh("200", `call GET "/billing/usage?app_instance_id=$APP_INSTANCE_ID&usage_source=app_runtime" "$HUMAN_TOKEN"`,
			&usage)
		for _, u := range usage.Items {
			require.Equal(t, i.ID, u.AppInstanceID)
			require.Equal(t, client.OperatingModeTenantDedicated, u.OperatingMode)
			require.Equal(t, i.RuntimeBackend, u.RuntimeBackend)
			require.Equal(t, q.Testbed.Tenant.Org.ID, u.OrgID)
			require.Equal(t, q.Testbed.Tenant.Project.ID, u.ProjectID)
		}
		return harness.Pending(nil, len(usage.Items) > 0)
	})
	// No body and no content type, as the quickstart has it.
	q.sh("202",
		`call POST "/projects/$PROJECT_ID/app-instances/$APP_INSTANCE_ID/decommission" "$SA_TOKEN" -H `+
			`"X-Idempotency-Key: $(new_id)"`, nil)
	q.until(client.AppInstanceStatusDecommissioned)
}

func (q *quickstart) until(status client.AppInstanceStatus) {
	q.Testbed.T.Helper()
	q.Testbed.Eventually("the instance is "+string(status), func() error {
		var i client.AppInstance
		q.sh("200", `call GET "/projects/$PROJECT_ID/app-instances/$APP_INSTANCE_ID" "$SA_TOKEN"`, &i)
		require.NotEqual(q.Testbed.T, client.AppInstanceStatusFailed, i.Status)
		return harness.Pending(nil, i.Status == status)
	})
}
