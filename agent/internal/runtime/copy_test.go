package runtime_test

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/pkg/execstream"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// packed is a tar stream of one file.
func packed(t *testing.T, name, text string) io.Reader {
	t.Helper()
	out := &bytes.Buffer{}
	w := tar.NewWriter(out)
	require.NoError(t, w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Size: int64(len(text)), Mode: 0o640}))
	_, err := w.Write([]byte(text))
	require.NoError(t, err)
	require.NoError(t, w.Close())
	return out
}

// copyInto copies a file into the container and returns what the copy says.
func (f *fixture) copyInto(id, path, name, text string) (notes string, code int) {
	f.t.Helper()
	var stderr bytes.Buffer
	code, err := f.rt.CopyFiles(f.t.Context(), id, path, true, execstream.Command{
		Stdin: packed(f.t, name, text), Stdout: io.Discard, Stderr: &stderr,
	})
	require.NoError(f.t, err)
	return stderr.String(), code
}

// copyOut returns the text of one file of the container.
func (f *fixture) copyOut(id, path string) (text, notes string, code int) {
	f.t.Helper()
	var stdout, stderr bytes.Buffer
	code, err := f.rt.CopyFiles(f.t.Context(), id, path, false, execstream.Command{
		Stdin: strings.NewReader(""), Stdout: &stdout, Stderr: &stderr,
	})
	require.NoError(f.t, err)
	if code == 0 {
		archive := tar.NewReader(&stdout)
		_, err := archive.Next()
		require.NoError(f.t, err)
		all, err := io.ReadAll(archive)
		require.NoError(f.t, err)
		text = string(all)
	}
	return text, stderr.String(), code
}

func TestFilesAreCopiedWithTheRightsOfTheContainersUser(t *testing.T) {
	f := newFixture(t)
	image := f.image()
	spec := f.spec(image, "wait")
	spec.Service.User = "1234:5678"
	spec.Service.Scratch = []*protocol.Scratch{{Path: "/scratch", SizeBytes: 1 << 20}}
	root := fmt.Sprintf("/proc/%d/root", f.start(spec).PID)
	defer unix.Umask(unix.Umask(0o077)) // the agent's own

	notes, code := f.copyInto(spec.ID, "/scratch", "file", "text")
	require.Zero(t, code, notes)
	info, err := os.Stat(root + "/scratch/file")
	require.NoError(t, err)
	require.Equal(t, fs.FileMode(0o640), info.Mode())
	owner := info.Sys().(*syscall.Stat_t)
	require.Equal(t, []uint32{runtime.DefaultUIDMapBase + 1234, runtime.DefaultUIDMapBase + 5678},
		[]uint32{owner.Uid, owner.Gid}, "what arrives is the user's")
	text, notes, code := f.copyOut(spec.ID, "/scratch/file")
	require.Zero(t, code, notes)
	require.Equal(t, "text", text)
	notes, code = f.copyInto(spec.ID, "/scratch/renamed", "file", "other")
	require.Zero(t, code, notes)
	text, _, _ = f.copyOut(spec.ID, "/scratch/renamed")
	require.Equal(t, "other", text)

	for path, want := range map[string]string{
		"/etc/new": "permission denied", "/scratch/none/file": "no such file", "/proc/self": "kernel",
		"/sys/fs/cgroup": "",
	} {
		notes, code := f.copyInto(spec.ID, path, "file", "x")
		require.Equal(t, 1, code, path)
		require.Contains(t, notes, want)
	}
	require.NoError(t, os.WriteFile(root+"/roots", []byte("secret"), 0o600))
	_, notes, code = f.copyOut(spec.ID, "/roots")
	require.Equal(t, 1, code)
	require.Contains(t, notes, "permission denied")
	// A megabyte is the limit of the directory.
	notes, code = f.copyInto(spec.ID, "/scratch", "big", strings.Repeat("x", 2<<20))
	require.Equal(t, 1, code)
	require.Contains(t, notes, "no space left")
}

// The user of an image may belong to several groups; the host has groups of the same numbers.
func TestLaw10ACopyHasTheGroupsOfTheContainersUserAndNoneOfTheHosts(t *testing.T) {
	f := newFixture(t)
	spec := f.spec(f.image(), "wait")
	spec.Service.User = "jovyan" // of the group lab, 200
	root := fmt.Sprintf("/proc/%d/root/tmp/", f.start(spec).PID)
	const lab = 200
	for dir, gid := range map[string]int{"lab": runtime.DefaultUIDMapBase + lab, "host": lab} {
		require.NoError(t, os.Mkdir(root+dir, 0o700))
		require.NoError(t, os.Chown(root+dir, 0, gid))
		require.NoError(t, os.Chmod(root+dir, 0o770))
	}
	notes, code := f.copyInto(spec.ID, "/tmp/lab", "file", "text")
	require.Zero(t, code, notes)
	notes, code = f.copyInto(spec.ID, "/tmp/host", "file", "text")
	require.Equal(t, 1, code)
	require.Contains(t, notes, "permission denied")
}

func TestNoLinkLeadsACopyOutOfTheContainer(t *testing.T) {
	f := newFixture(t)
	spec := f.spec(f.image(), "wait")
	spec.Service.Scratch = []*protocol.Scratch{{Path: "/scratch", SizeBytes: 1 << 20}}
	root := fmt.Sprintf("/proc/%d/root", f.start(spec).PID)
	require.NoError(t, os.Mkdir(root+"/links", 0o700))
	require.NoError(t, os.Chmod(root+"/links", 0o777))
	outside := t.TempDir()
	require.NoError(t, os.Chmod(outside, 0o777))
	require.NoError(t, os.WriteFile(outside+"/secret", []byte("host"), 0o644))
	for link, target := range map[string]string{
		"absolute": outside, "climbing": "../../../../../../../../.." + outside, "magic": "/proc/1/root" + outside,
		"file": outside + "/secret", "inside": "/scratch",
	} {
		require.NoError(t, os.Symlink(target, root+"/links/"+link))
	}
	for _, link := range []string{"absolute", "climbing", "magic"} {
		_, code := f.copyInto(spec.ID, "/links/"+link+"/planted", "planted", "x")
		require.Equal(t, 1, code, link)
		_, _, code = f.copyOut(spec.ID, "/links/"+link+"/secret")
		require.Equal(t, 1, code, link)
		f.copyInto(spec.ID, "/links/"+link, "planted", "x") // replaces a link that leads nowhere in the container
	}
	_, notes, code := f.copyOut(spec.ID, "/links/file")
	require.Equal(t, 1, code)
	require.Contains(t, notes, "symbolic link")
	notes, code = f.copyInto(spec.ID, "/links/file", "x", "container")
	require.Zero(t, code, notes)
	secret, err := os.ReadFile(outside + "/secret")
	require.NoError(t, err)
	require.Equal(t, "host", string(secret), "the link was replaced, not followed")
	require.NoFileExists(t, outside+"/planted")
	notes, code = f.copyInto(spec.ID, "/links/inside", "planted", "x")
	require.Zero(t, code, notes)
	require.FileExists(t, root+"/scratch/planted", "a link inside is followed as the container does")
}

// oomScores are those of the processes in the container's cgroup.
func (f *fixture) oomScores(id string) map[string]bool {
	scores := map[string]bool{}
	for _, pid := range f.cgroupPids(id) {
		score, _ := os.ReadFile("/proc/" + pid + "/oom_score_adj")
		scores[strings.TrimSpace(string(score))] = true
	}
	return scores
}

func TestACopyRunsInTheContainersCgroupAndEndsWithCallerOrContainer(t *testing.T) {
	f := newFixture(t)
	image := f.image()
	for name, end := range map[string]func(id string, leave func()){
		"caller":    func(_ string, leave func()) { leave() },
		"container": func(id string, _ func()) { require.NoError(t, f.rt.Stop(t.Context(), id, 0)) },
	} {
		t.Run(name, func(t *testing.T) {
			id := f.startWaiting(image)
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			input, silent := io.Pipe()
			defer func() { _ = silent.Close() }()
			ended := make(chan error, 1)
			go func() {
				_, err := f.rt.CopyFiles(ctx, id, "/", true, execstream.Command{
					Stdin: input, Stdout: io.Discard, Stderr: io.Discard,
				})
				ended <- err
			}()
			require.Eventually(t, func() bool { return len(f.cgroupPids(id)) == 2 }, time.Minute, time.Millisecond)
			require.Eventually(t, func() bool { return f.oomScores(id)["1000"] }, time.Minute, time.Millisecond,
				"the kernel kills the copy before the app")
			end(id, leave)
			err := <-ended
			require.Error(t, err)
			if name == "container" {
				require.Contains(t, []fault.Code{"container_missing", "copy_failed"}, fault.As(err).Code)
				require.NoError(t, f.rt.Remove(t.Context(), id))
			} else {
				require.Equal(t, "1", f.cgroupProcesses(id))
			}
		})
	}
	_, err := f.rt.CopyFiles(t.Context(), "none.at.all", "/x", false, execstream.Command{Stdin: strings.NewReader("")})
	require.EqualValues(t, "container_missing", fault.As(err).Code)
}
