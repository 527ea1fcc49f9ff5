package command

import (
	"context"
	"fmt"
	"math"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// placement is where a member runs, and what.
type placement struct {
	id        string
	candidate capacity.Candidate
	choice    plan.Choice
	services  []*protocol.Service
	// unreachable: the node is offline, and starts the member when it reconnects.
	unreachable bool
}

// placeMember reserves free capacity for one member and lowers the manifest to it.
func placeMember(ctx context.Context, tx db.Tx, m Meta, project iam.Project, in CreateInstanceInput,
	w resolvedVersion,
) (placement, error) {
	needs := plan.Needs(w.Version.Manifest, w.MaxAccelerators)
	if len(needs) == 0 {
		return placement{}, fault.New(fault.Forbidden, catalog.CodePolicyRefused, "The version needs more accelerators than "+
			"the project's entitlement allows.", nil).
			WithField("/version", "needs more accelerators than are allowed").Permanent()
	}
	candidates, err := capacity.AllocationCandidates(ctx, tx, project.ID, in.AllocationIDs)
	if err != nil {
		return placement{}, err
	}
	offline, err := checkNodes(ctx, tx, m, candidates)
	if err != nil {
		return placement{}, err
	}
	p := placement{id: db.NewID()}
	if p.candidate, p.choice, err = capacity.Choose(needs, candidates, len(in.AllocationIDs) > 0); err != nil {
		return placement{}, err
	}
	p.unreachable = offline[p.candidate.NodeID]
	if err := capacity.Reserve(ctx, tx, capacity.Reservation{
		MemberID: p.id, AllocationID: p.candidate.ID, NodeID: p.candidate.NodeID, Choice: p.choice,
	}, m.Now); err != nil {
		return placement{}, err
	}
	p.services, err = manifest.Lower(w.Version.Manifest, w.inputs(), manifest.Shape{
		CPUMillis: uint32(min(p.choice.Need.CPUMillis, math.MaxUint32)), MemoryBytes: uint64(p.choice.Need.MemoryBytes),
		AcceleratorVendor: p.choice.Need.AcceleratorVendor, AcceleratorIDs: p.choice.AcceleratorIDs,
	})
	if err != nil {
		return placement{}, err
	}
	if err := artifact.CheckRunnable(ctx, tx, w.Version.Version, p.services); err != nil {
		return placement{}, err
	}
	return p, nil
}

// checkNodes marks the candidates on nodes that accept no new work unusable, and returns which nodes are offline.
func checkNodes(ctx context.Context, tx db.Tx, m Meta, candidates []capacity.Candidate) (offline map[string]bool,
	err error,
) {
	ids := make([]string, 0, len(candidates))
	for _, r := range candidates {
		ids = append(ids, r.NodeID)
	}
	nodes, err := fleet.GetAll(ctx, tx, ids)
	if err != nil {
		return nil, err
	}
	members, err := instance.MemberCounts(ctx, tx, ids)
	if err != nil {
		return nil, err
	}
	offline = map[string]bool{}
	for i := range candidates {
		node, ok := nodes[candidates[i].NodeID]
		if !ok {
			return nil, fmt.Errorf("allocation %s is on node %s, which does not exist", candidates[i].ID, candidates[i].NodeID)
		}
		// An offline node may get an instance: it starts when the node is back. A draining or quarantined one gets nothing
		// new, nor does one with as many members as its state may have.
		if !node.TakesNew() || members[node.ID] >= protocol.MaxParts {
			candidates[i].Usable = false
		}
		candidates[i].Features = node.Features
		offline[node.ID] = !node.Connected(m.Now)
	}
	return offline, nil
}
