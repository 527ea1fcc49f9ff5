package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
)

// mutant is a patch and the tests that it must make fail.
type mutant struct {
	name   string
	law    string
	breaks string
	tests  []lawTest
	// suites are packages of which any test may notice.
	suites []string
	// e2e are tests that run the programs, which are built with the patch.
	e2e   []lawTest
	files []string
	diff  []byte
}

// lawTest is one test of one package.
type lawTest struct{ pkg, name string }

func runPatches(ctx context.Context, o options) error {
	mutants, err := load("e2e/mutants", o.match)
	if err != nil {
		return err
	}
	if !o.all && !o.e2e {
		mutants = someOfEachLaw(mutants, shortPatches, o.seed)
	}
	quotas, err := readQuotas("e2e/mutants/sample.txt")
	if err != nil {
		return err
	}
	var (
		wait     sync.WaitGroup
		mu       sync.Mutex
		noticed  int
		survived []error
		places   = make(chan struct{}, o.jobs)
		suite    = newSuite(quotas)
	)
	for _, m := range mutants {
		if o.e2e && len(m.e2e) == 0 {
			continue
		}
		places <- struct{}{}
		wait.Go(func() {
			defer func() { <-places }()
			by, err := m.mustBeNoticed(ctx, suite, o)
			mu.Lock()
			defer mu.Unlock()
			if ctx.Err() != nil {
				return
			}
			if err != nil {
				survived = append(survived, fmt.Errorf("%s (law %s, %s): %w", m.name, m.law, m.breaks, err))
				fmt.Printf("SURVIVED law %-3s %s\n", m.law, m.breaks)
				return
			}
			noticed++
			fmt.Printf("noticed  law %-3s %s (%s)\n", m.law, m.breaks, by)
		})
	}
	wait.Wait()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	how := "patches"
	if o.e2e {
		how = "patches end to end"
	}
	fmt.Printf("%d %s: %d noticed, %d survived\n", noticed+len(survived), how, noticed, len(survived))
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

// shortPatches is how many patches of a law the short sample takes.
const shortPatches = 1

// someOfEachLaw takes at most n patches of each law. Which ones follows from the seed and their names alone.
func someOfEachLaw(all []mutant, n int, seed string) []mutant {
	byRank := slices.SortedFunc(slices.Values(all), func(a, b mutant) int {
		return cmp.Compare(exponential(seed+"|"+a.name), exponential(seed+"|"+b.name))
	})
	taken, some := map[string]int{}, make([]mutant, 0, len(all))
	for _, m := range byRank {
		if taken[m.law] < n {
			taken[m.law]++
			some = append(some, m)
		}
	}
	slices.SortFunc(some, func(a, b mutant) int { return cmp.Compare(a.name, b.name) })
	return some
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
		case "Suite":
			m.suites = append(m.suites, value)
		case "Test", "E2E":
			pkg, test, ok := strings.Cut(value, " ")
			if !ok {
				return m, fmt.Errorf("%q is not a package and a test", value)
			}
			if key == "E2E" {
				m.e2e = append(m.e2e, lawTest{pkg, test})
			} else {
				m.tests = append(m.tests, lawTest{pkg, test})
			}
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
	if m.law == "" || m.breaks == "" || len(m.tests)+len(m.suites) == 0 || len(m.files) == 0 {
		return m, errors.New("needs Law, Breaks, Test or Suite, and a file that it patches")
	}
	return m, nil
}

// mustBeNoticed runs each of the mutant's tests alone with the patch, and returns an error for one that passes, or,
// with all mutants, fails without the patch, too.
func (m mutant) mustBeNoticed(ctx context.Context, s *suite, o options) (by string, err error) {
	dir, remove, err := overlayDir()
	if err != nil {
		return "", err
	}
	defer remove()
	overlay, err := m.overlay(ctx, dir)
	if err != nil {
		return "", err
	}
	if o.e2e {
		return m.mustBeNoticedEndToEnd(ctx, dir, overlay)
	}
	var names []string
	for _, t := range m.tests {
		if o.all { // make test has run all of them just before it makes the short sample
			if err := t.mustPassWithout(ctx); err != nil {
				return "", err
			}
		}
		if err := t.mustFail(ctx, overlay); err != nil {
			return "", err
		}
		names = append(names, t.name)
	}
	for _, pkg := range m.suites {
		v, err := s.notices(ctx, overlay, []string{pkg})
		if err != nil {
			return "", err
		}
		if !v.noticed {
			return "", fmt.Errorf("%s still passes", pkg)
		}
		names = append(names, v.by)
	}
	return strings.Join(names, ", "), nil
}

// mustBeNoticedEndToEnd builds the programs with the patch, in a directory of their own, and runs the tests with them.
func (m mutant) mustBeNoticedEndToEnd(ctx context.Context, dir, overlay string) (by string, err error) {
	bin := filepath.Join(dir, "bin")
	for out, tags := range map[string]string{bin: "", filepath.Join(bin, "failpoint"): "failpoint"} {
		build := exec.CommandContext(ctx, "go", "build", "-tags", tags, "-overlay", overlay, "-o", out+"/",
			"./hub/cmd/gpuaas-hub", "./agent/cmd/gpuaas-agent", "./pkg/cmd/gpuaas")
		if err := os.MkdirAll(out, 0o755); err != nil {
			return "", err
		}
		if text, err := build.CombinedOutput(); err != nil {
			return "", fmt.Errorf("build the programs: %w: %s", err, tail(text))
		}
	}
	var names []string
	for _, t := range m.e2e {
		if err := t.mustPassWithout(ctx); err != nil {
			return "", err
		}
		cmd := t.command(ctx, "-count=1")
		cmd.Env = append(os.Environ(), binEnv+"="+bin)
		if err := t.judge(ctx, cmd); err != nil {
			return "", err
		}
		names = append(names, t.name)
	}
	return strings.Join(names, ", "), nil
}

// binEnv names the directory of the programs that end-to-end tests run instead of those in bin/.
const binEnv = "GPUAAS_E2E_BIN"

// mustPassWithout runs the test without the patch, or takes the Go tool's word for it that it passed.
func (t lawTest) mustPassWithout(ctx context.Context) error {
	if out, err := t.command(ctx).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s fails without a mutant: %w: %s", t.pkg, t.name, err, tail(out))
	}
	return nil
}

// overlay patches copies of the files below dir and writes the list by which the compiler finds them.
func (m mutant) overlay(ctx context.Context, dir string) (string, error) {
	contents := map[string][]byte{}
	for _, file := range m.files {
		raw, err := os.ReadFile(file)
		if err != nil {
			return "", err
		}
		contents[file] = raw
	}
	overlay, err := writeOverlay(dir, contents)
	if err != nil {
		return "", err
	}
	apply := exec.CommandContext(ctx, "git", "apply", "--unidiff-zero", "-")
	apply.Dir, apply.Stdin = dir, bytes.NewReader(m.diff)
	// Outside any repository, or git would search for the files there.
	apply.Env = append(os.Environ(), "GIT_CEILING_DIRECTORIES="+filepath.Dir(dir), "GIT_DIR="+filepath.Join(dir, "none"))
	if out, err := apply.CombinedOutput(); err != nil {
		return "", fmt.Errorf("the patch no longer fits; write it anew: %w: %s", err, out)
	}
	return overlay, nil
}

func (t lawTest) mustFail(ctx context.Context, overlay string) error {
	return t.judge(ctx, t.command(ctx, "-count=1", "-overlay", overlay))
}

func (t lawTest) command(ctx context.Context, args ...string) *exec.Cmd {
	args = slices.Concat([]string{"test", "-vet=off"}, args, []string{"-run", "^" + t.name + "$", t.pkg})
	return exec.CommandContext(ctx, "go", args...)
}

// judge returns an error unless the test fails.
func (t lawTest) judge(ctx context.Context, cmd *exec.Cmd) error {
	defer forgetExamples(t.pkg)()
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

// tailBytes of a test's output are enough to see why it did not compile or start.
const tailBytes = 2000

func tail(out []byte) []byte { return out[max(0, len(out)-tailBytes):] }
