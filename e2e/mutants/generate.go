package main

import (
	"fmt"
	"go/ast"
	"go/token"
	"path"
	"regexp"
	"slices"
	"strings"
)

// candidate is one small change of one file.
type candidate struct {
	dir, file, function, kind string
	// ordinal numbers the changes of a kind within the function, so that the name does not depend on lines.
	ordinal    int
	start, end int
	text       string
	line       int
	before     string
}

func (c *candidate) name() string {
	return fmt.Sprintf("%s:%s:%s:%d", path.Join(c.dir, c.file), c.function, c.kind, c.ordinal)
}

// describe shows what is replaced by what, on one line.
func (c *candidate) describe() string {
	return fmt.Sprintf("line %d: %s => %s", c.line, oneLine(c.before), oneLine(c.text))
}

const describedBytes = 100

func oneLine(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	if text == "" {
		return "(nothing)"
	}
	if len(text) > describedBytes {
		return text[:describedBytes] + "…"
	}
	return text
}

// apply returns the file's content with the change.
func (c *candidate) apply(source []byte) []byte {
	return slices.Concat(source[:c.start], []byte(c.text), source[c.end:])
}

// generated is the line by which a file says that a program wrote it.
var generated = regexp.MustCompile(`(?m)^// Code generated .* DO NOT EDIT\.$`)

// candidates are all changes that the tool knows of for the package's files, in their order in the source. Not all of
// them compile.
func (c *checked) candidates() []*candidate {
	var all []*candidate
	for i, file := range c.files {
		if generated.Match(c.sources[i]) {
			continue
		}
		w := &walker{checked: c, name: c.names[i], source: c.sources[i], ordinals: map[string]int{}}
		for _, decl := range file.Decls {
			w.declaration(decl)
		}
		all = append(all, w.found...)
	}
	return all
}

// walker collects the candidates of one file.
type walker struct {
	*checked
	name     string
	source   []byte
	function string
	ordinals map[string]int
	found    []*candidate
}

// described matches functions whose result only people read.
var described = regexp.MustCompile(`^(String|GoString|LogValue|Error|Usage)$`)

func (w *walker) declaration(decl ast.Decl) {
	switch d := decl.(type) {
	case *ast.FuncDecl:
		if d.Body == nil || described.MatchString(d.Name.Name) {
			return
		}
		w.function = d.Name.Name
		if d.Recv != nil && len(d.Recv.List) == 1 {
			w.function = receiver(d.Recv.List[0].Type) + "." + d.Name.Name
		}
		ast.Inspect(d.Body, w.node)
	case *ast.GenDecl:
		for _, spec := range d.Specs {
			if v, ok := spec.(*ast.ValueSpec); ok && len(v.Names) > 0 {
				w.function = v.Names[0].Name
				ast.Inspect(v, w.node)
			}
		}
	}
}

func receiver(e ast.Expr) string {
	switch t := e.(type) {
	case *ast.StarExpr:
		return receiver(t.X)
	case *ast.IndexExpr:
		return receiver(t.X)
	case *ast.Ident:
		return t.Name
	}
	return "?"
}

// replace adds a candidate.
func (w *walker) replace(kind string, from, to token.Pos, text string) {
	start, end := w.fset.Position(from).Offset, w.fset.Position(to).Offset
	key := w.function + ":" + kind
	w.ordinals[key]++
	w.found = append(w.found, &candidate{
		dir: w.dir, file: w.name, function: w.function, kind: kind, ordinal: w.ordinals[key], start: start, end: end,
		text: text, line: w.fset.Position(from).Line, before: string(w.source[start:end]),
	})
}

// text is the source of a node.
func (w *walker) text(n ast.Node) string {
	return string(w.source[w.fset.Position(n.Pos()).Offset:w.fset.Position(n.End()).Offset])
}

// node adds the candidates of one node and says whether those within it are wanted.
func (w *walker) node(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.BinaryExpr:
		w.binary(n)
	case *ast.IfStmt:
		return w.condition(n)
	case *ast.BlockStmt:
		w.statements(n.List)
	case *ast.CaseClause:
		w.statements(n.Body)
	case *ast.CommClause:
		w.statements(n.Body)
	case *ast.CallExpr:
		return w.call(n)
	case *ast.BasicLit:
		w.literal(n)
	case *ast.Ident:
		w.identifier(n)
	case *ast.UnaryExpr:
		if n.Op == token.NOT {
			w.replace("not", n.Pos(), n.X.Pos(), "")
		}
	}
	return true
}

// statements adds what is done to whole statements: one is left out, or two calls change places.
func (w *walker) statements(list []ast.Stmt) {
	for i, s := range list {
		switch s := s.(type) {
		case *ast.ExprStmt:
			if call, ok := s.X.(*ast.CallExpr); ok && !w.withoutEffect(call) {
				w.replace("call", s.Pos(), s.End(), "")
			}
		case *ast.AssignStmt:
			if len(s.Lhs) == 1 && s.Tok != token.DEFINE && keptElsewhere(s.Lhs[0]) {
				w.replace("assign", s.Pos(), s.End(), "")
			}
		case *ast.IncDecStmt:
			w.replace("assign", s.Pos(), s.End(), "")
		case *ast.DeferStmt:
			if !w.withoutEffect(s.Call) {
				w.replace("defer", s.Pos(), s.End(), "")
			}
		}
		if i > 0 && w.isStep(list[i-1]) && w.isStep(s) {
			w.replace("swap", list[i-1].Pos(), s.End(), w.text(s)+"\n"+w.text(list[i-1]))
		}
	}
}

// keptElsewhere reports whether what is assigned outlives the function's own variables.
func keptElsewhere(e ast.Expr) bool {
	switch e.(type) {
	case *ast.SelectorExpr, *ast.IndexExpr, *ast.StarExpr:
		return true
	}
	return false
}

// isStep reports whether the statement is a call, with or without the check of its error.
func (w *walker) isStep(s ast.Stmt) bool {
	switch s := s.(type) {
	case *ast.ExprStmt:
		call, ok := s.X.(*ast.CallExpr)
		return ok && !w.withoutEffect(call)
	case *ast.IfStmt:
		return s.Init != nil && isErrorCheck(s.Cond)
	}
	return false
}

// quiet are calls that change nothing that a test checks: logs, metrics, failpoints and locks. Without a
// lock or unlock Go's own checks stop the program; the race detector finds the rest.
var quiet = regexp.MustCompile(`(^|\.)(log|slog|logger|failpoint|metrics|span|runtime|debug)\.|^(log|cancel|panic)\(|` +
	`\.(Inc|Observe|Debug|Info|Warn|Error|Log|Lock|Unlock|RLock|RUnlock|Close|Done|Wait|WriteHeader|warn|info|logf)` +
	`(Context)?\(|[cC]lose\(|[lL]og[A-Z]?\w*\(|(?i)metric|cancel\w*\(`)

func (w *walker) withoutEffect(call *ast.CallExpr) bool {
	text := w.text(call)
	return quiet.MatchString(text[:strings.IndexByte(text+"(", '(')+1])
}

// onlyLogs reports whether nothing but quiet calls are in a block.
func (w *walker) onlyLogs(block *ast.BlockStmt) bool {
	for _, s := range block.List {
		expr, ok := s.(*ast.ExprStmt)
		if !ok {
			return false
		}
		if call, ok := expr.X.(*ast.CallExpr); !ok || !w.withoutEffect(call) {
			return false
		}
	}
	return true
}

// isErrorCheck reports whether the condition is `err != nil`.
func isErrorCheck(e ast.Expr) bool {
	b, ok := e.(*ast.BinaryExpr)
	if !ok || b.Op != token.NEQ {
		return false
	}
	x, ok := b.X.(*ast.Ident)
	y, isNil := b.Y.(*ast.Ident)
	return ok && isNil && y.Name == "nil" && strings.HasPrefix(strings.ToLower(x.Name), "err")
}

func leaves(block *ast.BlockStmt) bool {
	if len(block.List) == 0 {
		return false
	}
	switch block.List[len(block.List)-1].(type) {
	case *ast.ReturnStmt, *ast.BranchStmt:
		return true
	}
	return false
}
