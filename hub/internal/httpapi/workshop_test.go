package httpapi

import (
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/manifest/manifesttest"
)

// workshop is a house with an app of an external worker, whose instances two service accounts may work for.
type workshop struct {
	*house
	world *commandtest.World

	project, elsewhere string
	// boss is a token of the org's admin, stranger of another org's, worker and other of the service accounts.
	boss, viewer, stranger, worker, other string
}

func newWorkshop(t *testing.T) *workshop {
	t.Helper()
	w := commandtest.New(t)
	w.PublishWorker(manifesttest.External("cluster"))
	s := &workshop{house: newHouseOn(t, w.DB, w.Now, nil), world: w, project: "/projects/" + w.Project.ID}
	_, s.boss = s.person(t, w.Project.OrgID, "boss@acme.example", `"org_admin"`)
	viewer, token := s.person(t, w.Project.OrgID, "viewer@acme.example", `"org_billing"`) // a member may work
	s.must(t, s.boss, "PUT", s.project+"/roles/"+viewer, "", `{"roles":["viewer"]}`, 200)
	s.viewer = token
	_, _, s.stranger = s.tenant(t, "other")
	s.elsewhere = "/projects/" + s.must(t, s.boss, "POST", "/projects", "elsewhere",
		`{"slug":"elsewhere","display_name":"E"}`, 201).text("id")
	account := func(slug string) string {
		made := s.must(t, s.boss, "POST", s.project+"/service-accounts", slug,
			`{"name":"`+slug+`","slug":"`+slug+`","role":"app_operator"}`, 201)
		return s.must(t, "", "POST", "/auth/service-account/token", "", mintBody(made), 200).text("access_token")
	}
	s.worker, s.other = account("worker"), account("other")
	return s
}

// launch asks for an instance on allocations of its own, and returns its path.
func (s *workshop) launch(t *testing.T, members int) string {
	t.Helper()
	s.world.EnrollNode()
	ids := make([]string, members)
	for n := range ids {
		ids[n] = `"` + s.world.Allocation().ID + `"`
	}
	return s.project + "/app-instances/" + s.must(t, s.boss, "POST", s.project+"/app-instances", db.NewID(),
		`{"app_slug":"cluster","version":"1.0.0","display_name":"c","placement_intent":{"allocation_ids":[`+
			strings.Join(ids, ",")+`]}}`, 201).text("id")
}

// task is the path of the first task of a state.
func (s *workshop) task(t *testing.T, instance, state string) string {
	t.Helper()
	list := items(s.must(t, s.worker, "GET", instance+"/tasks?state="+state, "", "", 200))
	require.NotEmpty(t, list)
	id, _ := list[0]["id"].(string)
	return instance + "/tasks/" + id
}

func (s *workshop) claim(t *testing.T, token, task string) {
	t.Helper()
	s.must(t, token, "POST", task+"/claim", "", `{"worker":"a","lease_seconds":600}`, 200)
}

// finish claims the pending task and takes it to its end.
func (s *workshop) finish(t *testing.T, instance string, phases ...string) (task string) {
	t.Helper()
	task = s.task(t, instance, "pending")
	s.claim(t, s.worker, task)
	for _, phase := range phases {
		s.must(t, s.worker, "POST", task+"/progress", "", `{"attempt":1,"phase":"`+phase+`"}`, 200)
	}
	s.must(t, s.worker, "POST", task+"/complete", "", `{"attempt":1}`, 200)
	return task
}

// member is the path of a member by its number, with the id of its allocation.
func (s *workshop) member(t *testing.T, instance string, n int) (path, allocation string) {
	t.Helper()
	list, _ := s.must(t, s.boss, "GET", instance, "", "", 200).body["members"].([]any)
	require.Greater(t, len(list), n)
	m, _ := list[n].(map[string]any)
	id, _ := m["id"].(string)
	allocation, _ = m["allocation_id"].(string)
	return instance + "/members/" + id, allocation
}

// refusal is a request that is refused, with the answer that the contract promises.
type refusal struct {
	why string
	// token is the worker's where it is empty; a header replaces what every request has.
	token, path, body string
	header            http.Header
	status            int
	code              string
	// fields are the places that the answer names.
	fields []string
}

// refused sends requests that are refused, and requires that each leaves every row as it was, but for the audit trail.
func (s *workshop) refused(t *testing.T, list ...refusal) {
	t.Helper()
	before := s.rows(t)
	for _, r := range list {
		got := s.try(t, r)
		name := r.why + ": " + r.path + " " + r.body[:min(len(r.body), 80)] + ": " + got.raw
		require.Equal(t, r.status, got.status, name)
		require.Equal(t, r.code, got.text("code"), name)
		require.Equal(t, "flow", got.text("correlation_id"), name)
		var fields []string
		named, _ := got.body["errors"].([]any)
		for _, field := range named {
			f, _ := field.(map[string]any)
			pointer, _ := f["pointer"].(string)
			require.NotEmpty(t, f["reason"], name)
			fields = append(fields, pointer)
		}
		require.Equal(t, r.fields, slices.Compact(fields), name)
		require.Equal(t, before, s.rows(t), name)
	}
}

// rows are the contents of all tables but those that record the refusal itself.
func (s *workshop) rows(t *testing.T) map[string]content {
	t.Helper()
	all := fingerprint(t, s.d)
	delete(all, "audit_rows")
	return all
}

func (s *workshop) try(t *testing.T, r refusal) answer {
	t.Helper()
	method := "POST"
	if path, _, _ := strings.Cut(r.path, "?"); strings.HasSuffix(path, "/tasks") {
		method = "GET"
	}
	var body io.Reader = http.NoBody
	if r.body != "" {
		body = strings.NewReader(r.body)
	}
	in := httptest.NewRequest(method, basePath+r.path, body)
	if r.token == "" {
		r.token = s.worker
	}
	in.Header.Set("Authorization", "Bearer "+r.token)
	in.Header.Set(requestIDHeader, "flow")
	in.Header.Set(idempotencyKeyHeader, db.NewID())
	if r.body != "" {
		in.Header.Set("Content-Type", mediaJSON)
	}
	maps.Copy(in.Header, r.header)
	w := httptest.NewRecorder()
	s.ServeHTTP(w, in)
	out := answer{status: w.Code, header: w.Header(), raw: w.Body.String()}
	require.NoError(t, json.Unmarshal([]byte(out.raw), &out.body), out.raw)
	return out
}
