package httpapi

import (
	"bytes"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/gin-gonic/gin"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/require"

	hubapi "github.com/gpuaas/gpuaas/hub/api"
)

// conforms lets a test's requests through and holds every answer against the contract: declared status, media type,
// schema.
func conforms(t *testing.T, next http.Handler) http.Handler {
	t.Helper()
	doc, err := openapi3.NewLoader().LoadFromData(hubapi.OpenAPI)
	require.NoError(t, err)
	compiler, err := schemaCompiler(hubapi.OpenAPI)
	require.NoError(t, err)
	codes, ok := doc.Components.Schemas["ProblemCode"].Value.Extensions["x-extensible-enum"].([]any)
	require.True(t, ok)
	var mu sync.Mutex
	schemaAt := func(pointer string) *jsonschema.Schema {
		mu.Lock()
		defer mu.Unlock()
		s, err := compiler.Compile(contractURL + "#" + pointer) // compiled once, then remembered
		if err != nil {
			t.Errorf("contract at %s: %v", pointer, err)
			return compiler.MustCompile(contractURL + "#/components/schemas/Problem")
		}
		return s
	}
	routes := gin.New()
	for path, item := range doc.Paths.Map() {
		for method := range item.Operations() {
			routes.Handle(method, basePath+ginPath(path), func(c *gin.Context) { c.Header("Path", path) })
		}
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rec := httptest.NewRecorder()
		next.ServeHTTP(rec, r)
		match := httptest.NewRecorder()
		routes.ServeHTTP(match, r)
		if found := match.Header().Get("Path"); found != "" {
			checkAnswer(t, doc.Paths.Value(found).Operations()[r.Method], "/paths/"+escapePointer(found)+"/"+
				strings.ToLower(r.Method), rec, schemaAt, codes)
		}
		maps.Copy(w.Header(), rec.Header())
		w.WriteHeader(rec.Code)
		_, _ = w.Write(rec.Body.Bytes())
	})
}

func checkAnswer(t *testing.T, op *openapi3.Operation, at string, rec *httptest.ResponseRecorder,
	schemaAt func(string) *jsonschema.Schema, codes []any,
) {
	t.Helper()
	pointer := at + "/responses/" + strconv.Itoa(rec.Code)
	declared := op.Responses.Status(rec.Code)
	if rec.Code >= http.StatusBadRequest {
		if declared = op.Responses.Default(); declared != nil {
			pointer = strings.TrimPrefix(declared.Ref, "#")
		}
	}
	if declared == nil {
		t.Errorf("%s: status %d is not in the contract", op.OperationID, rec.Code)
		return
	}
	media, _, _ := strings.Cut(rec.Header().Get("Content-Type"), ";")
	if len(declared.Value.Content) == 0 && rec.Body.Len() == 0 {
		return
	}
	if declared.Value.Content[media] == nil {
		t.Errorf("%s: %d answers %q, which is not in the contract", op.OperationID, rec.Code, media)
		return
	}
	if !strings.HasSuffix(media, "json") {
		return
	}
	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(rec.Body.Bytes()))
	if err == nil {
		err = schemaAt(pointer + "/content/" + escapePointer(media) + "/schema").Validate(value)
	}
	if code, known := knownCode(value, codes); err == nil && !known {
		t.Errorf("%s: the code %q is not in the contract", op.OperationID, code)
	}
	if err != nil {
		t.Errorf("%s: the answer %s is not what the contract says: %v", op.OperationID, rec.Body.String(), err)
	}
}

// knownCode gives the code of a problem, and whether the contract lists it; what is no problem has no code.
func knownCode(answer any, codes []any) (code any, known bool) {
	problem, _ := answer.(map[string]any)
	if urn, _ := problem["type"].(string); !strings.HasPrefix(urn, problemType) {
		return nil, true
	}
	return problem["code"], slices.Contains(codes, problem["code"])
}
