package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// tree is what the Go tool says of the module's packages, and the types of what they import.
type tree struct {
	root     string
	packages map[string]*listed // by import path
	exports  map[string]string  // import path to the file with its types
}

// listed is a package as `go list` prints it.
type listed struct {
	ImportPath, Name, Dir, Export      string
	GoFiles                            []string
	Imports, TestImports, XTestImports []string
	TestGoFiles, XTestGoFiles          []string
	Standard                           bool
	Module                             *struct{ Main bool }
}

func (p *listed) hasTests() bool { return len(p.TestGoFiles)+len(p.XTestGoFiles) > 0 }

// loadTree asks the Go tool; it compiles what is not in the build cache.
func loadTree(ctx context.Context) (*tree, error) {
	root, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	list := exec.CommandContext(ctx, "go", "list", "-export", "-deps", "-json=ImportPath,Name,Dir,Export,GoFiles,Imports,"+
		"TestImports,XTestImports,TestGoFiles,XTestGoFiles,Standard,Module", "./...")
	list.Stderr = os.Stderr
	out, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("list the packages: %w", err)
	}
	t := &tree{root: root, packages: map[string]*listed{}, exports: map[string]string{}}
	for decoder := json.NewDecoder(bytes.NewReader(out)); ; {
		var p listed
		if err := decoder.Decode(&p); err == io.EOF {
			return t, nil
		} else if err != nil {
			return nil, fmt.Errorf("read the list of packages: %w", err)
		}
		t.exports[p.ImportPath] = p.Export
		if p.Module != nil && p.Module.Main {
			t.packages[p.ImportPath] = &p
		}
	}
}

// relative is the package's directory within the tree, with slashes.
func (t *tree) relative(p *listed) string {
	dir, err := filepath.Rel(t.root, p.Dir)
	if err != nil {
		return p.Dir
	}
	return filepath.ToSlash(dir)
}

func (t *tree) at(dir string) *listed {
	for _, p := range t.packages {
		if t.relative(p) == dir {
			return p
		}
	}
	return nil
}

// neighbours are the packages with tests that import the package, those first that name it most often. End-to-end
// packages are none: they run the programs of bin/.
func (t *tree) neighbours(dir string, number int) ([]string, error) {
	of := t.at(dir)
	if of == nil {
		return nil, fmt.Errorf("there is no package in %s", dir)
	}
	var all []string
	uses := map[string]int{}
	for _, p := range t.packages {
		imports := slices.Concat(p.Imports, p.TestImports, p.XTestImports)
		at := t.relative(p)
		if p == of || !p.hasTests() || !slices.Contains(imports, of.ImportPath) || strings.HasPrefix(at, "e2e/") ||
			strings.HasPrefix(at, "docs/") {
			continue
		}
		all = append(all, at)
		for _, name := range slices.Concat(p.GoFiles, p.TestGoFiles, p.XTestGoFiles) {
			source, err := os.ReadFile(filepath.Join(p.Dir, name))
			if err != nil {
				return nil, err
			}
			uses[at] += bytes.Count(source, []byte(of.Name+"."))
		}
	}
	slices.SortFunc(all, func(a, b string) int { return cmp.Or(uses[b]-uses[a], strings.Compare(a, b)) })
	return all[:min(len(all), number)], nil
}

// checked is a package with its syntax and types.
type checked struct {
	dir     string
	path    string
	fset    *token.FileSet
	names   []string
	files   []*ast.File
	sources [][]byte
	info    *types.Info
	imports types.Importer
}

// check parses and type-checks a package without its tests.
func (t *tree) check(dir string) (*checked, error) {
	p := t.at(dir)
	if p == nil {
		return nil, fmt.Errorf("there is no package in %s", dir)
	}
	c := &checked{dir: dir, path: p.ImportPath, fset: token.NewFileSet()}
	c.imports = importer.ForCompiler(c.fset, "gc", func(path string) (io.ReadCloser, error) {
		return os.Open(t.exports[path])
	})
	for _, name := range p.GoFiles {
		source, err := os.ReadFile(filepath.Join(p.Dir, name))
		if err != nil {
			return nil, err
		}
		file, err := parser.ParseFile(c.fset, name, source, parser.ParseComments)
		if err != nil {
			return nil, err
		}
		c.names, c.files, c.sources = append(c.names, name), append(c.files, file), append(c.sources, source)
	}
	return c, c.types()
}

// types checks the package as it is.
func (c *checked) types() error {
	c.info = &types.Info{Types: map[ast.Expr]types.TypeAndValue{}, Uses: map[*ast.Ident]types.Object{}}
	config := types.Config{Importer: c.imports}
	if _, err := config.Check(c.path, c.fset, c.files, c.info); err != nil {
		return fmt.Errorf("%s: %w", c.dir, err)
	}
	return nil
}

// compiles reports whether the package is still valid with other content of one file.
func (c *checked) compiles(name string, source []byte) bool {
	file, err := parser.ParseFile(c.fset, name, source, parser.SkipObjectResolution)
	if err != nil {
		return false
	}
	files := slices.Clone(c.files)
	files[slices.Index(c.names, name)] = file
	config := types.Config{Importer: c.imports}
	_, err = config.Check(c.path, c.fset, files, nil)
	return err == nil
}
