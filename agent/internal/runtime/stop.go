package runtime

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/moby/sys/signal"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuaas/gpuaas/agent/internal/mountpoint"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/loop"
	"github.com/gpuaas/gpuaas/protocol"
)

// Stop ends the container's processes: the image's stop signal first (SIGTERM where it names none), and after the
// grace, a kill of all of them. It returns when they have ended. The container stays, so that exit code and time can be
// made durable. A container that is not there or has ended is no error.
func (r *Runtime) Stop(ctx context.Context, id string, grace time.Duration) error {
	ctx = r.ns(ctx)
	c, err := r.Get(ctx, id)
	switch {
	case fault.Is(err, fault.NotFound):
		return nil
	case err != nil:
		return err
	case c.State == StateExited, c.State == StateLost:
		return nil
	}
	// In an unknown state, the shim did not answer, and the process may run.
	if (c.State == StateRunning || c.State == StateUnknown) && grace > 0 {
		if err := r.signal(ctx, id, r.stopSignal(ctx, id), false); err != nil {
			return err
		}
		failpoint.Hit("agent/stop/signalled")
		ended, err := r.awaitExit(ctx, id, grace)
		if ended || err != nil {
			return err
		}
	}
	if err := r.signal(ctx, id, syscall.SIGKILL, true); err != nil {
		return err
	}
	ended, err := r.awaitExit(ctx, id, killWait)
	if !ended && err == nil && !r.hasProcesses(id) {
		r.killShim(ctx, id)
		ended, err = r.awaitExit(ctx, id, killWait)
	}
	if err == nil && !ended {
		err = fault.New(fault.Unavailable, codeStopFailed, "A process of the container, or its shim, does not end although "+
			"it was killed: it hangs in the kernel.", nil)
	}
	return err
}

func (r *Runtime) stopSignal(ctx context.Context, id string) syscall.Signal {
	record, err := r.client.ContainerService().Get(ctx, id)
	if err == nil && record.Labels[labelStopSignal] != "" {
		// Sending a number that is no signal fails, and so would the stop, before it kills the container.
		sig, err := signal.ParseSignal(record.Labels[labelStopSignal])
		if err == nil && signal.ValidSignalForPlatform(sig) {
			return sig
		}
	}
	return syscall.SIGTERM
}

// signalTimeout bounds the request for a signal, which a shim that does not answer would hold up.
const signalTimeout = 10 * time.Second

func (r *Runtime) signal(ctx context.Context, id string, sig syscall.Signal, all bool) error {
	limit, cancel := context.WithTimeout(ctx, signalTimeout)
	defer cancel()
	_, err := r.client.TaskService().Kill(limit, &tasks.KillRequest{ContainerID: id, Signal: uint32(sig), All: all})
	if err = errgrpc.ToNative(err); err == nil || errdefs.IsNotFound(err) || strings.Contains(err.Error(),
		"process already finished") {
		return nil
	}
	// containerd, which has the same deadline, may be the first to give up.
	if ctx.Err() == nil && (limit.Err() != nil || strings.Contains(err.Error(), context.DeadlineExceeded.Error())) {
		return r.signalPastShim(ctx, id, sig, all)
	}
	return fmt.Errorf("send %v to container %s: %w", sig, id, err)
}

// pollExit is how often the process is polled for its exit while containerd is being restarted.
const pollExit = 200 * time.Millisecond

// awaitExit waits until the container has ended, through restarts of containerd.
func (r *Runtime) awaitExit(ctx context.Context, id string, within time.Duration) (ended bool, err error) {
	limit, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	for {
		c, err := r.Get(limit, id)
		if fault.Is(err, fault.NotFound) || err == nil && (c.State == StateExited || c.State == StateLost) {
			return true, nil
		}
		if err == nil {
			// Returns when the process ends, or when the connection does.
			if _, err = r.client.TaskService().Wait(limit, &tasks.WaitRequest{ContainerID: id}); err == nil {
				continue
			}
		}
		if !loop.Pause(limit, pollExit) {
			return false, ctx.Err()
		}
	}
}

// Remove takes away everything of the run: processes, task, container, snapshot, log, bound files, cgroup. What is not
// there is no error, so it can be repeated from any half-way state.
func (r *Runtime) Remove(ctx context.Context, id string) error {
	ctx = r.ns(ctx)
	if !idPattern.MatchString(id) {
		return badSpec("The run has no usable id.")
	}
	container, err := r.client.LoadContainer(ctx, id)
	if errdefs.IsNotFound(err) {
		container, err = r.containerOfTask(ctx, id)
	}
	if err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("load container %s: %w", id, err)
	}
	if err := r.deleteTask(ctx, id); err != nil {
		return fmt.Errorf("delete task of container %s: %w", id, err)
	}
	failpoint.Hit("agent/remove/task_deleted")
	if container != nil {
		if err := container.Delete(ctx, client.WithSnapshotCleanup); err != nil && !errdefs.IsNotFound(err) {
			return fmt.Errorf("delete container %s: %w", id, err)
		}
	}
	failpoint.Hit("agent/remove/container_deleted")
	return r.removeTraces(ctx, id)
}

// containerOfTask makes a container for a task that has none; it returns errdefs' not found if there is no such task.
// containerd deletes a task only through its container. A task can be left without one when containerd ends a start of
// a killed agent after the container was removed.
func (r *Runtime) containerOfTask(ctx context.Context, id string) (client.Container, error) {
	all, err := r.client.TaskService().List(ctx, &tasks.ListTasksRequest{})
	if err != nil {
		return nil, errgrpc.ToNative(err)
	}
	if !slices.ContainsFunc(all.GetTasks(), func(p *tasktypes.Process) bool { return p.GetID() == id }) {
		return nil, errdefs.ErrNotFound
	}
	return r.client.NewContainer(ctx, id, client.WithRuntime(runcRuntime, &runcoptions.Options{Root: r.cfg.RuncRoot}),
		client.WithSpec(&specs.Spec{}))
}

// deleteWait bounds how long a task may refuse to be deleted, for instance while containerd finds out that its shim is
// dead.
const deleteWait = 20 * time.Second

func (r *Runtime) deleteTask(ctx context.Context, id string) error {
	limit, cancel := context.WithTimeout(ctx, deleteWait+2*killWait)
	defer cancel()
	deadline := time.Now().Add(deleteWait)
	killed := false
	for {
		wait := pollExit
		_, err := r.client.TaskService().Delete(limit, &tasks.DeleteTaskRequest{ContainerID: id})
		err = errgrpc.ToNative(err)
		if err == nil || errdefs.IsNotFound(err) {
			return nil
		}
		// Mostly it still runs: containerd 1.6 has no error code of its own for that.
		if e := r.signal(limit, id, syscall.SIGKILL, true); e == nil {
			if ended, e := r.awaitExit(limit, id, killWait); ended && e == nil && !killed {
				killed, wait = true, 0
			}
		}
		if time.Now().After(deadline) {
			return err
		}
		if !loop.Pause(limit, wait) {
			return errors.Join(err, limit.Err())
		}
	}
}

// removeTraces removes what may be left of a run that containerd no longer knows.
func (r *Runtime) removeTraces(ctx context.Context, id string) error {
	if err := r.client.SnapshotService(snapshotter).Remove(ctx, id); err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("remove snapshot of container %s: %w", id, err)
	}
	if err := r.removeCgroup(ctx, id); err != nil {
		return fmt.Errorf("remove cgroup of container %s: %w", id, err)
	}
	failpoint.Hit("agent/remove/cgroup_removed")
	if err := os.RemoveAll(filepath.Join(r.runcStates(), id)); err != nil {
		return err
	}
	if err := mountpoint.Unmount(r.files(id).secretsDir); err != nil {
		return fmt.Errorf("remove secrets of container %s: %w", id, err)
	}
	for _, dir := range []string{r.files(id).dir, r.files(id).devices} {
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("remove files of container %s: %w", id, err)
		}
	}
	failpoint.Hit("agent/remove/files_removed")
	r.running.Delete(id)
	return r.removeLogs(id)
}

// runcStates is runc's directory of the containers of this agent.
func (r *Runtime) runcStates() string { return filepath.Join(r.cfg.RuncRoot, r.cfg.Namespace) }

// RemoveMember removes every run of a member, whatever state a crash has left it in.
func (r *Runtime) RemoveMember(ctx context.Context, memberID string) error {
	traces, err := r.traces(r.ns(ctx), memberID)
	if err != nil {
		return err
	}
	ids := map[string]bool{}
	for _, t := range traces {
		ids[t.id] = true
	}
	var errs []error
	for _, id := range slices.Sorted(maps.Keys(ids)) {
		errs = append(errs, r.Remove(ctx, id))
	}
	return errors.Join(errs...)
}

// RemoveInterrupted removes what starts have left that a kill of an earlier agent cut off before containerd had a
// record of their container.
func (r *Runtime) RemoveInterrupted(ctx context.Context) error {
	records, err := r.client.ContainerService().List(r.ns(ctx))
	if err != nil {
		return fmt.Errorf("list containers: %w", err)
	}
	var errs []error
	for _, id := range r.earlier {
		if !slices.ContainsFunc(records, func(c containers.Container) bool { return c.ID == id }) {
			errs = append(errs, r.Remove(ctx, id))
		}
	}
	return errors.Join(errs...)
}

// Leftovers lists what still exists of a member, as "<kind> <what>" with the kinds of package protocol. It only reads,
// and relies on no record. An empty list is the runtime's part of a removal proof.
func (r *Runtime) Leftovers(ctx context.Context, memberID string) ([]string, error) {
	traces, err := r.traces(r.ns(ctx), memberID)
	if err != nil {
		return nil, err
	}
	out := make([]string, 0, len(traces))
	for _, t := range traces {
		out = append(out, t.kind+" "+t.id)
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

// trace is a thing of one run that exists on the machine.
type trace struct{ kind, id string }

func (r *Runtime) traces(ctx context.Context, memberID string) ([]trace, error) {
	if !idPattern.MatchString(memberID) {
		return nil, badSpec("The member has no usable id.")
	}
	var found []trace
	prefix := memberID + "."
	records, err := r.client.ContainerService().List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	for _, c := range records {
		if strings.HasPrefix(c.ID, prefix) || c.Labels[labelMember] == memberID {
			found = append(found, trace{protocol.AbsentContainer, c.ID})
		}
	}
	running, err := r.client.TaskService().List(ctx, &tasks.ListTasksRequest{})
	if err != nil {
		return nil, fmt.Errorf("list tasks: %w", errgrpc.ToNative(err))
	}
	for _, p := range running.GetTasks() {
		if strings.HasPrefix(p.GetID(), prefix) {
			found = append(found, trace{protocol.AbsentProcess, p.GetID()})
		}
	}
	err = r.client.SnapshotService(snapshotter).Walk(ctx, func(_ context.Context, info snapshots.Info) error {
		if strings.HasPrefix(info.Name, prefix) {
			found = append(found, trace{protocol.AbsentSnapshot, info.Name})
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list snapshots: %w", err)
	}
	onDisk, err := r.tracesOnDisk(prefix)
	return append(found, onDisk...), err
}

func (r *Runtime) tracesOnDisk(prefix string) ([]trace, error) {
	dirs := []trace{ // kind and directory
		{protocol.AbsentScratch, r.cfg.StateDir},
		{protocol.AbsentDeviceClaim, r.cfg.DeviceDir},
		{protocol.AbsentContainer, r.runcStates()},
		{protocol.AbsentLog, r.cfg.LogDir},
	}
	var found []trace
	for _, dir := range r.cgroupDirs(r.memberCgroup(strings.TrimSuffix(prefix, "."))) {
		dirs = append(dirs, trace{protocol.AbsentCgroup, dir})
		found = append(found, trace{protocol.AbsentCgroup, filepath.Base(dir)})
	}
	for _, dir := range dirs {
		entries, err := os.ReadDir(dir.id)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, err
		}
		for _, e := range entries {
			name := e.Name()
			if !strings.HasPrefix(name, prefix) {
				continue
			}
			if dir.kind == protocol.AbsentLog {
				name, _, _ = strings.Cut(name, logSuffix)
			}
			found = append(found, trace{dir.kind, name})
			procs, err := os.ReadFile(filepath.Join(dir.id, name, "cgroup.procs"))
			if dir.kind == protocol.AbsentCgroup && err == nil && len(procs) > 0 {
				found = append(found, trace{protocol.AbsentProcess, name})
			}
		}
	}
	return found, nil
}

// removeStraySnapshots removes the snapshots that no image holds any more, children first.
func (r *Runtime) removeStraySnapshots(ctx context.Context) error {
	service := r.client.SnapshotService(snapshotter)
	for {
		var all []string
		if err := service.Walk(ctx, func(_ context.Context, info snapshots.Info) error {
			all = append(all, info.Name)
			return nil
		}); err != nil {
			return fmt.Errorf("list snapshots: %w", err)
		}
		removed := 0
		for _, name := range all {
			if err := service.Remove(ctx, name); err == nil {
				removed++
			} else if !errdefs.IsNotFound(err) && !errdefs.IsFailedPrecondition(err) {
				return fmt.Errorf("remove snapshot %s: %w", name, err)
			}
		}
		if len(all) == 0 || removed == 0 {
			return nil
		}
	}
}
