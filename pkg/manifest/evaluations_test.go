package manifest_test

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
)

func closed(properties string) string {
	return "{type: object, additionalProperties: false, properties: {" + properties + "}}"
}

func repeat(n int, form string) string {
	all := make([]string, n)
	for i := range all {
		all[i] = fmt.Sprintf(form, i)
	}
	return strings.Join(all, ", ")
}

// Each value meets each of many keywords, and the validator notes all that is wrong: gigabytes, and minutes.
func TestAValueThatTakesTooLongToValidateIsRefused(t *testing.T) {
	numbers := `{"x": [` + repeat(4000, "%d") + `]}`
	names := `{"x": {` + repeat(2000, `"k%d": 1`) + `}}`
	text := `{"x": "` + strings.Repeat("x", 60000) + `"}`
	name := `{"x": {"` + strings.Repeat("x", 60000) + `": 1}}`
	large, unlike := repeat(600, "{minimum: 1%d0000}"), repeat(600, "{const: -%d}")
	for schema, config := range map[string]string{
		"x: {items: {allOf: [" + large + "]}}":                                       numbers,
		"x: {items: {anyOf: [" + unlike + "]}}":                                      numbers,
		"x: {items: {enum: [" + repeat(600, "-%d") + "]}}":                           numbers,
		"x: {prefixItems: [{}], contains: {not: {if: {oneOf: [" + unlike + "]}}}}":   numbers,
		"x: {allOf: [" + repeat(600, "{uniqueItems: true, minItems: %d}") + "]}":     numbers,
		"x: {patternProperties: {" + repeat(600, "'%d$': {minimum: 9000}") + "}}":    names,
		"x: {additionalProperties: {allOf: [" + large + "]}}":                        names,
		"x: {allOf: [" + repeat(600, "{pattern: '^x*y%d$'}") + "]}":                  text,
		"x: {propertyNames: {allOf: [" + repeat(600, "{pattern: '^x*y%d$'}") + "]}}": name,
		"x: {patternProperties: {" + repeat(600, "'^x*y%d$': {}") + "}}":             name,
	} {
		m, err := manifest.Parse(withConfig(t, closed(schema)))
		require.NoError(t, err, schema)
		_, err = m.CheckConfig([]byte(config))
		require.True(t, fault.Is(err, fault.Unprocessable), "%.80s: %v", schema, err)
		require.Equal(t, "/config", fault.As(err).Fields[0].Pointer, "%.80s", schema)
		require.Contains(t, fault.As(err).Fields[0].Reason, "takes too long", "%.80s", schema)
	}
}

// The default of a property is checked by the property's schema alone, whose references are its own.
func TestADefaultWhoseSchemaMultipliesIsRefused(t *testing.T) {
	own := strings.Replace(chain(16, "{allOf: [{$ref: '#/$defs/NEXT'}, {$ref: '#/$defs/NEXT'}]}"), "{type: object,",
		"{type: object, default: {x: 1},", 1)
	doc, err := os.ReadFile("testdata/jupyter.yaml")
	require.NoError(t, err)
	const last = "      verbose: {type: boolean}\n"
	require.Contains(t, string(doc), last)
	_, err = manifest.Parse([]byte(strings.Replace(string(doc), last, last+"      p: "+own+"\n", 1)))
	require.True(t, fault.Is(err, fault.Unprocessable), "%v", err)
	require.True(t, slices.ContainsFunc(fault.As(err).Fields, func(f fault.Field) bool {
		return f.Pointer == "/version/parameters/properties/p/default"
	}), "%v", fault.As(err).Fields)
}

func TestALargeValueOfAPlainSchemaIsValidated(t *testing.T) {
	m, err := manifest.Parse(withConfig(t, closed("x: {type: array, items: {type: integer, minimum: 0}, "+
		"uniqueItems: true}, y: {type: object, additionalProperties: {type: string, maxLength: 9, pattern: '^[a-z]+$'}}, "+
		repeat(200, "k%d: {type: string, enum: [a, b]}"))))
	require.NoError(t, err)
	_, err = m.CheckConfig([]byte(`{"x": [` + repeat(6000, "%d") + `], "y": {` + repeat(1500, `"k%d": "ab"`) + `}, ` +
		repeat(200, `"k%d": "b"`) + `}`))
	require.NoError(t, err)
}

// A reason names some of many allowed values.
func TestAReasonIsShort(t *testing.T) {
	m, err := manifest.Parse(withConfig(t, closed("x: {enum: ["+repeat(900, "value-%d")+"]}")))
	require.NoError(t, err)
	_, err = m.CheckConfig([]byte(`{"x": "other"}`))
	require.Less(t, len(fault.As(err).Fields[0].Reason), 500)
	require.Contains(t, fault.As(err).Fields[0].Reason, "value-0, value-1")
}
