package api_test

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// sources are the files of one package, without its tests.
type sources struct {
	path  string
	files []*ast.File
}

// collector finds the codes of faults by reading Go source. What it cannot resolve is an error.
type collector struct {
	packages map[string]*sources
	fset     *token.FileSet
	// local has the localFiles in which a fault was found.
	local map[string]struct{}
}

func newCollector() *collector {
	return &collector{packages: map[string]*sources{}, fset: token.NewFileSet(), local: map[string]struct{}{}}
}

// load parses a package of this module and those that it imports.
func (c *collector) load(path string) error {
	if _, loaded := c.packages[path]; loaded {
		return nil
	}
	p := &sources{path: path}
	c.packages[path] = p
	names, err := filepath.Glob(filepath.Join("../..", strings.TrimPrefix(path, modulePath), "*.go"))
	if err != nil {
		return err
	}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(c.fset, name, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		p.files = append(p.files, file)
		for _, i := range file.Imports {
			if imported, _ := strconv.Unquote(i.Path.Value); strings.HasPrefix(imported, modulePath) {
				if err := c.load(imported); err != nil {
					return err
				}
			}
		}
	}
	if len(p.files) == 0 {
		return fmt.Errorf("%s has no Go files", path)
	}
	return nil
}

// place is a node with the functions around it, the outermost first.
type place struct {
	p     *sources
	file  *ast.File
	funcs []ast.Node
	// depth counts the callers that were followed.
	depth int
}

// visit calls f for each node of the package.
func (p *sources) visit(f func(at place, n ast.Node, parent ast.Node)) {
	for _, file := range p.files {
		var stack []ast.Node
		ast.Inspect(file, func(n ast.Node) bool {
			if n == nil {
				stack = stack[:len(stack)-1]
				return true
			}
			at, parent := place{p: p, file: file}, ast.Node(nil)
			for _, around := range stack {
				switch around.(type) {
				case *ast.FuncDecl, *ast.FuncLit:
					at.funcs = append(at.funcs, around)
				}
				parent = around
			}
			f(at, n, parent)
			stack = append(stack, n)
			return true
		})
	}
}

// collect adds the codes of the faults that the package makes.
func (c *collector) collect(p *sources, codes map[string]struct{}) (failed error) {
	add := func(at place, e ast.Expr) {
		found, err := c.values(at, e)
		if err != nil && failed == nil {
			failed = fmt.Errorf("%s: %w", c.fset.Position(e.Pos()), err)
		}
		name := filepath.ToSlash(strings.TrimPrefix(c.fset.Position(e.Pos()).Filename, "../../"))
		if slices.Contains(localFiles, name) {
			c.local[name] = struct{}{}
			return
		}
		for _, code := range found {
			codes[code] = struct{}{}
		}
	}
	refuse := func(n ast.Node, why string) {
		if failed == nil {
			failed = fmt.Errorf("%s: %s", c.fset.Position(n.Pos()), why)
		}
	}
	p.visit(func(at place, n, parent ast.Node) {
		switch n := n.(type) {
		case *ast.CallExpr:
			if c.names(at, n.Fun, "New") {
				add(at, n.Args[1])
			}
		case *ast.SelectorExpr:
			if call, ok := parent.(*ast.CallExpr); c.names(at, n, "New") && (!ok || call.Fun != ast.Expr(n)) {
				refuse(n, "fault.New is used as a value")
			}
		case *ast.CompositeLit:
			if c.names(at, n.Type, "Error") && p.path != faultPath {
				refuse(n, "a fault is made without fault.New")
			}
			if id, ok := n.Type.(*ast.Ident); ok && id.Name == "Problem" {
				c.problem(at, n, add)
			}
		case *ast.AssignStmt:
			for _, to := range n.Lhs {
				if s, ok := to.(*ast.SelectorExpr); ok && s.Sel.Name == "Code" {
					refuse(n, "a code is assigned")
				}
			}
		}
	})
	return failed
}

// problem adds the code of a problem that is written without a fault.
func (c *collector) problem(at place, n *ast.CompositeLit, add func(place, ast.Expr)) {
	for _, e := range n.Elts {
		kv, ok := e.(*ast.KeyValueExpr)
		if !ok || kv.Key.(*ast.Ident).Name != "Code" {
			continue
		}
		if s, ok := kv.Value.(*ast.SelectorExpr); ok && s.Sel.Name == "Code" {
			continue // the code of a fault
		}
		add(at, kv.Value)
	}
}

// names reports whether e is the name of package fault.
func (c *collector) names(at place, e ast.Expr, name string) bool {
	switch e := e.(type) {
	case *ast.SelectorExpr:
		x, ok := e.X.(*ast.Ident)
		return ok && e.Sel.Name == name && imported(at.file, x.Name) == faultPath
	case *ast.Ident:
		return at.p.path == faultPath && e.Name == name
	}
	return false
}

// imported is the path that a file imports under the name; the last element of a path is taken for the package's name.
func imported(file *ast.File, name string) string {
	for _, i := range file.Imports {
		path, _ := strconv.Unquote(i.Path.Value)
		if i.Name != nil && i.Name.Name == name || i.Name == nil && path[strings.LastIndexByte(path, '/')+1:] == name {
			return path
		}
	}
	return ""
}

// values are all strings that the expression may have.
func (c *collector) values(at place, e ast.Expr) ([]string, error) {
	if at.depth > maxCallers {
		return nil, errors.New("a parameter goes through too many callers")
	}
	switch e := e.(type) {
	case *ast.BasicLit:
		s, err := strconv.Unquote(e.Value)
		return []string{s}, err
	case *ast.ParenExpr:
		return c.values(at, e.X)
	case *ast.CallExpr:
		if id, ok := e.Fun.(*ast.Ident); ok && id.Name == "string" && len(e.Args) == 1 {
			return c.values(at, e.Args[0])
		}
	case *ast.BinaryExpr:
		return c.joined(at, e)
	case *ast.SelectorExpr:
		if x, ok := e.X.(*ast.Ident); ok {
			if p := c.packages[imported(at.file, x.Name)]; p != nil {
				return c.constant(p, e.Sel.Name)
			}
		}
	case *ast.Ident:
		for i, f := range slices.Backward(at.funcs) {
			if n, ok := parameter(f, e.Name); ok {
				return c.arguments(at, at.funcs[:i], f, n)
			}
			if values, found, err := c.assigned(at, f, e.Name); found {
				return values, err
			}
		}
		return c.constant(at.p, e.Name)
	}
	return nil, fmt.Errorf("cannot tell the values of this %T", e)
}

// joined are the values of a literal and what follows it; a status stands for each constant of its type.
func (c *collector) joined(at place, e *ast.BinaryExpr) ([]string, error) {
	before, err := c.values(at, e.X)
	if err != nil {
		return nil, err
	}
	after, err := c.statuses(at, e.Y)
	if err != nil {
		return nil, err
	}
	var joined []string
	for _, b := range before {
		for _, a := range after {
			joined = append(joined, b+a)
		}
	}
	return joined, nil
}

// statuses are the constants of the type of x in string(x). A field is of the type of its own name.
func (c *collector) statuses(at place, e ast.Expr) ([]string, error) {
	call, ok := e.(*ast.CallExpr)
	if !ok || len(call.Args) != 1 {
		return c.values(at, e)
	}
	var typeName string
	switch x := call.Args[0].(type) {
	case *ast.SelectorExpr:
		typeName = x.Sel.Name
	case *ast.Ident:
		for _, f := range at.funcs {
			for _, field := range signature(f).Params.List {
				if t, ok := field.Type.(*ast.Ident); ok && slices.ContainsFunc(field.Names, func(n *ast.Ident) bool { return n.Name == x.Name }) {
					typeName = t.Name
				}
			}
		}
	}
	var values []string
	for _, d := range constants(at.p) {
		if t, ok := d.spec.Type.(*ast.Ident); ok && t.Name == typeName {
			more, err := c.values(d.at, d.value)
			if err != nil {
				return nil, err
			}
			values = append(values, more...)
		}
	}
	if len(values) == 0 {
		return nil, fmt.Errorf("%s has no constants of the type %q", at.p.path, typeName)
	}
	return values, nil
}

// declared is one constant of a package.
type declared struct {
	at    place
	spec  *ast.ValueSpec
	name  string
	value ast.Expr
}

func constants(p *sources) []declared {
	var all []declared
	for _, file := range p.files {
		for _, d := range file.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok || g.Tok != token.CONST {
				continue
			}
			for _, s := range g.Specs {
				spec := s.(*ast.ValueSpec)
				for i, value := range spec.Values {
					all = append(all, declared{place{p: p, file: file}, spec, spec.Names[i].Name, value})
				}
			}
		}
	}
	return all
}

func (c *collector) constant(p *sources, name string) ([]string, error) {
	for _, d := range constants(p) {
		if d.name == name {
			return c.values(d.at, d.value)
		}
	}
	return nil, fmt.Errorf("%s has no constant %s", p.path, name)
}

func signature(f ast.Node) *ast.FuncType {
	if d, ok := f.(*ast.FuncDecl); ok {
		return d.Type
	}
	return f.(*ast.FuncLit).Type
}

// parameter is the index of a function's parameter.
func parameter(f ast.Node, name string) (int, bool) {
	i := 0
	for _, field := range signature(f).Params.List {
		for _, n := range field.Names {
			if n.Name == name {
				return i, true
			}
			i++
		}
	}
	return 0, false
}

// assigned are the values that a function gives to a local variable.
func (c *collector) assigned(at place, f ast.Node, name string) (values []string, found bool, failed error) {
	is := func(e ast.Expr) bool {
		id, ok := e.(*ast.Ident)
		return ok && id.Name == name
	}
	at.p.visit(func(in place, n, _ ast.Node) {
		a, ok := n.(*ast.AssignStmt)
		if !ok || !slices.Contains(in.funcs, f) || !slices.ContainsFunc(a.Lhs, is) {
			return
		}
		found = true
		if len(a.Rhs) != len(a.Lhs) {
			failed = fmt.Errorf("%s is assigned from a call", name)
			return
		}
		more, err := c.values(in, a.Rhs[slices.IndexFunc(a.Lhs, is)])
		if err != nil {
			failed = err
		}
		values = append(values, more...)
	})
	return values, found, failed
}

// arguments are the values that the callers of f give to its parameter n; outer are the functions around f.
func (c *collector) arguments(at place, outer []ast.Node, f ast.Node, n int) (values []string, failed error) {
	name, within := "", ast.Node(nil)
	decl, isDecl := f.(*ast.FuncDecl)
	if isDecl {
		name = decl.Name.Name
	} else if len(outer) > 0 {
		within = outer[len(outer)-1]
		name = nameOf(at.p, f)
	}
	if name == "" || name == "_" {
		return nil, errors.New("the callers of a function are not known")
	}
	refersTo := func(in place, e ast.Expr) bool {
		switch e := e.(type) {
		case *ast.Ident:
			return e.Name == name && in.p == at.p && (!isDecl || decl.Recv == nil) && (within == nil || slices.Contains(in.funcs, within))
		case *ast.SelectorExpr:
			x, ok := e.X.(*ast.Ident)
			return isDecl && e.Sel.Name == name && (decl.Recv != nil || ok && imported(in.file, x.Name) == at.p.path)
		}
		return false
	}
	calls := 0
	for _, p := range c.packages {
		if p != at.p && (!isDecl || !decl.Name.IsExported()) {
			continue
		}
		p.visit(func(in place, e, parent ast.Node) {
			call, ok := e.(*ast.CallExpr)
			if x, isExpr := e.(ast.Expr); !ok && isExpr && refersTo(in, x) && isValue(parent, x) {
				failed = fmt.Errorf("%s: %s is used as a value", c.fset.Position(e.Pos()), name)
			}
			if !ok || !refersTo(in, call.Fun) || n >= len(call.Args) {
				return
			}
			calls++
			in.depth = at.depth + 1
			more, err := c.values(in, call.Args[n])
			if err != nil {
				failed = fmt.Errorf("%s: %w", c.fset.Position(call.Pos()), err)
			}
			values = append(values, more...)
		})
	}
	if failed == nil && calls == 0 {
		failed = fmt.Errorf("%s has no caller", name)
	}
	return values, failed
}

// nameOf is the local name of a function literal.
func nameOf(p *sources, f ast.Node) (name string) {
	p.visit(func(_ place, n, _ ast.Node) {
		a, ok := n.(*ast.AssignStmt)
		if !ok || len(a.Lhs) != len(a.Rhs) {
			return
		}
		for i, e := range a.Rhs {
			if id, ok := a.Lhs[i].(*ast.Ident); ok && ast.Node(e) == f {
				name = id.Name
			}
		}
	})
	return name
}

// isValue reports whether e stands where a function would be given away instead of called.
func isValue(parent ast.Node, e ast.Expr) bool {
	switch parent := parent.(type) {
	case *ast.CallExpr:
		return slices.Contains(parent.Args, e)
	case *ast.AssignStmt:
		return slices.Contains(parent.Rhs, e)
	case *ast.ReturnStmt:
		return slices.Contains(parent.Results, e)
	case *ast.CompositeLit:
		return slices.Contains(parent.Elts, e)
	case *ast.KeyValueExpr:
		return parent.Value == e
	}
	return false
}
