package reconcile

import (
	"context"
	"crypto/tls"
	"time"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/cdi"
	"github.com/gpuaas/gpuaas/agent/internal/network"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/protocol"
)

// Machine is the machine of a Reconciler. agent/internal/network implements Network, agent/internal/accelerator
// Accelerators, agent/internal/runtime the others.
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
}

// Containers lists, makes, stops and removes containers.
type Containers interface {
	List(ctx context.Context) ([]runtime.Container, error)
	Events(ctx context.Context) <-chan struct{}
	// Prepare, CreateTask and StartTask are the three steps of a start; the last two need the member's namespaces and its
	// complete network.
	Prepare(ctx context.Context, spec runtime.Spec) (*runtime.Pending, error)
	CreateTask(ctx context.Context, p *runtime.Pending) error
	StartTask(ctx context.Context, p *runtime.Pending, ip string) (runtime.Run, error)
	// DeliverConfig replaces the config file of a running container and sends the signal that the config names.
	DeliverConfig(ctx context.Context, id string, config *protocol.Config) error
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

// Stats reads what the running containers use, by container id.
type Stats interface {
	AllStats(ctx context.Context) (map[string]runtime.Stats, error)
}

// Logs bounds the containers' logs.
type Logs interface {
	RotateLogs(ctx context.Context) error
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

// Network attaches members to the node's bridge, each behind its isolation rules.
type Network interface {
	Setup(ctx context.Context, memberID string, ports []network.PortMapping, namespaces func()) (network.Attachment, error)
	Namespaces(memberID string) network.Attachment
	Remove(ctx context.Context, memberID string) error
	List() ([]string, error)
	Leftovers(ctx context.Context, memberID string) ([]string, error)
	EnsureRules(ctx context.Context) (restored bool, err error)
	PortFree(memberID string, port uint16) bool
	Conditions() []string
}

// Accelerators is the inventory of the machine, which changes while the agent runs.
type Accelerators interface {
	List() []*protocol.Accelerator
	Conditions() []string
	Subscribe() <-chan struct{}
	// State says why the accelerator of this id cannot be used; zero where it can.
	State(id string) agent.AcceleratorState
	// Edits are what a container needs to use these accelerators.
	Edits(ctx context.Context, ids []string) (cdi.Edits, error)
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
