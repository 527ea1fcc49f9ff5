// Command treecheck checks what the linters do not: it fails when a tracked file is large, holds a private key or names
// the machine that it was made on, when code, contracts or documents use words that this project does not use, when a
// line of a contract or document, a Go file or a function is too long, and when the structure has lost a property that
// it was given (structure.go). `make check` calls it in the root of the repository.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"strings"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	files, err := trackedFiles()
	if err != nil {
		return err
	}
	var problems []error
	tree := structure{tests: map[string]bool{}}
	for _, file := range files {
		content, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed, and the removal is not committed yet
		}
		if err != nil {
			return err
		}
		problems = append(problems, checkSize(file, content), checkKeys(file, content), checkMachine(file, content),
			checkProse(file, content), checkGo(file, content), tree.addGoFile(file, content))
	}
	return errors.Join(append(problems, tree.check())...)
}

// trackedFiles lists the regular files that git knows.
func trackedFiles() ([]string, error) {
	list := exec.Command("git", "ls-files", "--stage", "-z")
	list.Stderr = os.Stderr
	out, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("list the tracked files: %w", err)
	}
	var files []string
	for entry := range bytes.SplitSeq(out, []byte{0}) {
		mode, path, ok := strings.Cut(string(entry), "\t")
		if ok && strings.HasPrefix(mode, "100") {
			files = append(files, path)
		}
	}
	return files, nil
}
