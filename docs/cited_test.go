// Package docs_test checks that nothing refers to a document that does not exist.
package docs_test

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

const (
	moduleRoot = ".."
	// maxTextBytes bounds the files that are searched; a tracked file is smaller (make check).
	maxTextBytes = 1 << 20
)

var (
	// citedDocument is a document as comments and scripts name it, from the module's root.
	citedDocument = regexp.MustCompile(`\bdocs/[\w./-]+\.md\b`)
	// privateDocument is one that is not part of the module.
	privateDocument = regexp.MustCompile(`\b(DESIGN\s+§|(DESIGN|CONTRACT|STYLE|LIBRARIES)\.md)`)
)

// TestNoTextCitesADocumentThatIsNotHere searches code, scripts and documentation.
func TestNoTextCitesADocumentThatIsNotHere(t *testing.T) {
	for _, path := range textFiles(t) {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		for _, cited := range privateDocument.FindAllString(string(text), -1) {
			if filepath.Base(path) != "cited_test.go" {
				t.Errorf("%s cites %q, which is not in the tree", path, cited)
			}
		}
		if filepath.Ext(path) == ".md" {
			continue // its links are checked
		}
		for _, cited := range citedDocument.FindAllString(string(text), -1) {
			if _, err := os.Stat(filepath.Join(moduleRoot, cited)); err != nil {
				t.Errorf("%s cites %s, which is not in the tree", path, cited)
			}
		}
	}
}

// textFiles returns the text files of the module, without what git and the go tool ignore.
func textFiles(t *testing.T) []string {
	t.Helper()
	var paths []string
	err := filepath.WalkDir(moduleRoot, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := entry.Name()
		if entry.IsDir() {
			hidden := strings.HasPrefix(name, ".") && name != moduleRoot
			if hidden || name == "bin" || name == "testdata" || name == "node_modules" {
				return fs.SkipDir
			}
			return nil
		}
		if info, err := entry.Info(); err != nil || !info.Mode().IsRegular() || info.Size() > maxTextBytes {
			return err
		}
		content, err := os.ReadFile(path)
		if err == nil && utf8.Valid(content) && !bytes.ContainsRune(content, 0) {
			paths = append(paths, path)
		}
		return err
	})
	require.NoError(t, err)
	require.NotEmpty(t, paths)
	return paths
}
