package sim_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestTheSimulationDefinesNoConstantOfTheProduct: a constant that a product package defines, under the same name or
// with Default before it, must be taken from there.
func TestTheSimulationDefinesNoConstantOfTheProduct(t *testing.T) {
	product := map[string]string{}
	for _, dir := range []string{"../../agent", "../../hub", "../../protocol", "../../pkg"} {
		constants(t, dir, func(file, name string, _ ast.Expr) {
			product[strings.TrimPrefix(strings.ToLower(name), "default")] = file
		})
	}
	require.Contains(t, product, "resync")
	for _, dir := range []string{".", "books"} {
		constants(t, dir, func(file, name string, value ast.Expr) {
			where, defined := product[strings.ToLower(name)]
			if defined && !refersToAPackage(value) {
				t.Errorf("%s: %s stands in %s, too", file, name, where)
			}
		})
	}
}

// constants calls visit for every constant that the packages below a folder declare outside functions.
func constants(t *testing.T, dir string, visit func(file, name string, value ast.Expr)) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") ||
			strings.HasSuffix(path, ".pb.go") || strings.HasSuffix(path, ".gen.go") {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, d := range file.Decls {
			list, ok := d.(*ast.GenDecl)
			if !ok || list.Tok != token.CONST {
				continue
			}
			for _, spec := range list.Specs {
				c := spec.(*ast.ValueSpec)
				for i, name := range c.Names {
					if i < len(c.Values) {
						visit(path, name.Name, c.Values[i])
					}
				}
			}
		}
		return nil
	}))
}

// refersToAPackage reports whether a value is made of a constant of this project's packages.
func refersToAPackage(value ast.Expr) (refers bool) {
	ast.Inspect(value, func(n ast.Node) bool {
		if s, ok := n.(*ast.SelectorExpr); ok {
			if p, ok := s.X.(*ast.Ident); ok && p.Name != "time" {
				refers = true
			}
		}
		return true
	})
	return refers
}
