package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gpuaas/gpuaas/e2e/sandbox"
)

// packageLimit bounds the tests of one package with a mutant where sample.txt names no other limit; compiling is not
// counted by the Go tool.
const packageLimit = 2 * time.Minute

// suite runs the tests of packages, with and without mutants.
type suite struct {
	// limits are the times of packages whose tests take long.
	limits map[string]time.Duration
	mu     sync.Mutex
	green  map[string]func() error
}

func newSuite(quotas []quota) *suite {
	s := &suite{limits: map[string]time.Duration{}, green: map[string]func() error{}}
	for _, q := range quotas {
		s.limits[q.dir] = q.limit
	}
	return s
}

func (s *suite) limit(pkg string) time.Duration {
	return cmp.Or(s.limits[filepath.ToSlash(filepath.Clean(pkg))], packageLimit)
}

// verdict is what became of a mutant.
type verdict struct {
	noticed, timedOut bool
	by                string
}

// notices runs the package's tests and then those of its neighbours, until one fails.
func (s *suite) notices(ctx context.Context, overlay string, packages []string) (verdict, error) {
	for _, pkg := range packages {
		if err := s.mustBeGreen(ctx, pkg); err != nil {
			return verdict{}, err
		}
		out, err := goTest(ctx, pkg, "-count=1", "-failfast", "-timeout",
			s.limit(pkg).String(), "-overlay", overlay)
		switch {
		case err == nil:
			continue
		case ctx.Err() != nil:
			return verdict{}, ctx.Err()
		case bytes.Contains(out, []byte("[build failed]")), bytes.Contains(out, []byte("[setup failed]")):
			return verdict{}, fmt.Errorf("does not compile: %s", tail(out))
		case bytes.Contains(out, []byte("SQLSTATE 42601")):
			return verdict{}, fmt.Errorf("is no statement of SQL: %s", tail(out))
		case bytes.Contains(out, []byte("panic: test timed out after")):
			return verdict{noticed: true, timedOut: true, by: pkg}, nil
		}
		return verdict{noticed: true, by: pkg + " " + failed(out)}, nil
	}
	return verdict{}, nil
}

// mustBeGreen runs the package's tests without any mutant, once, or takes the Go tool's word for it that they passed.
func (s *suite) mustBeGreen(ctx context.Context, pkg string) error {
	s.mu.Lock()
	if s.green[pkg] == nil {
		s.green[pkg] = sync.OnceValue(func() error {
			if out, err := goTest(ctx, pkg); err != nil {
				return fmt.Errorf("%s fails without a mutant: %w: %s", pkg, err, tail(out))
			}
			return nil
		})
	}
	green := s.green[pkg]
	s.mu.Unlock()
	return green()
}

var failure = regexp.MustCompile(`(?m)^\s*--- FAIL: (\S+)`)

// failed names the first test that failed, and the innermost of its subtests.
func failed(out []byte) string {
	if m := failure.FindSubmatch(out); m != nil {
		return string(m[1])
	}
	if bytes.Contains(out, []byte("panic:")) || bytes.Contains(out, []byte("fatal error:")) {
		return "(stopped)"
	}
	return "(its TestMain)"
}

// goTest runs the tests of a package in a sandbox: what they leave when they are stopped ends with it.
func goTest(ctx context.Context, pkg string, args ...string) ([]byte, error) {
	defer forgetExamples(pkg)()
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	command := slices.Concat([]string{inSandbox, "go", "test", "-vet=off"}, args, []string{"./" + filepath.Clean(pkg)})
	return exec.CommandContext(ctx, self, command...).CombinedOutput()
}

// inSandbox as the first argument makes this program run the others as a command in a sandbox.
const inSandbox = "in-sandbox"

// runInSandbox runs a command in a sandbox that sees the tree and the Go tool's directories.
func runInSandbox(command []string) (int, error) {
	config, err := sandbox.OfTree()
	if err != nil {
		return 1, err
	}
	return sandbox.Run(config, func() int {
		cmd := exec.Command(command[0], command[1:]...)
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		for _, v := range os.Environ() {
			if !strings.HasPrefix(v, "GPUAAS_SANDBOX_") {
				cmd.Env = append(cmd.Env, v)
			}
		}
		if err := cmd.Run(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return 0
	})
}

// forgetExamples notes which files of failed properties and fuzz inputs the package holds; the function that it returns
// removes those that came since.
func forgetExamples(pkg string) func() {
	before := examples(pkg)
	return func() {
		for path := range examples(pkg) {
			if !before[path] {
				_ = os.RemoveAll(path)
			}
		}
		for _, dir := range []string{"rapid", "fuzz", ""} {
			_ = os.Remove(filepath.Join(pkg, "testdata", dir)) // only if it is empty
		}
	}
}

func examples(pkg string) map[string]bool {
	found := map[string]bool{}
	for _, pattern := range []string{"rapid/*", "rapid/*/*", "fuzz/*/*"} {
		paths, err := filepath.Glob(filepath.Join(pkg, "testdata", pattern))
		if err != nil {
			continue
		}
		for _, path := range paths {
			found[path] = true
		}
	}
	return found
}

// overlayDir makes a directory for a mutant's files within the tree: a sandbox does not see /tmp.
func overlayDir() (dir string, remove func(), err error) {
	base, err := filepath.Abs(".cache")
	if err != nil {
		return "", nil, err
	}
	if err := os.MkdirAll(base, 0o755); err != nil {
		return "", nil, err
	}
	dir, err = os.MkdirTemp(base, "mutant-")
	return dir, func() { _ = os.RemoveAll(dir) }, err
}

// writeOverlay writes the list by which the compiler finds the changed files instead of the tree's own.
func writeOverlay(dir string, changed map[string][]byte) (string, error) {
	replace := map[string]string{}
	for file, content := range changed {
		original, err := filepath.Abs(file)
		if err != nil {
			return "", err
		}
		copied := filepath.Join(dir, file)
		replace[original] = copied
		err = errors.Join(os.MkdirAll(filepath.Dir(copied), 0o700), os.WriteFile(copied, content, 0o600))
		if err != nil {
			return "", err
		}
	}
	list, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "overlay.json")
	return path, os.WriteFile(path, list, 0o600)
}
