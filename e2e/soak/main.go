// Command soak finds flaky tests: it runs each end-to-end test many times, one at a time and in random order, and lists
// every failure. `make soak` calls it. What it has run is kept in a directory, and not run again by the next call.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
)

func main() {
	var c config
	var match string
	flag.IntVar(&c.times, "n", 20, "how many times each test runs")
	flag.StringVar(&match, "run", "", "only the tests whose name matches this regular expression")
	flag.StringVar(&c.dir, "dir", "", "where the record of runs and the output of failures are kept")
	flag.Uint64Var(&c.seed, "seed", 1, "the order of the runs")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	failures, err := start(ctx, c, match, flag.Args())
	if err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(2)
	}
	if failures > 0 {
		os.Exit(1)
	}
}

func start(ctx context.Context, c config, match string, packages []string) (failures int, err error) {
	only, err := regexp.Compile(match)
	if err != nil {
		return 0, err
	}
	for _, dir := range packages {
		names, err := testsIn(dir)
		if err != nil {
			return 0, err
		}
		for _, name := range names {
			if only.MatchString(name) {
				c.tests = append(c.tests, test{Package: dir, Name: name})
			}
		}
	}
	if len(c.tests) == 0 || c.dir == "" || c.times < 1 {
		return 0, errors.New("name packages with tests, a directory and a number of runs")
	}
	c.out, c.run = os.Stdout, goTest
	return soak(ctx, c)
}

// goTest runs one test; the error of one that cannot be started is a failure too.
func goTest(ctx context.Context, t test) (output string, err error) {
	cmd := exec.CommandContext(ctx, "go", "test", "-vet=off", "-count=1", "-timeout", "20m", "-run", "^"+t.Name+"$",
		t.Package)
	// The Go tool ends the test, which then removes what it made.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) }
	out, err := cmd.CombinedOutput()
	if err == nil && strings.Contains(string(out), "[no tests to run]") {
		err = errors.New("the package has no such test")
	}
	return string(out), err
}

// testFunction is the head of a test; TestMain is none.
var testFunction = regexp.MustCompile(`(?m)^func (Test[A-Za-z0-9_]*)\(t \*testing\.T\)`)

// testsIn lists the tests of a package without running it.
func testsIn(dir string) (names []string, err error) {
	files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		source, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		for _, found := range testFunction.FindAllSubmatch(source, -1) {
			names = append(names, string(found[1]))
		}
	}
	return names, nil
}
