package runtime

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"syscall"
	"time"

	"github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/v2/client"
	coreevents "github.com/containerd/containerd/v2/core/events"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/loop"
	"github.com/gpuaas/gpuaas/pkg/notify"
)

// Reconnecting to containerd's event stream.
const (
	eventsBackoff    = 200 * time.Millisecond
	eventsMaxBackoff = 5 * time.Second
)

// Events wakes the reader whenever a container may have changed by itself, and after every interruption of containerd's
// event stream, because containerd does not replay. The reader then lists the containers. The channel is never closed.
func (r *Runtime) Events(ctx context.Context) <-chan struct{} {
	wake := notify.NewSignal()
	go func() {
		wait := eventsBackoff
		for {
			started := time.Now()
			r.listen(r.ns(ctx), wake)
			if time.Since(started) > eventsMaxBackoff {
				wait = eventsBackoff
			}
			if !loop.Pause(ctx, wait) {
				return
			}
			wait = min(2*wait, eventsMaxBackoff)
		}
	}()
	return wake
}

// listen wakes the reader for each relevant event until the stream breaks.
func (r *Runtime) listen(ctx context.Context, wake notify.Signal) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, errs := r.client.Subscribe(ctx, `namespace==`+r.cfg.Namespace+
		`,topic~="^/(tasks/(exit|oom|delete|paused|resumed)|containers/delete)$"`)
	// Subscribe first, wake afterwards: the reader then sees what happened in between.
	wake.Send()
	for {
		select {
		case e := <-stream:
			if relevant(e) {
				wake.Send()
			}
		case err := <-errs:
			r.cfg.Log.Debug("containerd's events are interrupted", slog.Any("error", err))
			wake.Send()
			return
		}
	}
}

// relevant drops the events of exec processes: every probe makes four of them.
func relevant(e *coreevents.Envelope) bool {
	if e == nil {
		return true
	}
	decoded, err := typeurl.UnmarshalAny(e.Event)
	if err != nil {
		return true
	}
	switch d := decoded.(type) {
	case *events.TaskExit:
		return d.GetID() == d.GetContainerID()
	case *events.TaskDelete:
		return d.GetID() == "" || d.GetID() == d.GetContainerID()
	}
	return true
}

// ErrExecTimeout is returned by Exec for a command that was killed because it took too long.
var ErrExecTimeout = errors.New("the command took too long")

// execStartMax bounds the start of a probe's command, which a busy machine may delay.
const execStartMax = 10 * time.Second

// Exec runs a command inside the container, as the container's user and with its limits, and returns its exit code. Its
// output is thrown away. It is for probes; a command that takes longer than timeout, from its start, is killed.
func (r *Runtime) Exec(ctx context.Context, id string, argv []string, timeout time.Duration) (int, error) {
	ctx = r.ns(ctx)
	if len(argv) == 0 {
		return 0, badSpec("The probe names no command.")
	}
	starting, cancel := context.WithTimeout(ctx, execStartMax)
	defer cancel()
	task, spec, err := r.taskOf(starting, id)
	if err != nil {
		return 0, err
	}
	process := spec.Process
	process.Args, process.Terminal = argv, false
	// With cio.NullIO the command could not write: the shim opens /dev/null for reading.
	p, err := task.Exec(starting, r.commandID(), process, cio.LogFile(os.DevNull))
	if err != nil {
		return 0, notRunning(err)
	}
	defer r.endCommand(ctx, id, p)
	exit, err := p.Wait(ctx)
	if err != nil {
		return 0, fmt.Errorf("watch the command: %w", err)
	}
	if err := p.Start(starting); err != nil {
		return 0, startFault(err)
	}
	return await(ctx, p, exit, timeout)
}

// await returns the exit code of a command that was started, and kills it after timeout.
func await(ctx context.Context, p client.Process, exit <-chan client.ExitStatus, timeout time.Duration) (int, error) {
	limit, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	select {
	case status := <-exit:
		code, _, err := status.Result()
		p.IO().Wait()
		return int(code), err
	case <-limit.Done():
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), killWait)
		defer cancel()
		if err := p.Kill(end, syscall.SIGKILL); err != nil && !errdefs.IsNotFound(err) {
			return 0, fmt.Errorf("kill the command: %w", err)
		}
		if ctx.Err() != nil {
			return 0, ctx.Err()
		}
		return 0, ErrExecTimeout
	}
}

func notRunning(err error) error {
	if errdefs.IsNotFound(err) || errdefs.IsFailedPrecondition(err) {
		return fault.New(fault.NotFound, codeContainerMissing, "The container does not run.", err)
	}
	return fmt.Errorf("run a command in the container: %w", err)
}
