package runtime

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/internal/containerfiles"
	"github.com/gpuaas/gpuaas/pkg/execstream"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	// maxCopies bounds the copies that run at once: each is a process.
	maxCopies = 8
	// copyNoteBytes bounds what a copy says at its end.
	copyNoteBytes = 4 << 10
)

// CopyFiles copies between the command's streams and a path in the container, as a tar stream, and returns the exit
// code. The end of ctx ends it. A process of its own does it (agent/internal/containerfiles), with the ids of the
// container's user, without capabilities and in the container's cgroup: it reads, writes and uses no more than the
// container.
func (r *Runtime) CopyFiles(ctx context.Context, id, file string, into bool, c execstream.Command) (int, error) {
	if !path.IsAbs(file) || strings.ContainsRune(file, 0) {
		return 0, badSpec("A path in a container begins with a slash.")
	}
	select {
	case r.copies <- struct{}{}:
		defer func() { <-r.copies }()
	default:
		return 0, fault.New(fault.Unavailable, codeCopiesBusy, fmt.Sprintf("%d copies run on the node already.", maxCopies),
			nil).RetryAfter(10 * time.Second)
	}
	ctx = r.ns(ctx)
	task, spec, err := r.taskOf(ctx, id)
	if err != nil {
		return 0, err
	}
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	exit, err := task.Wait(ctx)
	if err != nil {
		return 0, notRunning(err)
	}
	go func() {
		select {
		case <-exit: // its cgroup cannot go before the copy has
			end(notRunning(fmt.Errorf("the container has ended: %w", errdefs.ErrNotFound)))
		case <-ctx.Done():
		}
	}()
	root, err := r.openRoot(ctx, id, task.Pid())
	if err != nil {
		return 0, err
	}
	defer func() { _ = root.Close() }()
	return r.processIn(ctx, id, root, hostIDs(spec.Process.User, spec.Linux), []string{direction(into), file}, c)
}

// openRoot opens the root directory of a running container.
func (r *Runtime) openRoot(ctx context.Context, id string, pid uint32) (*os.File, error) {
	root, err := os.OpenFile(filepath.Join(r.cfg.ProcDir, strconv.Itoa(int(pid)), "root"), unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, notRunning(err)
	}
	// The process number may have been given again before the directory was opened: then the task has ended.
	if now, err := r.Get(ctx, id); err != nil || now.State != StateRunning {
		_ = root.Close()
		return nil, notRunning(cmp.Or(err, fmt.Errorf("the container has ended: %w", errdefs.ErrNotFound)))
	}
	return root, nil
}

func direction(into bool) string {
	if into {
		return containerfiles.In
	}
	return containerfiles.Out
}

// hostIDs are the ids of a container's user outside of it.
func hostIDs(u specs.User, l *specs.Linux) *syscall.Credential {
	outside := func(maps []specs.LinuxIDMapping, id uint32) uint32 {
		for _, m := range maps {
			if id >= m.ContainerID && id-m.ContainerID < m.Size {
				return m.HostID + id - m.ContainerID
			}
		}
		return id // the container has the host's user namespace
	}
	out := &syscall.Credential{Uid: outside(l.UIDMappings, u.UID), Gid: outside(l.GIDMappings, u.GID)}
	for _, g := range u.AdditionalGids {
		out.Groups = append(out.Groups, outside(l.GIDMappings, g))
	}
	return out
}

// processIn runs the agent's own program as the container's user.
func (r *Runtime) processIn(ctx context.Context, id string, root *os.File, who *syscall.Credential, args []string,
	c execstream.Command,
) (int, error) {
	hold, begin, err := os.Pipe()
	if err != nil {
		return 0, err
	}
	defer func() { _ = begin.Close() }()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", append([]string{containerfiles.Name}, args...)...)
	cmd.Env, cmd.Dir, cmd.ExtraFiles = []string{"GOMEMLIMIT=32MiB", "GOMAXPROCS=2"}, "/", []*os.File{root, hold}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: who} // it ends with its pipes where the agent is killed
	notes := &bytes.Buffer{}
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = c.Stdout, &limitedWriter{notes, copyNoteBytes}, outputWait
	input, err := cmd.StdinPipe() // Wait does not wait for input that nobody sends
	if err != nil {
		return 0, err
	}
	err = cmd.Start()
	_ = hold.Close()
	if err != nil {
		return 0, fmt.Errorf("start a process of the agent: %w", err)
	}
	go func() {
		_, _ = io.Copy(input, c.Stdin)
		_ = input.Close()
	}()
	if err = r.joinCgroup(id, cmd.Process.Pid); err == nil {
		err = begin.Close()
	} else {
		_ = cmd.Process.Kill()
	}
	ended := cmd.Wait()
	switch {
	case err != nil:
		return 0, notRunning(err)
	case ctx.Err() != nil:
		return 0, context.Cause(ctx)
	case cmd.ProcessState.ExitCode() < 0:
		return 0, fault.New(fault.Unavailable, codeCopyFailed, "The copy was ended: the app has stopped, or has no memory "+
			"left.", ended)
	}
	_, _ = c.Stderr.Write(notes.Bytes())
	return cmd.ProcessState.ExitCode(), nil
}

// joinCgroup moves a process into the container's cgroup.
func (r *Runtime) joinCgroup(id string, pid int) error {
	dirs := r.cgroupDirs(r.cgroupPath(id))
	if len(dirs) == 0 {
		return errors.New("the container has no cgroup")
	}
	for _, dir := range dirs {
		err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0)
		if err != nil {
			return fmt.Errorf("join the container's cgroup: %w", err)
		}
	}
	return nil
}

// limitedWriter drops what is over its limit.
type limitedWriter struct {
	to   io.Writer
	left int
}

// Write implements io.Writer.
func (l *limitedWriter) Write(p []byte) (int, error) {
	n := min(len(p), l.left)
	l.left -= n
	_, err := l.to.Write(p[:n])
	return len(p), err
}
