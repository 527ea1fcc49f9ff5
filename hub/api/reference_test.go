package api_test

import (
	"fmt"
	"go/ast"
	"maps"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/gpuaas/gpuaas/docs/reference"
	"github.com/gpuaas/gpuaas/hub/api"
)

// TestReferenceOfFaults writes the codes that the programs declare and give: those of the API with their status, and
// those that only a program shows at its command line. It fails where a code is no constant with a comment.
func TestReferenceOfFaults(t *testing.T) {
	answers, meanings := apiFaults(t)
	status := statuses(t)
	for i, f := range answers {
		if f.code == "method_not_allowed" {
			answers[i].kind = ""
			continue
		}
		require.Contains(t, status, f.kind, "%s: %s", f.file, f.code)
	}
	reference.Check(t, "errors.md", "faults of the API", faultTable(t, answers, meanings, status))
	known := map[string]bool{}
	for _, f := range answers {
		known[f.code] = true
	}
	for _, program := range []struct {
		name   string
		root   string
		relays []string
	}{
		{name: "gpuaas-hub", root: "hub/cmd/gpuaas-hub"},
		{name: "gpuaas-agent", root: "agent/cmd/gpuaas-agent", relays: []string{
			"agent/internal/local/client.go", "agent/internal/uplink/enroll.go", "agent/internal/uplink/streams.go",
		}},
		{name: "gpuaas", root: "pkg/cli"},
	} {
		all, meanings := faultsOf(t, program.relays, program.root)
		all = slices.DeleteFunc(all, func(f madeFault) bool { return known[f.code] })
		reference.Check(t, "errors.md", "faults of "+program.name, faultTable(t, all, meanings, nil))
	}
}

// faultTable has a row for each code, and for each status of it where they are given.
func faultTable(t *testing.T, all []madeFault, meanings map[string]string, status map[string]int) string {
	keys := map[[2]string]bool{}
	for _, f := range all {
		key := [2]string{f.code}
		if status != nil {
			key[1] = strconv.Itoa(status[f.kind])
		}
		keys[key] = true
	}
	header := []string{"code", "means"}
	if status != nil {
		header = []string{"code", "status", "means"}
	}
	var rows [][]string
	for _, key := range slices.SortedFunc(maps.Keys(keys), func(a, b [2]string) int {
		return strings.Compare(a[0]+a[1], b[0]+b[1])
	}) {
		require.Contains(t, meanings, key[0])
		row := []string{reference.Code(key[0]), reference.Sentence(meanings[key[0]])}
		if status != nil {
			row = slices.Insert(row, 1, key[1])
		}
		rows = append(rows, row)
	}
	return reference.Table(header, rows)
}

// statuses are the HTTP status of each kind of fault, read from httpapi's one translation. A problem without a kind is
// the 405.
func statuses(t *testing.T) map[string]int {
	byName := map[string]int{}
	for code := http.StatusContinue; code < 600; code++ {
		byName["Status"+strings.ReplaceAll(http.StatusText(code), " ", "")] = code
	}
	c := newCollector()
	require.NoError(t, c.load(modulePath+"hub/internal/httpapi"))
	found := map[string]int{"": http.StatusMethodNotAllowed, "Internal": http.StatusInternalServerError}
	c.packages[modulePath+"hub/internal/httpapi"].visit(func(at place, n, _ ast.Node) {
		entry, ok := n.(*ast.KeyValueExpr)
		if !ok || len(at.funcs) == 0 {
			return
		}
		if f, isDecl := at.funcs[0].(*ast.FuncDecl); !isDecl || f.Name.Name != "statusOf" {
			return
		}
		name := entry.Value.(*ast.SelectorExpr).Sel.Name
		require.Contains(t, byName, name)
		found[entry.Key.(*ast.SelectorExpr).Sel.Name] = byName[name]
	})
	return found
}

// TestReferenceHasEachReason: the reasons of an app instance are described by hand.
func TestReferenceHasEachReason(t *testing.T) {
	var rest schemas
	require.NoError(t, yaml.Unmarshal(api.OpenAPI, &rest))
	page, err := os.ReadFile(filepath.Join(reference.Root(t), "docs", "reference", "errors.md"))
	require.NoError(t, err)
	_, section, found := strings.Cut(string(page), "\n## Reasons of an app instance\n")
	require.True(t, found)
	section, _, _ = strings.Cut(section, "\n## ")
	var described []string
	for _, row := range regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\| \\S").FindAllStringSubmatch(section, -1) {
		described = append(described, row[1])
	}
	require.ElementsMatch(t, rest.Components.Schemas["StatusReason"].Enum, described)
}

// apiOperation is an operation of openapi.yaml.
type apiOperation struct {
	ID         string   `yaml:"operationId"`
	Tags       []string `yaml:"tags"`
	Summary    string   `yaml:"summary"`
	Permission string   `yaml:"x-permission"`
	Security   *[]any   `yaml:"security"`
	Parameters []struct {
		Ref string `yaml:"$ref"`
	} `yaml:"parameters"`
}

// access says who may call the operation.
func (o apiOperation) access() string {
	switch {
	case o.Security != nil:
		return "anybody"
	case o.Permission == "":
		return "any credential"
	}
	return reference.Code(o.Permission)
}

func (o apiOperation) needsKey() string {
	for _, p := range o.Parameters {
		if p.Ref == "#/components/parameters/IdempotencyKey" {
			return "yes"
		}
	}
	return ""
}

// TestReferenceOfOperations writes the operations of the REST API, by their tags.
func TestReferenceOfOperations(t *testing.T) {
	var doc struct {
		Tags []struct {
			Name        string `yaml:"name"`
			Description string `yaml:"description"`
		} `yaml:"tags"`
		Paths yaml.Node `yaml:"paths"`
	}
	require.NoError(t, yaml.Unmarshal(api.OpenAPI, &doc))
	rows := map[string][][]string{}
	eachPair(doc.Paths, func(path string, item yaml.Node) {
		eachPair(item, func(method string, node yaml.Node) {
			var o apiOperation
			require.NoError(t, node.Decode(&o), path)
			require.Len(t, o.Tags, 1, o.ID)
			rows[o.Tags[0]] = append(rows[o.Tags[0]], []string{
				reference.Code(strings.ToUpper(method) + " " + path), reference.Code(o.ID),
				o.access(), o.needsKey(), reference.Text(o.Summary),
			})
		})
	})
	var b strings.Builder
	for _, tag := range doc.Tags {
		require.NotEmpty(t, rows[tag.Name], "tag %s", tag.Name)
		fmt.Fprintf(&b, "\n## %s\n\n", reference.Text(tag.Description))
		b.WriteString(reference.Table([]string{"request", "operation", "permission", "key", "does"}, rows[tag.Name]))
		delete(rows, tag.Name)
	}
	require.Empty(t, rows, "tags that the document does not declare")
	reference.Check(t, "api.md", "operations", b.String())
}

// eachPair visits a mapping in the order of the document.
func eachPair(n yaml.Node, f func(key string, value yaml.Node)) {
	for i := 0; i+1 < len(n.Content); i += 2 {
		f(n.Content[i].Value, *n.Content[i+1])
	}
}

// TestReferenceOfEvents writes the types of events, by their channels, and the attributes of an event.
func TestReferenceOfEvents(t *testing.T) {
	var doc struct {
		Channels   yaml.Node `yaml:"channels"`
		Components struct {
			Messages map[string]struct {
				Name    string `yaml:"name"`
				Summary string `yaml:"summary"`
			} `yaml:"messages"`
			Schemas map[string]struct {
				Description string    `yaml:"description"`
				Required    []string  `yaml:"required"`
				Properties  yaml.Node `yaml:"properties"`
			} `yaml:"schemas"`
		} `yaml:"components"`
	}
	require.NoError(t, yaml.Unmarshal(api.AsyncAPI, &doc))
	var b strings.Builder
	eachPair(doc.Channels, func(_ string, node yaml.Node) {
		var channel struct {
			Title       string    `yaml:"title"`
			Description string    `yaml:"description"`
			Messages    yaml.Node `yaml:"messages"`
		}
		require.NoError(t, node.Decode(&channel))
		var rows [][]string
		eachPair(channel.Messages, func(key string, _ yaml.Node) {
			m := doc.Components.Messages[key]
			rows = append(rows, []string{reference.Code(m.Name), reference.Text(m.Summary)})
		})
		fmt.Fprintf(&b, "\n## %s\n\n%s\n\n", channel.Title, reference.Sentence(channel.Description))
		b.WriteString(reference.Table([]string{"type", "means"}, rows))
	})
	reference.Check(t, "events.md", "types", b.String())

	var resourceData struct {
		Required []string `yaml:"required"`
	}
	fields := func(schema string, required []string) string {
		var rows [][]string
		eachPair(doc.Components.Schemas[schema].Properties, func(name string, node yaml.Node) {
			var p struct {
				Description string `yaml:"description"`
				Ref         string `yaml:"$ref"`
			}
			require.NoError(t, node.Decode(&p))
			if p.Description == "" && p.Ref != "" {
				p.Description = doc.Components.Schemas[path.Base(p.Ref)].Description
			}
			require.NotEmpty(t, p.Description, "%s.%s", schema, name)
			always := ""
			if slices.Contains(required, name) {
				always = "yes"
			}
			rows = append(rows, []string{reference.Code(name), always, reference.Text(p.Description)})
			if schema == "ResourceEvent" && name == "data" {
				require.NoError(t, node.Decode(&resourceData))
			}
		})
		return reference.Table([]string{"attribute", "always", "meaning"}, rows)
	}
	attributes := fields("ResourceEvent", doc.Components.Schemas["ResourceEvent"].Required)
	reference.Check(t, "events.md", "attributes", attributes)
	reference.Check(t, "events.md", "data", fields("AppInstanceData", resourceData.Required))
}
