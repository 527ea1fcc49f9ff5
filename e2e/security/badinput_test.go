package security_test

import (
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
)

// operation is one of the contract's.
type operation struct {
	id, method, path string
	takesBody        bool
	// open operations take no credential.
	open bool
}

// operations reads the contract, which the hub also serves.
func operations(t *testing.T) []operation {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(harness.Source(t), "hub", "api", "openapi.yaml"))
	require.NoError(t, err)
	var contract struct {
		Paths map[string]map[string]struct {
			OperationID string         `yaml:"operationId"`
			RequestBody map[string]any `yaml:"requestBody"`
			Security    *[]any         `yaml:"security"`
		} `yaml:"paths"`
	}
	// A path's common parameters are a list, which is no operation.
	var tree map[string]any
	require.NoError(t, yaml.Unmarshal(text, &tree))
	paths, ok := tree["paths"].(map[string]any)
	require.True(t, ok)
	for _, item := range paths {
		delete(item.(map[string]any), "parameters") //nolint:forcetypeassert // a panic fails the test as well
	}
	clean, err := yaml.Marshal(map[string]any{"paths": paths})
	require.NoError(t, err)
	require.NoError(t, yaml.Unmarshal(clean, &contract))
	var all []operation
	for path, methods := range contract.Paths {
		for method, op := range methods {
			all = append(all, operation{
				id: op.OperationID, method: strings.ToUpper(method), path: path,
				takesBody: op.RequestBody != nil, open: op.Security != nil,
			})
		}
	}
	slices.SortFunc(all, func(a, b operation) int { return strings.Compare(a.path+a.method, b.path+b.method) })
	require.Greater(t, len(all), 40)
	return all
}

var pathParameter = regexp.MustCompile(`\{[a-z_]+\}`)

// filled replaces the path's parameters by plausible values.
func (o operation) filled() string {
	return pathParameter.ReplaceAllStringFunc(o.path, func(p string) string {
		if strings.HasSuffix(p, "_id}") {
			return "0192f0c0-0000-7000-8000-00000000000a"
		}
		return "a"
	})
}

// Law 12 from outside, one bad request for each operation of the contract. Every way to be wrong is in
// hub/internal/httpapi.
func TestLaw12BadInputIsAClearErrorFromOutside(t *testing.T) {
	w := harness.New(t)
	w.StartHub(w.HubConfig())
	w.NewTenant("acme")
	plain := w.PlainClient()
	const secret = "hush-hush-0123456789"
	before, audited := w.Rows(), auditedCount(w)
	refused, anonymous := 0, 0
	for _, op := range operations(t) {
		path, body, pointer := op.filled()+"?surprise="+secret, "", "query/surprise"
		if op.takesBody {
			path, body, pointer = op.filled(), `{"surprise":"`+secret+`"}`, "/surprise"
		}
		id := scenario.NewID()
		a := w.Ask(plain, op.method, path, body, map[string]string{"X-Request-ID": id, "X-Idempotency-Key": scenario.NewID()})
		require.Equal(t, http.StatusBadRequest, a.Status, "%s: %s", op.id, a.Body)
		require.NotContains(t, string(a.Body), secret, op.id)
		require.Equal(t, id, a.Problem.CorrelationID, op.id)
		require.Equal(t, id, a.Header.Get("X-Request-ID"), op.id)
		require.NotEmpty(t, a.Problem.Code, op.id)
		require.NotEmpty(t, a.Problem.Detail, op.id)
		found := false
		for _, e := range a.Problem.Errors {
			require.NotEmpty(t, e.Reason, op.id)
			found = found || e.Pointer == pointer
		}
		require.True(t, found, "%s points to no %s: %s", op.id, pointer, a.Body)
		switch {
		case op.method == http.MethodGet:
		case op.open:
			anonymous = 1 // one row an address and minute
		default:
			refused++
		}
	}
	require.Equal(t, before, w.Rows())
	require.Equal(t, audited+refused+anonymous, auditedCount(w), "each refused change is in the audit trail")
}

// auditedCount counts the audit trail's rows.
func auditedCount(w *harness.Testbed) (rows int) {
	w.T.Helper()
	db := w.Database()
	require.NoError(w.T, db.QueryRow(w.Ctx, `SELECT count(*) FROM audit_rows`).Scan(&rows))
	require.NoError(w.T, db.Close(w.Ctx))
	return rows
}
