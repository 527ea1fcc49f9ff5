package main

import (
	"go/ast"
	"go/token"
	"go/types"
	"regexp"
	"strconv"
)

// kindWeights say how often a kind is chosen, compared with the others. Checks of errors are most of the conditions in
// Go, and guard against what only injected faults cause.
func kindWeights() map[string]float64 {
	return map[string]float64{
		"boundary": 4, "operand": 4, "guard": 4, "branch": 3, "always": 0.5, "and-or": 2, "equality": 2, "not": 2,
		"call": 3, "assign": 3, "swap": 1.5, "defer": 0.5, "sync": 20, "bool": 1.5, "minmax": 4, "constant": 0.5,
		"arithmetic": 1, "unchecked": 0.4,
		"sql-condition": 5, "sql-boundary": 6, "sql-null": 2, "sql-lock": 0.5, "sql-order": 2,
	}
}

// swapped are the operators that change places.
func swapped(op token.Token) (kind, text string) {
	switch op {
	case token.LSS:
		return "boundary", "<="
	case token.LEQ:
		return "boundary", "<"
	case token.GTR:
		return "boundary", ">="
	case token.GEQ:
		return "boundary", ">"
	case token.EQL:
		return "equality", "!="
	case token.NEQ:
		return "equality", "=="
	case token.LAND:
		return "and-or", "||"
	case token.LOR:
		return "and-or", "&&"
	case token.ADD:
		return "arithmetic", "-"
	case token.SUB:
		return "arithmetic", "+"
	default:
		return "", ""
	}
}

func (w *walker) binary(n *ast.BinaryExpr) {
	kind, text := swapped(n.Op)
	if kind == "" || isErrorCheck(n) || kind == "arithmetic" && !w.isNumber(n) {
		return
	}
	opEnd := n.OpPos + token.Pos(len(n.Op.String()))
	w.replace(kind, n.OpPos, opEnd, text)
	if n.Op == token.LAND || n.Op == token.LOR {
		w.replace("operand", n.Pos(), n.Y.Pos(), "")
		w.replace("operand", n.X.End(), n.End(), "")
	}
}

func (w *walker) isNumber(e ast.Expr) bool {
	t := w.info.TypeOf(e)
	if t == nil {
		return false
	}
	basic, ok := t.Underlying().(*types.Basic)
	return ok && basic.Info()&types.IsNumeric != 0 && w.info.Types[e].Value == nil
}

// condition adds what is done to an if statement: it never applies, or always.
func (w *walker) condition(n *ast.IfStmt) bool {
	if w.onlyLogs(n.Body) && n.Else == nil {
		return false
	}
	cond := w.text(n.Cond)
	switch {
	case isErrorCheck(n.Cond):
		w.replace("unchecked", n.Cond.Pos(), n.Cond.End(), "false && "+cond)
	case leaves(n.Body):
		w.replace("guard", n.Cond.Pos(), n.Cond.End(), "false && ("+cond+")")
	default:
		w.replace("branch", n.Cond.Pos(), n.Cond.End(), "false && ("+cond+")")
		w.replace("always", n.Cond.Pos(), n.Cond.End(), "true || ("+cond+")")
	}
	return true
}

// syncs are the calls that make a write durable and return an error or nothing.
var syncs = regexp.MustCompile(`^[sS]ync$|^Fsync$|^Fdatasync$|^[sS]yncDir\w*$|^SyncFile$`)

// call adds a sync that does not happen, and min for max. It does not enter calls that only log.
func (w *walker) call(n *ast.CallExpr) bool {
	if w.withoutEffect(n) {
		_, isFunc := n.Fun.(*ast.FuncLit)
		return isFunc
	}
	name := ""
	switch f := n.Fun.(type) {
	case *ast.Ident:
		name = f.Name
	case *ast.SelectorExpr:
		name = f.Sel.Name
	}
	if syncs.MatchString(name) {
		if t := w.info.TypeOf(n); t != nil && t.String() == "error" {
			w.replace("sync", n.Pos(), n.End(), "error(nil)")
		}
	}
	if f, ok := n.Fun.(*ast.Ident); ok {
		if _, builtin := w.info.Uses[f].(*types.Builtin); builtin && (name == "min" || name == "max") {
			other := map[string]string{"min": "max", "max": "min"}[name]
			w.replace("minmax", f.Pos(), f.End(), other)
		}
	}
	return true
}

// maxConstant is the largest number that is changed by one: larger ones are sizes and limits of which one more or less
// is as good.
const maxConstant = 20

func (w *walker) literal(n *ast.BasicLit) {
	if n.Kind == token.INT {
		if v, err := strconv.ParseInt(n.Value, 0, 64); err == nil && v <= maxConstant {
			w.replace("constant", n.Pos(), n.End(), strconv.FormatInt(v+1, 10))
		}
	}
	if n.Kind == token.STRING {
		w.statementOfSQL(n)
	}
}

// identifier adds true for false and the other way round.
func (w *walker) identifier(n *ast.Ident) {
	if w.info.Uses[n] == types.Universe.Lookup("true") {
		w.replace("bool", n.Pos(), n.End(), "false")
	}
	if w.info.Uses[n] == types.Universe.Lookup("false") {
		w.replace("bool", n.Pos(), n.End(), "true")
	}
}
