package query

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
)

// maxTargets bounds how many allocations, and how many nodes, an answer names; those that fit come first.
const maxTargets = 100

// The kinds of a target.
const (
	TargetAllocation = "allocation"
	TargetNode       = "node"
)

// TargetsInput names what is to be placed.
type TargetsInput struct {
	ProjectID, AppSlug, Version string
	Resources                   manifest.Choice
	// VolumeIDs are volumes of the project that the instance is to have.
	VolumeIDs []string
	Now       time.Time
}

// Target is an allocation or a node, with what is free there, and why an instance does not fit; empty where it fits.
type Target struct {
	plan.Candidate
	Kind   string
	NodeID string
	Misfit plan.Misfit
}

// Targets lists where an instance of a version fits and where it does not: the project's active allocations and, for
// a caller who may create allocations, the nodes that are online and take new work. There is none for an app that the
// platform alone manages, which runs where the platform decides.
func (s *Service) Targets(ctx context.Context, p iam.Principal, in TargetsInput) ([]Target, error) {
	return read(ctx, s, access.Project(p, iam.AllocationRead, in.ProjectID),
		func(tx db.Tx, project iam.Project) ([]Target, error) {
			version, err := visibleVersion(ctx, tx, p, project, in.AppSlug, in.Version)
			if err != nil {
				return nil, err
			}
			if err := version.Manifest.CheckChoice(in.Resources); err != nil {
				return nil, inQuery(err)
			}
			if !slices.Contains(version.Manifest.App.SupportedModes.OperatingModes, manifest.TenantDedicated) {
				return nil, nil
			}
			entitlement, err := catalog.GetEntitlement(ctx, tx, project.ID, in.AppSlug)
			if err != nil && !fault.Is(err, fault.NotFound) {
				return nil, err
			}
			volumeNode, err := nodeOfVolumes(ctx, tx, project.ID, in.VolumeIDs)
			if err != nil {
				return nil, err
			}
			ask := targetsAsk{
				project: project, volumeNode: volumeNode,
				needs: plan.Needs(version.Manifest, in.Resources, entitlement.Policy.MaxAccelerators),
			}
			allocations, err := allocationTargets(ctx, tx, ask)
			if err != nil || iam.Authorize(p, iam.AllocationCreate, project.OrgID, project.ID) != nil {
				return allocations, err
			}
			ask.needs = allocationNeeds(ask.needs)
			nodes, err := nodeTargets(ctx, tx, ask, in.Now)
			return append(allocations, nodes...), err
		})
}

// targetsAsk is what a target is compared with.
type targetsAsk struct {
	project iam.Project
	// needs are none where the project's entitlement allows none of them.
	needs []plan.Need
	// volumeNode keeps the volumes that the instance is to have; empty where it is to have none.
	volumeNode string
}

func (a targetsAsk) target(kind, nodeID string, c plan.Candidate) Target {
	t := Target{Candidate: c, Kind: kind, NodeID: nodeID}
	switch {
	case len(a.needs) == 0:
		t.Misfit = plan.NotEntitled
	case a.volumeNode != "" && nodeID != a.volumeNode:
		t.Misfit = plan.VolumeElsewhere
	default:
		_, t.Misfit = plan.FirstFit(a.needs, c)
	}
	return t
}

// nodeOfVolumes returns the node that keeps these volumes of the project; empty for none.
func nodeOfVolumes(ctx context.Context, tx db.Tx, projectID string, ids []string) (nodeID string, err error) {
	for _, id := range ids {
		v, err := capacity.GetVolume(ctx, tx, projectID, id)
		if err == nil && nodeID != "" && v.NodeID != nodeID {
			err = fault.New(fault.Conflict, capacity.CodeVolumeElsewhere, "The volumes are on different nodes.", nil)
		}
		if err == nil {
			err = v.Usable()
		}
		if err != nil {
			return "", fault.As(err).WithField("query/volume_id", "names no volume that an instance could have there")
		}
		nodeID = v.NodeID
	}
	return nodeID, nil
}

func allocationTargets(ctx context.Context, tx db.Tx, ask targetsAsk) ([]Target, error) {
	candidates, err := capacity.AllocationCandidates(ctx, tx, ask.project.ID, nil)
	if err != nil {
		return nil, err
	}
	ids := make([]string, 0, len(candidates))
	for _, c := range candidates {
		ids = append(ids, c.NodeID)
	}
	nodes, err := fleet.GetAll(ctx, tx, ids)
	if err != nil {
		return nil, err
	}
	members, err := capacity.MemberCounts(ctx, tx, ids)
	if err != nil {
		return nil, err
	}
	targets := make([]Target, 0, len(candidates))
	for _, c := range candidates {
		node := nodes[c.NodeID]
		c.Usable = c.Usable && node.TakesAnother(members[c.NodeID])
		c.Features = node.Features
		targets = append(targets, ask.target(TargetAllocation, c.NodeID, c.Candidate))
	}
	return fittingFirst(targets), nil
}

// nodeTargets asks whether an allocation for the instance could be created on each node.
func nodeTargets(ctx context.Context, tx db.Tx, ask targetsAsk, now time.Time) ([]Target, error) {
	open, err := fleet.ForPlacement(ctx, tx, now)
	if err != nil {
		return nil, err
	}
	features := map[string][]string{}
	nodes := make([]capacity.Node, 0, len(open))
	for _, n := range open {
		features[n.ID] = n.Features
		nodes = append(nodes, capacity.Node{
			ID:          n.ID,
			CPUCores:    n.CPUCores,
			MemoryBytes: n.MemoryBytes,
			Usable:      true,
			OneOrg:      len(n.SingleOrgConditions()) > 0,
		})
	}
	candidates, err := capacity.NodeCandidates(ctx, tx, nodes, ask.project.OrgID)
	if err != nil {
		return nil, err
	}
	targets := make([]Target, 0, len(candidates))
	for _, c := range candidates {
		c.Features = features[c.ID]
		targets = append(targets, ask.target(TargetNode, c.ID, c))
	}
	return fittingFirst(targets), nil
}

// allocationNeeds are the smallest allocations that the needs fit into: whole cores, in a shape of the version.
func allocationNeeds(needs []plan.Need) []plan.Need {
	out := slices.Clone(needs)
	for n := range out {
		shapes := out[n].Shapes
		out[n].Whole = len(shapes) > 0 && !slices.Contains(shapes, plan.ShapeGPUSlice)
		out[n].Shapes = nil
		out[n].CPUMillis = (out[n].CPUMillis + 999) / 1000 * 1000
	}
	return out
}

func fittingFirst(targets []Target) []Target {
	slices.SortStableFunc(targets, func(a, b Target) int {
		return cmp.Or(cmp.Compare(a.Misfit, b.Misfit), cmp.Compare(a.ID, b.ID))
	})
	return targets[:min(len(targets), maxTargets)]
}
