package manifest

import (
	"maps"
	"slices"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	// maxEvaluations bounds the work of validating one value: how often a keyword meets a value. The validator has no
	// bound of its own, remembers nothing, and notes each thing that is wrong before it answers. What is allowed takes it
	// some tenths of a second.
	maxEvaluations = 100_000
	// bytesEach is how much of a string counts as one evaluation: patterns and lengths read it all.
	bytesEach = 64
)

// checkEmbedded lists what of a value breaks a schema that a publisher wrote, sorted by pointer. A value that would
// take too long is refused and not validated.
func checkEmbedded(schema map[string]any, value any) ([]fault.Field, error) {
	compiled, err := compileSchema(schema)
	if err != nil {
		return nil, err
	}
	e := evaluations{subschemas: newSubschemas(schema), left: maxEvaluations}
	if e.apply(schema, value); e.left < 0 {
		return []fault.Field{{
			Reason: "takes too long to validate against the version's schema",
			Hint:   "give fewer values, or ask the publisher for a simpler schema",
		}}, nil
	}
	return checkSchema(compiled, value), nil
}

// evaluations counts down what a validator does at most.
type evaluations struct {
	subschemas
	left int
}

// apply counts what a schema does with a value. Where that depends on the value's content, it counts all.
func (e *evaluations) apply(schema, value any) {
	e.left--
	if text, is := value.(string); is {
		e.left -= len(text) / bytesEach
	}
	keywords, is := schema.(map[string]any)
	if !is {
		return
	}
	for keyword, with := range keywords {
		if e.left--; e.left < 0 {
			return
		}
		e.keyword(keyword, with, value)
	}
}

// keyword counts what one keyword does (JSON Schema draft 2020-12, Core §10 and §11, Validation §6).
func (e *evaluations) keyword(keyword string, with, value any) {
	switch keyword {
	case "$ref", "$dynamicRef":
		if to, is := with.(string); is {
			e.apply(e.target(to), value)
		}
	case "not", "if", "then", "else":
		e.apply(with, value)
	case "allOf", "anyOf", "oneOf", "dependentSchemas", "dependencies":
		for _, schema := range children(with) {
			e.apply(schema, value)
		}
	case "properties":
		properties, _ := with.(map[string]any)
		object, _ := value.(map[string]any)
		for name, child := range object {
			if schema, has := properties[name]; has {
				e.apply(schema, child)
			}
		}
	case "patternProperties":
		for _, schema := range children(with) {
			e.names(true, value) // each name meets the pattern
			e.each(schema, value)
		}
	case "propertyNames":
		e.names(with, value)
	case "prefixItems", "items", "contains", "unevaluatedItems", "additionalProperties", "unevaluatedProperties":
		if list, is := with.([]any); is {
			for _, schema := range list {
				e.each(schema, value)
			}
			return
		}
		e.each(with, value)
	case "const", "enum", "pattern", "required", "dependentRequired", "uniqueItems":
		e.left -= size(with) + size(value)
	}
}

// each applies a schema to all children of a value.
func (e *evaluations) each(schema, value any) {
	for _, child := range children(value) {
		if e.left < 0 {
			return
		}
		e.apply(schema, child)
	}
}

// names applies a schema to all names of an object.
func (e *evaluations) names(schema, value any) {
	object, _ := value.(map[string]any)
	for name := range object {
		if e.left < 0 {
			return
		}
		e.apply(schema, name)
	}
}

// children are the values of an object or an array.
func children(v any) []any {
	switch v := v.(type) {
	case map[string]any:
		return slices.Collect(maps.Values(v))
	case []any:
		return v
	}
	return nil
}

// size is how many evaluations comparing a value takes.
func size(v any) int {
	n := 1
	if text, is := v.(string); is {
		n += len(text) / bytesEach
	}
	if object, is := v.(map[string]any); is {
		for name := range object {
			n += len(name) / bytesEach
		}
	}
	for _, child := range children(v) {
		n += size(child)
	}
	return n
}
