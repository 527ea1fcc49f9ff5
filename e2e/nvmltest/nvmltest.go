// Package nvmltest gives tests a machine with NVIDIA GPUs that are not there: a libnvidia-ml.so.1 compiled from C,
// which a program loads as it would load NVIDIA's. For GPUs that are there it has a program that computes on them.
package nvmltest

import (
	_ "embed"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/e2e/skip"
)

//go:embed testdata/nvml.c
var library []byte

//go:embed testdata/cuda.c
var cuda []byte

//go:embed testdata/count.c
var count []byte

//go:embed testdata/keepmode.c
var keepMode []byte

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
		skip.Lacking(t, "there is no gcc to compile a stand-in for NVIDIA's library: install gcc")
	}
	dir := t.TempDir()
	compile(t, library, filepath.Join(dir, "libnvidia-ml.so.1"), "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1")
	l := &Library{t: t, machine: filepath.Join(dir, "machine")}
	l.Env = []string{"LD_LIBRARY_PATH=" + dir, "FAKE_NVML=" + l.machine}
	return l
}

// Version is the version of the driver that Driver installs.
const Version = "550.54.15"

// Driver installs a driver in a directory: libraries, a program, and device nodes of this many GPUs, with NVIDIA's
// numbers. The first library is the stand-in itself; the library of CUDA counts the device nodes.
func (l *Library) Driver(root string, gpus int) {
	l.t.Helper()
	libraries := filepath.Join(root, "usr/lib/x86_64-linux-gnu")
	for _, dir := range []string{libraries, filepath.Join(root, "usr/bin"), filepath.Join(root, "dev")} {
		require.NoError(l.t, os.MkdirAll(dir, 0o755))
	}
	for soname, source := range map[string][]byte{"libnvidia-ml.so.1": library, "libcuda.so.1": cuda} {
		file := strings.TrimSuffix(soname, "1") + Version
		compile(l.t, source, filepath.Join(libraries, file), "-shared", "-fPIC", "-Wl,-soname,"+soname)
		require.NoError(l.t, os.Symlink(file, filepath.Join(libraries, soname)))
	}
	require.NoError(l.t, os.Symlink("libcuda.so.1", filepath.Join(libraries, "libcuda.so")))
	require.NoError(l.t, os.WriteFile(filepath.Join(root, "usr/bin/nvidia-smi"), []byte("#!/bin/sh\n"), 0o755))
	numbers := map[string]uint64{
		"nvidiactl": unix.Mkdev(195, 255), "nvidia-modeset": unix.Mkdev(195, 254), "nvidia-uvm": unix.Mkdev(511, 0),
		"nvidia-uvm-tools": unix.Mkdev(511, 1),
	}
	for minor := range gpus {
		numbers["nvidia"+strconv.Itoa(minor)] = unix.Mkdev(195, uint32(minor))
	}
	for name, number := range numbers {
		require.NoError(l.t, unix.Mknod(filepath.Join(root, "dev", name), unix.S_IFCHR|0o666, int(number)))
	}
}

// Counter compiles a program that prints how many GPUs CUDA finds, and returns it with the system's libraries that it
// needs, by their paths.
func Counter(t testing.TB) (program string, needs []string) {
	t.Helper()
	program = filepath.Join(t.TempDir(), "count")
	compile(t, count, program, "-ldl")
	return program, Needs(t, program)
}

// Needs returns the system's libraries that a program or library needs, by their paths.
func Needs(t testing.TB, file string) (needs []string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "ldd", file).CombinedOutput()
	require.NoError(t, err, "%s", out)
	for word := range strings.FieldsSeq(string(out)) {
		if filepath.IsAbs(word) && !strings.HasSuffix(word, ":") {
			needs = append(needs, word)
		}
	}
	return needs
}

// KeepingMode returns a program gpuaas-nvml that leaves the compute mode of GPUs as it is, for a machine whose settings
// must not change.
func KeepingMode(t testing.TB, program string) string {
	t.Helper()
	dir := t.TempDir()
	library, path := filepath.Join(dir, "keepmode.so"), filepath.Join(dir, "gpuaas-nvml")
	compile(t, keepMode, library, "-shared", "-fPIC")
	script := "#!/bin/sh\nLD_PRELOAD=" + library + " exec " + program + " \"$@\"\n"
	require.NoError(t, os.WriteFile(path, []byte(script), 0o755))
	return path
}

func compile(t testing.TB, source []byte, out string, flags ...string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "source.c")
	require.NoError(t, os.WriteFile(path, source, 0o600))
	run(t, append([]string{"gcc", "-Wall", "-Werror", "-o", out, path}, flags...)...)
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

// ComputeMode is the id of a GPU and the compute mode that a program has set last; empty where none has.
func (l *Library) ComputeMode() string {
	raw, _ := os.ReadFile(l.machine + ".mode")
	return string(raw)
}

// MPSControl stands in for nvidia-cuda-mps-control: as a daemon it makes its socket and a file in /dev/shm, and
// otherwise it writes down its commands.
const MPSControl = `#!/bin/sh
if [ "$1" != -f ]; then exec cat >> "$CUDA_MPS_LOG_DIRECTORY/commands"; fi
echo "$CUDA_VISIBLE_DEVICES" > "$CUDA_MPS_LOG_DIRECTORY/gpu"
touch /dev/shm/gpuaas-test-mps "$CUDA_MPS_PIPE_DIRECTORY/control"
exec sleep 1000
`
