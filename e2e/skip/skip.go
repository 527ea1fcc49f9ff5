// Package skip is the one way by which a test does without something. What a machine lacks is a failure where
// everything is required (`make test`, and so CI); the few exceptions, which no installation mends, are listed here.
package skip

import (
	"fmt"
	"os"
	"testing"
)

const (
	// RequireAll is the variable that makes each skip for what a machine lacks a failure.
	RequireAll = "GPUAAS_REQUIRE_ALL"
	// Report is the variable that names a file, to which the tests add the exceptions that they took, one a line.
	Report = "GPUAAS_SKIPPED"
)

// Exception is why a test may be skipped although everything is required.
type Exception string

// The exceptions.
const (
	NoGPU         Exception = "GPUs of this machine are used by make test-gpu alone, where there are any"
	NoCockroachDB Exception = "there is no cockroach program on the PATH: what CockroachDB promises is not tested here"
	NoRelease     Exception = "no release is tagged or recorded yet: there is nothing to upgrade from"
	OwnRelease    Exception = "the commit to upgrade from was named, and may be today's"
	NoHistory     Exception = "the clone is shallow: it has no commit of before to build"
	CgroupV2      Exception = "cgroup version 2: no file takes a device's rules away"
	No32Bit       Exception = "this machine runs no programs of 32 bits"
	NoResize      Exception = "this machine does not let a process resize a mounted file system"
	Short         Exception = "go test -short was asked for"
)

// Root skips a test that needs root, for what.
func Root(t testing.TB, what string) {
	t.Helper()
	if os.Geteuid() != 0 {
		Lacking(t, what+" need root")
	}
}

// Lacking skips a test for something that this machine lacks and could have.
func Lacking(t testing.TB, what string) {
	t.Helper()
	if os.Getenv(RequireAll) != "" {
		t.Fatalf("everything is required (%s): %s", RequireAll, what)
	}
	t.Skip(what)
}

// Except skips a test for one of the exceptions. detail may be empty.
func Except(t testing.TB, e Exception, detail string) {
	t.Helper()
	text := string(e)
	if detail != "" {
		text += ": " + detail
	}
	if path := os.Getenv(Report); path != "" {
		report(t, path, t.Name()+": "+text)
	}
	t.Skip(text)
}

func report(t testing.TB, path, line string) {
	t.Helper()
	file, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatalf("note an exception in the file that %s names: %v", Report, err)
	}
	defer func() { _ = file.Close() }()
	if _, err := fmt.Fprintln(file, line); err != nil {
		t.Fatal(err)
	}
}
