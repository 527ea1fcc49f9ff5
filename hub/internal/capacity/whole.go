package capacity

import (
	"context"
	"slices"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// Whole returns the choice of all that an allocation has, for a member that an external worker operates: the worker
// may do anything on it. An allocation that is in use or not usable is refused.
func (c Candidate) Whole() (plan.Choice, error) {
	a := c.Allocation
	if !c.Usable || a.FreeCPUMillis != a.CPUCores*millisPerCore || a.FreeMemoryBytes != a.MemoryMiB*mebibyte ||
		len(c.Accelerators) != len(a.AcceleratorIDs) {
		return plan.Choice{}, fault.New(fault.Conflict, CodeInsufficient, "A member of this app needs an active allocation "+
			"of its own; the named one is in use, or its node takes nothing new.", nil).
			WithField("/placement_intent/allocation_ids", "is in use")
	}
	return plan.Choice{
		Need:           plan.Need{CPUMillis: a.FreeCPUMillis, MemoryBytes: a.FreeMemoryBytes},
		AcceleratorIDs: slices.Clone(a.AcceleratorIDs),
	}, nil
}

// CandidatesFor returns the candidates of several members: the named allocations, or the only active one.
func CandidatesFor(ctx context.Context, tx db.Tx, projectID string, ids []string) ([]Candidate, error) {
	if len(ids) == 0 {
		all, err := AllocationCandidates(ctx, tx, projectID, nil)
		if err == nil && len(all) != 1 {
			err = placementRequired("Name the allocations of the members, in the order of the components.")
		}
		return all, err
	}
	var out []Candidate
	for i, id := range ids {
		if slices.Contains(ids[:i], id) {
			return nil, fault.New(fault.Unprocessable, codePlacementUnsupported, "Each member needs an allocation of its own.",
				nil).WithField("/placement_intent/allocation_ids", "names one twice").Permanent()
		}
		c, err := AllocationCandidates(ctx, tx, projectID, []string{id})
		if err != nil {
			return nil, err
		}
		out = append(out, c...)
	}
	return out, nil
}
