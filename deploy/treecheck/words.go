package main

import (
	"bytes"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path"
	"regexp"
	"slices"
	"strings"
	"unicode"
)

const (
	// maxFileLines and maxFunctionLines bound what is written by hand; a function's comments do not count.
	maxFileLines     = 500
	maxFunctionLines = 70
)

var (
	// unwantedName is a part of an identifier or of a file's name that this project has a plain word for.
	unwantedName = regexp.MustCompile(`^(whoever|heard|greet(s|ed)?|bring(s)?|brought|walls|look(s|ed)?|lull|breath|` +
		`calm|crowd|lanes?|beats?|doors?|truth|witness|yesterday|mortal|enrols?|enrolment)$`)
	// unwantedText is a word or phrase of a comment that this project has a plain word for.
	unwantedText = regexp.MustCompile(`(?i)\b(whoever|somebody|heard|greet(s|ed)?|bring(s|ing)?|brought|walls|` +
		`look(s|ed|ing)?|lull|breath|calm|crowd|lanes?|beats?|doors?|truth|witness|yesterday|mortal|` +
		`of the moment|is wanted|which of it|is told|enrols?|enrolment)\b`)
	// generatedMark is the line that generators write (https://go.dev/s/generatedcode).
	generatedMark = regexp.MustCompile(`(?m)^// Code generated .* DO NOT EDIT\.$`)
)

// checkGo reports unwanted words, long functions and the length of a Go file that is written by hand.
func checkGo(file string, content []byte) error {
	if path.Ext(file) != ".go" || generatedMark.Match(content) {
		return nil
	}
	var problems []error
	if lines := bytes.Count(content, []byte("\n")); lines > maxFileLines {
		problems = append(problems, fmt.Errorf("%s has %d lines, a file has at most %d: find its second subject", file, lines,
			maxFileLines))
	}
	files := token.NewFileSet()
	parsed, err := parser.ParseFile(files, file, content, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	for name, lines := range longFunctions(files, parsed, content) {
		problems = append(problems, fmt.Errorf("%s: %s has %d lines, a function has at most %d: find its second step", file,
			name, lines, maxFunctionLines))
	}
	for _, line := range skips(files, parsed) {
		if !strings.HasPrefix(file, "e2e/skip/") {
			problems = append(problems, fmt.Errorf("%s:%d skips a test: package e2e/skip does that", file, line))
		}
	}
	for _, word := range unwantedWords(file, parsed) {
		problems = append(problems, fmt.Errorf("%s uses %q, which this project does not", file, word))
	}
	return errors.Join(problems...)
}

// skips are the lines in which a test is skipped.
func skips(files *token.FileSet, parsed *ast.File) (lines []int) {
	ast.Inspect(parsed, func(n ast.Node) bool {
		call, _ := n.(*ast.CallExpr)
		if call == nil {
			return true
		}
		method, _ := call.Fun.(*ast.SelectorExpr)
		if method == nil || !slices.Contains([]string{"Skip", "Skipf", "SkipNow"}, method.Sel.Name) {
			return true
		}
		if of, _ := method.X.(*ast.Ident); of != nil && slices.Contains([]string{"t", "b", "f", "tb"}, of.Name) {
			lines = append(lines, files.Position(call.Pos()).Line)
		}
		return true
	})
	return lines
}

// longFunctions are the functions above the limit, with the lines of their bodies.
func longFunctions(files *token.FileSet, parsed *ast.File, content []byte) map[string]int {
	lines := strings.Split(string(content), "\n")
	long := map[string]int{}
	for _, declaration := range parsed.Decls {
		function, ok := declaration.(*ast.FuncDecl)
		if !ok || function.Body == nil {
			continue
		}
		count := 0
		for n := files.Position(function.Body.Lbrace).Line + 1; n < files.Position(function.Body.Rbrace).Line; n++ {
			if !strings.HasPrefix(strings.TrimSpace(lines[n-1]), "//") {
				count++
			}
		}
		if count > maxFunctionLines {
			long[function.Name.Name] = count
		}
	}
	return long
}

// unwantedWords finds the words in the file's name, in the names that it declares and in its comments. Strings belong
// to what users read and are not searched.
func unwantedWords(file string, parsed *ast.File) []string {
	var words []string
	addName := func(name string) {
		for part := range strings.FieldsFuncSeq(splitCamelCase(name), func(r rune) bool { return !unicode.IsLetter(r) }) {
			if unwantedName.MatchString(strings.ToLower(part)) {
				words = append(words, name)
			}
		}
	}
	addName(strings.TrimSuffix(path.Base(file), ".go"))
	addName(parsed.Name.Name)
	ast.Inspect(parsed, func(node ast.Node) bool {
		for _, name := range declaredNames(node) {
			addName(name.Name)
		}
		return true
	})
	for _, group := range parsed.Comments {
		var text []string
		for _, comment := range group.List {
			text = append(text, strings.Fields(strings.TrimPrefix(comment.Text, "//"))...)
		}
		words = append(words, unwantedText.FindAllString(strings.Join(text, " "), -1)...)
	}
	return words
}

// declaredNames are the names that a node declares; names of other packages' declarations are theirs to choose.
func declaredNames(node ast.Node) []*ast.Ident {
	var expressions []ast.Expr
	switch n := node.(type) {
	case *ast.FuncDecl:
		return []*ast.Ident{n.Name}
	case *ast.TypeSpec:
		return []*ast.Ident{n.Name}
	case *ast.ValueSpec:
		return n.Names
	case *ast.Field:
		return n.Names
	case *ast.AssignStmt:
		if n.Tok == token.DEFINE {
			expressions = n.Lhs
		}
	case *ast.RangeStmt:
		if n.Tok == token.DEFINE {
			expressions = []ast.Expr{n.Key, n.Value}
		}
	}
	var names []*ast.Ident
	for _, e := range expressions {
		if name, ok := e.(*ast.Ident); ok {
			names = append(names, name)
		}
	}
	return names
}

// splitCamelCase separates the words of a name: "nodeState" is "node State", "HTTPServer" is "HTTP Server".
func splitCamelCase(name string) string {
	var out strings.Builder
	letters := []rune(name)
	for i, r := range letters {
		afterLower := i > 0 && !unicode.IsUpper(letters[i-1])
		beforeLower := i > 0 && i+1 < len(letters) && unicode.IsLower(letters[i+1])
		if unicode.IsUpper(r) && (afterLower || beforeLower) {
			out.WriteByte(' ')
		}
		out.WriteRune(r)
	}
	return out.String()
}
