package httpapi

import (
	"fmt"
	"net/http"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	hubapi "github.com/gpuaas/gpuaas/hub/api"
)

// Whatever a body holds, checking it takes some memory for each of its bytes, and an answer names some of its faults.
func TestABodyWithManyFaultsTakesLittleMemory(t *testing.T) {
	operations, err := loadContract(hubapi.OpenAPI)
	require.NoError(t, err)
	var create *operation
	for _, o := range operations {
		if o.id == "createAppInstance" {
			create = o
		}
	}
	require.NotNil(t, create)
	var keys strings.Builder
	for n := range 20_000 {
		fmt.Fprintf(&keys, `"k%d": 1, `, n)
	}
	for name, body := range map[string]string{
		"items": `{"placement_intent": {"allocation_ids": [` + strings.Repeat("1,", 100_000) + `1]}}`,
		"keys":  `{` + keys.String() + `"last": 1}`,
	} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "/", nil)
		require.NoError(t, err)
		r.Header.Set("Content-Type", mediaJSON)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		fields, err := checkBody(r, create, []byte(body))
		runtime.ReadMemStats(&after)
		require.NoError(t, err, name)
		require.Greater(t, len(fields), maxProblemFields, name)
		require.Less(t, (after.TotalAlloc-before.TotalAlloc)/uint64(len(body)), uint64(1000), name)
	}
}
