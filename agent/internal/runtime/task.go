package runtime

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	cgroup1 "github.com/containerd/cgroups/v3/cgroup1/stats"
	cgroup2 "github.com/containerd/cgroups/v3/cgroup2/stats"
	"github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/v2/client"
	coreevents "github.com/containerd/containerd/v2/core/events"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/typeurl/v2"
	"golang.org/x/sync/errgroup"

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

// Stats is the resource use of a container.
type Stats struct {
	// CPUUsageMicros is CPU time since the container was made, in microseconds, of all cores together.
	CPUUsageMicros uint64
	// MemoryBytes is memory in use now, without file cache that the kernel can drop at once.
	MemoryBytes uint64
	Pids        uint64
}

const (
	// allStatsTimeout bounds the request for the metrics of all containers, oneStatsTimeout that for those of one, and
	// silentStatsTimeout that for those of one whose shim did not answer in time before.
	allStatsTimeout    = 5 * time.Second
	oneStatsTimeout    = 2 * time.Second
	silentStatsTimeout = time.Minute
	// maxStatsAsked bounds the containers that are asked for at once.
	maxStatsAsked = 32
)

// AllStats reads the use of every running container, by id, in one request. containerd asks one shim after the other,
// so that after a silent one the answer lacks the others: AllStats asks for each of these alone. A container whose shim
// is silent is left out until the shim answers.
func (r *Runtime) AllStats(ctx context.Context) (map[string]Stats, error) {
	out := map[string]Stats{}
	if !r.anySilent() {
		all, err := r.readStats(ctx, allStatsTimeout)
		if err != nil && !errdefs.IsDeadlineExceeded(err) {
			return nil, err
		}
		maps.Copy(out, all)
	}
	var missing []string
	r.running.Range(func(key, _ any) bool {
		id, _ := key.(string)
		_, has := out[id]
		if _, silent := r.silent.Load(id); !has && !silent {
			missing = append(missing, id)
		}
		return true
	})
	var mu sync.Mutex
	var asking errgroup.Group
	asking.SetLimit(maxStatsAsked)
	for _, id := range missing {
		asking.Go(func() error {
			one, answered := r.readStatsOf(ctx, id, oneStatsTimeout)
			if !answered {
				r.silent.Store(id, true)
				r.cfg.Log.WarnContext(ctx, "a container's shim does not answer", slog.String("container_id", id))
				go r.awaitShim(ctx, id)
			}
			mu.Lock()
			defer mu.Unlock()
			maps.Copy(out, one)
			return nil
		})
	}
	return out, errors.Join(asking.Wait(), ctx.Err())
}

// awaitShim asks a silent shim until it answers, or its container has ended.
func (r *Runtime) awaitShim(ctx context.Context, id string) {
	defer r.silent.Delete(id)
	for ctx.Err() == nil {
		_, runs := r.running.Load(id)
		if _, answered := r.readStatsOf(ctx, id, silentStatsTimeout); answered || !runs {
			return
		}
	}
}

func (r *Runtime) anySilent() (is bool) {
	r.silent.Range(func(any, any) bool {
		is = true
		return false
	})
	return is
}

// readStatsOf reads the use of one container. That it does not run is an answer, too, but none where most of the time
// was over: containerd says the same of a silent shim.
func (r *Runtime) readStatsOf(ctx context.Context, id string, within time.Duration,
) (found map[string]Stats, answered bool) {
	began := time.Now()
	found, _ = r.readStats(ctx, within, "id=="+strconv.Quote(id))
	return found, len(found) > 0 || time.Since(began) < within/2
}

// readStats reads the use of the containers that a filter of containerd names, of all without one.
func (r *Runtime) readStats(ctx context.Context, within time.Duration, filters ...string) (map[string]Stats, error) {
	ctx, cancel := context.WithTimeout(r.ns(ctx), within)
	defer cancel()
	response, err := r.client.TaskService().Metrics(ctx, &tasks.MetricsRequest{Filters: filters})
	if err != nil {
		return nil, fmt.Errorf("read metrics: %w", errgrpc.ToNative(err))
	}
	out := map[string]Stats{}
	for _, m := range response.GetMetrics() {
		decoded, err := typeurl.UnmarshalAny(m.GetData())
		if err != nil {
			return nil, fmt.Errorf("decode metrics of %s: %w", m.GetID(), err)
		}
		s, err := statsOf(decoded)
		if err != nil {
			return nil, err
		}
		out[m.GetID()] = s
	}
	return out, nil
}

// statsOf reads either version's metrics: which one arrives depends on how the host is booted.
func statsOf(metrics any) (Stats, error) {
	switch m := metrics.(type) {
	case *cgroup1.Metrics:
		return Stats{
			CPUUsageMicros: m.GetCPU().GetUsage().GetTotal() / 1000,
			MemoryBytes:    difference(m.GetMemory().GetUsage().GetUsage(), m.GetMemory().GetTotalInactiveFile()),
			Pids:           m.GetPids().GetCurrent(),
		}, nil
	case *cgroup2.Metrics:
		return Stats{
			CPUUsageMicros: m.GetCPU().GetUsageUsec(),
			MemoryBytes:    difference(m.GetMemory().GetUsage(), m.GetMemory().GetInactiveFile()),
			Pids:           m.GetPids().GetCurrent(),
		}, nil
	}
	return Stats{}, fmt.Errorf("metrics of unknown type %T", metrics)
}

// difference is a-b, but not below 0.
func difference(a, b uint64) uint64 { return a - min(a, b) }

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
