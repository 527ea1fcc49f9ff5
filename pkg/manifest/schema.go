package manifest

import (
	_ "embed" // the schema is part of the contract and of this package
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

//go:embed manifest.v1.schema.json
var schemaDocument []byte

// Schema returns the JSON Schema (draft 2020-12) of a manifest, for editors and for the API.
func Schema() []byte { return slices.Clone(schemaDocument) }

//nolint:gochecknoglobals // a constant that has to be compiled; the embedded document cannot fail to compile (tested)
var manifestSchema = sync.OnceValue(func() *jsonschema.Schema {
	doc, err := jsonschema.UnmarshalJSON(strings.NewReader(string(schemaDocument)))
	if err != nil {
		panic(err)
	}
	s, err := compileSchema(doc)
	if err != nil {
		panic(err)
	}
	return s
})

type noLoader struct{}

// Load refuses: a schema never fetches anything.
func (noLoader) Load(string) (any, error) {
	return nil, errors.New("a schema must not refer to another document")
}

func compileSchema(doc any) (*jsonschema.Schema, error) {
	const url = "mem:///schema.json"
	c := jsonschema.NewCompiler()
	c.DefaultDraft(jsonschema.Draft2020)
	c.UseLoader(noLoader{})
	if err := c.AddResource(url, doc); err != nil {
		return nil, err
	}
	return c.Compile(url)
}

// checkSchema lists what breaks the schema, sorted by pointer. Reasons never hold the value.
func checkSchema(s *jsonschema.Schema, value any) []fault.Field {
	err := s.Validate(value)
	if err == nil {
		return nil
	}
	var v *jsonschema.ValidationError
	if !errors.As(err, &v) {
		return []fault.Field{{Reason: "is not a JSON value"}}
	}
	var fields []fault.Field
	collect(v, &fields)
	slices.SortStableFunc(fields, func(a, b fault.Field) int { return strings.Compare(a.Pointer, b.Pointer) })
	return slices.Compact(fields)
}

// maxCollected bounds the fields that are sorted; a fault names fewer.
const maxCollected = 1000

func collect(v *jsonschema.ValidationError, out *[]fault.Field) {
	if len(*out) >= maxCollected {
		return
	}
	pointer := joinPointer(v.InstanceLocation)
	switch k := v.ErrorKind.(type) {
	case *kind.AdditionalProperties:
		for _, p := range k.Properties {
			*out = append(*out, fault.Field{Pointer: pointer + "/" + escapePointer(p), Reason: "is not a known key"})
		}
		return
	case *kind.Required:
		for _, p := range k.Missing {
			*out = append(*out, fault.Field{Pointer: pointer + "/" + escapePointer(p), Reason: "is required"})
		}
		return
	case *kind.OneOf, *kind.AnyOf:
		*out = append(*out, fault.Field{Pointer: pointer, Reason: "has none of the allowed forms"})
		return
	}
	if len(v.Causes) == 0 {
		*out = append(*out, fault.Field{Pointer: pointer, Reason: reasonOf(v.ErrorKind)})
		return
	}
	for _, c := range v.Causes {
		collect(c, out)
	}
}

func joinPointer(steps []string) string {
	var b strings.Builder
	for _, s := range steps {
		b.WriteString("/" + escapePointer(s))
	}
	return b.String()
}

func reasonOf(k jsonschema.ErrorKind) string {
	switch k := k.(type) {
	case *kind.Type:
		return "must be of type " + strings.Join(k.Want, " or ")
	case *kind.Enum:
		return "must be one of " + joinAny(k.Want)
	case *kind.Const:
		return "must be " + joinAny([]any{k.Want})
	case *kind.Pattern:
		return "must match " + k.Want
	case *kind.MinLength:
		return "must have at least " + strconv.Itoa(k.Want) + " characters"
	case *kind.MaxLength:
		return "must have at most " + strconv.Itoa(k.Want) + " characters"
	case *kind.MinItems:
		return "must have at least " + strconv.Itoa(k.Want) + " items"
	case *kind.MaxItems:
		return "must have at most " + strconv.Itoa(k.Want) + " items"
	case *kind.UniqueItems:
		return "must not hold an item twice"
	case *kind.Minimum:
		return "must be at least " + k.Want.RatString()
	case *kind.Maximum:
		return "must be at most " + k.Want.RatString()
	}
	if path := k.KeywordPath(); len(path) > 0 {
		return "breaks the schema's " + strings.Join(path, "/")
	}
	return "is not allowed"
}

// maxNamed bounds the values that a reason names.
const maxNamed = 32

func joinAny(values []any) string {
	texts := make([]string, 0, min(len(values), maxNamed+1))
	for _, v := range values {
		if len(texts) == maxNamed {
			texts = append(texts, "…")
			break
		}
		texts = append(texts, fmt.Sprint(v))
	}
	return strings.Join(texts, ", ")
}
