// Command treecheck checks what the linters do not: it fails when a tracked file is large, holds a private key or names
// the machine that it was made on, when code or documents use words that this project does not use, when a Go file or
// function is too long, and when the structure has lost a property that it was given (structure.go). What stands in
// baseline.txt is tolerated until it is mended; the counts there may only fall. `make check` calls it in the root of
// the repository.
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"strings"
)

const baselineFile = "deploy/treecheck/baseline.txt"

func main() {
	update := flag.Bool("update", false, "write the present counts into "+baselineFile+" where they have fallen")
	list := flag.Bool("list", false, "print the words that are counted")
	flag.Parse()
	if err := run(*update, *list); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(update, list bool) error {
	files, err := trackedFiles()
	if err != nil {
		return err
	}
	var problems []error
	found, tree := counts{}, structure{tests: map[string]bool{}}
	for _, file := range files {
		content, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed, and the removal is not committed yet
		}
		if err != nil {
			return err
		}
		problems = append(problems, checkSize(file, content), checkKeys(file, content), checkMachine(file, content),
			checkProse(file, content), tree.addGoFile(file, content))
		words, err := found.addGoFile(file, content)
		if err != nil {
			return err
		}
		if list && len(words) > 0 {
			fmt.Printf("%s: %s\n", file, strings.Join(words, ", "))
		}
	}
	problems = append(problems, tree.check())
	before, err := readBaseline(baselineFile)
	if err != nil {
		return err
	}
	if update {
		if err := before.replaceBy(found, baselineFile); err != nil {
			return err
		}
		before = found
	}
	return errors.Join(append(problems, found.compare(before))...)
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
