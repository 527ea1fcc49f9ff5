package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const source = `package p

type file struct{ n int }

func (f *file) Sync() error { return nil }

func (f *file) put(a, b int, err error) (bool, error) {
	if err != nil {
		return false, err
	}
	if a < b && b != 3 {
		f.n = max(a, b)
	}
	touch()
	other()
	return true, f.Sync()
}

func touch() {}
func other() {}

const query = ` + "`SELECT x FROM t WHERE a = $1 AND (b < $2 OR c IS NULL) AND d BETWEEN 1 AND 2 FOR UPDATE`" + `
`

func parsed(t *testing.T, text string) *checked {
	t.Helper()
	c := &checked{dir: "p", path: "p", fset: token.NewFileSet(), names: []string{"p.go"}, sources: [][]byte{[]byte(text)}}
	file, err := parser.ParseFile(c.fset, "p.go", text, parser.ParseComments)
	require.NoError(t, err)
	c.files = []*ast.File{file}
	require.NoError(t, c.types())
	return c
}

// changes are the candidates as the tests read them.
func changes(c *checked) (all []string) {
	for _, m := range c.candidates() {
		all = append(all, m.function+" "+m.kind+" "+oneLine(m.before)+" => "+oneLine(m.text))
	}
	return all
}

func TestEachKindOfChangeIsMade(t *testing.T) {
	require.ElementsMatch(t, []string{
		"file.put unchecked err != nil => false && err != nil",
		"file.put bool false => true",
		"file.put branch a < b && b != 3 => false && (a < b && b != 3)",
		"file.put always a < b && b != 3 => true || (a < b && b != 3)",
		"file.put and-or && => ||",
		"file.put operand a < b && => (nothing)",
		"file.put operand && b != 3 => (nothing)",
		"file.put boundary < => <=",
		"file.put equality != => ==",
		"file.put constant 3 => 4",
		"file.put assign f.n = max(a, b) => (nothing)",
		"file.put minmax max => min",
		"file.put call touch() => (nothing)",
		"file.put call other() => (nothing)",
		"file.put swap touch() other() => other() touch()",
		"file.put bool true => false",
		"file.put sync f.Sync() => error(nil)",
		"query sql-condition a = $1 => (a = $1 OR true)",
		"query sql-condition (b < $2 OR c IS NULL) => ((b < $2 OR c IS NULL) OR true)",
		"query sql-condition d BETWEEN 1 AND 2 => (d BETWEEN 1 AND 2 OR true)",
		"query sql-boundary < => <=",
		"query sql-null IS NULL => IS NOT NULL",
		"query sql-lock FOR UPDATE => (nothing)",
	}, changes(parsed(t, source)))
}

func TestNamesAndRanksDoNotDependOnOtherFunctions(t *testing.T) {
	chosen := func(text string) (names []string) {
		c := parsed(t, text)
		for _, m := range choose(c.candidates(), 2, seed, func(*candidate) bool { return true }) {
			names = append(names, m.name())
		}
		return names
	}
	before := chosen(source)
	require.Len(t, before, 2)
	moved := strings.Replace(source, "type file", "// A comment.\nfunc unrelated() int { return 30 }\n\ntype file", 1)
	require.Equal(t, before, chosen(moved))
}

func TestOnlyWhatCompilesIsChosen(t *testing.T) {
	c := parsed(t, "package p\n\nfunc f(a bool) int {\n\tif a {\n\t\treturn 1\n\t}\n\tpanic(a)\n}\n")
	for _, m := range c.candidates() {
		require.True(t, c.compiles("p.go", m.apply(c.sources[0])), m.describe())
	}
	require.False(t, c.compiles("p.go", []byte("package p\n\nfunc f() int {}\n")))
	none := choose(c.candidates(), 5, seed, func(*candidate) bool { return false })
	require.Empty(t, none)
}

func TestAFunctionHasNoMoreThanItsShare(t *testing.T) {
	all := parsed(t, source).candidates()
	chosen := choose(all, len(all), seed, func(*candidate) bool { return true })
	require.Len(t, chosen, 2*maxInFunction)
	require.Len(t, slices.CompactFunc(chosen, func(a, b *candidate) bool { return a == b }), 2*maxInFunction)
}

func TestConditionsOfSQLEndWhereTheyEnd(t *testing.T) {
	for text, want := range map[string]string{
		"a = $1 ORDER BY b":               "a = $1",
		"a IN (SELECT b FROM c) AND d":    "a IN (SELECT b FROM c)",
		"a = $1)":                         "a = $1",
		"a = $1 OR b = $2 LIMIT 1":        "a = $1 OR b = $2",
		"a <> 'AND ORDER'":                "a <> 'AND ORDER'",
		"a = ANY(":                        "",
		"a = ":                            "",
		"x.a = y.a\n\t\tGROUP BY x.a":     "x.a = y.a",
		"a = $1 THEN b ELSE c END, other": "a = $1",
	} {
		require.Equal(t, want, conditionAt(text), text)
	}
}

func TestAPatchNamesItsLawAndWhatMustNotice(t *testing.T) {
	const diff = "\n--- a/x.go\n+++ b/x.go\n@@ -1 +1 @@\n-a\n+b\n"
	m, err := parse("x", []byte("Law: 3\nBreaks: it\nTest: ./p TestX\nSuite: ./q\nE2E: ./e2e/r TestY\n"+diff))
	require.NoError(t, err)
	require.Equal(t, []lawTest{{"./p", "TestX"}}, m.tests)
	require.Equal(t, []string{"./q"}, m.suites)
	require.Equal(t, []lawTest{{"./e2e/r", "TestY"}}, m.e2e)
	require.Equal(t, []string{"x.go"}, m.files)
	for _, bad := range []string{"Breaks: it\n", "Test: ./p T\n", "Breaks: it\nTest: T\n"} {
		_, err := parse("x", []byte("Law: 3\n"+bad+diff))
		require.Error(t, err)
	}
	_, err = parse("x", []byte("Law: 3\nBreaks: it\nTest: ./p T\n\n--- a/x\n+++ b/../x\n"))
	require.ErrorContains(t, err, "outside")
}

func TestTheShortSampleHasAFewPatchesOfEachLaw(t *testing.T) {
	all, err := load(".", regexp.MustCompile(""))
	require.NoError(t, err)
	of := func(patches []mutant) map[string][]string {
		names := map[string][]string{}
		for _, m := range patches {
			names[m.law] = append(names[m.law], m.name)
		}
		return names
	}
	whole, short := of(all), of(someOfEachLaw(all, 2, seed))
	require.Greater(t, len(whole), 10)
	for law, names := range whole {
		require.Len(t, short[law], min(len(names), 2), law)
		require.Subset(t, names, short[law])
	}
	// A patch of another law changes nothing.
	for law := range whole {
		without := slices.DeleteFunc(slices.Clone(all), func(m mutant) bool { return m.law == law })
		rest := of(someOfEachLaw(without, 2, seed))
		require.Empty(t, rest[law])
		for other := range rest {
			require.Equal(t, short[other], rest[other])
		}
	}
}
