package nvmltest

import (
	_ "embed"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/pkg/appkit"
)

//go:embed testdata/compute.c
var compute []byte

const (
	realGPUs = "GPUAAS_TEST_GPU"
	// keepModeValue is the value of the variable for a machine whose settings must not change.
	keepModeValue = "keep-mode"
)

// RequireRealGPUs skips a test that `make test-gpu` does not run. keepMode: the compute mode of GPUs stays as it is.
func RequireRealGPUs(t *testing.T) (keepMode bool) {
	t.Helper()
	if os.Getenv(realGPUs) == "" {
		skip.Except(t, skip.NoGPU, "")
	}
	return os.Getenv(realGPUs) == keepModeValue
}

// ComputerFiles are those of an image: /compute, a program that uses a real GPU (testdata/compute.c says what for), and
// the system's libraries that it and these libraries of the driver need. A container gets the driver's own by mounts.
func ComputerFiles(t testing.TB, libraries ...string) []appkit.File {
	t.Helper()
	program := filepath.Join(t.TempDir(), "compute")
	compile(t, compute, program, "-ldl")
	files := []appkit.File{{Path: "/compute", Source: program, Mode: 0o755}}
	inImage := map[string]bool{}
	for _, needing := range append([]string{program}, libraries...) {
		for _, path := range Needs(t, needing) {
			if inImage[path] || strings.Contains(path, "nvidia") || strings.Contains(path, "libcuda") {
				continue
			}
			inImage[path] = true
			source, err := filepath.EvalSymlinks(path)
			require.NoError(t, err)
			files = append(files, appkit.File{Path: path, Source: source, Mode: 0o755})
		}
	}
	return files
}

var computed = regexp.MustCompile(`computed on 1 GPUs: (\S+) (\d+) (.*)\n`)

// RequireComputed checks, by its output, that the program computed on one GPU, of this id and with that much memory.
func RequireComputed(t testing.TB, output, id string, memoryBytes uint64) {
	t.Helper()
	m := computed.FindStringSubmatch(output)
	require.NotNil(t, m, output)
	require.Equal(t, strings.TrimPrefix(strings.TrimPrefix(id, "GPU-"), "MIG-"), m[1])
	memory, err := strconv.ParseUint(m[2], 10, 64)
	require.NoError(t, err)
	require.InEpsilon(t, memoryBytes, memory, 0.05, "the driver keeps a part for itself")
	t.Logf("computed on %s: %s bytes of memory, CUDA says %s", id, m[2], m[3])
}
