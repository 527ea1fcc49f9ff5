package runtime

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// runcRuntime is containerd's runtime plugin; its shim is the parent of a container and outlives containerd.
const runcRuntime = "io.containerd.runc.v2"

// Run is a started container.
type Run struct {
	ContainerID string
	PID         uint32
	StartedAt   time.Time
}

// State is how far a container is.
type State string

// The states of a container.
const (
	// StateCreated: made, not started; a crash came between.
	StateCreated State = "created"
	StateRunning State = "running"
	// StateExited: ended, and its exit code and time are known as long as the container is not removed.
	StateExited State = "exited"
	// StateLost: ended, nobody knows when or how: the machine restarted or the shim was killed.
	StateLost State = "lost"
	// StateUnknown: its shim does not answer now. It may run; look again.
	StateUnknown State = "unknown"
)

// Container is what is there of one run.
type Container struct {
	ID         string
	MemberID   string
	InstanceID string
	Service    string
	Revision   uint64
	SpecDigest string
	// Labels are the caller's own.
	Labels map[string]string
	// Image is its name, <repository>@<digest>.
	Image     string
	State     State
	PID       uint32
	CreatedAt time.Time
	// StartedAt is zero for a container that never started.
	StartedAt time.Time
	// ExitedAt and ExitCode mean something in StateExited only. 128+n is death by signal n.
	ExitedAt time.Time
	ExitCode uint32
	// OOMKilled is set when the kernel ended one of its processes for want of memory.
	OOMKilled bool
	// UserNamespace is false where the host could not give one.
	UserNamespace bool
}

// BuildSpec is the OCI spec that Start would use: the same bytes for the same run on the same host.
func (r *Runtime) BuildSpec(ctx context.Context, spec Spec) (*specs.Spec, error) {
	s, _, err := r.buildSpec(r.ns(ctx), spec)
	return s, err
}

func (r *Runtime) buildSpec(ctx context.Context, spec Spec) (*specs.Spec, readyImage, error) {
	if err := spec.check(r.host); err != nil {
		return nil, readyImage{}, err
	}
	ref, err := ParseImage(spec.Service.GetImage())
	if err != nil {
		return nil, readyImage{}, err
	}
	image, err := r.readyImage(ctx, ref.name())
	if errdefs.IsNotFound(err) {
		return nil, readyImage{}, imageMissing(ref.name(), err)
	}
	if err != nil {
		return nil, readyImage{}, fmt.Errorf("look for image %s: %w", ref.name(), err)
	}
	who := spec.Service.GetUser()
	if who == "" {
		who = image.config.User
	}
	usr, err := r.resolveUser(ctx, image.Image, who)
	if err != nil {
		return nil, readyImage{}, err
	}
	s, err := buildSpec(specInput{
		spec: spec, image: image.config, user: usr, host: r.host, files: r.files(spec.ID), cgroup: r.cgroupPath(spec.ID),
		uidMap: r.uidMap(),
	})
	return s, image, err
}

func imageMissing(name string, cause error) error {
	return fault.New(fault.NotFound, "image_missing", "The image "+name+" is not on this node yet.", cause)
}

// Start makes and starts the container of this run. A run that is up already is returned as it is; one that a crash
// left half made is made again; one that has ended is a conflict.
func (r *Runtime) Start(ctx context.Context, spec Spec) (Run, error) {
	ctx = r.ns(ctx)
	if r.host.appArmor != "" {
		// The owner's tools may have unloaded it meanwhile (aa-remove-unknown).
		if _, err := r.cfg.LoadAppArmor(r.host.appArmor); err != nil {
			return Run{}, fault.New(fault.Unavailable, "apparmor_unavailable",
				"The AppArmor profile of containers cannot be loaded: see whether apparmor_parser works.", err)
		}
	}
	ociSpec, image, err := r.buildSpec(ctx, spec)
	if err != nil {
		return Run{}, err
	}
	switch had, err := r.Get(ctx, spec.ID); {
	case fault.Is(err, fault.NotFound):
		// What a crash before the container's record may have left shows itself when it is in the way.
	case err != nil:
		return Run{}, err
	case had.State == StateRunning:
		return Run{ContainerID: had.ID, PID: had.PID, StartedAt: had.StartedAt}, nil
	case had.State == StateUnknown:
		return Run{}, fault.New(fault.Unavailable, "container_unknown", "The container does not answer at the moment.", nil)
	case had.State == StateExited, had.State == StateLost && !had.StartedAt.IsZero():
		return Run{}, fault.New(fault.Conflict, "run_ended", "This run has ended; a new one needs an id of its own.",
			nil).Permanent()
	default:
		if err := r.Remove(ctx, spec.ID); err != nil {
			return Run{}, err
		}
	}
	run, err := r.start(ctx, spec, ociSpec, image)
	if errdefs.IsAlreadyExists(err) {
		if err := r.Remove(ctx, spec.ID); err != nil {
			return Run{}, err
		}
		run, err = r.start(ctx, spec, ociSpec, image)
	}
	if err != nil {
		clean, cancel := r.detached(ctx)
		defer cancel()
		if e := r.Remove(clean, spec.ID); e != nil {
			r.cfg.Log.Warn("cannot clean up after a failed start", "container", spec.ID, "cause", e)
		}
		return Run{}, startFault(err)
	}
	return run, nil
}

func (r *Runtime) start(ctx context.Context, spec Spec, ociSpec *specs.Spec, image readyImage) (Run, error) {
	defer r.beginStart(spec.ID)()
	if err := r.prepareFiles(spec); err != nil {
		return Run{}, err
	}
	failpoint.Hit("agent/start/files")
	// A session keyring of its own counts for the user, and the kernel gives a user 200 keys: all containers of a node
	// share those ids. The filter of system calls keeps a container from the keyring that it inherits.
	options := &runcoptions.Options{Root: r.cfg.RuncRoot, NoNewKeyring: r.host.seccomp}
	if r.host.userNamespaces {
		options.IoUid, options.IoGid = r.cfg.UIDMapBase, r.cfg.UIDMapBase
	}
	var rootfs []mount.Mount
	_, err := r.client.NewContainer(ctx, spec.ID,
		client.WithSnapshotter(r.cfg.Snapshotter),
		r.withSnapshot(spec, image, &rootfs),
		client.WithContainerLabels(spec.labels(r.host, r.uidMap(), image.config.StopSignal, r.diskLimit(spec))),
		client.WithRuntime(runcRuntime, options),
		client.WithSpec(ociSpec),
	)
	if err != nil {
		return Run{}, fmt.Errorf("make container: %w", err)
	}
	failpoint.Hit("agent/start/container")
	if err := r.newTask(ctx, spec, rootfs); err != nil {
		return Run{}, err
	}
	failpoint.Hit("agent/start/task")
	if err := r.awaitNetwork(ctx, spec); err != nil {
		return Run{}, err
	}
	started, err := r.client.TaskService().Start(ctx, &tasks.StartRequest{ContainerID: spec.ID})
	if err != nil {
		return Run{}, fmt.Errorf("start task: %w", errgrpc.ToNative(err))
	}
	failpoint.Hit("agent/start/running")
	r.noteRunning(spec.ID, started.GetPid())
	run := Run{ContainerID: spec.ID, PID: started.GetPid(), StartedAt: failpoint.Now()}
	return run, r.noteStart(spec.ID, run.StartedAt)
}

// newTask makes the container's first process, which waits for the start before it becomes the workload's.
// Container.NewTask would ask containerd four times for what is known here.
func (r *Runtime) newTask(ctx context.Context, spec Spec, rootfs []mount.Mount) error {
	if spec.Namespaces != nil {
		if err := spec.Namespaces(ctx); err != nil {
			return err
		}
	}
	log, err := cio.LogFile(r.logPath(spec.ID))(spec.ID)
	if err != nil {
		return fmt.Errorf("prepare the log: %w", err)
	}
	r.parents.RLock()
	defer r.parents.RUnlock()
	_, err = r.client.TaskService().Create(ctx, &tasks.CreateTaskRequest{
		ContainerID: spec.ID, Rootfs: mount.ToProto(rootfs), Stdout: log.Config().Stdout, Stderr: log.Config().Stderr,
	})
	if err != nil {
		return fmt.Errorf("make task: %w", errgrpc.ToNative(err))
	}
	return nil
}

// awaitNetwork waits until the network stands that is made beside the container, and tells the container its address.
func (r *Runtime) awaitNetwork(ctx context.Context, spec Spec) (err error) {
	if spec.Network == nil {
		return nil
	}
	if spec.IP, err = spec.Network(ctx); err != nil {
		return err
	}
	return r.writeHosts(spec)
}

// withSnapshot makes the container's file system upon that of the image, and gives its mounts. client.WithNewSnapshot
// would look for the image anew each time.
func (r *Runtime) withSnapshot(spec Spec, image readyImage, rootfs *[]mount.Mount) client.NewContainerOpts {
	return func(ctx context.Context, _ *client.Client, c *containers.Container) (err error) {
		mapped := snapshots.Info{}
		if r.host.userNamespaces {
			if err := r.remapOption()(&mapped); err != nil {
				return err
			}
		}
		labels := map[string]string{labelMember: spec.MemberID}
		maps.Copy(labels, mapped.Labels)
		*rootfs, err = r.client.SnapshotService(c.Snapshotter).Prepare(ctx, spec.ID, image.snapshot,
			snapshots.WithLabels(labels))
		if errdefs.IsNotFound(err) {
			r.forgetImages() // somebody has removed it
			return imageMissing(image.Name(), err)
		}
		c.SnapshotKey, c.Image = spec.ID, image.Name()
		return err
	}
}

// beginStart notes that the container is being made until end is called.
func (r *Runtime) beginStart(id string) (end func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.starting[id] = true
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.starting, id)
	}
}

func (r *Runtime) isStarting(id string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.starting[id]
}

func startFault(err error) error {
	if _, known := errors.AsType[*fault.Error](err); known {
		return err
	}
	text := err.Error()
	switch {
	case strings.Contains(text, "executable file not found"), strings.Contains(text, "no such file or directory") &&
		strings.Contains(text, "exec"):
		return fault.New(fault.Unprocessable, "bad_command", "The command is not in the image.", err).Permanent()
	case strings.Contains(text, "no space left on device"):
		return fault.New(fault.Unavailable, agent.CodeDiskFull, "The node's disk is full: free space where containerd "+
			"keeps its data.", err)
	}
	return fault.New(fault.Unavailable, "start_failed", "The container could not be started.", err)
}

// List tells what is there of every run in the agent's containerd namespace, ordered by id.
func (r *Runtime) List(ctx context.Context) ([]Container, error) {
	ctx = r.ns(ctx)
	records, err := r.client.ContainerService().List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	out := make([]Container, 0, len(records))
	for _, record := range records {
		c, err := r.describe(ctx, record, r.stillRunning(record.ID))
		if err != nil {
			return nil, err
		}
		out = append(out, c)
	}
	slices.SortFunc(out, func(a, b Container) int { return strings.Compare(a.ID, b.ID) })
	return out, nil
}

// Get tells what is there of one run; fault NotFound when nothing is.
func (r *Runtime) Get(ctx context.Context, id string) (Container, error) {
	ctx = r.ns(ctx)
	record, err := r.client.ContainerService().Get(ctx, id)
	if errdefs.IsNotFound(err) {
		return Container{}, fault.New(fault.NotFound, "container_missing", "There is no such container on this node.", err)
	}
	if err != nil {
		return Container{}, fmt.Errorf("look for container %s: %w", id, err)
	}
	return r.describe(ctx, record, nil)
}

func (r *Runtime) describe(ctx context.Context, record containers.Container,
	process *tasktypes.Process,
) (Container, error) {
	revision, _ := strconv.ParseUint(record.Labels[labelRevision], 10, 64)
	c := Container{
		ID: record.ID, MemberID: record.Labels[labelMember], InstanceID: record.Labels[labelInstance],
		Service:  record.Labels[labelService],
		Revision: revision, SpecDigest: record.Labels[labelSpecDigest], Image: record.Image, CreatedAt: record.CreatedAt,
		Labels: map[string]string{}, StartedAt: r.startedAt(record.ID), UserNamespace: record.Labels[labelUserNS] != "none",
	}
	for name, value := range record.Labels {
		if !strings.HasPrefix(name, labelPrefix) {
			c.Labels[name] = value
		}
	}
	if process == nil && r.isStarting(record.ID) {
		c.State = StateCreated // nothing of it runs that this process does not know of
		return c, nil
	}
	if process == nil {
		// A shim may not answer: only a clear "not found" means that its task is gone.
		response, err := r.client.TaskService().Get(ctx, &tasks.GetRequest{ContainerID: record.ID})
		err = errgrpc.ToNative(err)
		switch {
		case errdefs.IsNotFound(err):
			c.State = StateLost
			return c, nil
		case ctx.Err() != nil:
			return Container{}, ctx.Err()
		case err != nil:
			c.State = StateUnknown
			return c, nil //nolint:nilerr // that is what unknown says
		}
		process = response.GetProcess()
		if process.GetStatus() == tasktypes.Status_RUNNING {
			r.noteRunning(record.ID, process.GetPid())
		}
	}
	c.PID = process.GetPid()
	switch process.GetStatus() {
	case tasktypes.Status_CREATED:
		c.State = StateCreated
	case tasktypes.Status_STOPPED:
		c.State, c.ExitCode, c.ExitedAt = StateExited, process.GetExitStatus(),
			failpoint.Machine(process.GetExitedAt().AsTime())
		c.OOMKilled = r.oomKilled(record.ID)
	case tasktypes.Status_RUNNING, tasktypes.Status_PAUSED, tasktypes.Status_PAUSING:
		c.State = StateRunning
		if c.StartedAt.IsZero() {
			// A crash came between the start and the note of it.
			if p, there := readProcess(c.PID); there {
				c.StartedAt = p.startedAt()
			}
		}
	default:
		c.State = StateUnknown
	}
	return c, nil
}
