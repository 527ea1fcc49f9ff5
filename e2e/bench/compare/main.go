// Command compare tells a regression of a row of the benchmark from noise: it builds two commits in worktrees, measures
// the row with the one and the other in turn, and prints the median ratio of the pairs with its confidence interval.
// `make bench-compare` calls it. It owns no measurement: those are e2e/bench's, of the tree in which compare runs, so
// that both commits are measured alike.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
)

// options are what the command line says.
type options struct {
	a, b, row      string
	pairs, samples int
}

func main() {
	var o options
	flag.StringVar(&o.a, "a", "", "the commit to compare with")
	flag.StringVar(&o.b, "b", "", "the commit to judge")
	flag.StringVar(&o.row, "row", "", "the one row to measure, by its whole name")
	flag.IntVar(&o.pairs, "pairs", 10, "how many times each is measured")
	flag.IntVar(&o.samples, "n", 0, "take at most this many samples each time")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	worse, err := run(ctx, o)
	switch {
	case err != nil:
		fmt.Fprintln(os.Stderr, "bench-compare:", err)
		os.Exit(2)
	case worse:
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) (worse bool, err error) {
	if o.a == "" || o.b == "" || o.row == "" {
		return false, errors.New("name two commits and a row: make bench-compare A=<commit> B=<commit> ROW=<name>")
	}
	if o.row == "simulation" {
		return false, errors.New("this row runs code of the measuring program, which is the same for both commits")
	}
	root, err := os.Getwd()
	if err != nil {
		return false, err
	}
	dir, err := os.MkdirTemp(filepath.Join(root, ".cache"), "compare-")
	if err != nil {
		return false, err
	}
	defer func() {
		// Also after an interrupt: the worktrees must not stay.
		prune := exec.CommandContext(context.WithoutCancel(ctx), "git", "-C", root, "worktree", "prune")
		err = errors.Join(err, os.RemoveAll(dir), prune.Run())
	}()
	bench, err := build(ctx, root, dir, o)
	if err != nil {
		return false, err
	}
	collected := pairs{}
	for n := range o.pairs {
		if err := onePair(ctx, bench, dir, o, n, collected); err != nil {
			return false, fmt.Errorf("pair %d: %w", n+1, err)
		}
		fmt.Fprintf(os.Stderr, "pair %d of %d measured\n", n+1, o.pairs)
	}
	verdicts := collected.judge()
	return anyWorse(verdicts), show(os.Stdout, verdicts)
}

// build builds the measuring program of this tree, and the programs of both commits in worktrees below dir.
func build(ctx context.Context, root, dir string, o options) (bench string, err error) {
	bench = filepath.Join(dir, "bench")
	if err := do(ctx, root, "go", "build", "-o", bench, "./e2e/bench"); err != nil {
		return "", err
	}
	for name, commit := range map[string]string{"a": o.a, "b": o.b} {
		tree := filepath.Join(dir, name)
		if err := do(ctx, root, "git", "worktree", "add", "--quiet", "--detach", tree, commit); err != nil {
			return "", err
		}
		if err := do(ctx, tree, "make", "--no-print-directory", "build"); err != nil {
			return "", err
		}
	}
	return bench, nil
}

// onePair measures both commits; which is first alternates, so that what the first leaves in caches helps neither.
func onePair(ctx context.Context, bench, dir string, o options, n int, collected pairs) error {
	order := []string{"a", "b"}
	if n%2 == 1 {
		order = []string{"b", "a"}
	}
	values := map[string][]line{}
	for _, name := range order {
		lines, err := measure(ctx, bench, filepath.Join(dir, name), o)
		if err != nil {
			return fmt.Errorf("commit %s: %w", name, err)
		}
		values[name] = lines
	}
	collected.add(values["a"], values["b"])
	return nil
}

// measure runs the row with the programs of one commit.
func measure(ctx context.Context, bench, tree string, o options) (lines []line, err error) {
	out := filepath.Join(filepath.Dir(bench), "out.json")
	// A number of samples keeps results.json as it is.
	n := o.samples
	if n == 0 {
		n = 1 << 30
	}
	err = do(ctx, tree, bench, "-row", "^"+regexp.QuoteMeta(o.row)+"$", "-n", strconv.Itoa(n), "-json", out)
	if err != nil {
		return nil, err
	}
	raw, err := os.ReadFile(out)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(raw, &lines); err != nil {
		return nil, err
	}
	if len(lines) == 0 {
		return nil, fmt.Errorf("no row is named %q", o.row)
	}
	return lines, nil
}

// do runs a program, and shows what it printed when it fails.
func do(ctx context.Context, dir, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", filepath.Base(name), strings.Join(args, " "), err, out[max(0, len(out)-3000):])
	}
	return nil
}
