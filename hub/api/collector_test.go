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

// collector finds the faults that the code makes by reading Go source. A code that it cannot resolve is an error.
type collector struct {
	packages map[string]*sources
	fset     *token.FileSet
	// relays are the files that pass on the code of a fault that another program made.
	relays []string
}

func newCollector() *collector {
	return &collector{packages: map[string]*sources{}, fset: token.NewFileSet()}
}

// madeFault is one fault that the code can make.
type madeFault struct {
	// file is its path from the root of the repository.
	file string
	// kind is the name of a constant of package fault.
	kind string
	code string
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
		file, err := parser.ParseFile(c.fset, name, nil, parser.ParseComments|parser.SkipObjectResolution)
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
	// calls are those through which the functions were reached.
	calls []callOf
}

// callOf is a call of a function literal or declaration.
type callOf struct {
	f    ast.Node
	call *ast.CallExpr
	at   place
}

// within is the place, reached through one more call.
func (at place) within(c callOf) place {
	at.calls = append(slices.Clip(at.calls), c)
	return at
}

// argument is what the call that led here gives to parameter n of f.
func (at place) argument(f ast.Node, n int) (place, ast.Expr, bool) {
	for i, c := range at.calls {
		if c.f == f && n < len(c.call.Args) {
			from := c.at
			from.calls = slices.Concat(at.calls[:i], at.calls[i+1:])
			return from, c.call.Args[n], true
		}
	}
	return place{}, nil, false
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

// collect gives the faults that the package makes.
func (c *collector) collect(p *sources) (all []madeFault, failed error) {
	refuse := func(n ast.Node, why string) {
		if failed == nil {
			failed = fmt.Errorf("%s: %s", c.fset.Position(n.Pos()), why)
		}
	}
	p.visit(func(at place, n, parent ast.Node) {
		switch n := n.(type) {
		case *ast.CallExpr:
			if c.names(at, n.Fun, "New") {
				made, err := c.made(at, n)
				if err != nil && !slices.Contains(c.relays, c.fileOf(n)) {
					refuse(n, err.Error())
				}
				all = append(all, made...)
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
				made, err := c.problem(at, n)
				if err != nil {
					refuse(n, err.Error())
				}
				all = append(all, made...)
			}
		case *ast.AssignStmt:
			if slices.ContainsFunc(n.Lhs, isCode) {
				refuse(n, "a code is assigned")
			}
		case *ast.BinaryExpr:
			compares := n.Op == token.EQL || n.Op == token.NEQ
			if compares && (at.holdsCode(n.X) && isText(n.Y) || at.holdsCode(n.Y) && isText(n.X)) {
				refuse(n, comparedAsText)
			}
		case *ast.SwitchStmt:
			if at.holdsCode(n.Tag) && slices.ContainsFunc(n.Body.List, hasTextCase) {
				refuse(n, comparedAsText)
			}
		}
	})
	return all, failed
}

const comparedAsText = "a code is compared as text"

// isCode reports whether e is the field Code of something.
func isCode(e ast.Expr) bool {
	s, ok := e.(*ast.SelectorExpr)
	return ok && s.Sel.Name == "Code"
}

// holdsCode reports whether e is the field Code of something, converted or not, or a variable that it was assigned to.
func (at place) holdsCode(e ast.Expr) bool {
	e = withoutConversion(e)
	variable, ok := e.(*ast.Ident)
	if !ok || len(at.funcs) == 0 {
		return isCode(e)
	}
	found := false
	ast.Inspect(at.funcs[0], func(n ast.Node) bool {
		if assign, ok := n.(*ast.AssignStmt); ok && len(assign.Lhs) == len(assign.Rhs) {
			for i, left := range assign.Lhs {
				id, ok := left.(*ast.Ident)
				found = found || ok && id.Name == variable.Name && isCode(withoutConversion(assign.Rhs[i]))
			}
		}
		return true
	})
	return found
}

// isText reports whether e is a literal that is not empty, converted or not.
func isText(e ast.Expr) bool {
	text, ok := withoutConversion(e).(*ast.BasicLit)
	return ok && text.Value != `""`
}

func hasTextCase(s ast.Stmt) bool {
	clause, ok := s.(*ast.CaseClause)
	return ok && slices.ContainsFunc(clause.List, isText)
}

// withoutConversion is x of string(x), Code(x) and fault.Code(x).
func withoutConversion(e ast.Expr) ast.Expr {
	call, ok := e.(*ast.CallExpr)
	if !ok || len(call.Args) != 1 {
		return e
	}
	if id, ok := call.Fun.(*ast.Ident); ok && (id.Name == "string" || id.Name == "Code") || isCode(call.Fun) {
		return call.Args[0]
	}
	return e
}

// fileOf is the path of the node's file from the root of the repository.
func (c *collector) fileOf(n ast.Node) string {
	return filepath.ToSlash(strings.TrimPrefix(c.fset.Position(n.Pos()).Filename, "../../"))
}

// made resolves a call of fault.New, once for each way that its arguments reach it through parameters.
func (c *collector) made(at place, call *ast.CallExpr) ([]madeFault, error) {
	if len(at.calls) > maxCallers {
		return nil, errors.New("a parameter goes through too many callers")
	}
	for _, e := range call.Args[:2] {
		f, n, outer, unknown := unbound(at, e)
		if !unknown {
			continue
		}
		callers, err := c.callers(f, n, outer)
		if err != nil {
			return nil, err
		}
		var all []madeFault
		for _, from := range callers {
			made, err := c.made(at.within(from), call)
			if err != nil {
				return nil, err
			}
			all = append(all, made...)
		}
		return all, nil
	}
	kinds := []string{"Internal"} // 0
	if _, isLiteral := call.Args[0].(*ast.BasicLit); !isLiteral {
		var err error
		if kinds, err = c.values(at, call.Args[0]); err != nil {
			return nil, err
		}
	}
	codes, err := c.values(at, call.Args[1])
	if err != nil {
		return nil, err
	}
	if len(kinds) == 0 || len(codes) == 0 {
		return nil, errors.New("a fault without kind or code")
	}
	var all []madeFault
	for _, kind := range kinds {
		for _, code := range codes {
			all = append(all, madeFault{c.fileOf(call), kind, code})
		}
	}
	return all, nil
}

// unbound finds the parameter that the expression is and that no call has given a value yet.
func unbound(at place, e ast.Expr) (f ast.Node, n int, outer place, found bool) {
	id, ok := e.(*ast.Ident)
	if !ok {
		return nil, 0, place{}, false
	}
	for i, f := range slices.Backward(at.funcs) {
		n, ok := parameter(f, id.Name)
		if !ok {
			continue
		}
		if from, given, bound := at.argument(f, n); bound {
			return unbound(from, given)
		}
		at.funcs = at.funcs[:i]
		return f, n, at, true
	}
	return nil, 0, place{}, false
}

// problem gives the code of a problem that is written without a fault.
func (c *collector) problem(at place, n *ast.CompositeLit) ([]madeFault, error) {
	fields := map[string]ast.Expr{}
	for _, e := range n.Elts {
		if kv, ok := e.(*ast.KeyValueExpr); ok {
			fields[kv.Key.(*ast.Ident).Name] = kv.Value
		}
	}
	code, isConversion := fields["Code"].(*ast.CallExpr)
	if !isConversion || isCode(code.Args[0]) {
		return nil, nil // the code of a fault
	}
	codes, err := c.values(at, code)
	var all []madeFault
	for _, code := range codes {
		all = append(all, madeFault{c.fileOf(n), "", code})
	}
	return all, err
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

// callers are the calls of f that give its parameter n; outer is the place around f.
func (c *collector) callers(f ast.Node, n int, outer place) (calls []callOf, failed error) {
	name, within := "", ast.Node(nil)
	decl, isDecl := f.(*ast.FuncDecl)
	if isDecl {
		name = decl.Name.Name
	} else if len(outer.funcs) > 0 {
		within = outer.funcs[len(outer.funcs)-1]
		name = nameOf(outer.p, f)
	}
	if name == "" || name == "_" {
		return nil, errors.New("the callers of a function are not known")
	}
	refersTo := func(in place, e ast.Expr) bool {
		switch e := e.(type) {
		case *ast.Ident:
			return e.Name == name && in.p == outer.p && (!isDecl || decl.Recv == nil) &&
				(within == nil || slices.Contains(in.funcs, within))
		case *ast.SelectorExpr:
			x, ok := e.X.(*ast.Ident)
			return isDecl && e.Sel.Name == name && (decl.Recv != nil || ok && imported(in.file, x.Name) == outer.p.path)
		}
		return false
	}
	for _, p := range c.packages {
		if p != outer.p && (!isDecl || !decl.Name.IsExported()) {
			continue
		}
		p.visit(func(in place, e, parent ast.Node) {
			call, ok := e.(*ast.CallExpr)
			if x, isExpr := e.(ast.Expr); !ok && isExpr && refersTo(in, x) && isValue(parent, x) {
				failed = fmt.Errorf("%s: %s is used as a value", c.fset.Position(e.Pos()), name)
			}
			if ok && refersTo(in, call.Fun) && n < len(call.Args) {
				calls = append(calls, callOf{f, call, in})
			}
		})
	}
	if failed == nil && len(calls) == 0 {
		failed = fmt.Errorf("%s has no caller", name)
	}
	return calls, failed
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
