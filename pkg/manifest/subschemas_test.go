package manifest_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
)

// withConfig is a manifest with a schema for its config.
func withConfig(t *testing.T, schema string) []byte {
	t.Helper()
	doc, err := os.ReadFile("testdata/jupyter.yaml")
	require.NoError(t, err)
	before, own, found := strings.Cut(string(doc), "  config_schema:\n")
	require.True(t, found)
	_, after, found := strings.Cut(own, "  metering:")
	require.True(t, found)
	return []byte(before + "  config_schema: " + schema + "\n  metering:" + after)
}

// chain has as many definitions, each of which refers to the next one as form says.
func chain(definitions int, form string) string {
	var defs []string
	for n := range definitions {
		defs = append(defs, fmt.Sprintf("d%d: ", n)+strings.ReplaceAll(form, "NEXT", fmt.Sprintf("d%d", n+1)))
	}
	return fmt.Sprintf("{type: object, additionalProperties: false, properties: {x: {$ref: '#/$defs/d0'}}, "+
		"$defs: {%s, d%d: {type: integer}}}", strings.Join(defs, ", "), definitions)
}

// The validator would need 2^40 steps for one value. A publisher's manifest reaches the hub and its nodes.
func TestASchemaWhoseReferencesMultiplyIsRefused(t *testing.T) {
	for _, form := range []string{
		"{allOf: [{$ref: '#/$defs/NEXT'}, {$ref: '#/$defs/NEXT'}]}",
		"{$ref: '#/$defs/NEXT', not: {$ref: '#%2F$defs/NEXT'}}",
		"{$anchor: NEXT-before, $ref: '#/$defs/NEXT', if: {$dynamicRef: '#/$defs/NEXT'}}",
	} {
		_, err := manifest.Parse(withConfig(t, chain(40, form)))
		require.True(t, fault.Is(err, fault.Unprocessable), "%s: %v", form, err)
		require.Equal(t, "/version/config_schema", fault.As(err).Fields[0].Pointer)
		require.Contains(t, fault.As(err).Fields[0].Reason, "2000 subschemas")
	}
	itself := "{type: object, additionalProperties: false, properties: {x: {$ref: '#/$defs/n'}}, $defs: {n: " +
		"{properties: {x: {allOf: [{$ref: '#n'}, {$ref: '#/$defs/n'}]}}, $anchor: n}}}"
	_, err := manifest.Parse(withConfig(t, itself))
	require.True(t, fault.Is(err, fault.Unprocessable), "%v", err)
}

func TestASchemaMayReferToItselfAndManyTimesToADefinition(t *testing.T) {
	list := "{type: object, additionalProperties: false, properties: {head: {$ref: '#/$defs/n'}}, $defs: " +
		"{n: {type: object, properties: {value: {type: integer}, next: {$ref: '#/$defs/n'}}}}}"
	m, err := manifest.Parse(withConfig(t, list))
	require.NoError(t, err)
	_, err = m.CheckConfig([]byte(`{"head": {"value": 1, "next": {"value": 2}}}`))
	require.NoError(t, err)
	_, err = m.CheckConfig([]byte(`{"head": {"value": 1, "next": {"value": "2"}}}`))
	require.Equal(t, "/config/head/next/value", fault.As(err).Fields[0].Pointer)
	_, err = manifest.Parse(withConfig(t, chain(40, "{$ref: '#/$defs/NEXT'}")))
	require.NoError(t, err)
	var many []string
	for n := range 200 {
		many = append(many, fmt.Sprintf("p%d: {$ref: '#/$defs/one'}", n))
	}
	_, err = manifest.Parse(withConfig(t, "{type: object, additionalProperties: false, properties: {"+
		strings.Join(many, ", ")+"}, $defs: {one: {type: object, properties: {a: {type: string}}}}}"))
	require.NoError(t, err)
}
