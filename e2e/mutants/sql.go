package main

import (
	"go/ast"
	"go/token"
	"regexp"
	"strings"
)

var (
	// isSQL recognises statements and parts of statements: the project writes keywords in capitals.
	isSQL = regexp.MustCompile(`\b(SELECT|UPDATE|DELETE FROM|INSERT INTO|WHERE|JOIN)\b`)
	// conjunction begins a condition.
	conjunction = regexp.MustCompile(`\b(WHERE|AND)\s+`)
	// conditionEnd is a word that cannot be part of a condition at its own depth.
	conditionEnd = regexp.MustCompile(`^(AND|ORDER|GROUP|LIMIT|FOR|RETURNING|UNION|WHERE|JOIN|LEFT|HAVING|OFFSET|THEN|` +
		`SET|ON|INNER|CROSS|WINDOW|EXCEPT|DO|WHEN|ELSE|END)\b`)
	comparison = regexp.MustCompile(`\s(<=|>=|<|>)\s`)
	nullCheck  = regexp.MustCompile(`\bIS (NOT )?NULL\b`)
	rowLock    = regexp.MustCompile(`\s+FOR (UPDATE|SHARE|NO KEY UPDATE)( OF [a-z_, ]+)?( SKIP LOCKED| NOWAIT)?`)
	descending = regexp.MustCompile(`\s+DESC\b`)
	between    = regexp.MustCompile(`\bBETWEEN\b`)
)

// statementOfSQL adds the changes of a string that holds SQL. A condition that is left out keeps its parameters, so
// that the statement is still valid.
func (w *walker) statementOfSQL(n *ast.BasicLit) {
	if !isSQL.MatchString(n.Value) {
		return
	}
	at := func(offset int) token.Pos { return n.Pos() + token.Pos(offset) }
	replaceAll := func(kind string, pattern *regexp.Regexp, with func(string) string) {
		for _, m := range pattern.FindAllStringIndex(n.Value, -1) {
			w.replace(kind, at(m[0]), at(m[1]), with(n.Value[m[0]:m[1]]))
		}
	}
	for _, m := range conjunction.FindAllStringIndex(n.Value, -1) {
		if condition := conditionAt(n.Value[m[1] : len(n.Value)-1]); condition != "" && !inBetween(n.Value[:m[0]]) {
			end := m[1] + len(condition)
			w.replace("sql-condition", at(m[1]), at(end), "("+condition+" OR true)")
		}
	}
	replaceAll("sql-boundary", comparison, func(s string) string {
		other := map[string]string{"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
		return " " + other[strings.TrimSpace(s)] + " "
	})
	replaceAll("sql-null", nullCheck, func(s string) string {
		if s == "IS NULL" {
			return "IS NOT NULL"
		}
		return "IS NULL"
	})
	replaceAll("sql-lock", rowLock, func(string) string { return "" })
	replaceAll("sql-order", descending, func(string) string { return "" })
}

// conditionAt is the condition with which the text begins, or "" if it does not end within the text.
func conditionAt(text string) string {
	depth, quoted, end := 0, false, len(text)
scan:
	for i := range len(text) {
		switch c := text[i]; {
		case c == '\'':
			quoted = !quoted
		case quoted:
		case c == '(':
			depth++
		case c == ')':
			depth--
			if depth < 0 {
				end = i
				break scan
			}
		case c == ',' && depth == 0:
			end = i
			break scan
		case depth == 0 && c >= 'A' && c <= 'Z' && (i == 0 || strings.IndexByte(" \n\t(", text[i-1]) >= 0) &&
			conditionEnd.MatchString(text[i:]) && !inBetween(text[:i]):
			end = i
			break scan
		}
	}
	if depth > 0 || quoted {
		return ""
	}
	condition := strings.TrimSpace(text[:end])
	if condition == "" || !endsCondition.MatchString(condition) {
		return ""
	}
	return condition
}

// endsCondition is the last character of a complete condition: the text may be continued by another string.
var endsCondition = regexp.MustCompile(`[\w)'\]]$`)

// inBetween reports whether the AND that follows belongs to a BETWEEN.
func inBetween(before string) bool {
	last := between.FindAllStringIndex(before, -1)
	return len(last) > 0 && !strings.Contains(before[last[len(last)-1][1]:], "AND")
}
