package reference_test

import (
	"context"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/gpuaas/gpuaas/docs/reference"
	"github.com/gpuaas/gpuaas/pkg/telemetry/metrics"
)

// instrument is an OpenTelemetry instrument as the source makes it.
type instrument struct {
	// method of metric.Meter that makes it.
	method, name, unit, description string
	// variable or field that holds it.
	variable string
	// attributes are given with each measurement.
	attributes []string
}

// TestReferenceOfMetrics finds the instruments in the source, makes each of them, and writes what Prometheus then
// reads.
func TestReferenceOfMetrics(t *testing.T) {
	var found []instrument
	for _, side := range []string{"hub", "agent"} {
		dir := filepath.Join(reference.Root(t), side)
		require.NoError(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				found = append(found, instrumentsOf(t, path)...)
			}
			return err
		}))
	}
	require.NotEmpty(t, found)
	tel, err := metrics.Start()
	require.NoError(t, err)
	defer func() { require.NoError(t, tel.Close(t.Context())) }()
	for _, i := range found {
		require.NotEmpty(t, i.description, i.name)
		measure(t, i)
	}
	w := httptest.NewRecorder()
	tel.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", http.NoBody))
	var rows [][]string
	for _, i := range found {
		head := regexp.MustCompile(`# HELP (\S+) ` + regexp.QuoteMeta(i.description) + `\n# TYPE \S+ (\w+)\n`)
		family := head.FindStringSubmatch(w.Body.String())
		require.NotNil(t, family, "%s is not among the metrics", i.name)
		sample := regexp.MustCompile(`(?m)^` + family[1] + `(?:_count)?\{([^}]*)\}`).FindStringSubmatch(w.Body.String())
		var labels []string
		if sample != nil {
			for _, label := range regexp.MustCompile(`(\w+)="`).FindAllStringSubmatch(sample[1], -1) {
				labels = append(labels, reference.Code(label[1]))
			}
		}
		meaning := reference.Text(i.description)
		rows = append(rows, []string{reference.Code(family[1]), family[2], strings.Join(labels, ", "), meaning})
	}
	slices.SortFunc(rows, func(a, b []string) int { return strings.Compare(a[0], b[0]) })
	reference.Check(t, "metrics.md", "metrics", reference.Table([]string{"metric", "type", "labels", "meaning"}, rows))
}

// instrumentsOf parses one package.
func instrumentsOf(t *testing.T, dir string) []instrument {
	names, err := filepath.Glob(filepath.Join(dir, "*.go"))
	require.NoError(t, err)
	var files []*ast.File
	for _, name := range names {
		if !strings.HasSuffix(name, "_test.go") {
			file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
			require.NoError(t, err)
			files = append(files, file)
		}
	}
	var found []instrument
	for _, file := range files {
		ast.Inspect(file, func(n ast.Node) bool {
			if a, ok := n.(*ast.AssignStmt); ok && len(a.Rhs) == 1 {
				if i, ok := made(t, a.Rhs[0]); ok {
					i.variable = lastName(a.Lhs[0])
					found = append(found, i)
				}
			}
			return true
		})
	}
	for at := range found {
		for _, file := range files {
			found[at].attributes = append(found[at].attributes, attributesOf(file, found[at].variable)...)
		}
		slices.Sort(found[at].attributes)
		found[at].attributes = slices.Compact(found[at].attributes)
	}
	return found
}

// made reads a call like meter.Int64Counter("name", metric.WithDescription("text")).
func made(t *testing.T, e ast.Expr) (instrument, bool) {
	call, ok := e.(*ast.CallExpr)
	methods := regexp.MustCompile(`^(Int|Float)64(Observable)?(Counter|UpDownCounter|Gauge|Histogram)$`)
	if !ok || !methods.MatchString(lastName(call.Fun)) {
		return instrument{}, false
	}
	i := instrument{method: lastName(call.Fun), name: text(t, call.Args[0])}
	for _, option := range call.Args[1:] {
		with, ok := option.(*ast.CallExpr)
		require.True(t, ok, i.name)
		switch lastName(with.Fun) {
		case "WithDescription":
			i.description = text(t, with.Args[0])
		case "WithUnit":
			i.unit = text(t, with.Args[0])
		}
	}
	return i, true
}

// attributesOf are those that the measurements with the instrument give.
func attributesOf(file *ast.File, variable string) []string {
	var found []string
	ast.Inspect(file, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		method, ok := call.Fun.(*ast.SelectorExpr)
		if !ok || lastName(method.X) != variable || method.Sel.Name != "Add" && method.Sel.Name != "Record" {
			return true
		}
		ast.Inspect(call, func(n ast.Node) bool {
			if made, ok := n.(*ast.CallExpr); ok && len(made.Args) == 2 {
				if f, ok := made.Fun.(*ast.SelectorExpr); ok && lastName(f.X) == "attribute" {
					if literal, ok := made.Args[0].(*ast.BasicLit); ok {
						found = append(found, strings.Trim(literal.Value, `"`))
					}
				}
			}
			return true
		})
		return true
	})
	return found
}

// measure makes the instrument and gives it one value.
func measure(t *testing.T, i instrument) {
	meter, ctx := otel.Meter("reference"), t.Context()
	var pairs []attribute.KeyValue
	for _, name := range i.attributes {
		pairs = append(pairs, attribute.String(name, "x"))
	}
	with, about, unit := metric.WithAttributes(pairs...), metric.WithDescription(i.description), metric.WithUnit(i.unit)
	var err error
	switch i.method {
	case "Int64Counter":
		var c metric.Int64Counter
		c, err = meter.Int64Counter(i.name, about, unit)
		c.Add(ctx, 1, with)
	case "Float64Histogram":
		var h metric.Float64Histogram
		h, err = meter.Float64Histogram(i.name, about, unit)
		h.Record(ctx, 1, with)
	case "Int64ObservableGauge":
		observe := func(_ context.Context, o metric.Int64Observer) error {
			o.Observe(1, with)
			return nil
		}
		_, err = meter.Int64ObservableGauge(i.name, about, unit, metric.WithInt64Callback(observe))
	default:
		require.Fail(t, "add this method to measure", i.method)
	}
	require.NoError(t, err)
}

func lastName(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return e.Sel.Name
	}
	return ""
}

func text(t *testing.T, e ast.Expr) string {
	if sum, ok := e.(*ast.BinaryExpr); ok && sum.Op == token.ADD {
		return text(t, sum.X) + text(t, sum.Y)
	}
	literal, ok := e.(*ast.BasicLit)
	require.True(t, ok, "names and texts of instruments are literals")
	value, err := strconv.Unquote(literal.Value)
	require.NoError(t, err)
	return value
}
