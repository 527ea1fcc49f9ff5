package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"golang.org/x/sys/unix"
)

// report is bench/results.json.
type report struct {
	Machine machine `json:"machine"`
	// Commit is that of the last run; lines of others are marked.
	Commit  string   `json:"commit,omitempty"`
	Results []Result `json:"results"`
}

// machine is what the numbers were measured on. It does not name the machine.
type machine struct {
	OS           string `json:"os"`
	Architecture string `json:"architecture"`
	CPUs         int    `json:"cpus"`
	MemoryMiB    uint64 `json:"memory_mib"`
	Go           string `json:"go"`
}

func thisMachine() machine {
	m := machine{
		OS: runtime.GOOS, Architecture: runtime.GOARCH, CPUs: runtime.NumCPU(), Go: runtime.Version(),
	}
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) == nil {
		m.MemoryMiB = uint64(info.Totalram) * uint64(info.Unit) >> 20
	}
	return m
}

// printTable writes the lines, and below them what belongs to some of them.
func printTable(out io.Writer, results []Result) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	say := func(cells ...string) { _, _ = fmt.Fprintln(w, strings.Join(cells, "\t")) }
	say("", "WHAT", "N", "P50", "P99", "BASELINE", "RATIO", "UNIT", "TARGET", "REACHED")
	for _, r := range results {
		reached := "no"
		if r.Reached {
			reached = "yes"
		}
		mark := ""
		if r.OtherCommit {
			mark = "*"
		}
		say(mark, r.What, strconv.Itoa(r.N), number(r.P50), orDash(r.P99), orDash(r.Baseline), orDash(r.Ratio), r.Unit,
			r.Target, reached)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if slices.ContainsFunc(results, func(r Result) bool { return r.OtherCommit }) {
		_, _ = fmt.Fprintln(out, "* measured at another commit, or with changes that are in none")
	}
	for _, r := range results {
		var parts []string
		for _, p := range r.Parts {
			parts = append(parts, p.Name+" "+number(p.Value))
		}
		if len(parts) > 0 {
			_, _ = fmt.Fprintf(out, "%s: %s\n", r.Name, strings.Join(parts, " · "))
		}
		if r.Note != "" {
			_, _ = fmt.Fprintf(out, "%s: %s\n", r.Name, r.Note)
		}
	}
	return nil
}

func orDash(v float64) string {
	if v == 0 {
		return "–"
	}
	return number(v)
}

// number keeps three or four digits that mean something.
func number(v float64) string {
	switch {
	case v >= 1000:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case v >= 100:
		return strconv.FormatFloat(v, 'f', 1, 64)
	default:
		return strconv.FormatFloat(v, 'f', 2, 64)
	}
}

// keep writes the results into the file; lines of rows that were not measured now stay as they were.
func keep(path, commit string, results []Result, known []string) error {
	var old report
	data, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(data, &old)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	all := merge(old.Results, results, known)
	markOthers(all, commit)
	data, err = json.MarshalIndent(report{Machine: thisMachine(), Commit: commit, Results: all}, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, append(data, '\n'), 0o644)
}

// merge replaces the lines that were measured now, and forgets those of rows that there are no more. The order is that
// of the known rows.
func merge(old, now []Result, known []string) []Result {
	at := func(r Result) int {
		return slices.IndexFunc(known, func(row string) bool { return r.Name == row || strings.HasPrefix(r.Name, row+".") })
	}
	all := slices.Clone(now)
	for _, o := range old {
		if at(o) >= 0 && !slices.ContainsFunc(now, func(n Result) bool { return n.Name == o.Name }) {
			all = append(all, o.honest())
		}
	}
	slices.SortStableFunc(all, func(a, b Result) int {
		if d := at(a) - at(b); d != 0 {
			return d
		}
		return strings.Compare(a.Name, b.Name)
	})
	return all
}
