// Package runtime runs containers on this node: images, containers, tasks, logs, exec. It is the only user of
// containerd. It owns what lies under its state, log and runc directories, the containerd namespace it is given and the
// cgroup parent. It decides nothing: agent/internal/reconcile says what runs and when, and containers outlive it.
package runtime

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"github.com/google/uuid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// Defaults of Config.
const (
	DefaultAddress   = "/run/containerd/containerd.sock"
	DefaultNamespace = "gpuaas"
	DefaultCgroup    = "/gpuaas"
	// DefaultUIDMapBase is the first host user id of the one range that all containers of a node are mapped to.
	DefaultUIDMapBase = 100000
	DefaultUIDMapSize = 65536
	// DefaultMaxLogBytes bounds one log file; a rotated one of the same size stays beside it.
	DefaultMaxLogBytes = 16 << 20
	// DefaultMaxImageBytes bounds the compressed size of one image.
	DefaultMaxImageBytes = 64 << 30
)

// Limits of single calls to containerd.
const (
	openTimeout    = 10 * time.Second
	cleanupTimeout = 60 * time.Second
	// defaultAnswer bounds a listing: a containerd that hangs counts as one that is away.
	defaultAnswer = 30 * time.Second
	// killWait bounds how long a killed process may take to end: a process that hangs in the kernel never ends.
	killWait = 30 * time.Second
)

// Pauses between dials of a containerd that went away. They are short, because usage is not measured meanwhile.
const (
	connectAgainMin = 50 * time.Millisecond
	connectAgainMax = 500 * time.Millisecond
)

// Config says where everything is. Zero values take the defaults above; StateDir, LogDir and RuncRoot have none.
type Config struct {
	// Address is the path of containerd's socket.
	Address string
	// Namespace is the containerd namespace that belongs to this agent alone.
	Namespace string
	// StateDir holds the files that are bound into containers. User-namespaced containers must be able to walk to it, so
	// it and every directory above it are world-executable. It does not have to outlive a reboot.
	StateDir string
	// LogDir holds the containers' logs.
	LogDir string
	// RuncRoot is runc's own state directory; it must not outlive a reboot.
	RuncRoot string
	// CgroupParent is the absolute cgroup path below which every container has its cgroup.
	CgroupParent string
	UIDMapBase   uint32
	UIDMapSize   uint32
	MaxLogBytes  int64
	// DiskBytes limits a container's own file system where its service names no limit.
	DiskBytes int64
	// MaxImageBytes refuses larger images before a layer is fetched.
	MaxImageBytes int64
	// MinUnpackBytes is the size that every image may unpack to, however small its layers are.
	MinUnpackBytes int64
	// MaxImageStoreBytes bounds what all images take, while some of them are unused; zero leaves only free space as a
	// bound.
	MaxImageStoreBytes int64
	// ResolvConf is the host's resolver configuration.
	ResolvConf string
	// ProcDir is where proc(5) is mounted.
	ProcDir string
	// DeviceDir holds the containers' device nodes, which must work there: /run and /tmp are mounted without them on many
	// machines. Empty is a directory of the containerd namespace in /dev.
	DeviceDir string
	// LoadAppArmor makes sure that the kernel has the profile of this name, and reports whether it can have one; nil loads
	// containerd's default profile under the name.
	LoadAppArmor func(profile string) (bool, error)
	// NoUserNamespaces runs containers in the host's user namespace; it is reported as a condition.
	NoUserNamespaces bool
	// NoIDMappedMounts shifts the user ids of images while they are unpacked; it is reported as a condition.
	NoIDMappedMounts bool
	// NoSeccomp runs containers without a filter of system calls; it is reported as a condition.
	NoSeccomp bool
	Log       *slog.Logger
}

func (c Config) withDefaults() Config {
	c.Address = cmp.Or(c.Address, DefaultAddress)
	c.Namespace = cmp.Or(c.Namespace, DefaultNamespace)
	c.CgroupParent = cmp.Or(c.CgroupParent, DefaultCgroup)
	c.ResolvConf = cmp.Or(c.ResolvConf, "/etc/resolv.conf")
	c.ProcDir = cmp.Or(c.ProcDir, "/proc")
	c.DeviceDir = cmp.Or(c.DeviceDir, deviceDirPrefix+c.Namespace)
	c.UIDMapBase = cmp.Or(c.UIDMapBase, DefaultUIDMapBase)
	c.UIDMapSize = cmp.Or(c.UIDMapSize, DefaultUIDMapSize)
	c.MaxLogBytes = cmp.Or(c.MaxLogBytes, DefaultMaxLogBytes)
	c.DiskBytes = cmp.Or(c.DiskBytes, DefaultDiskBytes)
	c.MaxImageBytes = cmp.Or(c.MaxImageBytes, DefaultMaxImageBytes)
	c.MinUnpackBytes = cmp.Or(c.MinUnpackBytes, DefaultMinUnpackBytes)
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	if c.LoadAppArmor == nil {
		c.LoadAppArmor = loadAppArmor
	}
	return c
}

// Runtime is the connection to one containerd. Its methods may be called at the same time.
type Runtime struct {
	cfg    Config
	client *client.Client
	host   hostSupport
	rootfs rootfs
	// pulling has the *pullState of each pull under way, by the image's name.
	pulling sync.Map
	// disk belongs to the caller of OverLimit.
	disk diskWatch
	// answerWithin is defaultAnswer; tests shorten it.
	answerWithin time.Duration

	// claims is held while a container with accelerators is recorded: no other may get the same.
	claims sync.Mutex
	// parents is held for reading while a cgroup is made below the parent, and for writing while the empty parent goes.
	parents sync.RWMutex

	// imageMounts serializes the mounts of images.
	imageMounts sync.Mutex

	mu    sync.Mutex
	pulls map[string]*sharedPull // by image name
	users map[string]user        // by image digest and user as written; bounded by maxCachedUsers
	ready map[string]readyImage  // by name; bounded by maxReadyImages
	// forgotten counts how often ready was emptied: what was found before is not kept after.
	forgotten int
	// rotations are those of logs, by container id.
	rotations map[string]logRotation

	// starting has the ids of containers between Prepare and StartTask, running the process of each container that was
	// last known to run, by container id.
	starting, running sync.Map
	// earlier are the runs that had files when this runtime was opened: of an earlier agent, since no id is used twice.
	earlier []string
	// commands marks the commands in containers that this process has started.
	commands string
	// copies has an entry for each copy of files that runs.
	copies chan struct{}
}

// Open connects to containerd, detects the host's features, and removes what interrupted pulls left.
func Open(ctx context.Context, cfg Config) (*Runtime, error) {
	cfg = cfg.withDefaults()
	if err := cfg.check(); err != nil {
		return nil, err
	}
	for _, dir := range []string{cfg.StateDir, cfg.RuncRoot} {
		if err := os.MkdirAll(dir, 0o711); err != nil { //nolint:gosec // remapped containers walk through it
			return nil, directoryFault(dir, err)
		}
	}
	if err := os.MkdirAll(cfg.LogDir, 0o700); err != nil {
		return nil, directoryFault(cfg.LogDir, err)
	}
	if err := useOwnTempMounts(cfg); err != nil {
		return nil, err
	}
	ask, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	var userNamespace <-chan error
	if !cfg.NoUserNamespaces {
		userNamespace = tryUserNamespace(ask, cfg)
		defer func() { // or its child outlives a program that ends for what follows
			cancel()
			for range userNamespace {
			}
		}()
	}
	again := backoff.Config{
		BaseDelay: connectAgainMin, Multiplier: backoff.DefaultConfig.Multiplier,
		Jitter: backoff.DefaultConfig.Jitter, MaxDelay: connectAgainMax,
	}
	c, err := client.New(cfg.Address, client.WithDefaultNamespace(cfg.Namespace), client.WithTimeout(openTimeout),
		client.WithExtraDialOpts([]grpc.DialOption{grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           again,
			MinConnectTimeout: openTimeout,
		})}))
	if err != nil {
		return nil, unavailable(cfg.Address, err)
	}
	r := &Runtime{
		cfg: cfg, client: c, pulls: map[string]*sharedPull{}, users: map[string]user{}, ready: map[string]readyImage{},
		commands: uuid.NewString()[:8], copies: make(chan struct{}, maxCopies), answerWithin: defaultAnswer,
	}
	r.disk.layers = map[string]*layer{}
	if r.earlier, err = r.runsWithFiles(); err != nil {
		return nil, errors.Join(directoryFault(cfg.StateDir, err), c.Close())
	}
	ask = r.ns(ask)
	if _, err := c.Version(ask); err != nil {
		_ = c.Close()
		return nil, unavailable(cfg.Address, err)
	}
	if r.host, err = detectHost(ask, c, cfg, userNamespace); err != nil {
		_ = c.Close()
		return nil, err
	}
	r.chooseRootfs(ask)
	if err := r.dropStaleLeases(ask); err != nil {
		// They expire. On a full disk containerd cannot end them, and the agent must start to end containers.
		cfg.Log.Warn("cannot delete the leases of interrupted operations", slog.Any("error", err))
	}
	return r, nil
}

// chooseRootfs says in the log why images take the ids of containers in a slower way than by idmapped mounts.
func (r *Runtime) chooseRootfs(ctx context.Context) {
	var why error
	r.rootfs, why = newRootfs(ctx, r)
	r.host.mappedMounts = why == nil
	if why != nil {
		r.cfg.Log.Info("images are not mounted with the user ids of containers", slog.Any("reason", why))
	}
}

func (c Config) check() error {
	for name, path := range map[string]string{
		"state": c.StateDir, "log": c.LogDir, "runc": c.RuncRoot,
		"cgroup": c.CgroupParent,
	} {
		if !filepath.IsAbs(path) || path == "/" {
			return fault.New(fault.Unprocessable, codeBadConfiguration, fmt.Sprintf("The runtime's %s path must be absolute "+
				"and not /.", name), nil).Permanent()
		}
	}
	if c.UIDMapSize < 65536 {
		return fault.New(fault.Unprocessable, codeBadConfiguration, "The range of user ids for containers must hold at "+
			"least 65536.", nil).Permanent()
	}
	return nil
}

func directoryFault(dir string, err error) error {
	return fault.New(fault.Unavailable, fault.CodeDirectoryUnusable, fmt.Sprintf("The agent cannot make its directory "+
		"%s: run it as root and free space on that disk.", dir), err)
}

func unavailable(address string, err error) error {
	return fault.New(fault.Unavailable, agent.CodeContainerdUnavailable,
		fmt.Sprintf("containerd does not answer on %s: install it (apt-get install containerd), start it (systemctl start "+
			"containerd), or name its socket with --containerd-address.", address), err)
}

// IsAway reports whether an error says that containerd did not answer, which is no fault of the workload.
func IsAway(err error) bool { return errdefs.IsUnavailable(err) }

// Close ends the connection and unmounts what the runtime itself has mounted. Containers go on.
func (r *Runtime) Close() error {
	return errors.Join(r.unmountImages(), r.rootfs.close(), r.client.Close())
}

// UserNamespaces reports whether containers get user namespaces, and the range of host ids that theirs must map.
func (r *Runtime) UserNamespaces() (available bool, base, size uint32) {
	return r.host.userNamespaces, r.cfg.UIDMapBase, r.cfg.UIDMapSize
}

// Conditions name what this host cannot give to containers.
func (r *Runtime) Conditions() []string { return r.host.conditions() }

// ns puts the agent's containerd namespace into the context.
func (r *Runtime) ns(ctx context.Context) context.Context {
	return namespaces.WithNamespace(ctx, r.cfg.Namespace)
}

// detached is a context for a clean-up after the caller's context has ended.
func (r *Runtime) detached(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(r.ns(ctx)), cleanupTimeout)
}

// dropStaleLeases deletes the leases of operations that a crash cut off: pulls, and the making of containers. The
// namespace is this agent's alone, so all leases are stale when the agent starts.
func (r *Runtime) dropStaleLeases(ctx context.Context) error {
	stale, err := r.client.LeasesService().List(ctx)
	if err != nil {
		return fmt.Errorf("list leases: %w", err)
	}
	for i, l := range stale {
		var opts []leases.DeleteOpt
		if i == len(stale)-1 {
			opts = append(opts, leases.SynchronousDelete)
		}
		if err := r.client.LeasesService().Delete(ctx, l, opts...); err != nil && !errdefs.IsNotFound(err) {
			return fmt.Errorf("delete the lease of an interrupted operation: %w", err)
		}
	}
	return nil
}

// runsWithFiles returns the ids of the runs that have files in the state directory.
func (r *Runtime) runsWithFiles() (ids []string, err error) {
	entries, err := os.ReadDir(r.cfg.StateDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, e := range entries {
		if e.IsDir() && idPattern.MatchString(e.Name()) {
			ids = append(ids, e.Name())
		}
	}
	return ids, nil
}

// Version has the versions of the programs that run this node's containers.
type Version struct {
	Containerd, Runc string
}

// Purge removes everything of this agent's containerd namespace, images too, and its own directories. For uninstalling.
func (r *Runtime) Purge(ctx context.Context) error {
	all, err := r.List(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, c := range all {
		errs = append(errs, r.Stop(ctx, c.ID, 0), r.Remove(ctx, c.ID))
	}
	// An interrupted start may have left files, with its secrets mounted, and no container.
	left, err := r.runsWithFiles()
	if err != nil {
		return err
	}
	for _, id := range left {
		errs = append(errs, r.Remove(ctx, id))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := r.RemoveUnusedImages(ctx); err != nil {
		return err
	}
	if err := r.removeStraySnapshots(r.ns(ctx)); err != nil {
		return err
	}
	if err := r.client.NamespaceService().Delete(r.ns(ctx), r.cfg.Namespace); err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("delete containerd's namespace %s: %w", r.cfg.Namespace, err)
	}
	if err := errors.Join(r.unmountImages(), r.rootfs.close()); err != nil {
		return err // what is mounted there is not the agent's to remove
	}
	for _, dir := range []string{r.cfg.StateDir, r.cfg.LogDir, r.cfg.RuncRoot, r.cfg.DeviceDir} {
		errs = append(errs, os.RemoveAll(dir))
	}
	if r.host.appArmor != "" {
		errs = append(errs, removeAppArmor(r.host.appArmor))
	}
	return errors.Join(append(errs, r.removeMemberCgroups(), r.removeEmptyCgroup(r.cfg.CgroupParent))...)
}
