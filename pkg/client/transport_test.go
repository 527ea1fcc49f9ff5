package client

import (
	"net/http"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/stretchr/testify/require"
)

// The generated code writes 0 for a number that was not set, and false; the text "0" is what a caller asked for.
func TestOnlyNumbersAndSwitchesAreAbsentAtZero(t *testing.T) {
	doc, err := openapi3.NewLoader().LoadFromFile("../../hub/api/openapi.yaml")
	require.NoError(t, err)
	numbers, texts := map[string]string{}, map[string]bool{}
	for _, item := range doc.Paths.Map() {
		for _, operation := range item.Operations() {
			for _, p := range operation.Parameters {
				if p.Value.In != openapi3.ParameterInQuery {
					continue
				}
				switch of := p.Value.Schema.Value.Type; {
				case of.Is(openapi3.TypeInteger):
					numbers[p.Value.Name] = "0"
				case of.Is(openapi3.TypeBoolean):
					numbers[p.Value.Name] = "false"
				default:
					texts[p.Value.Name] = true
				}
			}
		}
	}
	left := func(name, value string) string {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://hub/x?"+name+"="+value, nil)
		require.NoError(t, err)
		dropAbsent(r)
		return r.URL.Query().Get(name)
	}
	require.NotEmpty(t, numbers)
	for name, zero := range numbers {
		require.Empty(t, left(name, zero), name)
		require.Equal(t, "1", left(name, "1"), name)
		delete(texts, name)
	}
	require.NotEmpty(t, texts)
	for name := range texts {
		require.Empty(t, left(name, ""), name)
		require.Equal(t, "0", left(name, "0"), name)
		require.Equal(t, "false", left(name, "false"), name)
	}
}
