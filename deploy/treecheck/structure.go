package main

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path"
	"slices"
	"strings"
)

const (
	recoveryPackage = "github.com/gpuaas/gpuaas/hub/internal/recovery"
	recoveryDir     = "hub/internal/recovery"
	// maxRecoveryFiles bounds the files of package recovery, and the files that import it.
	maxRecoveryFiles = 6
	// wiringFile constructs the hub's components.
	wiringFile = "hub/cmd/gpuaas-hub/hub.go"
)

// testedDirs were tested only from other packages once; each has its own tests now.
func testedDirs() []string {
	return []string{"hub/internal/dispatch", "hub/internal/catalog", recoveryDir, "pkg/fault"}
}

// structure collects what the checks of the tree's structure need from all Go files.
type structure struct {
	tests    map[string]bool // directories with a test function
	recovery []string        // product files of package recovery
	users    []string        // product files that import it
	problems []error
}

func (s *structure) addGoFile(file string, content []byte) error {
	if path.Ext(file) != ".go" {
		return nil
	}
	parsed, err := parser.ParseFile(token.NewFileSet(), file, content, parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	dir := path.Dir(file)
	if strings.HasSuffix(file, "_test.go") {
		if slices.ContainsFunc(parsed.Decls, isTest) {
			s.tests[dir] = true
		}
		return nil
	}
	if dir == recoveryDir {
		s.recovery = append(s.recovery, file)
	}
	for _, i := range parsed.Imports {
		if i.Path.Value == `"`+recoveryPackage+`"` {
			s.users = append(s.users, file)
		}
	}
	if file == wiringFile {
		for _, field := range lateFields(parsed) {
			s.problems = append(s.problems, fmt.Errorf("%s sets %s after construction: pass it to the constructor", file, field))
		}
	}
	return nil
}

func isTest(d ast.Decl) bool {
	function, ok := d.(*ast.FuncDecl)
	return ok && function.Recv == nil && strings.HasPrefix(function.Name.Name, "Test")
}

// check reports what is wrong after all files were added.
func (s *structure) check() error {
	problems := s.problems
	for _, dir := range testedDirs() {
		if !s.tests[dir] {
			problems = append(problems, fmt.Errorf("%s has no tests of its own", dir))
		}
	}
	for what, files := range map[string][]string{"lie in": s.recovery, "import": s.users} {
		if len(files) > maxRecoveryFiles {
			problems = append(problems, fmt.Errorf("%d files %s %s, at most %d may: %s", len(files), what, recoveryDir,
				maxRecoveryFiles, strings.Join(files, " ")))
		}
	}
	return errors.Join(problems...)
}

// lateFields are the assignments to fields of components. A function may set the fields of its receiver and of literals
// that it has made itself.
func lateFields(file *ast.File) (fields []string) {
	for _, d := range file.Decls {
		function, ok := d.(*ast.FuncDecl)
		if !ok || function.Body == nil {
			continue
		}
		own := map[string]bool{}
		if function.Recv != nil && len(function.Recv.List[0].Names) > 0 {
			own[function.Recv.List[0].Names[0].Name] = true
		}
		ast.Inspect(function.Body, func(node ast.Node) bool {
			assign, ok := node.(*ast.AssignStmt)
			if !ok {
				return true
			}
			for n, left := range assign.Lhs {
				switch left := left.(type) {
				case *ast.Ident:
					if n < len(assign.Rhs) && isLiteral(assign.Rhs[n]) {
						own[left.Name] = true
					}
				case *ast.SelectorExpr:
					if base, ok := left.X.(*ast.Ident); !ok || !own[base.Name] {
						fields = append(fields, left.Sel.Name)
					}
				}
			}
			return true
		})
	}
	return fields
}

func isLiteral(e ast.Expr) bool {
	if address, ok := e.(*ast.UnaryExpr); ok && address.Op == token.AND {
		e = address.X
	}
	_, ok := e.(*ast.CompositeLit)
	return ok
}
