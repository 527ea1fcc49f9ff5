package runtime

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// runcRuntime is containerd's runtime plugin; its shim is the parent of a container and outlives containerd.
const runcRuntime = "io.containerd.runc.v2"

// Run is a started container.
type Run struct {
	ContainerID string
	PID         uint32
	StartedAt   time.Time
}

// State is the state of a container.
type State string

// The states of a container.
const (
	// StateCreated: created, not started.
	StateCreated State = "created"
	StateRunning State = "running"
	// StateExited: ended, and its exit code and time are known as long as the container is not removed.
	StateExited State = "exited"
	// StateLost: ended without exit time and code: the machine restarted or the shim was killed.
	StateLost State = "lost"
	// StateUnknown: its shim does not answer now, or has not noticed its exit. It may run; list again.
	StateUnknown State = "unknown"
)

// Container is the container of one run.
type Container struct {
	ID         string
	MemberID   string
	InstanceID string
	Service    string
	Copy       string
	Revision   uint64
	SpecDigest string
	// Image is its name, <repository>@<digest>.
	Image string
	State State
	PID   uint32
	// StartedAt is zero for a container that never started.
	StartedAt time.Time
	// ExitedAt and ExitCode mean something in StateExited only. 128+n is death by signal n.
	ExitedAt time.Time
	ExitCode uint32
	// OOMKilled says that the kernel killed one of its processes because of the memory limit.
	OOMKilled bool
	// UserNamespace is false where the host could not give one.
	UserNamespace bool
	// AcceleratorIDs are the accelerators and partitions that it holds alone, sorted.
	AcceleratorIDs []string
	// DependsOn are the services that it needs; it stops before they do.
	DependsOn []string
	// StopGrace is how long its process has between SIGTERM and SIGKILL; zero where its service did not say.
	StopGrace time.Duration
	Restart   protocol.Service_RestartPolicy
	// Environment is the id of the environment that it installs.
	Environment string
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
		return nil, readyImage{}, fmt.Errorf("find image %s: %w", ref.name(), err)
	}
	usr, err := r.resolveUser(ctx, image.Image, cmp.Or(spec.Service.GetUser(), image.config.User))
	if err != nil {
		return nil, readyImage{}, err
	}
	mounted, err := r.mountImages(ctx, spec.Service)
	if err != nil {
		return nil, readyImage{}, err
	}
	s, err := buildSpec(specInput{
		imageMounts: mounted, spec: spec, image: image.config, user: usr, host: r.host, files: r.files(spec.ID),
		cgroup: r.cgroupPath(spec.ID),
		uidMap: r.uidMap(),
	})
	return s, image, err
}

func imageMissing(name string, cause error) error {
	return fault.New(fault.NotFound, codeImageMissing, "The image "+name+" is not on this node yet.", cause)
}

// Pending is a container between Prepare and StartTask. The caller closes it in any case.
type Pending struct {
	Spec    Spec
	oci     *specs.Spec
	image   readyImage
	rootfs  []mount.Mount
	running *Run
	// starting has the container's id until Close.
	starting *sync.Map
}

// Close ends the start: from now on List asks containerd for the container's state. It removes nothing.
func (p *Pending) Close() {
	if p.starting != nil {
		p.starting.Delete(p.Spec.ID)
	}
}

// Prepare makes the container's files, snapshot and record. It needs no network. After an error in a later step the
// caller removes the container.
func (r *Runtime) Prepare(ctx context.Context, spec Spec) (*Pending, error) {
	ctx = r.ns(ctx)
	if r.host.appArmor != "" {
		// The owner's tools may have unloaded it meanwhile (aa-remove-unknown).
		if _, err := r.cfg.LoadAppArmor(r.host.appArmor); err != nil {
			return nil, fault.New(fault.Unavailable, codeApparmorUnavailable,
				"The AppArmor profile of containers cannot be loaded: see whether apparmor_parser works.", err)
		}
	}
	ociSpec, image, err := r.buildSpec(ctx, spec)
	if err != nil {
		return nil, err
	}
	p := &Pending{Spec: spec, oci: ociSpec, image: image, starting: &r.starting}
	if p.running, err = r.clearEarlierTry(ctx, spec.ID); err != nil || p.running != nil {
		return p, err
	}
	r.starting.Store(spec.ID, true)
	err = r.newContainer(ctx, p)
	if errdefs.IsAlreadyExists(err) {
		err = r.newContainerAgain(ctx, p)
	}
	if err == nil {
		_, err = r.mountImages(ctx, spec.Service) // now that its record keeps them on the node
	}
	if err != nil {
		p.Close()
		r.abandon(ctx, spec.ID)
		return nil, startFault(err)
	}
	return p, nil
}

// abandon removes what a failed start left.
func (r *Runtime) abandon(ctx context.Context, id string) {
	clean, cancel := r.detached(ctx)
	defer cancel()
	if err := r.Remove(clean, id); err != nil {
		r.cfg.Log.WarnContext(ctx, "cannot clean up after a failed start", slog.String("container_id", id),
			slog.Any("error", err))
	}
}

// clearEarlierTry removes what a crash left of the run before it started. It returns the run if it is up, and fails if
// the run has ended.
func (r *Runtime) clearEarlierTry(ctx context.Context, id string) (*Run, error) {
	switch had, err := r.Get(ctx, id); {
	case fault.Is(err, fault.NotFound):
		// What a crash before the container's record left makes the next step fail with AlreadyExists.
		return nil, nil
	case err != nil:
		return nil, err
	case had.State == StateRunning:
		return &Run{ContainerID: had.ID, PID: had.PID, StartedAt: had.StartedAt}, nil
	case had.State == StateUnknown:
		return nil, fault.New(fault.Unavailable, codeContainerUnknown, "The container does not answer at the moment.", nil)
	case had.State == StateExited, had.State == StateLost && !had.StartedAt.IsZero():
		return nil, fault.New(fault.Conflict, codeRunEnded, "This run has ended; a new one needs an id of its own.",
			nil).Permanent()
	default:
		return nil, r.Remove(ctx, id)
	}
}

func (r *Runtime) newContainerAgain(ctx context.Context, p *Pending) error {
	if err := r.Remove(ctx, p.Spec.ID); err != nil {
		return err
	}
	return r.newContainer(ctx, p)
}

func (r *Runtime) newContainer(ctx context.Context, p *Pending) error {
	if len(p.Spec.Devices.Claims) > 0 {
		r.claims.Lock()
		defer r.claims.Unlock()
		if err := r.checkClaims(ctx, p.Spec); err != nil {
			return err
		}
	}
	if err := errors.Join(r.prepareFiles(p.Spec), r.ownVolumes(p)); err != nil {
		return err
	}
	failpoint.Hit("agent/start/files_written")
	// A session keyring of its own counts for the user, and the kernel gives a user 200 keys: all containers of a node
	// share those ids. The filter of system calls keeps a container from the keyring that it inherits.
	options := &runcoptions.Options{Root: r.cfg.RuncRoot, NoNewKeyring: r.host.seccomp}
	if r.host.userNamespaces {
		options.IoUid, options.IoGid = r.cfg.UIDMapBase, r.cfg.UIDMapBase
	}
	labels := p.Spec.labels(r.host, r.uidMap(), p.image.config.StopSignal, r.diskLimit(p.Spec))
	_, err := r.client.NewContainer(ctx, p.Spec.ID,
		client.WithSnapshotter(snapshotter),
		r.withSnapshot(p.Spec, p.image, &p.rootfs),
		client.WithContainerLabels(labels),
		client.WithRuntime(runcRuntime, options),
		client.WithSpec(p.oci),
	)
	if err != nil {
		return fmt.Errorf("make container: %w", err)
	}
	failpoint.Hit("agent/start/container_made")
	return nil
}

// CreateTask makes the container's first process, in namespaces that must exist by now. The process waits for
// StartTask before it runs the workload.
func (r *Runtime) CreateTask(ctx context.Context, p *Pending) error {
	if p.running != nil {
		return nil
	}
	ctx = r.ns(ctx)
	err := r.newTask(ctx, p)
	if errdefs.IsAlreadyExists(err) {
		if err = r.newContainerAgain(ctx, p); err == nil {
			err = r.newTask(ctx, p)
		}
	}
	if err != nil {
		return startFault(err)
	}
	failpoint.Hit("agent/start/task_made")
	return nil
}

// newTask makes one call to containerd; Container.NewTask would make five.
func (r *Runtime) newTask(ctx context.Context, p *Pending) error {
	stdout, stderr, err := r.makeLog(p.Spec.ID)
	if err != nil {
		return fmt.Errorf("make the log: %w", err)
	}
	r.parents.RLock()
	defer r.parents.RUnlock()
	_, err = r.client.TaskService().Create(ctx, &tasks.CreateTaskRequest{
		ContainerID: p.Spec.ID,
		Rootfs:      mount.ToProto(p.rootfs),
		Stdout:      stdout,
		Stderr:      stderr,
	})
	if err != nil {
		return fmt.Errorf("make task: %w", errgrpc.ToNative(err))
	}
	return nil
}

// StartTask runs the workload. The network must be complete; ip is the container's address for its /etc/hosts, peers
// are the member's other services.
func (r *Runtime) StartTask(ctx context.Context, p *Pending, ip string, peers []Peer) (Run, error) {
	if p.running != nil {
		return *p.running, nil
	}
	ctx = r.ns(ctx)
	if p.Spec.IP != ip || len(peers) > 0 {
		p.Spec.IP, p.Spec.Peers = ip, peers
		if err := r.writeHosts(p.Spec); err != nil {
			return Run{}, startFault(err)
		}
	}
	// Should a crash come before the note of the start: the process waits since CreateTask, and that time is not billed.
	if err := r.noteTime(p.Spec.ID, startCalledFile, failpoint.Now()); err != nil {
		return Run{}, startFault(err)
	}
	started, err := r.client.TaskService().Start(ctx, &tasks.StartRequest{ContainerID: p.Spec.ID})
	if err != nil {
		return Run{}, startFault(fmt.Errorf("start task: %w", errgrpc.ToNative(err)))
	}
	failpoint.Hit("agent/start/task_started")
	r.noteRunning(p.Spec.ID, started.GetPid())
	run := Run{ContainerID: p.Spec.ID, PID: started.GetPid(), StartedAt: failpoint.Now()}
	if err := r.noteTime(p.Spec.ID, startedFile, run.StartedAt); err != nil {
		return run, startFault(err)
	}
	return run, nil
}

// withSnapshot makes the container's file system upon that of the image, and gives its mounts. client.WithNewSnapshot
// would search the image each time.
func (r *Runtime) withSnapshot(spec Spec, image readyImage, rootfs *[]mount.Mount) client.NewContainerOpts {
	return func(ctx context.Context, _ *client.Client, c *containers.Container) (err error) {
		*rootfs, err = r.rootfs.prepare(ctx, spec.ID, image.snapshot, map[string]string{labelMember: spec.MemberID})
		if errdefs.IsNotFound(err) {
			r.forgetImages() // another program has removed it
			return imageMissing(image.Name(), err)
		}
		c.SnapshotKey, c.Image = spec.ID, image.Name()
		return err
	}
}

func startFault(err error) error {
	if _, known := errors.AsType[*fault.Error](err); known {
		return err
	}
	text := err.Error()
	switch {
	case isBadCommand(text):
		return fault.New(fault.Unprocessable, codeBadCommand, "The command is not in the image, or may not be executed.",
			err).Permanent()
	case strings.Contains(text, "no space left on device"):
		return fault.New(fault.Unavailable, fault.CodeDiskFull, "The node's disk is full: free space where containerd "+
			"keeps its data.", err)
	}
	return fault.New(fault.Unavailable, codeStartFailed, "The container could not be started.", err)
}

// isBadCommand reports whether runc, which itself ran, could not run the command in the container.
func isBadCommand(text string) bool {
	_, why, ofRunc := strings.Cut(text, "unable to start container process: ")
	return ofRunc && strings.Contains(why, `exec: "`) && (strings.Contains(why, "executable file not found") ||
		strings.Contains(why, "no such file or directory") || strings.Contains(why, "permission denied"))
}

// List returns every container in the agent's containerd namespace, ordered by id. It fails where containerd does not
// answer: its caller must not wait for ever, and without a word to the hub.
func (r *Runtime) List(ctx context.Context) ([]Container, error) {
	ctx = r.ns(ctx)
	answer, cancel := context.WithTimeout(ctx, r.answerWithin)
	defer cancel()
	records, err := r.client.ContainerService().List(answer)
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

// Get returns the container of one run; fault NotFound when there is none.
func (r *Runtime) Get(ctx context.Context, id string) (Container, error) {
	ctx = r.ns(ctx)
	record, err := r.client.ContainerService().Get(ctx, id)
	if errdefs.IsNotFound(err) {
		return Container{}, fault.New(fault.NotFound, codeContainerMissing, "There is no such container on this node.", err)
	}
	if err != nil {
		return Container{}, fmt.Errorf("find container %s: %w", id, err)
	}
	return r.describe(ctx, record, nil)
}

func (r *Runtime) describe(ctx context.Context, record containers.Container,
	process *tasktypes.Process,
) (Container, error) {
	_, starting := r.starting.Load(record.ID) // before the note is read, which StartTask makes before it ends
	revision, _ := strconv.ParseUint(record.Labels[labelRevision], 10, 64)
	grace, _ := strconv.ParseUint(record.Labels[labelStopGrace], 10, 32)
	restart, _ := strconv.ParseInt(record.Labels[labelRestart], 10, 32)
	c := Container{
		ID:             record.ID,
		MemberID:       record.Labels[labelMember],
		InstanceID:     record.Labels[labelInstance],
		Service:        record.Labels[labelService],
		Copy:           record.Labels[labelCopy],
		Revision:       revision,
		SpecDigest:     record.Labels[labelSpecDigest],
		Image:          record.Image,
		StartedAt:      r.notedTime(record.ID, startedFile),
		UserNamespace:  record.Labels[labelUserNS] != "none",
		AcceleratorIDs: acceleratorsOf(record.Labels),
		DependsOn:      strings.Fields(record.Labels[labelDependsOn]),
		StopGrace:      time.Duration(grace) * time.Second,
		Restart:        protocol.Service_RestartPolicy(restart),
		Environment:    record.Labels[labelEnvironment],
	}
	if process == nil {
		if starting {
			c.State = StateCreated // StartTask notes the process before it runs
			return c, nil
		}
		// A shim may not answer: only a clear "not found" means that its task is gone.
		var err error
		process, err = r.askShim(ctx, record.ID)
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
		switch {
		case !c.StartedAt.IsZero():
		case starting:
			c.State = StateCreated // StartTask is about to note when it started
		default:
			// A crash came between the start and the note of it.
			if p, there := readProcess(c.PID); there {
				c.StartedAt = p.startedAt()
			}
			if called := r.notedTime(record.ID, startCalledFile); called.After(c.StartedAt) {
				c.StartedAt = called
			}
		}
	default:
		c.State = StateUnknown
	}
	return c, nil
}
