// Package nvmltest gives tests a machine with NVIDIA GPUs that are not there: a libnvidia-ml.so.1 compiled from C,
// which a program loads as it would load NVIDIA's.
package nvmltest

import (
	_ "embed"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

//go:embed testdata/nvml.c
var library []byte

// Library is a stand-in for NVIDIA's library.
type Library struct {
	t testing.TB
	// Env makes a process load it.
	Env []string

	machine string
}

// New compiles the library; it skips the test where there is no C compiler.
func New(t testing.TB) *Library {
	t.Helper()
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("there is no gcc to compile a stand-in for NVIDIA's library: install gcc")
	}
	dir := t.TempDir()
	source := filepath.Join(dir, "nvml.c")
	require.NoError(t, os.WriteFile(source, library, 0o600))
	run(t, "gcc", "-Wall", "-Werror", "-shared", "-fPIC", "-o", filepath.Join(dir, "libnvidia-ml.so.1"), source)
	l := &Library{t: t, machine: filepath.Join(dir, "machine")}
	l.Env = []string{"LD_LIBRARY_PATH=" + dir, "FAKE_NVML=" + l.machine}
	return l
}

// Program builds gpuaas-nvml, with cgo.
func Program(t testing.TB) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "gpuaas-nvml")
	run(t, "env", "CGO_ENABLED=1", "go", "build", "-o", path, "github.com/gpuaas/gpuaas/agent/cmd/gpuaas-nvml")
	return path
}

func run(t testing.TB, argv ...string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), argv[0], argv[1:]...).CombinedOutput()
	require.NoError(t, err, "%s: %s", strings.Join(argv, " "), out)
}

// Setenv makes the processes that the test starts load the library.
func (l *Library) Setenv() {
	l.t.Helper()
	for _, e := range l.Env {
		name, value, _ := strings.Cut(e, "=")
		require.NoError(l.t, os.Setenv(name, value))
		l.t.Cleanup(func() { require.NoError(l.t, os.Unsetenv(name)) })
	}
}

// Set replaces the machine that the library describes from its next start on; testdata/nvml.c explains the lines.
// Before the first call the library says that no driver is loaded.
func (l *Library) Set(lines ...string) {
	l.t.Helper()
	next := l.machine + ".next"
	require.NoError(l.t, os.WriteFile(next, []byte(strings.Join(lines, "\n")+"\n"), 0o600))
	require.NoError(l.t, os.Rename(next, l.machine))
}
