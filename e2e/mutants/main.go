// Command mutants breaks the product on purpose, one law at a time, and checks that the law's test fails.
//
// Each patch in e2e/mutants names its law, and one or more tests that must fail with it:
//
//	Law: 2
//	Breaks: a generation below the accepted one is taken
//	Test: ./agent/internal/state TestLaw02StateNeverGoesBackwards
//
//	--- a/agent/internal/state/accept.go
//	+++ b/agent/internal/state/accept.go
//	…
//
// The tree itself is never touched: the compiler reads the patched files through its overlay.
package main

import (
	"bytes"
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
	"slices"
	"strings"
	"sync"
	"syscall"
)

// mutant is a patch and the tests that it must make fail.
type mutant struct {
	name   string
	law    string
	breaks string
	tests  []lawTest
	files  []string
	diff   []byte
}

// lawTest is one test of one package.
type lawTest struct{ pkg, name string }

func main() {
	if len(os.Args) > 2 && os.Args[1] == inSandbox {
		code, err := runInSandbox(os.Args[2:])
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(code)
	}
	only := flag.String("run", "", "take only the mutants whose name matches this expression")
	all := flag.Bool("all", false, "take every generated mutant of the sample, not only the short one")
	list := flag.Bool("list", false, "print the generated mutants and run none")
	patches := flag.Bool("patches", true, "run the patches, too")
	jobs := flag.Int("j", 2, "mutants at a time")
	neighbours := flag.Int("neighbours", 3, "packages beside its own whose tests a mutant must pass to survive")
	seed := flag.String("seed", seed, "choose other generated mutants")
	flag.Parse()
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	match, err := regexp.Compile(*only)
	if err == nil {
		o := options{match: match, all: *all, list: *list, jobs: *jobs, neighbours: *neighbours, seed: *seed}
		if *patches && !*list {
			err = runPatches(ctx, o)
		}
		err = errors.Join(err, runGenerated(ctx, o))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		cancel()
		os.Exit(1) //nolint:gocritic // cancel ran
	}
}

func runPatches(ctx context.Context, o options) error {
	mutants, err := load("e2e/mutants", o.match)
	if err != nil {
		return err
	}
	var (
		wait     sync.WaitGroup
		mu       sync.Mutex
		survived []error
		places   = make(chan struct{}, o.jobs)
	)
	for _, m := range mutants {
		places <- struct{}{}
		wait.Go(func() {
			defer func() { <-places }()
			err := m.mustBeNoticed(ctx)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				survived = append(survived, fmt.Errorf("%s (law %s, %s): %w", m.name, m.law, m.breaks, err))
				fmt.Printf("SURVIVED law %-3s %s\n", m.law, m.breaks)
				return
			}
			fmt.Printf("noticed  law %-3s %s\n", m.law, m.breaks)
		})
	}
	wait.Wait()
	fmt.Printf("%d patches, %d survived\n", len(mutants), len(survived))
	return errors.Join(survived...)
}

// load reads the patches; one that names no test, or a file outside the tree, is an error.
func load(dir string, match *regexp.Regexp) ([]mutant, error) {
	names, err := filepath.Glob(filepath.Join(dir, "*.patch"))
	if err != nil {
		return nil, err
	}
	slices.Sort(names)
	var all []mutant
	for _, name := range names {
		if !match.MatchString(filepath.Base(name)) {
			continue
		}
		raw, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		m, err := parse(filepath.Base(name), raw)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		all = append(all, m)
	}
	return all, nil
}

func parse(name string, raw []byte) (mutant, error) {
	m := mutant{name: name}
	head, _, found := bytes.Cut(raw, []byte("\n--- "))
	if !found {
		return m, errors.New("holds no diff")
	}
	m.diff = raw[len(head)+1:]
	for line := range strings.Lines(string(head)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		switch key {
		case "Law":
			m.law = value
		case "Breaks":
			m.breaks = value
		case "Test":
			pkg, test, ok := strings.Cut(value, " ")
			if !ok {
				return m, fmt.Errorf("%q is not a package and a test", value)
			}
			m.tests = append(m.tests, lawTest{pkg, test})
		}
	}
	for line := range strings.Lines(string(m.diff)) {
		if file, ok := strings.CutPrefix(strings.TrimSpace(line), "+++ b/"); ok {
			if !filepath.IsLocal(file) {
				return m, fmt.Errorf("%q lies outside the tree", file)
			}
			m.files = append(m.files, file)
		}
	}
	if m.law == "" || m.breaks == "" || len(m.tests) == 0 || len(m.files) == 0 {
		return m, errors.New("needs Law, Breaks, Test and a file that it patches")
	}
	return m, nil
}

// mustBeNoticed runs each of the mutant's tests alone with the patch, and returns an error for one that passes.
func (m mutant) mustBeNoticed(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "gpuaas-mutant-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	overlay, err := m.overlay(ctx, dir)
	if err != nil {
		return err
	}
	for _, t := range m.tests {
		if err := t.mustFail(ctx, overlay); err != nil {
			return err
		}
	}
	return nil
}

// overlay patches copies of the files below dir and writes the list by which the compiler finds them.
func (m mutant) overlay(ctx context.Context, dir string) (string, error) {
	replace := map[string]string{}
	for _, file := range m.files {
		original, err := filepath.Abs(file)
		if err != nil {
			return "", err
		}
		raw, err := os.ReadFile(file)
		if err != nil {
			return "", err
		}
		replace[original] = filepath.Join(dir, file)
		if err := os.MkdirAll(filepath.Dir(replace[original]), 0o700); err != nil {
			return "", err
		}
		if err := os.WriteFile(replace[original], raw, 0o600); err != nil {
			return "", err
		}
	}
	apply := exec.CommandContext(ctx, "git", "apply", "--unidiff-zero", "-")
	apply.Dir, apply.Stdin = dir, bytes.NewReader(m.diff)
	// Outside any repository, or git would search for the files there.
	apply.Env = append(os.Environ(), "GIT_CEILING_DIRECTORIES="+filepath.Dir(dir), "GIT_DIR="+filepath.Join(dir, "none"))
	if out, err := apply.CombinedOutput(); err != nil {
		return "", fmt.Errorf("the patch no longer fits; write it anew: %w: %s", err, out)
	}
	list, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "overlay.json")
	return path, os.WriteFile(path, list, 0o600)
}

func (t lawTest) mustFail(ctx context.Context, overlay string) error {
	defer t.forget()()
	cmd := exec.CommandContext(ctx, "go", "test", "-vet=off", "-count=1", "-overlay", overlay, "-run", "^"+t.name+"$",
		t.pkg)
	out, err := cmd.CombinedOutput()
	switch {
	case err == nil && bytes.Contains(out, []byte("no tests to run")):
		return fmt.Errorf("%s has no test %s", t.pkg, t.name)
	case err == nil:
		return fmt.Errorf("%s %s still passes", t.pkg, t.name)
	case ctx.Err() != nil:
		return ctx.Err()
	case !bytes.Contains(out, []byte("--- FAIL: "+t.name)):
		return fmt.Errorf("%s %s did not fail by itself: %w\n%s", t.pkg, t.name, err, tail(out))
	}
	return nil
}

// forget notes whether the package holds files of failed properties; the function that it returns removes those that
// came since.
func (t lawTest) forget() func() {
	dir := filepath.Join(t.pkg, "testdata", "rapid", t.name)
	if _, err := os.Stat(dir); err == nil {
		return func() {}
	}
	return func() {
		_ = os.RemoveAll(dir)
		_ = os.Remove(filepath.Dir(dir))
		_ = os.Remove(filepath.Dir(filepath.Dir(dir)))
	}
}

// tailBytes of a test's output are enough to see why it did not compile or start.
const tailBytes = 2000

func tail(out []byte) []byte { return out[max(0, len(out)-tailBytes):] }
