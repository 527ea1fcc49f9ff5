package command

import (
	"context"
	"fmt"
	"math"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
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
	// chosen is what the tenant chose, with the sizes of the project's volumes.
	chosen   manifest.Choice
	services []*protocol.Service
	// unreachable: the node is offline, and starts the member when it reconnects.
	unreachable bool
}

// placeMember reserves free capacity for one member and lowers the manifest to it.
func placeMember(ctx context.Context, tx db.Tx, m Meta, project iam.Project, in CreateInstanceInput,
	w resolvedVersion,
) (placement, error) {
	if err := checkVolumeSizes(in.Resources); err != nil {
		return placement{}, err
	}
	chosen, volumeNode, err := chooseVolumes(ctx, tx, project.ID, in.Resources)
	if err != nil {
		return placement{}, err
	}
	needs, err := needsOf(w, chosen)
	if err != nil {
		return placement{}, err
	}
	candidates, err := candidatesFor(ctx, tx, project, in, w)
	if err != nil {
		return placement{}, err
	}
	if candidates, err = onNode(candidates, volumeNode); err != nil {
		return placement{}, err
	}
	offline, err := checkNodes(ctx, tx, candidates, chosen, project.OrgID)
	if err != nil {
		return placement{}, err
	}
	p := placement{id: db.NewID(), chosen: chosen}
	if w.OperatingMode == manifest.PlatformManaged {
		p.candidate, p.choice, err = capacity.ChooseFirst(needs, candidates)
	} else {
		p.candidate, p.choice, err = capacity.Choose(needs, candidates, len(in.AllocationIDs) > 0)
	}
	if err != nil {
		return placement{}, err
	}
	p.unreachable = offline[p.candidate.NodeID]
	if err := capacity.Reserve(ctx, tx, capacity.Reservation{
		MemberID: p.id, AllocationID: p.candidate.ID, NodeID: p.candidate.NodeID, Choice: p.choice,
	}, m.Now); err != nil {
		return placement{}, err
	}
	if p.services, err = lower(w, chosen, p.choice); err != nil {
		return placement{}, err
	}
	return p, capacity.ReserveVolumes(ctx, tx, p.id, p.candidate.ID, p.services)
}

// candidatesFor returns the allocations that an instance may run in: its project's, or the platform's for what that
// manages.
func candidatesFor(ctx context.Context, tx db.Tx, project iam.Project, in CreateInstanceInput, w resolvedVersion,
) ([]capacity.Candidate, error) {
	if w.OperatingMode != manifest.PlatformManaged {
		return capacity.AllocationCandidates(ctx, tx, project.ID, in.AllocationIDs)
	}
	if len(in.AllocationIDs) > 0 {
		return nil, fault.New(fault.Unprocessable, codePlacementManaged, "The platform decides where an app that it "+
			"manages runs; name no allocation.", nil).
			WithField("/placement_intent/allocation_ids", "must be absent").Permanent()
	}
	platform, err := iam.PlatformProject(ctx, tx)
	if err != nil || platform.ID == "" {
		return nil, err
	}
	return capacity.LentCandidates(ctx, tx, platform.ID, project.OrgID)
}

// needsOf returns what an instance of the version may use, in the order of preference.
func needsOf(w resolvedVersion, chosen manifest.Choice) ([]plan.Need, error) {
	if err := w.Version.Manifest.CheckChoice(chosen); err != nil {
		return nil, err
	}
	needs := plan.Needs(w.Version.Manifest, chosen, w.MaxAccelerators)
	switch {
	case len(needs) > 0:
		return needs, nil
	case chosen.Accelerators != nil && w.MaxAccelerators > 0 && *chosen.Accelerators > w.MaxAccelerators:
		return nil, fault.New(fault.Forbidden, catalog.CodePolicyRefused, "These are more accelerators than the project's "+
			"entitlement allows.", nil).
			WithField("/resources/accelerators", fmt.Sprintf("must be at most %d", w.MaxAccelerators)).Permanent()
	}
	return nil, fault.New(fault.Forbidden, catalog.CodePolicyRefused, "The version needs more accelerators than "+
		"the project's entitlement allows.", nil).
		WithField("/version", "needs more accelerators than are allowed").Permanent()
}

// lower gives what a member runs of the version with what it uses of its allocation.
func lower(w resolvedVersion, chosen manifest.Choice, at plan.Choice) ([]*protocol.Service, error) {
	return manifest.Lower(w.Version.Manifest, w.inputs(), manifest.Shape{
		CPUMillis:         uint32(min(chosen.CPUMillis, math.MaxUint32)),
		MemoryBytes:       chosen.MemoryMiB << 20,
		DiskBytes:         chosen.DiskMiB << 20,
		ShmBytes:          chosen.ShmMiB << 20,
		Variant:           at.Need.Variant.Name,
		AcceleratorVendor: at.Need.Variant.Accelerator,
		AcceleratorIDs:    at.AcceleratorIDs,

		AcceleratorSharing: at.Need.Sharing,
		Ports:              chosen.Ports,
		Volumes:            chosen.Volumes,
		Environment:        chosen.Environment,
	})
}

// checkNodes marks the candidates on nodes that accept no new work unusable, gives each what its node knows and may
// publish on, and returns which nodes are offline. A node that serves one org at a time has none of another's.
func checkNodes(ctx context.Context, tx db.Tx, candidates []capacity.Candidate,
	chosen manifest.Choice, orgID string,
) (offline map[string]bool, err error) {
	ids := make([]string, 0, len(candidates))
	for _, r := range candidates {
		ids = append(ids, r.NodeID)
	}
	var (
		nodes   map[string]fleet.Node
		members map[string]int
	)
	if err := db.Together(ctx, tx, func(tx db.Tx) (err error) {
		nodes, err = fleet.GetAllWithoutSessions(ctx, tx, ids)
		return err
	}, func(tx db.Tx) (err error) {
		members, err = capacity.MemberCounts(ctx, tx, ids)
		return err
	}); err != nil {
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
		foreign := candidates[i].Allocation.OrgID != orgID && len(node.SingleOrgConditions()) > 0
		if foreign || !node.TakesAnother(members[node.ID]) {
			candidates[i].Usable = false
		}
		candidates[i].Features = node.Features
		offline[node.ID] = !node.Reachable
	}
	if len(chosen.Ports) == 0 {
		return offline, nil
	}
	allowed, err := fleet.HostPorts(ctx, tx, nodes)
	if err != nil {
		return nil, err
	}
	return offline, capacity.SetHostPorts(ctx, tx, candidates, allowed)
}
