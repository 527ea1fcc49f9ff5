package reconcile

import (
	"context"
	"crypto/tls"
	"io"
	"time"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/cdi"
	"github.com/gpuaas/gpuaas/agent/internal/network"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/internal/volume"
	"github.com/gpuaas/gpuaas/protocol"
)

// Machine is the machine of a Reconciler. agent/internal/network implements Network, agent/internal/accelerator
// Accelerators, agent/internal/volume Volumes and Environments, agent/internal/runtime the others.
type Machine struct {
	Containers   Containers
	Images       Images
	Stats        Stats
	Logs         Logs
	Disk         Disk
	Exec         Exec
	Host         Host
	Network      Network
	Accelerators Accelerators
	Devices      Devices
	Volumes      Volumes
	Environments Environments
}

// Containers lists, makes, stops and removes containers.
type Containers interface {
	List(ctx context.Context) ([]runtime.Container, error)
	Events(ctx context.Context) <-chan struct{}
	// Prepare, CreateTask and StartTask are the three steps of a start; the last two need the service's namespaces and the
	// member's complete networks.
	Prepare(ctx context.Context, spec runtime.Spec) (*runtime.Pending, error)
	CreateTask(ctx context.Context, p *runtime.Pending) error
	StartTask(ctx context.Context, p *runtime.Pending, ip string, peers []runtime.Peer) (runtime.Run, error)
	// UpdateHosts tells a running container the addresses of its peers.
	UpdateHosts(spec runtime.Spec) error
	// DeliverConfig replaces the config file of a running container and sends the signal that the config names.
	DeliverConfig(ctx context.Context, id string, config *protocol.Config) error
	// DeliverSecrets does the same with the secret parameters.
	DeliverSecrets(ctx context.Context, id string, secrets map[string][]byte, change *protocol.Secrets) error
	Stop(ctx context.Context, id string, grace time.Duration) error
	Remove(ctx context.Context, id string) error
	RemoveMember(ctx context.Context, memberID string) error
	Leftovers(ctx context.Context, memberID string) ([]string, error)
}

// Images pulls images and removes those that nothing uses.
type Images interface {
	EnsureImage(ctx context.Context, ref runtime.ImageRef, creds runtime.Credentials, tlsConf *tls.Config) error
	HasImage(ctx context.Context, ref runtime.ImageRef) (bool, error)
	// PullProgress returns false where no pull of the image is under way.
	PullProgress(image string) (runtime.PullProgress, bool)
	CollectImages(ctx context.Context, need int64, keep ...runtime.ImageRef) error
}

// Stats reads what a running container uses.
type Stats interface {
	Stats(id string) (runtime.Stats, error)
}

// Logs bounds and reads the containers' logs.
type Logs interface {
	RotateLogs(ctx context.Context) error
	Logs(ctx context.Context, id string, tailLines int, follow bool) (io.ReadCloser, error)
}

// Disk names the containers that write more than they may, and the pause until the next question.
type Disk interface {
	OverLimit(ctx context.Context) (over []runtime.Excess, pause time.Duration)
}

// Exec runs a command in a container.
type Exec interface {
	Exec(ctx context.Context, id string, argv []string, timeout time.Duration) (code int, err error)
}

// Host names what the machine cannot give to containers.
type Host interface {
	Conditions() []string
}

// Network attaches the services of members to the node's bridge, each behind its isolation rules. network.ID names an
// attachment.
type Network interface {
	Setup(ctx context.Context, id string, ports []network.PortMapping, namespaces func()) (network.Attachment, error)
	Namespaces(id string) network.Attachment
	// Publish leads ports to an attachment, away from other copies of its service; open connections stay.
	Publish(ctx context.Context, id string, ports []network.PortMapping) error
	// Drain waits until no connection from outside to the attachment is open, for limit at most.
	Drain(ctx context.Context, id string, limit time.Duration) error
	Remove(ctx context.Context, id string) error
	RemoveMember(ctx context.Context, memberID string) error
	List() ([]string, error)
	Leftovers(ctx context.Context, memberID string) ([]string, error)
	EnsureRules(ctx context.Context) (restored bool, err error)
	PortFree(memberID string, port uint16) bool
	// PublishedOn is the host port that leads to a port of a member's service; 0 for none.
	PublishedOn(memberID, service string, port uint16) uint16
	Conditions() []string
}

// Accelerators is the inventory of the machine, which changes while the agent runs.
type Accelerators interface {
	List() []*protocol.Accelerator
	Conditions() []string
	Subscribe() <-chan struct{}
	// ScannedAt is when the last scan began whose result State knows; zero before the first.
	ScannedAt() time.Time
	// State says why the accelerator of this id cannot be used; zero where it can.
	State(id string) agent.AcceleratorState
	// SetUsed takes which accelerators containers have now: only one that none has is reset.
	SetUsed(ids []string)
	// Edits are what a container of an org needs to use these accelerators.
	Edits(ctx context.Context, ids []string, orgID string) (cdi.Edits, error)
}

// Devices says which devices a running container cannot open any more, as seen from within it; empty for none.
type Devices interface {
	LostDevices(ctx context.Context, id string) (lost string, err error)
}

// Volumes are directories that outlive containers.
type Volumes interface {
	// Apply makes, changes or deletes a volume of a project as the state describes it, and takes it from members that may
	// not use it.
	Apply(ctx context.Context, desired *protocol.ProjectVolume, mayUse func(memberID string) bool) *protocol.VolumeStatus
	// Prepare makes and mounts a volume for a revision and returns its directory. No container of an earlier or later
	// revision may use the volume of an instance meanwhile, unless it is only snapshotted.
	Prepare(ctx context.Context, u volume.Use) (dir string, err error)
	// Detach unmounts what the member has.
	Detach(ctx context.Context, memberID string) error
	// RemoveMember deletes the volumes of the member and keeps those of its project.
	RemoveMember(ctx context.Context, memberID string) error
	Leftovers(memberID string) ([]string, error)
	Conditions() []string
}

// Environments are Python packages that one container installs and others have read-only.
type Environments interface {
	// Begin returns an empty directory for the container of the run; Commit keeps what it has installed, Discard does not.
	Begin(ctx context.Context, runID, orgID string, sizeBytes uint64, used map[string]string) (dir string, err error)
	Commit(ctx context.Context, runID string, made volume.Environment) error
	Discard(ctx context.Context, runID string) error
	// Use returns the directory of an environment and, below it, that of its packages.
	Use(ctx context.Context, id string) (dir, packages string, err error)
	Has(id string) bool
	List() ([]volume.Environment, error)
	Delete(ctx context.Context, id string) error
	Collect(ctx context.Context, used map[string]string, exists func(runID string) bool) error
	RemoveMember(ctx context.Context, memberID string) error
}

// Hub is what only a hub can give. Without a session every call fails with a fault of kind Unavailable; nothing waits
// for it.
type Hub interface {
	// PullCredential lets this node pull from one repository for a while.
	PullCredential(ctx context.Context, repository string) (*protocol.PullCredential, error)
	// RegistryTLS verifies the registry and shows this node's certificate.
	RegistryTLS() (*tls.Config, error)
	// Part fetches a document by its digest.
	Part(ctx context.Context, sha256 [32]byte) ([]byte, error)
}
