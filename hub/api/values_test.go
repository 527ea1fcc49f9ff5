package api_test

import (
	"fmt"
	"go/ast"
	"go/token"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// texts are the texts that the expression may have; what is known only when the program runs is an ellipsis.
func (c *collector) texts(at place, e ast.Expr) []string {
	switch e := e.(type) {
	case *ast.BinaryExpr:
		if e.Op != token.ADD {
			break
		}
		var all []string
		for _, x := range c.texts(at, e.X) {
			for _, y := range c.texts(at, e.Y) {
				all = append(all, x+y)
			}
		}
		return all
	case *ast.CallExpr:
		if s, ok := e.Fun.(*ast.SelectorExpr); ok && s.Sel.Name == "Sprintf" {
			return c.formatted(at, e.Args)
		}
	case *ast.Ident:
		for _, f := range slices.Backward(at.funcs) {
			n, ok := parameter(f, e.Name)
			if !ok {
				continue
			}
			if from, given, bound := at.argument(f, n); bound {
				return c.texts(from, given)
			}
			return []string{"…"}
		}
		if all, found := c.assignedTexts(at, e.Name); found {
			return all
		}
	}
	if known, err := c.values(at, e); err == nil {
		return known
	}
	return []string{"…"}
}

// assignedTexts are the texts that the functions around give to a local variable.
func (c *collector) assignedTexts(at place, name string) (all []string, found bool) {
	if len(at.funcs) == 0 {
		return nil, false
	}
	at.p.visit(func(in place, n, _ ast.Node) {
		a, ok := n.(*ast.AssignStmt)
		if !ok || len(a.Lhs) != len(a.Rhs) || !slices.Contains(in.funcs, at.funcs[0]) {
			return
		}
		for i, to := range a.Lhs {
			if id, ok := to.(*ast.Ident); ok && id.Name == name && a.Tok != token.ADD_ASSIGN {
				found = true
				in.calls = at.calls
				all = append(all, c.texts(in, a.Rhs[i])...)
			}
		}
	})
	return all, found
}

// formatted are the texts of fmt.Sprintf.
func (c *collector) formatted(at place, args []ast.Expr) []string {
	all := c.texts(at, args[0])
	verb := regexp.MustCompile(`%[-+#0 ]*[0-9]*(\.[0-9]+)?[a-zA-Z]`)
	for _, arg := range args[1:] {
		var next []string
		for _, format := range all {
			for _, value := range c.texts(at, arg) {
				filled := format
				if place := verb.FindStringIndex(format); place != nil {
					filled = format[:place[0]] + strings.ReplaceAll(value, "%", "%%") + format[place[1]:]
				}
				next = append(next, filled)
			}
		}
		all = next
	}
	for i := range all {
		all[i] = strings.ReplaceAll(all[i], "%%", "%")
	}
	return all
}

// values are all strings that the expression may have.
func (c *collector) values(at place, e ast.Expr) ([]string, error) {
	switch e := e.(type) {
	case *ast.BasicLit:
		if e.Kind == token.STRING {
			s, err := strconv.Unquote(e.Value)
			return []string{s}, err
		}
		return nil, fmt.Errorf("%s is no string", e.Value)
	case *ast.ParenExpr:
		return c.values(at, e.X)
	case *ast.CallExpr:
		if id, ok := e.Fun.(*ast.Ident); ok && id.Name == "string" && len(e.Args) == 1 {
			return c.values(at, e.Args[0])
		}
	case *ast.BinaryExpr:
		if e.Op == token.ADD {
			return c.joined(at, e)
		}
	case *ast.SelectorExpr:
		if x, ok := e.X.(*ast.Ident); ok {
			if imported(at.file, x.Name) == faultPath {
				return []string{e.Sel.Name}, nil // a kind
			}
			if p := c.packages[imported(at.file, x.Name)]; p != nil {
				return c.constant(p, e.Sel.Name)
			}
		}
	case *ast.Ident:
		for _, f := range slices.Backward(at.funcs) {
			if n, ok := parameter(f, e.Name); ok {
				if from, given, bound := at.argument(f, n); bound {
					return c.values(from, given)
				}
				return nil, fmt.Errorf("the parameter %s has no value here", e.Name)
			}
			if values, found, err := c.assigned(at, f, e.Name); found {
				return values, err
			}
		}
		if at.p.path == faultPath {
			return []string{e.Name}, nil // a kind
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
				t, ok := field.Type.(*ast.Ident)
				if ok && slices.ContainsFunc(field.Names, func(n *ast.Ident) bool { return n.Name == x.Name }) {
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
