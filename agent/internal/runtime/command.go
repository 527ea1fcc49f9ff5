package runtime

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	"github.com/google/uuid"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuaas/gpuaas/pkg/execstream"
)

const (
	// commandPrefix begins the ids of all commands in containers.
	commandPrefix = "exec-"
	// outputWait is how long the output of an ended command is waited for: a process that it has left behind may keep it
	// open for ever.
	outputWait = 2 * time.Second
)

// RunCommand runs a command in the container, as the container's user and with its limits, and returns its exit code.
// The end of ctx kills it. Its input and output pass without being kept: a caller who does not read stops the command.
func (r *Runtime) RunCommand(ctx context.Context, id string, c execstream.Command) (int, error) {
	ctx = r.ns(ctx)
	if len(c.Argv) == 0 {
		return 0, badSpec("There is no command to run.")
	}
	task, spec, err := r.taskOf(ctx, id)
	if err != nil {
		return 0, err
	}
	process := spec.Process
	process.Args, process.Terminal = c.Argv, c.Terminal
	input := &commandInput{Reader: c.Stdin, ended: make(chan struct{})}
	opts := []cio.Opt{cio.WithStreams(input, c.Stdout, c.Stderr), cio.WithFIFODir(r.files(id).dir)}
	if c.Terminal {
		opts = append(opts, cio.WithTerminal)
		process.Env = append(process.Env, "TERM=xterm-256color")
		process.ConsoleSize = &specs.Box{Height: uint(c.Size.Rows), Width: uint(c.Size.Columns)}
	}
	// A start that is given up goes on in the shim, and nothing would end the command: a caller who goes waits for it.
	starting, cancel := r.detached(ctx)
	defer cancel()
	p, err := task.Exec(starting, r.commandID(), process, cio.NewCreator(opts...))
	if err != nil {
		return 0, notRunning(err)
	}
	defer r.endCommand(ctx, id, p)
	exit, err := p.Wait(context.WithoutCancel(ctx))
	if err != nil {
		return 0, fmt.Errorf("watch the command: %w", err)
	}
	if err := p.Start(starting); err != nil {
		return 0, startFault(err)
	}
	return serveCommand(ctx, p, c, input, exit)
}

// serveCommand passes the end of the input and changes of size on until the command ends.
func serveCommand(ctx context.Context, p client.Process, c execstream.Command, input *commandInput,
	exit <-chan client.ExitStatus,
) (int, error) {
	resize, ended := c.Resize, input.ended
	if !c.Terminal {
		resize = nil
	} else if c.Size.Rows > 0 && c.Size.Columns > 0 {
		_ = p.Resize(ctx, uint32(c.Size.Columns), uint32(c.Size.Rows))
	}
	for {
		select {
		case status := <-exit:
			code, _, err := status.Result()
			awaitOutput(ctx, p)
			return int(code), err
		case size := <-resize:
			_ = p.Resize(ctx, uint32(size.Columns), uint32(size.Rows)) // the command may have ended
		case <-ended:
			ended = nil
			_ = p.CloseIO(ctx, client.WithStdinCloser)
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
}

func awaitOutput(ctx context.Context, p client.Process) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.IO().Wait()
	}()
	limit := time.NewTimer(outputWait)
	defer limit.Stop()
	select {
	case <-done:
		return
	case <-limit.C:
	case <-ctx.Done():
	}
	p.IO().Cancel()
}

// commandInput tells when the input has ended.
type commandInput struct {
	io.Reader

	once  sync.Once
	ended chan struct{}
}

// Read implements io.Reader.
func (c *commandInput) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	if err != nil {
		c.once.Do(func() { close(c.ended) })
	}
	return n, err
}

// taskOf returns the container's task, and its spec with its process as the pattern of another one in it.
func (r *Runtime) taskOf(ctx context.Context, id string) (client.Task, *specs.Spec, error) {
	container, err := r.client.LoadContainer(ctx, id)
	if err != nil {
		return nil, nil, notRunning(err)
	}
	spec, err := container.Spec(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("read the container's spec: %w", err)
	}
	task, err := container.Task(ctx, nil)
	if err != nil {
		return nil, nil, notRunning(err)
	}
	return task, spec, nil
}

// commandID is the id of a new command. It names this process of the agent: EndOldCommands spares its commands.
func (r *Runtime) commandID() string { return commandPrefix + r.commands + "-" + uuid.NewString() }

// endCommand kills the command where it still runs, and removes what containerd keeps of it.
func (r *Runtime) endCommand(ctx context.Context, containerID string, p client.Process) {
	end, cancel := r.detached(ctx)
	defer cancel()
	if _, err := p.Delete(end, client.WithProcessKill); err != nil && !errdefs.IsNotFound(err) {
		r.cfg.Log.WarnContext(ctx, "cannot delete a finished command", slog.String("container_id", containerID),
			slog.Any("error", err))
	}
}

// EndOldCommands kills the commands that an agent which was killed has left in containers: their streams are gone.
func (r *Runtime) EndOldCommands(ctx context.Context) error {
	ctx = r.ns(ctx)
	containers, err := r.client.Containers(ctx)
	if err != nil {
		return fmt.Errorf("list containers: %w", err)
	}
	var errs []error
	for _, c := range containers {
		errs = append(errs, r.endOldCommands(ctx, c))
	}
	return errors.Join(errs...)
}

// endOldCommands kills those of one container, whose shim may not answer.
func (r *Runtime) endOldCommands(ctx context.Context, c client.Container) error {
	ctx, cancel := context.WithTimeout(ctx, cleanupTimeout)
	defer cancel()
	task, err := c.Task(ctx, nil)
	if err != nil {
		return nil // it does not run
	}
	pids, err := task.Pids(ctx)
	if err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("list the processes of %s: %w", c.ID(), err)
	}
	var errs []error
	for _, info := range pids {
		id := commandOf(info)
		if id == "" || strings.HasPrefix(id, commandPrefix+r.commands) {
			continue
		}
		errs = append(errs, killCommand(ctx, task, id))
	}
	return errors.Join(errs...)
}

// commandOf is the id of the command that a process was started as; empty for any other process.
func commandOf(info client.ProcessInfo) string {
	if info.Info == nil {
		return ""
	}
	decoded, err := typeurl.UnmarshalAny(info.Info)
	if err != nil {
		return ""
	}
	details, ok := decoded.(*options.ProcessDetails)
	if !ok || !strings.HasPrefix(details.GetExecID(), commandPrefix) {
		return ""
	}
	return details.GetExecID()
}

func killCommand(ctx context.Context, task client.Task, id string) error {
	p, err := task.LoadProcess(ctx, id, nil)
	if err == nil {
		err = p.Kill(ctx, syscall.SIGKILL)
	}
	if err == nil {
		_, err = p.Delete(ctx, client.WithProcessKill)
	}
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}
