// Package plan decides on which node and in which allocation an instance is placed, and compiles the state of a node
// from a snapshot of the hub's rows; a check by other means follows. It takes no context, clock, database or key, and
// it knows nothing of generations, leases or signatures.
package plan

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/protocol"
)

// Snapshot is everything that the state of one node follows from, read in one transaction. The order of its lists does
// not matter.
type Snapshot struct {
	Node        Node
	Allocations []Allocation
	// Members that are to be on the node; one that is being decommissioned is not among them.
	Members []Member
	// Volumes of projects on the node.
	Volumes []*protocol.ProjectVolume
	// SSHKeys of the node's allocations.
	SSHKeys []*protocol.SSHKey
}

// Node is what the hub knows of the node itself.
type Node struct {
	ID string
	// AcceleratorIDs of every accelerator that was ever reported and not retired, healthy or not: a device that fell off
	// the bus must not freeze the state of the whole node.
	AcceleratorIDs []string
	// OneOrg has the GPU of each of its partitions that no hardware keeps apart: one org has them all.
	OneOrg map[string]string
	// Banned nodes get an empty state.
	Banned bool
}

// Allocation is capacity of the node that one project has.
type Allocation struct {
	ID             string
	NodeID         string
	OrgID          string
	ProjectID      string
	CPUMillis      int64
	MemoryBytes    int64
	AcceleratorIDs []string
	// Platform: the platform lends it to what it manages for other projects.
	Platform bool
}

// Member is an app instance's part on the node, at the desired revision. Its fields are frozen when the revision is
// made, so that a newer hub does not compile other bytes, and with them other containers, from the same rows.
type Member struct {
	ID            string
	InstanceID    string
	AllocationID  string
	OrgID         string
	OrgSlug       string
	ProjectID     string
	AppSlug       string
	AppVersion    string
	Revision      uint64
	CorrelationID string
	// Traceparent is the W3C trace context of the request for the revision; empty where there was none.
	Traceparent string
	// How the instance is operated.
	OperatingMode, ControlPlaneScope, RuntimeBackend string
	// NamedAt is when the revision was requested; delegations are checked as of then. Zero if unknown.
	NamedAt time.Time
	// ManifestEnvelope and DelegationEnvelope are protocol.Envelope in protobuf; the second is empty where the catalog key
	// itself signed.
	ManifestEnvelope   []byte
	DelegationEnvelope []byte
	ParametersJSON     string
	// SecretReferences are sorted by parameter.
	SecretReferences []*protocol.SecretReference
	// Services keep their order, which is the manifest's.
	Services []*protocol.Service
	Features []string
	// RollsBack says that the tenant returned to AppVersion.
	RollsBack bool
	// Stopped keeps ports, volumes and leases, and no container.
	Stopped          bool
	ReadinessTimeout time.Duration
	// Fallback is the revision to which the node rolls back when this one is not ready in time; it has none itself.
	Fallback *Member
}

// NodeState is what one node is to run, ready to be named by a protocol.DesiredState.
type NodeState struct {
	NodeID string
	// Parts are sorted by ID.
	Parts []Part
	// Volumes are sorted by id.
	Volumes []*protocol.ProjectVolume
	// SSHKeys are sorted by allocation, set, account and key.
	SSHKeys []*protocol.SSHKey
}

// Part is one workload with the very bytes that are hashed, stored and sent.
type Part struct {
	ID       string
	Workload *protocol.Workload
	Bytes    []byte
	SHA256   [sha256.Size]byte
}

// Refs names the parts for a protocol.DesiredState, in their order.
func (s NodeState) Refs() []*protocol.PartRef {
	refs := make([]*protocol.PartRef, 0, len(s.Parts))
	for _, p := range s.Parts {
		refs = append(refs, &protocol.PartRef{Id: p.ID, Sha256: p.SHA256[:], SizeBytes: uint64(len(p.Bytes))})
	}
	return refs
}

// Compile turns a snapshot into the state of its node. Equal snapshots give equal bytes, whatever the order of their
// lists. It only translates: Check says whether the result may be signed. CompileEach is for what fails it.
func Compile(snap Snapshot) (NodeState, error) {
	state := NodeState{NodeID: snap.Node.ID}
	if snap.Node.Banned {
		return state, nil
	}
	members := slices.Clone(snap.Members)
	slices.SortStableFunc(members, func(a, b Member) int { return cmp.Compare(a.ID, b.ID) })
	for _, m := range members {
		part, err := compileMember(m)
		if err != nil {
			return NodeState{}, err
		}
		state.Parts = append(state.Parts, part)
	}
	state.Volumes, state.SSHKeys = sortedVolumes(snap), sortedSSHKeys(snap)
	return state, nil
}

func sortedVolumes(snap Snapshot) []*protocol.ProjectVolume {
	if snap.Node.Banned {
		return nil
	}
	return slices.SortedFunc(slices.Values(snap.Volumes), func(a, b *protocol.ProjectVolume) int {
		return cmp.Compare(a.GetId(), b.GetId())
	})
}

func compileMember(m Member) (Part, error) {
	w, err := compileWorkload(m)
	if err != nil {
		return Part{}, err
	}
	if m.Fallback != nil {
		if w.Fallback, err = compileWorkload(*m.Fallback); err != nil {
			return Part{}, fmt.Errorf("fallback: %w", err)
		}
	}
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(w)
	if err != nil {
		return Part{}, fmt.Errorf("member %s: %w", m.ID, err)
	}
	return Part{ID: m.ID, Workload: w, Bytes: data, SHA256: sha256.Sum256(data)}, nil
}

func compileWorkload(m Member) (*protocol.Workload, error) {
	manifest, err := envelope(m.ManifestEnvelope)
	if err != nil {
		return nil, fmt.Errorf("member %s: manifest envelope: %w", m.ID, err)
	}
	delegation, err := envelope(m.DelegationEnvelope)
	if err != nil {
		return nil, fmt.Errorf("member %s: delegation envelope: %w", m.ID, err)
	}
	return &protocol.Workload{
		Id:                      m.ID,
		InstanceId:              m.InstanceID,
		AllocationId:            m.AllocationID,
		OrgId:                   m.OrgID,
		OrgSlug:                 m.OrgSlug,
		ProjectId:               m.ProjectID,
		AppSlug:                 m.AppSlug,
		AppVersion:              m.AppVersion,
		Revision:                m.Revision,
		CorrelationId:           m.CorrelationID,
		Manifest:                manifest,
		Delegation:              delegation,
		Services:                m.Services,
		Features:                sortedUnique(m.Features),
		Stopped:                 m.Stopped,
		RollsBack:               m.RollsBack,
		ReadinessTimeoutSeconds: wholeSeconds(m.ReadinessTimeout),
		ParametersJson:          m.ParametersJSON,
		SecretReferences:        m.SecretReferences,
		FirstNamedAt:            timestamp(m.NamedAt),
		Traceparent:             m.Traceparent,
		OperatingMode:           m.OperatingMode,
		ControlPlaneScope:       m.ControlPlaneScope,
		RuntimeBackend:          m.RuntimeBackend,
	}, nil
}

func timestamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

// envelope gives nil for no bytes: an absent delegation is an absent field, not an empty one.
func envelope(data []byte) (*protocol.Envelope, error) {
	if len(data) == 0 {
		return nil, nil
	}
	env := &protocol.Envelope{}
	if err := proto.Unmarshal(data, env); err != nil {
		return nil, err
	}
	return env, nil
}

func sortedUnique(in []string) []string {
	out := slices.Clone(in)
	slices.Sort(out)
	return slices.Compact(out)
}

// wholeSeconds rounds up: a timeout is never shorter than asked for.
func wholeSeconds(d time.Duration) uint32 {
	if d <= 0 {
		return 0
	}
	return uint32(min((d+time.Second-1)/time.Second, 1<<32-1))
}
