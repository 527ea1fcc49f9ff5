// Package agent decides what a node does next: Diff compares the signed state, the leases and the machine, and returns
// actions; Statuses derives the report to the hub. It is pure: no I/O, no clock. It does not execute
// anything (agent/internal/reconcile) and remembers nothing (agent/internal/state).
package agent

import (
	"time"

	"github.com/gpuaas/gpuaas/protocol"
)

// Desired is the accepted desired state, ready to compare.
type Desired struct {
	Epoch      uint64
	Generation uint64
	// Workloads are those whose documents the node holds, ordered by member id.
	Workloads []Workload
	// Missing names members whose documents are not here yet. What runs of them stays as it is.
	Missing []MissingPart
	// Unverified: the node has no state that verifies. Nothing starts, and running containers go on until their leases
	// end.
	Unverified bool
}

// MissingPart is a document that the state names and the node has yet to fetch.
type MissingPart struct {
	MemberID string
	SHA256   [32]byte
}

// Workload is what runs for one member.
type Workload struct {
	MemberID      string
	InstanceID    string
	Revision      uint64
	CorrelationID string
	// Traceparent is the W3C trace context of the command that asked for the revision.
	Traceparent string `json:",omitempty"`
	// OrgID is the org with which it may share an accelerator.
	OrgID string `json:",omitempty"`
	// ProjectID is the project whose volumes it may have.
	ProjectID string `json:",omitempty"`
	// AppVersion is the version of the app; RollsBack says that the tenant returns to it.
	AppVersion string `json:",omitempty"`
	RollsBack  bool   `json:",omitempty"`
	// Stopped keeps the member's place (ports, volumes, lease) with nothing running.
	Stopped bool
	// Refused is set when the node must not start this workload. A workload that the owner refuses is stopped as well;
	// under any other refusal, running containers of this revision go on.
	Refused protocol.WorkloadStatus_Reason
	// RefusedDetail is for people.
	RefusedDetail string
	// ReadinessTimeout of zero means DefaultReadinessTimeout.
	ReadinessTimeout time.Duration
	Services         []Service
	// Sealed are the secret parameters as the hub sealed them, by name.
	Sealed map[string][]byte `json:",omitempty"`
	// SealedIndex is the package index for the service that installs the environment, as the hub sealed it.
	SealedIndex []byte `json:",omitempty"`
	// Fallback runs instead when this revision fails before it was ever ready. It is admitted and has no fallback of its
	// own.
	Fallback *Workload `json:",omitempty"`
}

// Effective returns the workload that runs: the fallback, once the node has fallen back.
func (w Workload) Effective(m Member) Workload {
	if w.Fallback != nil && m.FellBackFrom == w.Revision {
		return *w.Fallback
	}
	return w
}

// MayRun returns the workload and its fallback, which goes on until the workload's images are there.
func (w Workload) MayRun() []Workload {
	if w.Fallback == nil {
		return []Workload{w}
	}
	return []Workload{w, *w.Fallback}
}

// Service is one container of a workload.
type Service struct {
	Name string
	// Images are its own, first, and those that it mounts; each is <repository>@sha256:<hex>.
	Images []string
	// SpecDigest changes whenever anything about the container must.
	SpecDigest string
	// StopGrace is how long the process has between SIGTERM and SIGKILL; zero means DefaultStopGrace.
	StopGrace      time.Duration
	AcceleratorIDs []string
	// ConfigSHA256 is the digest of the config that its container must have, in hex; empty where there is none.
	ConfigSHA256 string `json:",omitempty"`
	// SecretsSHA256 is the digest of the sealed secret parameters that its container must have, in hex; empty where a
	// change of them replaces it.
	SecretsSHA256 string `json:",omitempty"`
	// PortsDigest changes whenever the service's network must.
	PortsDigest string       `json:",omitempty"`
	DependsOn   []Dependency `json:",omitempty"`
	// Environment is the id of the service's environment; empty where it has none. BuildsEnvironment says that the service
	// installs it, within BuildTimeout, instead of using it.
	Environment       string        `json:",omitempty"`
	BuildsEnvironment bool          `json:",omitempty"`
	BuildTimeout      time.Duration `json:",omitempty"`
	// Copy is set of a service that starts first: it names the network of its containers, which is another one for each
	// spec. Recreate says that its fallback's container ends before this time.
	Copy     string `json:",omitempty"`
	Recreate bool   `json:",omitempty"`
	// Spec is what the executor starts; Diff passes it through unread.
	Spec *protocol.Service
}

// Attachment names the network of the service's container.
func (s Service) Attachment() string { return attachmentOf(s.Name, s.Copy) }

// Dependency is what must be so of another service of the workload before a service starts.
type Dependency struct {
	Service   string
	Condition protocol.Dependency_Condition
}

// Lease is the newest lease of a member.
type Lease struct {
	MemberID  string
	No        uint64
	ExpiresAt time.Time
	// Exhausted says that its cap is spent.
	Exhausted bool
	// RunsUnbilled is the end policy run_unbilled, allowed by the owner of this node.
	RunsUnbilled bool
	// Unverified says that the member may have a lease that the node cannot verify, or one whose use is unknown: what
	// runs goes on until the lease has ended, and nothing is started.
	Unverified bool
}

// Ended reports whether the lease is over for sure: its end has come, or its cap is known to be spent.
func (l Lease) Ended(now time.Time) bool {
	l.Unverified = false
	return l.No > 0 && !l.Covers(now)
}

// Covers reports whether the member may run at this time.
func (l Lease) Covers(now time.Time) bool {
	if l.No == 0 || l.Unverified {
		return false
	}
	return l.RunsUnbilled || (!l.Exhausted && now.Before(l.ExpiresAt))
}

// Leases holds the newest lease of each member.
type Leases map[string]Lease

// ContainerStatus is what the runtime says of a container.
type ContainerStatus string

// The statuses.
const (
	// Created has no process yet: its start was interrupted.
	Created ContainerStatus = "created"
	Running ContainerStatus = "running"
	Exited  ContainerStatus = "exited"
	// Unknown is neither: the runtime could not tell. It is left alone until it can.
	Unknown ContainerStatus = "unknown"
)

// Container is one container on the machine that belongs to this agent: one start of one service.
type Container struct {
	ID         string
	MemberID   string
	InstanceID string
	Service    string
	// Copy is the service's, as it was started.
	Copy       string `json:",omitempty"`
	Revision   uint64
	SpecDigest string
	Status     ContainerStatus
	StartedAt  time.Time
	ExitedAt   time.Time
	ExitCode   int32
	// WatchedSince is when this agent began to probe containers; the container may have started before.
	WatchedSince time.Time `json:",omitzero"`
	// ExitRecorded says that exit code and usage are durable, so that the container may be removed.
	ExitRecorded   bool
	AcceleratorIDs []string
	// DependsOn, StopGrace and Restart are its service's, as it was started: its workload may have left the state.
	DependsOn []string                       `json:",omitempty"`
	StopGrace time.Duration                  `json:",omitempty"`
	Restart   protocol.Service_RestartPolicy `json:",omitempty"`
	// ConfigSHA256 is the digest of the config that it has, in hex.
	ConfigSHA256 string `json:",omitempty"`
	// SecretsSHA256 is the digest of the sealed secret parameters that it has, in hex.
	SecretsSHA256 string `json:",omitempty"`
	// Environment is the id of the environment that it installs; empty for any other container.
	Environment string `json:",omitempty"`
	// ReadyAt is when its readiness probe first succeeded in this run; zero while it has not.
	ReadyAt time.Time
	// Failing says that the probe has failed lately after it had succeeded.
	Failing bool
	// NotAlive says that its liveness probe failed too often, or that it cannot open its accelerators: it is ended, which
	// counts as a failure.
	NotAlive bool `json:",omitempty"`
}

// Network is the network attachment of one service of a member.
type Network struct {
	MemberID string
	Service  string
	// Copy is that of the containers which use it.
	Copy string `json:",omitempty"`
	// PortsDigest is of the service that it was made for.
	PortsDigest string `json:",omitempty"`
	// Ready is false for an attachment whose setup was interrupted.
	Ready bool
}

// Observed is one complete snapshot of machine and store.
type Observed struct {
	Containers []Container
	Networks   []Network
	Members    map[string]Member
	// Images are those pulled, unpacked and ready for a container.
	Images map[string]bool
	// Environments are those that desired services name and that are installed, by id.
	Environments map[string]bool
	// Busy are members with a running action; the snapshot may show it half done.
	Busy map[string]Work
	// Unusable has the accelerators that desired workloads or containers name and that cannot be used.
	Unusable map[string]AcceleratorState
}

// Work is what runs for a member.
type Work struct {
	// Pulling has the images that are being pulled; a pull may take minutes and can be cancelled.
	Pulling []string
	// Services have a running action of their own.
	Services map[string]bool
	// Other is an action for the whole member; it ends by itself.
	Other bool
}

// With reports whether an action runs that may change something of the service.
func (w Work) With(service string) bool { return w.Other || w.Services[service] }

// Mark adds an action on a service, or on the whole member where that is empty.
func (w *Work) Mark(service string) {
	if service == "" {
		w.Other = true
		return
	}
	if w.Services == nil {
		w.Services = map[string]bool{}
	}
	w.Services[service] = true
}

// any reports whether anything but pulls runs.
func (w Work) any() bool { return w.Other || len(w.Services) > 0 }

// Limits and times of restarts.
const (
	// CrashLoopAfter early exits in a row a revision counts as failed. It is still tried, at BackoffMax.
	CrashLoopAfter = 5
	// GiveUpAfter is the same for starts that never came to a running container. A pull that may still succeed has no such
	// bound, except that an upgrade is left for its fallback.
	GiveUpAfter = 9
	// BackoffMin is the pause after the first failure; it doubles up to BackoffMax.
	BackoffMin = time.Second
	BackoffMax = 5 * time.Minute
	// StableAfter is the running time after which an exit counts as the first failure again.
	StableAfter = 10 * time.Minute
	// DefaultReadinessTimeout and DefaultStopGrace stand for values that a manifest leaves out.
	DefaultReadinessTimeout = 5 * time.Minute
	DefaultStopGrace        = 10 * time.Second
)

// Backoff is the pause after this many failures in a row.
func Backoff(failures uint32) time.Duration {
	if failures == 0 {
		return 0
	}
	pause := BackoffMin
	for range failures - 1 {
		if pause *= 2; pause >= BackoffMax {
			return BackoffMax
		}
	}
	return pause
}
