package agent

import (
	"time"

	"github.com/gpuaas/gpuaas/protocol"
)

// Action is one step for the executor, which makes no choices of its own. The set is closed.
//
//sumtype:decl
type Action interface {
	// memberID is the member of the action; empty for a container without one.
	memberID() string
	// order sorts releases before acquisitions, and each kind within.
	order() int
}

// FallBack records that a revision failed before it was ready: its fallback runs from now on.
type FallBack struct {
	MemberID string
	Revision uint64
	Reason   protocol.WorkloadStatus_Reason
	Detail   string
}

// ConfirmRevision records that a revision with a fallback was ready: the node does not fall back from it on its own.
type ConfirmRevision struct {
	MemberID string
	Revision uint64
}

// CancelPull cancels an image pull that no desired revision needs any more.
type CancelPull struct{ MemberID string }

// StopContainer ends a container's process: SIGTERM, Grace, SIGKILL.
type StopContainer struct {
	MemberID    string
	ContainerID string
	Grace       time.Duration
	// Why is for the log: left_state, replaced, device_lost, not_alive, stopped, refused, lease_ended, duplicate.
	Why     string
	Service string
	// Copy names its network.
	Copy string `json:",omitempty"`
	// Drain waits before, for half of Grace at most, until no connection from outside to it is open.
	Drain bool `json:",omitempty"`
}

// Attachment names the container's network.
func (a StopContainer) Attachment() string { return attachmentOf(a.Service, a.Copy) }

// notAlive is why a container is stopped whose liveness probe fails: its exit is a failure.
const notAlive = "not_alive"

// RecordExit makes a container's exit and its usage durable.
type RecordExit struct {
	MemberID    string
	ContainerID string
	Service     string
	Revision    uint64
	SpecDigest  string
	// Restart says which exit completes the service.
	Restart protocol.Service_RestartPolicy `json:",omitempty"`
	// Unasked says that the agent did not request the exit: it counts as a failure.
	Unasked bool
}

// RemoveContainer removes a container whose exit is durable, or that never ran, with its snapshot.
type RemoveContainer struct {
	MemberID    string
	ContainerID string
	Service     string
}

// RemoveNetwork removes a service's namespaces, address, port mappings and rules.
type RemoveNetwork struct {
	MemberID, Service string
	Copy              string `json:",omitempty"`
	// Ends says that the member ends or is stopped: no other service of it starts, and its volumes are unmounted.
	Ends bool `json:",omitempty"`
	// Done is the revision that has completed the service, where the member ends; otherwise zero.
	Done uint64 `json:",omitempty"`
}

// Attachment names the network.
func (a RemoveNetwork) Attachment() string { return attachmentOf(a.Service, a.Copy) }

// RetireMember closes a member that has left the machine: last usage record, ports, scratch, logs, proof.
type RetireMember struct{ MemberID string }

// FetchPart gets a document that the state names.
type FetchPart struct {
	MemberID string
	SHA256   [32]byte
}

// PullImage makes an image ready for containers.
type PullImage struct {
	MemberID string
	OrgID    string `json:",omitempty"`
	Revision uint64
	Image    string
	// Services need it.
	Services []string
	// Beside says that the fallback goes on meanwhile: a failure is the member's, as the services' are the fallback's.
	Beside bool `json:",omitempty"`
}

// SetupNetwork makes the network attachments of a member's services, with their published ports.
type SetupNetwork struct {
	MemberID string
	Revision uint64
	Workload Workload
	// Services are those that have none.
	Services []string
	// Unpublished are those whose published ports stay with containers that serve beside.
	Unpublished []string `json:",omitempty"`
	// Start are the containers to create in parallel, when their images are ready. None runs before the network is
	// complete.
	Start []StartContainer `json:",omitempty"`
}

// Attachment names the network of one of the services.
func (a SetupNetwork) Attachment(service string) string {
	s, _ := serviceNamed(a.Workload, service)
	return s.Attachment()
}

// StartContainer creates and starts the container of one service.
type StartContainer struct {
	MemberID string
	Revision uint64
	LeaseNo  uint64
	Workload Workload
	Service  Service
}

// PublishPorts leads the published ports of a service to its present copy, for new connections.
type PublishPorts struct {
	MemberID string
	Revision uint64
	Workload Workload
	Service  Service
}

// DeliverConfig replaces the config file of a running container and tells the app as the manifest says.
type DeliverConfig struct {
	MemberID    string
	ContainerID string
	Service     Service
}

// DeliverSecrets replaces the secret parameters of a running container and tells the app as the manifest says.
type DeliverSecrets struct {
	MemberID    string
	ContainerID string
	Workload    Workload
	Service     Service
}

// ServiceOf returns the service that the action is about; empty for an action on the whole member.
func ServiceOf(a Action) string {
	switch a := a.(type) {
	case StopContainer:
		return a.Service
	case RecordExit:
		return a.Service
	case RemoveContainer:
		return a.Service
	case RemoveNetwork:
		return a.Service
	case StartContainer:
		return a.Service.Name
	case PublishPorts:
		return a.Service.Name
	case DeliverConfig:
		return a.Service.Name
	case DeliverSecrets:
		return a.Service.Name
	case ConfirmRevision, FallBack, CancelPull, RetireMember, FetchPart, PullImage, SetupNetwork:
	}
	return ""
}

// The order of kinds.
const (
	orderConfirm = iota
	orderFallBack
	orderCancelPull
	orderStop
	orderRecord
	orderRemoveContainer
	orderRemoveNetwork
	orderRetire
	orderFetch
	orderPull
	orderNetwork
	orderPublish
	orderStart
	orderConfig
)

func (a ConfirmRevision) memberID() string { return a.MemberID }
func (a FallBack) memberID() string        { return a.MemberID }
func (a CancelPull) memberID() string      { return a.MemberID }
func (a StopContainer) memberID() string   { return a.MemberID }
func (a RecordExit) memberID() string      { return a.MemberID }
func (a RemoveContainer) memberID() string { return a.MemberID }
func (a RemoveNetwork) memberID() string   { return a.MemberID }
func (a RetireMember) memberID() string    { return a.MemberID }
func (a FetchPart) memberID() string       { return a.MemberID }
func (a PullImage) memberID() string       { return a.MemberID }
func (a SetupNetwork) memberID() string    { return a.MemberID }
func (a PublishPorts) memberID() string    { return a.MemberID }
func (a StartContainer) memberID() string  { return a.MemberID }
func (a DeliverConfig) memberID() string   { return a.MemberID }
func (a DeliverSecrets) memberID() string  { return a.MemberID }

func (ConfirmRevision) order() int { return orderConfirm }
func (FallBack) order() int        { return orderFallBack }
func (CancelPull) order() int      { return orderCancelPull }
func (StopContainer) order() int   { return orderStop }
func (RecordExit) order() int      { return orderRecord }
func (RemoveContainer) order() int { return orderRemoveContainer }
func (RemoveNetwork) order() int   { return orderRemoveNetwork }
func (RetireMember) order() int    { return orderRetire }
func (FetchPart) order() int       { return orderFetch }
func (PullImage) order() int       { return orderPull }
func (SetupNetwork) order() int    { return orderNetwork }
func (PublishPorts) order() int    { return orderPublish }
func (StartContainer) order() int  { return orderStart }
func (DeliverConfig) order() int   { return orderConfig }
func (DeliverSecrets) order() int  { return orderConfig }

// MemberOf returns the member that the action is about; empty for a container that bears no member.
func MemberOf(a Action) string { return a.memberID() }
