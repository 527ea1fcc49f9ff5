// Package capacity owns accelerators, SKUs, allocations, claims and the reservations of members: what nodes have and
// who uses it. It does not know instances, prices or nodes beyond their ids; sizes of nodes are arguments.
package capacity

import (
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// Shape is how capacity is sold: a whole node, or a part of one.
type Shape string

// The shapes of the contract.
const (
	Baremetal Shape = plan.ShapeBaremetal
	GPUSlice  Shape = plan.ShapeGPUSlice
)

// Status of an allocation.
type Status string

// The statuses of the contract.
const (
	Pending   Status = "pending"
	Active    Status = "active"
	Releasing Status = "releasing"
	Released  Status = "released"
	NodeLost  Status = "node_lost"
)

const (
	millisPerCore = 1000
	mebibyte      = 1 << 20
)

// Allocation is capacity that a project holds on a node.
type Allocation struct {
	ID               string
	OrgID            string
	ProjectID        string
	NodeID           string
	SKU              string
	Shape            Shape
	AcceleratorCount int
	AcceleratorModel string
	// AcceleratorIDs are the claimed ones, sorted; they stay readable after the release.
	AcceleratorIDs []string
	CPUCores       int64
	MemoryMiB      int64
	// FreeCPUMillis and FreeMemoryBytes are not reserved by members.
	FreeCPUMillis   int64
	FreeMemoryBytes int64
	Status          Status
	RequestedBy     principal.Actor
	CorrelationID   string
	ResourceVersion int64
	CreatedAt       time.Time
	UpdatedAt       time.Time
	ActivatedAt     time.Time
	ReleasedAt      time.Time
}

// EventType names the event of the allocation's latest status.
func (a Allocation) EventType() string { return "capacity.allocation." + string(a.Status) }

// NewAllocation is what a project asks for.
type NewAllocation struct {
	ID        string
	OrgID     string
	ProjectID string
	// NodeID is empty where the hub chooses.
	NodeID           string
	SKU              string
	Shape            Shape
	AcceleratorCount int
	AcceleratorModel string
	CPUCores         int64
	MemoryMiB        int64
	RequestedBy      principal.Actor
	CorrelationID    string
}

// Node is a candidate for an allocation.
type Node struct {
	ID          string
	CPUCores    int64
	MemoryBytes int64
	Usable      bool
	// OneOrg is true where the node isolates workloads too weakly to serve two orgs at a time.
	OneOrg bool
}

func (n NewAllocation) need() plan.Need {
	return plan.Need{
		CPUMillis: n.CPUCores * millisPerCore, MemoryBytes: n.MemoryMiB * mebibyte, Accelerators: n.AcceleratorCount,
		AcceleratorModel: n.AcceleratorModel, Whole: n.Shape == Baremetal,
	}
}

// place chooses a node and returns the allocation to store.
func (n NewAllocation) place(nodes []Node, candidates []plan.Candidate, now time.Time) (Allocation, error) {
	choices := plan.Fitting(n.need(), candidates)
	if len(choices) == 0 {
		return Allocation{}, fault.New(fault.Conflict, CodeInsufficient,
			"No node that may get new work has this much free; ask for less, name no node, or try again later.", nil)
	}
	chosen := choices[0]
	a := Allocation{
		ID: n.ID, OrgID: n.OrgID, ProjectID: n.ProjectID, NodeID: chosen.ID, SKU: n.SKU, Shape: n.Shape,
		AcceleratorCount: len(chosen.AcceleratorIDs), AcceleratorModel: n.AcceleratorModel,
		AcceleratorIDs: chosen.AcceleratorIDs,
		CPUCores:       n.CPUCores, MemoryMiB: n.MemoryMiB, Status: Active, RequestedBy: n.RequestedBy,
		CorrelationID:   n.CorrelationID,
		ResourceVersion: 1, CreatedAt: now, UpdatedAt: now, ActivatedAt: now,
	}
	if n.Shape == Baremetal {
		for _, node := range nodes {
			if node.ID == chosen.ID {
				a.CPUCores, a.MemoryMiB = node.CPUCores, node.MemoryBytes/mebibyte
			}
		}
	}
	a.FreeCPUMillis, a.FreeMemoryBytes = a.CPUCores*millisPerCore, a.MemoryMiB*mebibyte
	return a, nil
}

func errNotFound() error {
	return fault.New(fault.NotFound, fault.CodeNotFound, "There is no such allocation in this project.", nil)
}
