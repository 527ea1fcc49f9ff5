package reference_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/docs/reference"
)

// TestReferenceOfConditions writes the conditions of a node with the comments of their constants.
func TestReferenceOfConditions(t *testing.T) {
	path := filepath.Join(reference.Root(t), "protocol", "condition.go")
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments|parser.SkipObjectResolution)
	require.NoError(t, err)
	var rows [][]string
	ast.Inspect(file, func(n ast.Node) bool {
		if spec, ok := n.(*ast.ValueSpec); ok {
			name := spec.Names[0].Name
			meaning, found := strings.CutPrefix(strings.ReplaceAll(spec.Doc.Text(), "\n", " "), name+": ")
			require.True(t, found, "%s has no comment", name)
			rows = append(rows, []string{reference.Code(text(t, spec.Values[0])), reference.Sentence(meaning)})
		}
		return true
	})
	reference.Check(t, "errors.md", "conditions of a node", reference.Table([]string{"condition", "meaning"}, rows))
}
