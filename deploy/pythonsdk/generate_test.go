package main

import (
	"archive/zip"
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/hub/api"
)

// project is the directory of the Python project.
const project = "../../pkg/client/python"

func TestModuleIsThatOfTheContract(t *testing.T) {
	want, err := Python(api.OpenAPI)
	require.NoError(t, err)
	got, err := os.ReadFile(filepath.Join(project, "gpuaas", "api_gen.py"))
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, got), "api_gen.py is stale: make generate")
}

func TestClientInPython(t *testing.T) {
	out, err := python(t, project, "-m", "unittest", "-q", "tests/test_client.py")
	require.NoError(t, err, out)
	require.Contains(t, out, "OK")
}

func TestTypesInPython(t *testing.T) {
	mypy, err := exec.LookPath("mypy")
	if err != nil {
		skip.Lacking(t, "there is no mypy: make deps installs it")
	}
	cmd := exec.CommandContext(t.Context(), mypy, "--strict", "--cache-dir", t.TempDir(), "gpuaas", "tests")
	cmd.Dir = project
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
}

func TestWheelIsTheSameEachTimeAndCanBeImported(t *testing.T) {
	name, wheel, err := Wheel(project)
	require.NoError(t, err)
	_, again, err := Wheel(project)
	require.NoError(t, err)
	require.Equal(t, wheel, again)
	dir := t.TempDir()
	path := filepath.Join(dir, name)
	require.NoError(t, os.WriteFile(path, wheel, 0o600))
	files, err := zip.NewReader(bytes.NewReader(wheel), int64(len(wheel)))
	require.NoError(t, err)
	var inside []string
	for _, f := range files.File {
		inside = append(inside, f.Name)
	}
	require.Contains(t, inside, "gpuaas/py.typed")
	require.Contains(t, inside, "gpuaas-1.0.0.dist-info/RECORD")
	out, err := python(t, dir, "-c", "import sys; sys.path.insert(0, "+`"`+name+`"`+
		"); import gpuaas; print(gpuaas.Client('https://hub.example:8443'))")
	require.NoError(t, err, out)
	require.Contains(t, out, "gpuaas.client.Client")
}

// python runs Python in a directory, in which it leaves nothing.
func python(t *testing.T, dir string, args ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "python3", append([]string{"-B"}, args...)...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	return string(out), err
}
