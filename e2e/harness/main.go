package harness

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/gpuaas/e2e/leakcheck"
	"github.com/gpuaas/gpuaas/e2e/sandbox"
)

// preparedHubDir is where the tests of the process make their hub. It is made before the first test and removed after
// the last, so it is no leak of any test.
//
//nolint:gochecknoglobals // TestMain sets it for the tests of the process
var preparedHubDir string

// RunTests runs the tests of a package in a sandbox: what other programs do on the machine does not disturb them, and
// nothing of theirs gets out. The functions in prepare fetch and build what needs the network, which the sandbox does
// not have; they get the root of the source tree, and do nothing for what is there already.
func RunTests(m *testing.M, prepare ...func(ctx context.Context, root string) error) {
	code, err := runInSandbox(m, prepare)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func runInSandbox(m *testing.M, prepare []func(ctx context.Context, root string) error) (int, error) {
	config, err1 := sandbox.OfTree()
	root, err2 := sourceRoot()
	if err := errors.Join(err1, err2); err != nil {
		return 1, err
	}
	config.Prepare = func() error {
		ctx, cancel := context.WithTimeout(context.Background(), prepareLimit)
		defer cancel()
		for _, step := range prepare {
			if err := step(ctx, root); err != nil {
				return err
			}
		}
		return nil
	}
	return sandbox.Run(config, func() int {
		// The tests share a network namespace, in which the first agent turns forwarding on and the last one off, and
		// isolates the links that it finds. Agents change nothing on a machine that forwards already, and tests do not
		// feel each other's.
		if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o600); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		code, err := checkLeaks(m)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return code
	})
}

// prepareLimit bounds the preparation: an image from Debian's packages, an earlier release and npm's packages.
const prepareLimit = 10 * time.Minute

// checkLeaks runs the tests and compares the whole sandbox with how it was before them.
func checkLeaks(m *testing.M) (code int, err error) {
	if !sandbox.Inside() {
		return m.Run(), nil
	}
	// A containerd that is killed while it starts a shim leaves the socket that it made for it; a shim that is left is
	// found as a process.
	before, err := leakcheck.Take(leakcheck.Scope{
		IgnoreFiles: append(sandbox.Kept(), "/run/containerd/s/"), IgnoreMounts: sandbox.Kept(),
	})
	if err != nil {
		return 1, err
	}
	defer func() {
		if left := leakcheck.Left(before); len(left) > 0 {
			err = errors.Join(err, fmt.Errorf("the tests left %d things behind:\n  %s", len(left), strings.Join(left, "\n  ")))
		}
	}()
	preparedHubDir = fmt.Sprintf("/tmp/gpuaas-e2e-%d-hub", os.Getpid())
	if err := os.Mkdir(preparedHubDir, 0o711); err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(preparedHubDir)) }()
	return m.Run(), nil
}
