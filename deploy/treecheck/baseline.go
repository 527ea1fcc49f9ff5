package main

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
)

// key names one count: the unwanted words of a package, or the lines of a file or function that is too long.
type key struct{ kind, place string }

// counts are what is wrong in the tree. A missing key is 0.
type counts map[key]int

// total counts the words of all packages, or the files or functions that are too long.
func (c counts) total(kind string) (sum int) {
	for k, n := range c {
		switch {
		case k.kind != kind:
		case kind == "words":
			sum += n
		default:
			sum++
		}
	}
	return sum
}

// compare returns an error for each count that has risen, and for each that has fallen without the baseline.
func (c counts) compare(baseline counts) error {
	all := map[key]bool{}
	for k := range c {
		all[k] = true
	}
	for k := range baseline {
		all[k] = true
	}
	var problems []error
	for _, k := range slices.SortedFunc(maps.Keys(all), compareKeys) {
		switch have, allowed := c[k], baseline[k]; {
		case have > allowed && k.kind == "lines":
			problems = append(problems, fmt.Errorf("%s has %d lines, a file has at most %d: find its second subject",
				k.place, have, maxFileLines))
		case have > allowed && k.kind == "function":
			problems = append(problems, fmt.Errorf("%s has %d lines, a function has at most %d: find its second step",
				k.place, have, maxFunctionLines))
		case have > allowed:
			problems = append(problems, fmt.Errorf("%s uses %d words that this project does not use (see %s), %d are allowed",
				k.place, have, "deploy/treecheck/words.go", allowed))
		case have < allowed:
			problems = append(problems, fmt.Errorf("%s %s has fallen from %d to %d: "+
				"go run ./deploy/treecheck -update lowers the baseline", k.kind, k.place, allowed, have))
		}
	}
	return errors.Join(problems...)
}

func compareKeys(a, b key) int {
	return cmp.Or(cmp.Compare(a.kind, b.kind), cmp.Compare(a.place, b.place))
}

// replaceBy writes the present counts. No kind may have risen in all; packages may be renamed and files moved.
func (c counts) replaceBy(present counts, file string) error {
	for _, kind := range []string{"function", "lines", "words"} {
		if len(c) > 0 && present.total(kind) > c.total(kind) {
			return fmt.Errorf("the baseline only falls: %s would rise from %d to %d", kind, c.total(kind), present.total(kind))
		}
	}
	if len(present) == 0 {
		err := os.Remove(file)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	var out strings.Builder
	for _, k := range slices.SortedFunc(maps.Keys(present), compareKeys) {
		fmt.Fprintf(&out, "%s %s %d\n", k.kind, k.place, present[k])
	}
	return os.WriteFile(file, []byte(out.String()), 0o600)
}

func readBaseline(file string) (counts, error) {
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return counts{}, nil
	}
	if err != nil {
		return nil, err
	}
	c := counts{}
	for line := range strings.Lines(string(text)) {
		var k key
		var n int
		if _, err := fmt.Sscanf(line, "%s %s %d\n", &k.kind, &k.place, &n); err != nil {
			return nil, fmt.Errorf("%s: line %q: %w", file, line, err)
		}
		c[k] = n
	}
	return c, nil
}
