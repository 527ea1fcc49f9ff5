package docs_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// pages are all documents of the tree.
func pages(t *testing.T) (paths []string) {
	t.Helper()
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "node_modules" || len(d.Name()) > 2 && strings.HasPrefix(d.Name(), ".")):
			return filepath.SkipDir
		case filepath.Ext(path) == ".md":
			paths = append(paths, path)
		}
		return nil
	})
	require.NoError(t, err)
	require.Greater(t, len(paths), 30)
	return paths
}

// prose is a page without its fenced blocks.
func prose(text string) string {
	parts := strings.Split("\n"+text, "\n```")
	var out strings.Builder
	for i, part := range parts {
		if i%2 == 0 {
			out.WriteString(part + "\n")
		}
	}
	return out.String()
}

// anchors are the fragments of a page's headings, as GitHub makes them.
func anchors(text string) (all []string) {
	for line := range strings.Lines(prose(text)) {
		if !strings.HasPrefix(line, "#") {
			continue
		}
		heading := strings.ToLower(strings.TrimSpace(strings.TrimLeft(line, "#")))
		heading = regexp.MustCompile(`[^\p{L}\p{N} _-]`).ReplaceAllString(heading, "")
		all = append(all, strings.ReplaceAll(heading, " ", "-"))
	}
	return all
}

// Every link between documents leads to a file of the tree, and to a heading of it where it names one.
func TestLinksLeadSomewhere(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^()\s]+)\)`)
	for _, page := range pages(t) {
		for _, m := range link.FindAllStringSubmatch(prose(read(t, page)), -1) {
			target, fragment, _ := strings.Cut(m[1], "#")
			if strings.Contains(target, "://") {
				continue
			}
			path := page
			if target != "" {
				path = filepath.Join(filepath.Dir(page), target)
			}
			if _, err := os.Stat(path); err != nil {
				t.Errorf("%s: %s is not there", page, m[1])
				continue
			}
			if fragment != "" && !slices.Contains(anchors(read(t, path)), fragment) {
				t.Errorf("%s: %s has no heading %s", page, target, fragment)
			}
		}
	}
}
