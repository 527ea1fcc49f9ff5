package api_test

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/gpuaas/gpuaas/docs/reference"
	"github.com/gpuaas/gpuaas/hub/api"
)

const (
	modulePath = "github.com/gpuaas/gpuaas/"
	faultPath  = modulePath + "pkg/fault"
	codesBegin = "        # Fault codes of the code (go test ./hub/api -update):\n"
	// maxCallers bounds how many calls a code is followed through.
	maxCallers = 8
	codesEnd   = "        # End of the fault codes.\n"
)

// localFiles make faults for the hub's commands and its start only; no caller of the API gets them.
func localFiles() []string {
	return []string{
		"hub/internal/db/copy.go",
		"hub/internal/db/lease.go",
		"hub/internal/db/migrate.go",
		"hub/internal/iam/bootstrap.go",
		"hub/internal/trust/init.go",
		"hub/internal/trust/keyfile.go",
		"hub/internal/trust/names.go",
		"hub/internal/trust/offline.go",
		"hub/internal/trust/passphrase.go",
		"hub/internal/trust/root.go",
		"hub/internal/trust/trust.go",
	}
}

// faultsOf gives the faults of packages and of those that they import, and what each code means.
func faultsOf(t *testing.T, relays []string, roots ...string) ([]madeFault, map[string]string) {
	c := newCollector()
	c.relays = relays
	for _, root := range roots {
		require.NoError(t, c.load(modulePath+root))
	}
	var all []madeFault
	for _, p := range c.packages {
		made, err := c.collect(p)
		require.NoError(t, err)
		all = append(all, made...)
	}
	meanings, err := c.meanings()
	require.NoError(t, err)
	return all, meanings
}

// apiFaults are those that a caller of the REST API can get. The session answers requests for logs; the API reaches it
// through an interface.
func apiFaults(t *testing.T) ([]madeFault, map[string]string) {
	all, meanings := faultsOf(t, nil, "hub/internal/httpapi", "hub/internal/nodelink")
	var local []string
	answers := slices.DeleteFunc(all, func(f madeFault) bool {
		if !slices.Contains(localFiles(), f.file) {
			return false
		}
		local = append(local, f.file)
		return true
	})
	slices.Sort(local)
	require.Equal(t, localFiles(), slices.Compact(local), "a file of the list makes no fault")
	return answers, meanings
}

// TestTheContractHasTheFaultCodesOfTheCode: ProblemCode lists what the packages behind the REST API give as the code
// of a fault.
func TestTheContractHasTheFaultCodesOfTheCode(t *testing.T) {
	codes := map[string]bool{}
	answers, _ := apiFaults(t)
	for _, f := range answers {
		codes[f.code] = true
	}
	inCode := slices.Sorted(maps.Keys(codes))
	if reference.Update() {
		begin, rest, _ := strings.Cut(string(api.OpenAPI), codesBegin)
		_, end, found := strings.Cut(rest, codesEnd)
		require.True(t, found, "openapi.yaml has no list of fault codes")
		var list bytes.Buffer
		for _, code := range inCode {
			fmt.Fprintf(&list, "        - %s\n", code)
		}
		require.NoError(t, os.WriteFile("openapi.yaml", []byte(begin+codesBegin+list.String()+codesEnd+end), 0o644))
		return
	}
	var doc struct {
		Components struct {
			Schemas struct {
				ProblemCode struct {
					Codes []string `yaml:"x-extensible-enum"`
				} `yaml:"ProblemCode"`
			} `yaml:"schemas"`
		} `yaml:"components"`
	}
	require.NoError(t, yaml.Unmarshal(api.OpenAPI, &doc))
	require.Equal(t, inCode, doc.Components.Schemas.ProblemCode.Codes, "go test ./hub/api -update rewrites the list")
}

// TestTheCollectorRefusesWhatItCannotRead: a code that is not seen would be missing from the contract without a word.
func TestTheCollectorRefusesWhatItCannotRead(t *testing.T) {
	for name, c := range map[string]struct {
		source string
		codes  []string
	}{
		"constant":  {`const b fault.Code = "b"; var _ = fault.New(0, b, "", nil)`, []string{"b"}},
		"converted": {`const b = "b"; const c = fault.Code(b); var _ = fault.New(0, c, "", nil)`, []string{"b"}},
		"parameter": {
			`func f(code fault.Code) { fault.New(0, code, "", nil) }; func g() { f(x); f(y) }; const x = "x"; const y = "y"`,
			[]string{"x", "y"},
		},
		"closure": {
			`const x = "x"; func f() { no := func(code fault.Code) { fault.New(0, code, "", nil) }; no(x) }`,
			[]string{"x"},
		},
		"variable": {
			`func f(i int) { code := x; if i > 0 { code = y }; fault.New(0, code, "", nil) }; const x = "x"; const y = "y"`,
			[]string{"x", "y"},
		},
		"table": {
			`const x = "x"; const y = "y"; func f(s S) { fault.New(0, map[S]fault.Code{A: x, B: y}[s], "", nil) }`,
			[]string{"x", "y"},
		},
		"literal":           {`var _ = fault.New(0, "a", "", nil)`, nil},
		"converted literal": {`var _ = fault.New(0, fault.Code("a"), "", nil)`, nil},
		"literal argument":  {`func f(code fault.Code) { fault.New(0, code, "", nil) }; func g() { f("x") }`, nil},
		"literal in table":  {`func f(s S) { fault.New(0, map[S]fault.Code{A: "x"}[s], "", nil) }`, nil},
		"call":              {`func f() { fault.New(0, g(), "", nil) }; func g() fault.Code`, nil},
		"unused parameter":  {`func f(code fault.Code) { fault.New(0, code, "", nil) }`, nil},
		"variadic call":     {`func f(code ...fault.Code) { fault.New(0, code[0], "", nil) }`, nil},
		"function value": {
			`const x = "x"; func f(code fault.Code) { fault.New(0, code, "", nil) }; func g() { f(x); h(f) }; func h(any)`,
			nil,
		},
		"New as a value":   {`var no = fault.New`, nil},
		"literal of Error": {`var _ = fault.Error{Code: x}; const x = "x"`, nil},
		"assigned code":    {`func f(e *fault.Error) { e.Code = x }; const x = "x"`, nil},
	} {
		t.Run(name, func(t *testing.T) {
			made, err := collectFrom(t, c.source)
			if c.codes == nil {
				require.Error(t, err)
				return
			}
			require.NoError(t, err)
			var codes []string
			for _, f := range made {
				codes = append(codes, f.code)
			}
			require.ElementsMatch(t, c.codes, codes)
		})
	}
}

// collectFrom gives the faults that declarations make which import package fault.
func collectFrom(t *testing.T, declarations string) ([]madeFault, error) {
	const head = `package p
import "github.com/gpuaas/gpuaas/pkg/fault"
`
	c := newCollector()
	file, err := parser.ParseFile(c.fset, "p.go", head+declarations, parser.SkipObjectResolution)
	require.NoError(t, err)
	p := &sources{path: modulePath + "p", files: []*ast.File{file}}
	c.packages[p.path] = p
	return c.collect(p)
}

// TestNoCodeIsComparedAsText: a comparison with a constant is found when the code is renamed, one with text is not.
func TestNoCodeIsComparedAsText(t *testing.T) {
	for name, source := range map[string]string{
		"compared":             `func f(err error) bool { return fault.As(err).Code == "x" }`,
		"text first":           `func f(err error) bool { return "x" != fault.As(err).Code }`,
		"converted text":       `func f(err error) bool { return fault.As(err).Code == fault.Code("x") }`,
		"converted code":       `func f(err error) bool { return string(fault.As(err).Code) == "x" }`,
		"variable":             `func f(err error) bool { code := fault.As(err).Code; return code == "x" }`,
		"switch":               `func f(err error) { switch fault.As(err).Code { case x, "y": } }; const x = "x"`,
		"switch of a variable": `func f(err error) { switch code := fault.As(err).Code; code { case "x": } }`,
	} {
		_, err := collectFrom(t, source)
		require.ErrorContains(t, err, comparedAsText, name)
	}
	for name, source := range map[string]string{
		"constant":              `func f(err error) bool { return fault.As(err).Code == x }; const x = "x"`,
		"no code":               `func f(err error) bool { return fault.As(err).Code != "" }`,
		"part of a text":        `func f(err error) string { return string(fault.As(err).Code) + ": " }`,
		"switch over constants": `func f(err error) { switch fault.As(err).Code { case x: } }; const x = "x"`,
	} {
		_, err := collectFrom(t, source)
		require.NoError(t, err, name)
	}
}

// TestTheCollectorKeepsKindAndCodeTogether: a function that makes faults gives each caller's kind to that caller's
// code.
func TestTheCollectorKeepsKindAndCodeTogether(t *testing.T) {
	const source = `package p
import "github.com/gpuaas/gpuaas/pkg/fault"
const (
	codeA fault.Code = "a"
	codeB fault.Code = "b"
	codeC fault.Code = "c"
)
func refuse(kind fault.Kind, code fault.Code, text string) { fault.New(kind, code, text, nil) }
func a() { refuse(fault.Conflict, codeA, "It failed.") }
func b() {
	say := func(code fault.Code) { refuse(fault.NotFound, code, "It is absent.") }
	say(codeB); say(codeC)
}`
	c := newCollector()
	file, err := parser.ParseFile(c.fset, "p.go", source, parser.SkipObjectResolution)
	require.NoError(t, err)
	c.packages[modulePath+"p"] = &sources{path: modulePath + "p", files: []*ast.File{file}}
	made, err := c.collect(c.packages[modulePath+"p"])
	require.NoError(t, err)
	require.ElementsMatch(t, []madeFault{
		{"p.go", "Conflict", "a"}, {"p.go", "NotFound", "b"}, {"p.go", "NotFound", "c"},
	}, made)
	_, err = c.meanings()
	require.ErrorContains(t, err, "has no comment")
}
