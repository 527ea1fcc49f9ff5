package httpapi

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
)

// stage is a theater with one of each resource that a request can name, in the org acme, and another org beside it.
type stage struct {
	*theater
	// ids are the values of the parameters of paths.
	ids map[string]string
	// strange are some of the other org's.
	strange map[string]string
	// ships are the keys and the registry with which acme ships apps.
	ships *yard
	// boss is a token of acme's admin, stranger of the other org's.
	boss, stranger string
}

// mark is in the names of all that is the other org's; no request but theirs has it.
const mark = "zq7x"

func newStage(t *testing.T) *stage {
	t.Helper()
	return newStageOn(t, newHouse(t))
}

func newStageOn(t *testing.T, h *house) *stage {
	t.Helper()
	s := &stage{theater: &theater{house: h}}
	orgID, projectID, boss := s.tenant(t, "acme")
	strangeOrg, strangeProject, stranger := s.tenant(t, mark)
	s.stranger = stranger
	s.boss = boss
	project := "/projects/" + projectID
	user := s.must(t, s.admin, "POST", "/admin/users", "user", `{"org_id":"`+orgID+
		`","email":"a@acme.example","display_name":"A","roles":["org_member"]}`, 201).text("id")
	token := s.must(t, s.admin, "POST", "/admin/users/"+user+"/tokens", "token", `{}`, 201).text("id")
	s.must(t, boss, "PUT", project+"/roles/"+user, "", `{"roles":["viewer"]}`, 200)
	account := s.must(t, boss, "POST", project+"/service-accounts", "account", `{"name":"CI","slug":"ci"}`, 201).text("id")
	role := s.must(t, boss, "POST", "/orgs/"+orgID+"/roles", "role",
		`{"slug":"reader","display_name":"R","permissions":["apps.instance.read"]}`, 201).text("id")
	s.open(t)
	s.ships = &yard{house: s.house, orgID: orgID, projectID: projectID, boss: boss}
	allocation := s.must(t, boss, "POST", project+"/allocations", "allocation", sliceBody, 201).text("id")
	volume := s.must(t, boss, "POST", project+"/volumes", "volume", `{"name":"v","size_mib":64}`, 201).text("id")
	s.direct = s.handler(t, s.log)
	s.Handler = conforms(t, s.direct)
	instance := s.instance(t, orgID, projectID, allocation)
	s.ids = map[string]string{
		"secret_id": s.must(t, boss, "POST", project+"/secrets", "secret", `{"name":"token","value":"v"}`, 201).text("id"),
		"access_credential_id": s.must(t, boss, "POST", project+"/access-credentials", "credential", `{"name":"key"}`,
			201).text("id"),
		"webhook_id": s.must(t, boss, "POST", "/orgs/"+orgID+"/webhooks", "webhook",
			`{"url":"https://hooks.example/x"}`, 201).text("id"),
		"invitation_id": s.must(t, boss, "POST", "/orgs/"+orgID+"/invitations", "invitation",
			`{"email":"b@acme.example","roles":["org_member"]}`, 201).text("id"),
		"artifact_id": db.NewID(), "session_id": db.NewID(), "task_id": db.NewID(), "attachment_id": db.NewID(),
		"member_id": instance.Members[0].ID,
		"org_id":    orgID, "project_id": projectID, "user_id": user, "token_id": token, "service_account_id": account,
		"role_id": role, "allocation_id": allocation, "volume_id": volume, "snapshot_id": db.NewID(), "node_id": s.node,
		"app_instance_id": instance.ID, "app_slug": "demo", "version": "1.0.0",
		"sku": "cpu-1", "digest": hex64,
	}
	s.insert(t)
	theirs := s.must(t, stranger, "POST", "/projects/"+strangeProject+"/allocations", "theirs", sliceBody, 201).text("id")
	s.strange = map[string]string{
		"org_id": strangeOrg, "project_id": strangeProject, "allocation_id": theirs,
		"volume_id": s.must(t, stranger, "POST", "/projects/"+strangeProject+"/volumes", "theirs",
			`{"name":"`+mark+`-volume","size_mib":64}`, 201).text("id"),
	}
	return s
}

// insert writes the rows that a node or a signed document would leave.
func (s *stage) insert(t *testing.T) {
	t.Helper()
	now := s.clock()
	s.tx(t, func(ctx context.Context, tx db.Tx) error {
		for _, row := range []struct {
			sql  string
			args []any
		}{
			{
				`INSERT INTO apps (slug, org_id, display_name, description, category, runtime_backend, resource_version,
				created_at, updated_at) VALUES ('demo', $1, 'D', '', '', 'launchable_oci', 1, $2, $2)`,
				[]any{s.ids["org_id"], now},
			},
			{`INSERT INTO app_versions (app_slug, version, id, status, manifest, manifest_envelope, manifest_sha256,
				publisher_key_id, resource_version, created_at, updated_at)
				VALUES ('demo', '1.0.0', $1, 'draft', '{}', '', '', 'k', 1, $2, $2)`, []any{db.NewID(), now}},
			{
				`INSERT INTO artifacts (id, org_id, project_id, app_slug, app_version, artifact_name, artifact_kind, repository,
				digest, media_type, size_bytes, platforms, status, trust_state, channel, evidence, resource_version,
				created_by_type, created_by_id, created_at, updated_at) VALUES ($1, $2, $3, 'demo', '1.0.0', 'unused', 'oci',
				'org/acme/demo/unused', $4, 'm', 1, '[]', 'registered', 'verified', 'dev', '[]', 1, 'user', $5, $6, $6)`,
				[]any{
					s.ids["artifact_id"], s.ids["org_id"], s.ids["project_id"], "sha256:" + hex64, s.ids["user_id"], now,
				},
			},
			{
				`INSERT INTO entitlements (project_id, app_slug, org_id, enabled, policy_overrides, resource_version,
				updated_at, updated_by) VALUES ($1, 'demo', $2, true, '{}', 1, $3, $4)`,
				[]any{s.ids["project_id"], s.ids["org_id"], now, s.ids["user_id"]},
			},
			{
				`INSERT INTO sessions (id, user_id, family_hash, refresh_hash, user_agent, source_address, created_at, refreshed_at,
				expires_at) SELECT $1, id, '', '', '', '', $2, $2, $3 FROM users WHERE platform_admin`,
				[]any{s.ids["session_id"], now, now.Add(time.Hour)},
			},
			{
				`INSERT INTO instance_tasks (id, instance_id, kind, revision, phases, state, requested_by_type, requested_by_id,
				correlation_id, created_at, updated_at) VALUES ($1, $2, 'deploy', 1, '["a"]', 'pending', 'user', $3, 'c', $4, $4)`,
				[]any{s.ids["task_id"], s.ids["app_instance_id"], s.ids["user_id"], now},
			},
			{
				`INSERT INTO instance_attachments (id, instance_id, org_id, owner_project_id, project_id, requested_by_type,
				requested_by_id, correlation_id, created_at) VALUES ($1, $2, $3, $4, $5, 'user', $6, 'c', $7)`,
				[]any{
					s.ids["attachment_id"], s.ids["app_instance_id"], s.ids["org_id"], s.ids["project_id"], db.NewID(),
					s.ids["user_id"], now,
				},
			},
			{`INSERT INTO package_indexes (project_id, url, username, own_ca, sealed_url, updated_at)
				VALUES ($1, 'https://packages.example', '', false, '', $2)`, []any{s.ids["project_id"], now}},
			{`INSERT INTO environments (node_id, project_id, digest, description, description_sha256)
				VALUES ($1, $2, $3, '{}', '\x01')`, []any{s.ids["node_id"], s.ids["project_id"], s.ids["digest"]}},
			{
				`INSERT INTO volume_snapshots (id, volume_id, description, size_bytes, status, correlation_id, resource_version,
				created_at, updated_at) VALUES ($1, $2, '', 0, 'ready', 'c', 1, $3, $3)`,
				[]any{s.ids["snapshot_id"], s.ids["volume_id"], now},
			},
		} {
			if _, err := tx.Exec(ctx, row.sql, row.args...); err != nil {
				return err
			}
		}
		return nil
	})
}

// handler has every operation, also those that seal or sign.
func (s *stage) handler(t *testing.T, log io.Writer) http.Handler {
	t.Helper()
	kek, err := secret.NewKEK([]byte(houseKey))
	require.NoError(t, err)
	registry := s.ships.openRegistry(t)
	api := serverOn(s.d, secret.NewSealer(kek), s.ships.keys)
	api.NodeStreams, api.Queries.Registry, api.Commands.Registry = s, registry, registry
	api.RegistryHost = registry.Host()
	h, err := NewHandler(api, Config{
		Authenticator: TokenAuthenticator{DB: s.d}, Auditor: &command.Service{DB: s.d}, Registry: registry,
		Log: slog.New(slog.NewJSONHandler(log, nil)), Now: s.clock, RequestsPerSecond: 1e6, Burst: 1e6,
	})
	require.NoError(t, err)
	return h
}

var pathParameter = regexp.MustCompile(`\{([a-z_]+)\}`)

// path fills the parameters of an operation's path.
func (s *stage) path(t *testing.T, op *operation) string {
	t.Helper()
	return pathParameter.ReplaceAllStringFunc(op.template, func(name string) string {
		value := s.ids[strings.Trim(name, "{}")]
		require.NotEmpty(t, value, "newStage has no %s for %s", name, op.id)
		return value
	})
}

// send sends a good request of an operation with further headers.
func (s *stage) send(t *testing.T, token string, op *operation, header http.Header) answer {
	t.Helper()
	return s.sendOver(t, nil, token, op, header)
}

func (s *stage) sendOver(t *testing.T, conn *tls.ConnectionState, token string, op *operation,
	header http.Header,
) answer {
	t.Helper()
	return s.sendBody(t, conn, token, op, header, samples()[op.id])
}

// sendBody sends a request with another body than the sample.
func (s *stage) sendBody(t *testing.T, conn *tls.ConnectionState, token string, op *operation, header http.Header,
	body string,
) answer {
	t.Helper()
	text := strings.NewReplacer(`"org_id":"`+someID, `"org_id":"`+s.ids["org_id"],
		`"project_id":"`+someID, `"project_id":"`+s.ids["project_id"],
		`"custom_roles":["`+someID, `"custom_roles":["`+s.ids["role_id"],
		`,"ca_pem":"pem"`, "").Replace(body)
	r := httptest.NewRequest(op.method, basePath+s.path(t, op), strings.NewReader(text))
	r.Header, r.TLS = header.Clone(), conn
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	r.Header.Set("X-Idempotency-Key", db.NewID())
	if text != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	w := httptest.NewRecorder()
	s.ServeHTTP(w, r)
	out := answer{status: w.Code, header: w.Header(), raw: w.Body.String()}
	if strings.HasSuffix(out.header.Get("Content-Type"), "json") && out.raw != "" {
		require.NoError(t, json.Unmarshal([]byte(out.raw), &out.body), op.id)
	}
	return out
}

// askIf is ask without a body, for the version of If-Match.
func (h *house) askIf(t *testing.T, token, method, path, key, ifMatch string) answer {
	t.Helper()
	r := httptest.NewRequest(method, basePath+path, http.NoBody)
	r.Header.Set("Authorization", "Bearer "+token)
	r.Header.Set("X-Idempotency-Key", key)
	r.Header.Set(ifMatchHeader, ifMatch)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	out := answer{status: w.Code, header: w.Header(), raw: w.Body.String()}
	if strings.HasSuffix(out.header.Get("Content-Type"), "json") {
		require.NoError(t, json.Unmarshal([]byte(out.raw), &out.body))
	}
	return out
}
