package main

import (
	"errors"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"
)

// maxColumns bounds the lines of documents, as lll does those of Go files.
const maxColumns = 120

var (
	// unwantedProse is a word or phrase of a document that this project has a plain word for.
	unwantedProse = regexp.MustCompile(`(?i)\b(whoever|somebody|heard|greet(s|ed)?|brought|walls|lull|breath|calm|crowd|` +
		`lanes?|beats?|truth|witness|yesterday|mortal|of the moment|is wanted|which of it|is told|enrols?|enrolment)\b`)
	codeSpan = regexp.MustCompile("`[^`]*`")
)

// plainKinds are the endings of files, besides Go and Markdown, of which each line is checked.
func plainKinds() []string { return []string{".proto", ".yaml", ".yml"} }

// checkProse reports unwanted words and long lines of a Markdown, protobuf or YAML file that is written by hand. In
// Markdown, tables and fenced blocks may hold any word, tables any length.
func checkProse(file string, content []byte) error {
	markdown := path.Ext(file) == ".md"
	if !markdown && !slices.Contains(plainKinds(), path.Ext(file)) || strings.HasPrefix(file, "docs/reference/") {
		return nil
	}
	var problems []error
	fenced, number := false, 0
	for line := range strings.Lines(string(content)) {
		line, number = strings.TrimRight(line, "\n"), number+1
		if markdown && strings.HasPrefix(strings.TrimSpace(line), "```") {
			fenced = !fenced
		}
		if table := markdown && strings.HasPrefix(line, "|"); !table && utf8.RuneCountInString(line) > maxColumns {
			problems = append(problems, fmt.Errorf("%s:%d has more than %d columns", file, number, maxColumns))
		}
		if fenced {
			continue
		}
		for _, word := range unwantedProse.FindAllString(codeSpan.ReplaceAllString(line, ""), -1) {
			problems = append(problems, fmt.Errorf("%s:%d uses %q, which this project does not", file, number, word))
		}
	}
	return errors.Join(problems...)
}
