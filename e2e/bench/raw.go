package main

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// minForP99 is how many samples a 99th percentile needs; of fewer it would be the slowest one.
const minForP99 = 100

// honest takes away a 99th percentile of too few samples.
func (r Result) honest() Result {
	if r.N < minForP99 {
		r.P99 = 0
	}
	return r
}

// keepRaw writes the samples of each line into a file of its own, one a line, in the order in which they were taken.
func keepRaw(dir string, results []Result) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	var errs []error
	for _, r := range results {
		var text strings.Builder
		for _, v := range r.raw {
			text.WriteString(strconv.FormatFloat(v, 'g', 6, 64) + "\n")
		}
		if len(r.raw) > 0 {
			errs = append(errs, os.WriteFile(filepath.Join(dir, r.Name+".txt"), []byte(text.String()), 0o644))
		}
	}
	return errors.Join(errs...)
}

// markOthers marks the lines that are not of the commit. A line without a commit is older than this rule.
func markOthers(results []Result, commit string) {
	for i, r := range results {
		results[i].OtherCommit = r.Conditions == nil || r.Conditions.Commit != commit || r.Conditions.Dirty
	}
}

// writeJSON writes the results for another program.
func writeJSON(path string, results []Result) error {
	data, err := json.MarshalIndent(results, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(data, '\n'), 0o600)
}
