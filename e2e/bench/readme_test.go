package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// bench/README.md describes every row and every line of bench/results.json, and none that is gone. Lines of a long row
// may be described before they are first measured.
func TestTheReadmeDescribesEveryLineOfTheResults(t *testing.T) {
	read := func(name string) []byte {
		data, err := os.ReadFile(filepath.Join("..", "..", "bench", name))
		require.NoError(t, err)
		return data
	}
	var kept report
	require.NoError(t, json.Unmarshal(read("results.json"), &kept))
	_, table, found := strings.Cut(string(read("README.md")), "## Rows\n")
	require.True(t, found)
	var described, again []string
	for line := range strings.Lines(table) {
		cells := strings.Split(line, "|")
		if len(cells) < 6 || !strings.Contains(cells[2], "`") {
			continue
		}
		for _, name := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(cells[2], -1) {
			described = append(described, name[1])
		}
		if pick, ok := strings.CutPrefix(strings.Trim(cells[5], " `"), "make bench ROW="); ok {
			again = append(again, pick)
		}
	}
	var lines []string
	for _, r := range kept.Results {
		lines = append(lines, r.Name)
	}
	require.Subset(t, described, lines)
	for _, line := range described {
		if !slices.Contains(lines, line) {
			require.True(t, slices.ContainsFunc(rows(), func(r Row) bool {
				return r.Long && (line == r.Name || strings.HasPrefix(line, r.Name+"."))
			}), "%s is not in the results", line)
		}
	}
	var known []string
	for n, row := range rows() {
		known = append(known, row.Name)
		require.Greater(t, len(again), n, "row %s has no command", row.Name)
		chosen, err := regexp.Compile(again[n])
		require.NoError(t, err)
		picked := slices.DeleteFunc(rows(), func(r Row) bool { return !chosen.MatchString(r.Name) })
		require.Len(t, picked, 1, "ROW=%s", again[n])
		require.Equal(t, row.Name, picked[0].Name)
	}
	require.Len(t, again, len(known))
}
