package api_test

import (
	"errors"
	"fmt"
	"go/ast"
	"go/token"
	"slices"
	"strconv"
	"strings"
)

// values are all strings that the expression may have; a literal counts only as the value of a constant.
func (c *collector) values(at place, e ast.Expr) ([]string, error) {
	switch e := e.(type) {
	case *ast.BasicLit:
		return nil, fmt.Errorf("%s is a literal; declare a constant of the type fault.Code", e.Value)
	case *ast.ParenExpr:
		return c.values(at, e.X)
	case *ast.CallExpr:
		id, ok := e.Fun.(*ast.Ident)
		if len(e.Args) == 1 && (ok && id.Name == "string" || c.names(at, e.Fun, "Code")) {
			return c.values(at, e.Args[0])
		}
	case *ast.IndexExpr:
		if table, ok := e.X.(*ast.CompositeLit); ok {
			return c.elements(at, table)
		}
	case *ast.SelectorExpr:
		if x, ok := e.X.(*ast.Ident); ok {
			if imported(at.file, x.Name) == faultPath && !strings.HasPrefix(e.Sel.Name, "Code") {
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
		if at.p.path == faultPath && !strings.HasPrefix(e.Name, "Code") {
			return []string{e.Name}, nil // a kind
		}
		return c.constant(at.p, e.Name)
	}
	return nil, fmt.Errorf("cannot tell the values of this %T", e)
}

// elements are the values of a table.
func (c *collector) elements(at place, table *ast.CompositeLit) (all []string, failed error) {
	for _, e := range table.Elts {
		kv, ok := e.(*ast.KeyValueExpr)
		if !ok {
			return nil, errors.New("a table without keys")
		}
		values, err := c.values(at, kv.Value)
		if err != nil {
			return nil, err
		}
		all = append(all, values...)
	}
	return all, nil
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
		if lit, ok := d.value.(*ast.BasicLit); ok && d.name == name {
			value, err := strconv.Unquote(lit.Value)
			return []string{value}, err
		}
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

// meanings are the comments of the constants of the type fault.Code, by their values.
func (c *collector) meanings() (map[string]string, error) {
	all := map[string]string{}
	for _, p := range c.packages {
		for _, d := range constants(p) {
			if !c.names(d.at, d.spec.Type, "Code") {
				continue
			}
			values, err := c.values(d.at, ast.NewIdent(d.name))
			if err != nil {
				return nil, err
			}
			meaning, found := strings.CutPrefix(strings.ReplaceAll(d.spec.Doc.Text(), "\n", " "), d.name+": ")
			if _, again := all[values[0]]; again || !found {
				return nil, fmt.Errorf("%s.%s has no comment, or its code is declared twice", p.path, d.name)
			}
			all[values[0]] = meaning
		}
	}
	return all, nil
}
