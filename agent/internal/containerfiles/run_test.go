package containerfiles

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/skip"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == Name {
		os.Exit(Run(os.Args[2:]))
	}
	os.Exit(m.Run())
}

// process is a copy that has been started and waits until it is released.
type process struct {
	t          *testing.T
	cmd        *exec.Cmd
	hold       *os.File
	out, notes bytes.Buffer
}

// begin starts the process for the container whose root directory this is, with the agent's ids.
func begin(t *testing.T, root string, stdin io.Reader, args ...string) *process {
	t.Helper()
	dir, err := os.Open(root)
	require.NoError(t, err)
	defer func() { _ = dir.Close() }()
	hold, release, err := os.Pipe()
	require.NoError(t, err)
	defer func() { _ = hold.Close() }()
	p := &process{t: t, hold: release}
	p.cmd = exec.CommandContext(t.Context(), os.Args[0], append([]string{Name}, args...)...)
	p.cmd.ExtraFiles = []*os.File{dir, hold}
	p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = stdin, &p.out, &p.notes
	require.NoError(t, p.cmd.Start())
	return p
}

// end releases the process and returns how it ended.
func (p *process) end() (out, notes string, code int) {
	p.t.Helper()
	require.NoError(p.t, p.hold.Close())
	_ = p.cmd.Wait()
	return p.out.String(), p.notes.String(), p.cmd.ProcessState.ExitCode()
}

func copied(t *testing.T, root string, stdin io.Reader, args ...string) (out, notes string, code int) {
	t.Helper()
	return begin(t, root, stdin, args...).end()
}

// archived is a tar stream of one file.
func archived(t *testing.T, name, content string) io.Reader {
	t.Helper()
	var stream bytes.Buffer
	w := tar.NewWriter(&stream)
	err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o640, Size: int64(len(content))})
	require.NoError(t, err)
	_, err = w.Write([]byte(content))
	require.NoError(t, err)
	require.NoError(t, w.Close())
	return &stream
}

// files are the regular files of a tar stream.
func files(t *testing.T, stream string) map[string]string {
	t.Helper()
	found := map[string]string{}
	for r := tar.NewReader(strings.NewReader(stream)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return found
		}
		require.NoError(t, err)
		content, err := io.ReadAll(r)
		require.NoError(t, err)
		if h.Typeflag == tar.TypeReg {
			found[h.Name] = string(content)
		}
	}
}

func write(t *testing.T, path, content string) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
}

func TestFilesAreCopiedOutAndLinksLeadNowhereElse(t *testing.T) {
	outside := t.TempDir()
	write(t, filepath.Join(outside, "secret"), "of the host")
	root := t.TempDir()
	write(t, filepath.Join(root, "data/a"), "1")
	write(t, filepath.Join(root, "data/sub/b"), "2")
	write(t, filepath.Join(root, outside, "secret"), "of the container")
	require.NoError(t, os.Symlink(outside, filepath.Join(root, "out")))
	require.NoError(t, os.Symlink("../../../../../../"+outside+"/secret", filepath.Join(root, "climbs")))

	stream, notes, code := copied(t, root, nil, Out, "/data")
	require.Zero(t, code, notes)
	require.Equal(t, map[string]string{"data/a": "1", "data/sub/b": "2"}, files(t, stream))
	stream, notes, code = copied(t, root, nil, Out, "/out/secret")
	require.Zero(t, code, notes)
	require.Equal(t, map[string]string{"secret": "of the container"}, files(t, stream))
	stream, notes, code = copied(t, root, nil, Out, "/climbs")
	require.Equal(t, 1, code)
	require.Empty(t, stream)
	require.Contains(t, notes, "/climbs is a symbolic link")
	_, notes, code = copied(t, root, nil, Out, "/data/none")
	require.Equal(t, 1, code)
	require.Contains(t, notes, "no such file")
}

func TestAFileKeepsItsNameInADirectoryAndTakesThatOfThePathElsewhere(t *testing.T) {
	root := t.TempDir()
	write(t, filepath.Join(root, "data/old"), "old")
	for path, at := range map[string]string{"/data": "data/a", "/data/b": "data/b", "/data/old": "data/old"} {
		_, notes, code := copied(t, root, archived(t, "a", "new"), In, path)
		require.Zero(t, code, notes)
		content, err := os.ReadFile(filepath.Join(root, at))
		require.NoError(t, err)
		require.Equal(t, "new", string(content), path)
	}
	_, notes, code := copied(t, root, archived(t, "a", "new"), In, "/none/c")
	require.Equal(t, 1, code)
	require.Contains(t, notes, "no such file")
}

func TestFilesOfTheKernelAreNotCopied(t *testing.T) {
	cgroups, err := filepath.Glob("/sys/fs/cgroup/*/cgroup.procs")
	require.NoError(t, err)
	for _, path := range append([]string{"/proc/self/environ", "/proc", "/sys"}, cgroups...) {
		stream, notes, code := copied(t, "/", nil, Out, path)
		require.Equal(t, 1, code, path)
		require.Empty(t, stream, path)
		require.Contains(t, notes, "files of the kernel are not copied", path)
	}
	_, notes, code := copied(t, "/", archived(t, "a", ""), In, "/sys/kernel")
	require.Equal(t, 1, code)
	require.Contains(t, notes, "files of the kernel are not copied")
}

// Root of a container without a user namespace is the machine's root; it must not read what its ids do not allow.
func TestNoCapabilityHelpsACopy(t *testing.T) {
	skip.Root(t, "files of another user")
	root := t.TempDir()
	private := filepath.Join(root, "data/private")
	write(t, private, "of another user")
	require.NoError(t, os.Chown(private, 12345, 12345))
	stream, notes, _ := copied(t, root, nil, Out, "/data/private")
	require.NotContains(t, stream, "of another user")
	require.Contains(t, notes, "permission denied")
}

func TestALostDeviceIsNamed(t *testing.T) {
	_, notes, code := copied(t, "/", nil, Devices, "/dev/null", "/dev/zero")
	require.Zero(t, code)
	require.Empty(t, notes)
	_, notes, code = copied(t, "/", nil, Devices, "/dev/null", "/dev/none", "/dev/gone")
	require.Equal(t, DeviceLost, code)
	require.Equal(t, "/dev/none: no such file or directory\n/dev/gone: no such file or directory\n", notes)
}

// The agent moves the process into the container's cgroup meanwhile: what it reads counts as the container's.
func TestNothingIsDoneBeforeTheProcessIsReleased(t *testing.T) {
	root := t.TempDir()
	p := begin(t, root, nil, Out, "/a")
	score := fmt.Sprintf("/proc/%d/oom_score_adj", p.cmd.Process.Pid)
	require.Eventually(t, func() bool {
		raw, err := os.ReadFile(score)
		return err == nil && strings.TrimSpace(string(raw)) == oomScore
	}, 30*time.Second, time.Millisecond, "the kernel kills it before the app")
	write(t, filepath.Join(root, "a"), "made while it waited")
	stream, notes, code := p.end()
	require.Zero(t, code, notes)
	require.Equal(t, map[string]string{"a": "made while it waited"}, files(t, stream))
}

func TestACopyNeedsADirectionAndAPath(t *testing.T) {
	for _, args := range [][]string{{}, {In}, {Out}, {Devices}, {"sideways", "/a"}, {Out, "/a", "/b"}} {
		_, notes, code := copied(t, t.TempDir(), nil, args...)
		require.Equal(t, 2, code, args)
		require.Contains(t, notes, "needs a direction and a path")
	}
}
