package docs_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(data)
}

// The index of decision records lists each of them with its number and title.
func TestTheIndexListsEveryDecision(t *testing.T) {
	index := read(t, "adr/README.md")
	records, err := filepath.Glob("adr/[0-9]*.md")
	require.NoError(t, err)
	require.NotEmpty(t, records)
	for _, record := range records {
		heading, _, _ := strings.Cut(read(t, record), "\n")
		number, title, ok := strings.Cut(strings.TrimPrefix(heading, "# "), ". ")
		require.True(t, ok, "%s: the heading is %q", record, heading)
		file := filepath.Base(record)
		require.Equal(t, strings.TrimLeft(file[:4], "0"), number, record)
		require.Contains(t, index, "| "+number+" | ["+title+"]("+file+") |", record)
	}
	require.Equal(t, len(records), strings.Count(index, "](0"))
}

// CONTRIBUTING names files and, in brackets behind them, what stands in them; all of it is there.
func TestContributingNamesWhatIsThere(t *testing.T) {
	text := strings.Join(strings.Fields(read(t, "../CONTRIBUTING.md")), " ")
	file := regexp.MustCompile("`((?:agent|deploy|docs|e2e|hub|pkg|protocol)(?:/[\\w.-]+)+)`" +
		"(?: \\(((?:`\\w+`(?:, )?)+)\\))?")
	named := 0
	for _, m := range file.FindAllStringSubmatch(text, -1) {
		path := filepath.Join("..", m[1])
		if _, err := os.Stat(path); err != nil {
			t.Errorf("%s is not there", m[1])
			continue
		}
		for name := range strings.SplitSeq(strings.Trim(m[2], "`"), "`, `") {
			if name == "" {
				continue
			}
			named++
			if !regexp.MustCompile(`\b` + name + `\b`).MatchString(read(t, path)) {
				t.Errorf("%s does not name %s", m[1], name)
			}
		}
	}
	require.Greater(t, named, 15)
}

// ARCHITECTURE.md has a place for each package of the module, and names none that is gone.
func TestTheMapNamesEveryPackage(t *testing.T) {
	list := exec.Command("go", "list", "-f", "{{if .GoFiles}}{{.Dir}}{{else if .XTestGoFiles}}{{.Dir}}{{end}}", "./...")
	list.Dir = moduleRoot
	out, err := list.Output()
	require.NoError(t, err)
	root, err := filepath.Abs(moduleRoot)
	require.NoError(t, err)
	var packages []string
	for dir := range strings.FieldsSeq(string(out)) {
		path, err := filepath.Rel(root, dir)
		require.NoError(t, err)
		if path != "docs" && path != "docs/design" { // tests of these pages
			packages = append(packages, path)
		}
	}
	var named []string
	for _, m := range regexp.MustCompile(`\*\*([\w./-]+)\*\*`).FindAllStringSubmatch(read(t, "../ARCHITECTURE.md"), -1) {
		if m[1] != "bootstrap" && m[1] != "systemd" { // without Go code
			named = append(named, m[1])
		}
	}
	require.ElementsMatch(t, packages, named)
}
