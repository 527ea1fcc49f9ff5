// Package design_test keeps the specification in step with the code.
package design_test

import (
	"cmp"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "rewrite the lists of tests in laws.md")

const (
	moduleRoot = "../.."
	lawsFile   = "laws.md"
	lawCount   = 17
)

var (
	lawHeading = regexp.MustCompile(`(?m)^## (\d+)\. `)
	lawTest    = regexp.MustCompile(`^Test(Law\d\d)(AndLaw\d\d)*`)
	lawNumber  = regexp.MustCompile(`Law(\d\d)`)
)

// TestEachLawNamesItsTests parses laws.md and all test files of the module. It fails when a law has no test, a listed
// test does not exist, or a test named after a law is not listed.
func TestEachLawNamesItsTests(t *testing.T) {
	tests := findLawTests(t)
	document, err := os.ReadFile(lawsFile)
	require.NoError(t, err)
	sections := splitLaws(t, string(document))
	require.Len(t, sections, lawCount+1, "laws.md states %d laws", lawCount)

	written := []string{sections[0]}
	for number := 1; number <= lawCount; number++ {
		require.NotEmpty(t, tests[number], "law %d has no test named TestLaw%02d…", number, number)
		statement, _, _ := strings.Cut(sections[number], "\nTests:\n")
		written = append(written, strings.TrimRight(statement, "\n")+"\n\nTests:\n\n"+renderTests(tests[number])+"\n")
	}
	for number := range tests {
		require.True(t, number >= 1 && number <= lawCount, "tests %v name law %d, which laws.md does not state",
			tests[number], number)
	}
	want := strings.TrimRight(strings.Join(written, ""), "\n") + "\n"
	if *update {
		require.NoError(t, os.WriteFile(lawsFile, []byte(want), 0o644))
		return
	}
	require.Equal(t, want, string(document), "the lists of tests are out of step; go test ./docs/design -update "+
		"rewrites them")
}

// splitLaws returns what precedes the first law, and the section of each law in the order of their numbers.
func splitLaws(t *testing.T, document string) []string {
	t.Helper()
	found := lawHeading.FindAllStringSubmatchIndex(document, -1)
	sections := []string{document}
	for i, at := range found {
		number, err := strconv.Atoi(document[at[2]:at[3]])
		require.NoError(t, err)
		require.Equal(t, i+1, number, "laws are numbered in order")
		end := len(document)
		if i+1 < len(found) {
			end = found[i+1][0]
		}
		sections = append(sections, document[at[0]:end])
	}
	if len(found) > 0 {
		sections[0] = document[:found[0][0]]
	}
	return sections
}

// lawTests are the names of the tests of one law by the directory of their package.
type lawTests map[string][]string

func findLawTests(t *testing.T) map[int]lawTests {
	t.Helper()
	out := map[int]lawTests{}
	err := filepath.WalkDir(moduleRoot, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			return skipDirectory(path, entry)
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		directory, err := filepath.Rel(moduleRoot, filepath.Dir(path))
		if err != nil {
			return err
		}
		for _, declaration := range file.Decls {
			function, isFunction := declaration.(*ast.FuncDecl)
			if !isFunction || function.Recv != nil {
				continue
			}
			for _, number := range lawsOf(function.Name.Name) {
				if out[number] == nil {
					out[number] = lawTests{}
				}
				out[number][filepath.ToSlash(directory)] = append(out[number][filepath.ToSlash(directory)], function.Name.Name)
			}
		}
		return nil
	})
	require.NoError(t, err)
	return out
}

// skipDirectory leaves out what git and the go tool ignore.
func skipDirectory(path string, entry fs.DirEntry) error {
	name := entry.Name()
	hidden := strings.HasPrefix(name, ".") && !strings.HasPrefix(name, "..")
	if path != moduleRoot && (hidden || name == "testdata" || name == "node_modules") {
		return fs.SkipDir
	}
	return nil
}

// lawsOf returns the numbers of the laws that a test's name begins with.
func lawsOf(name string) []int {
	var numbers []int
	for _, match := range lawNumber.FindAllStringSubmatch(lawTest.FindString(name), -1) {
		number, _ := strconv.Atoi(match[1]) // two digits
		numbers = append(numbers, number)
	}
	return numbers
}

func renderTests(tests lawTests) string {
	var out strings.Builder
	for _, directory := range slices.SortedFunc(maps.Keys(tests), cmp.Compare[string]) {
		fmt.Fprintf(&out, "* [%s](../../%s)\n", directory, directory)
		for _, name := range slices.Sorted(slices.Values(tests[directory])) {
			fmt.Fprintf(&out, "  * `%s`\n", name)
		}
	}
	return out.String()
}
