package httpapi

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v3"
)

const (
	basePath = "/api/v1"
	// defaultMaxBodyBytes bounds a request body; an operation that needs more says so as x-max-body-bytes. Larger ones are
	// 413.
	defaultMaxBodyBytes = 256 << 10
	// maxEmptyBodyBytes is for operations that take no body: an empty object counts as none.
	maxEmptyBodyBytes    = 1 << 10
	maxBodyBytesKey      = "x-max-body-bytes"
	idempotencyKeyHeader = "X-Idempotency-Key"
	requestIDHeader      = "X-Request-ID"
	contractURL          = "contract:///openapi.json"
	mediaJSON            = "application/json"
	mediaForm            = "application/x-www-form-urlencoded"
)

// operation is what the checks of a request need to know of it.
type operation struct {
	id     string
	method string
	// template is the path as in the contract, without the base path.
	template string
	// open operations need no credential.
	open     bool
	needsKey bool
	body     *jsonschema.Schema
	// form is the schema of the body as a form; nil where the operation takes JSON only.
	form *jsonschema.Schema
	// bodyOptional: it may be left out as a whole.
	bodyOptional bool
	maxBodyBytes int64
	params       []parameter
	// resource is the kind that it reads or changes; empty for none. versioned: its answer has the version.
	resource  string
	versioned bool
}

func (o *operation) route() string { return o.method + " " + o.template }

// mutates reports whether a success changes something.
func (o *operation) mutates() bool { return o.method != http.MethodGet && o.method != http.MethodHead }

// takes reports whether the operation has a parameter.
func (o *operation) takes(name string) bool {
	return slices.ContainsFunc(o.params, func(p parameter) bool { return p.name == name })
}

type parameter struct {
	name string
	// in is path, query or header.
	in       string
	required bool
	// kind is the JSON type: string, integer, boolean, or array, which is one of strings, each given by itself.
	kind   string
	schema *jsonschema.Schema
}

// loadContract returns the operations of openapi.yaml by method and gin's path, with every schema compiled. Its errors
// are defects of that file.
func loadContract(text []byte) (map[string]*operation, error) {
	doc, err := openapi3.NewLoader().LoadFromData(text)
	if err != nil {
		return nil, fmt.Errorf("read the contract: %w", err)
	}
	compiler, err := schemaCompiler(text)
	if err != nil {
		return nil, err
	}
	operations := map[string]*operation{}
	for path, item := range doc.Paths.Map() {
		for method, op := range item.Operations() {
			o, err := newOperation(compiler, method, path, op)
			if err != nil {
				return nil, fmt.Errorf("contract, %s %s: %w", method, path, err)
			}
			operations[method+" "+basePath+ginPath(path)] = o
		}
	}
	return operations, nil
}

// schemaCompiler compiles straight from the document by JSON pointer. kin-openapi's own validation is not used: for an
// OpenAPI 3.1 document it compiles the schema anew for each request, and its texts quote the submitted values.
func schemaCompiler(text []byte) (*jsonschema.Compiler, error) {
	var tree any
	if err := yaml.Unmarshal(text, &tree); err != nil {
		return nil, fmt.Errorf("read the contract: %w", err)
	}
	asJSON, err := json.Marshal(tree)
	if err != nil {
		return nil, fmt.Errorf("read the contract: %w", err)
	}
	doc, err := jsonschema.UnmarshalJSON(strings.NewReader(string(asJSON)))
	if err != nil {
		return nil, fmt.Errorf("read the contract: %w", err)
	}
	compiler := jsonschema.NewCompiler()
	compiler.DefaultDraft(jsonschema.Draft2020)
	compiler.AssertFormat()
	compiler.RegisterFormat(&jsonschema.Format{Name: "int32", Validate: wholeNumber(32)})
	compiler.RegisterFormat(&jsonschema.Format{Name: "int64", Validate: wholeNumber(64)})
	if err := compiler.AddResource(contractURL, doc); err != nil {
		return nil, fmt.Errorf("read the contract: %w", err)
	}
	return compiler, nil
}

// wholeNumber refuses what the Go type behind the field could not hold, also 1.0 and 1e3, which JSON Schema counts as
// integers.
func wholeNumber(bits int) func(any) error {
	return func(v any) error {
		if n, ok := v.(json.Number); ok {
			_, err := strconv.ParseInt(n.String(), 10, bits)
			return err
		}
		return nil
	}
}

func newOperation(compiler *jsonschema.Compiler, method, path string, op *openapi3.Operation) (*operation, error) {
	o := &operation{
		id: op.OperationID, method: method, template: path, maxBodyBytes: defaultMaxBodyBytes,
		open: op.Security != nil && len(*op.Security) == 0,
	}
	var err error
	if o.resource, o.versioned, err = resourceOf(method, path, op); err != nil {
		return nil, err
	}
	here := "/paths/" + escapePointer(path) + "/" + strings.ToLower(method)
	for i, ref := range op.Parameters {
		p := ref.Value
		if p.Name == requestIDHeader {
			continue // a bad one is replaced, not refused
		}
		at := here + "/parameters/" + strconv.Itoa(i) + "/schema"
		if ref.Ref != "" {
			at = strings.TrimPrefix(ref.Ref, "#") + "/schema"
		}
		schema, err := compiler.Compile(contractURL + "#" + at)
		if err != nil {
			return nil, err
		}
		kind := "string"
		if types := p.Schema.Value.Type.Slice(); len(types) == 1 {
			kind = types[0]
		}
		o.params = append(o.params, parameter{name: p.Name, in: p.In, required: p.Required, kind: kind, schema: schema})
		o.needsKey = o.needsKey || p.Name == idempotencyKeyHeader
	}
	slices.SortFunc(o.params, func(a, b parameter) int { return strings.Compare(a.in+"/"+a.name, b.in+"/"+b.name) })
	if op.RequestBody == nil {
		o.maxBodyBytes = maxEmptyBodyBytes
	} else {
		o.bodyOptional = !op.RequestBody.Value.Required
		content := contractURL + "#" + here + "/requestBody/content/"
		if o.body, err = compiler.Compile(content + escapePointer(mediaJSON) + "/schema"); err != nil {
			return nil, err
		}
		if op.RequestBody.Value.Content[mediaForm] != nil {
			if o.form, err = compiler.Compile(content + escapePointer(mediaForm) + "/schema"); err != nil {
				return nil, err
			}
		}
	}
	if limit, ok := op.Extensions[maxBodyBytesKey]; ok {
		n, ok := limit.(float64)
		if !ok || n <= 0 {
			return nil, fmt.Errorf("%s is not a positive number", maxBodyBytesKey)
		}
		o.maxBodyBytes = int64(n)
	}
	return o, nil
}

// ginPath turns /orgs/{org_id} into /orgs/:org_id.
func ginPath(path string) string {
	return strings.NewReplacer("{", ":", "}", "").Replace(path)
}
