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

// faultsOf gives the faults of packages and of those that they import.
func faultsOf(t *testing.T, relays []string, roots ...string) (*collector, []madeFault) {
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
	return c, all
}

// apiFaults are those that a caller of the REST API can get. The session answers requests for logs; the API reaches it
// through an interface.
func apiFaults(t *testing.T) []madeFault {
	_, all := faultsOf(t, nil, "hub/internal/httpapi", "hub/internal/nodelink")
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
	return answers
}

// TestTheContractHasTheFaultCodesOfTheCode: ProblemCode lists what the packages behind the REST API give as the code
// of a fault.
func TestTheContractHasTheFaultCodesOfTheCode(t *testing.T) {
	codes := map[string]bool{}
	for _, f := range apiFaults(t) {
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
	const head = `package p
import "github.com/gpuaas/gpuaas/pkg/fault"
`
	for name, c := range map[string]struct {
		source string
		codes  []string
	}{
		"literal":   {`var _ = fault.New(0, "a", "", nil)`, []string{"a"}},
		"constant":  {`const b = "b"; var _ = fault.New(0, string(b), "", nil)`, []string{"b"}},
		"parameter": {`func f(code string) { fault.New(0, code, "", nil) }; func g() { f("x"); f("y") }`, []string{"x", "y"}},
		"closure":   {`func f() { no := func(code string) { fault.New(0, code, "", nil) }; no("x") }`, []string{"x"}},
		"variable": {
			`func f(i int) { code := "x"; if i > 0 { code = "y" }; fault.New(0, code, "", nil) }`,
			[]string{"x", "y"},
		},
		"status": {`type S string; const A S = "a"; const B S = "b"; ` +
			`func f(s S) { fault.New(0, "is_"+string(s), "", nil) }`, []string{"is_a", "is_b"}},
		"call":             {`func f() { fault.New(0, g(), "", nil) }; func g() string`, nil},
		"unused parameter": {`func f(code string) { fault.New(0, code, "", nil) }`, nil},
		"variadic call":    {`func f(code ...string) { fault.New(0, code[0], "", nil) }`, nil},
		"function value": {
			`func f(code string) { fault.New(0, code, "", nil) }; func g() { f("x"); h(f) }; func h(any)`,
			nil,
		},
		"New as a value":   {`var no = fault.New`, nil},
		"literal of Error": {`var _ = fault.Error{Code: "x"}`, nil},
		"assigned code":    {`func f(e *fault.Error) { e.Code = "x" }`, nil},
	} {
		t.Run(name, func(t *testing.T) {
			col := newCollector()
			file, err := parser.ParseFile(col.fset, "p.go", head+c.source, parser.SkipObjectResolution)
			require.NoError(t, err)
			p := &sources{path: modulePath + "p", files: []*ast.File{file}}
			col.packages[p.path] = p
			made, err := col.collect(p)
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

// TestTheCollectorKeepsKindCodeAndTextTogether: a function that makes faults gives each caller's text to that caller's
// code.
func TestTheCollectorKeepsKindCodeAndTextTogether(t *testing.T) {
	const source = `package p
import ("fmt"; "github.com/gpuaas/gpuaas/pkg/fault")
func refuse(kind fault.Kind, code, text string, n int) {
	fault.New(kind, code, fmt.Sprintf("It %s, %d times.", text, n<<1), nil)
}
func a(n int) { refuse(fault.Conflict, "a", "failed", n) }
func b(path string) {
	say := func(code string) { refuse(fault.NotFound, code, "is not at "+path, 2) }
	say("b"); say("c")
}`
	c := newCollector()
	file, err := parser.ParseFile(c.fset, "p.go", source, parser.SkipObjectResolution)
	require.NoError(t, err)
	c.packages[modulePath+"p"] = &sources{path: modulePath + "p", files: []*ast.File{file}}
	made, err := c.collect(c.packages[modulePath+"p"])
	require.NoError(t, err)
	require.ElementsMatch(t, []madeFault{
		{"p.go", "Conflict", "a", "It failed, … times."},
		{"p.go", "NotFound", "b", "It is not at …, … times."},
		{"p.go", "NotFound", "c", "It is not at …, … times."},
	}, made)
}
