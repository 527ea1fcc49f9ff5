package command

import (
	"context"
	"maps"
	"slices"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/quota"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	// placementCandidates is how many nodes one transaction reads.
	placementCandidates = 4
	// placementAttempts bounds how often the snapshot is read anew because others have taken the candidates meanwhile.
	placementAttempts = 20
)

// CreateAllocation holds capacity on a node for a project. It answers with the active allocation. It chooses among all
// nodes by a snapshot, and checks a few candidates in the transaction: one that read all nodes would conflict with
// every report of any. NodeID, SKU and AcceleratorModel of the request may be empty.
func (s *Service) CreateAllocation(ctx context.Context, m Meta,
	in capacity.NewAllocation,
) (capacity.Allocation, error) {
	for attempt := 1; ; attempt++ {
		nodeIDs, err := s.candidates(ctx, m, in)
		if err != nil {
			return capacity.Allocation{}, err
		}
		check := access.Project(m.Principal, iam.AllocationCreate, in.ProjectID)
		a, err := once(ctx, s, m, check, func(tx db.Tx, project iam.Project) (capacity.Allocation, error) {
			return s.createAllocation(ctx, tx, m, project, in, nodeIDs)
		})
		taken := fault.As(err).Code == capacity.CodeInsufficient && in.NodeID == "" && len(nodeIDs) > 0
		if err == nil || !taken || attempt == placementAttempts {
			return a, err
		}
	}
}

// candidates are the nodes that the request fits on best, or the one that it names.
func (s *Service) candidates(ctx context.Context, m Meta, in capacity.NewAllocation) ([]string, error) {
	if in.NodeID != "" {
		return []string{in.NodeID}, nil
	}
	ids, err := db.ReadTx(ctx, s.DB, func(tx db.Tx) ([]string, error) {
		project, err := access.Project(m.Principal, iam.AllocationCreate, in.ProjectID)(ctx, tx)
		if err != nil {
			return nil, err
		}
		in.OrgID, in.ProjectID = project.OrgID, project.ID
		open, err := fleet.ForPlacement(ctx, tx, m.Now)
		if err != nil {
			return nil, err
		}
		return capacity.NodesFor(ctx, tx, in, capacityNodes(m, open), placementCandidates)
	})
	if f := fault.As(err); err != nil && f.Kind == fault.Unprocessable {
		return nil, nil // the transaction says the same, unless the request was answered before
	}
	return ids, err
}

func (s *Service) createAllocation(ctx context.Context, tx db.Tx, m Meta, project iam.Project,
	in capacity.NewAllocation, nodeIDs []string,
) (capacity.Allocation, error) {
	known, err := fleet.GetAll(ctx, tx, nodeIDs)
	if err != nil {
		return capacity.Allocation{}, err
	}
	held, err := capacity.HeldByOrg(ctx, tx, project.OrgID)
	if err != nil {
		return capacity.Allocation{}, err
	}
	in.ID, in.OrgID, in.ProjectID = db.NewID(), project.OrgID, project.ID
	in.RequestedBy, in.CorrelationID = m.Principal.Actor(), m.CorrelationID
	a, err := capacity.Create(ctx, tx, in, capacityNodes(m, slices.Collect(maps.Values(known))), m.Now)
	if err != nil {
		return capacity.Allocation{}, err
	}
	if err := quota.CheckAllocation(ctx, tx, held, a); err != nil {
		return capacity.Allocation{}, err
	}
	if err := ledger.OpenSubject(ctx, tx, ledger.Subject{
		ID:            a.ID,
		Kind:          ledger.Allocation,
		OrgID:         a.OrgID,
		ProjectID:     a.ProjectID,
		AllocationID:  a.ID,
		NodeID:        a.NodeID,
		SKU:           a.SKU,
		CorrelationID: m.CorrelationID,
		OpenedAt:      m.Now,
	}); err != nil {
		return capacity.Allocation{}, err
	}
	return a, change.RecordAllocation(ctx, tx, m.by(), iam.AllocationCreate, "", a)
}

// ReleaseAllocation gives capacity back. It answers with the allocation, released or, while something still has to be
// removed from the node, releasing.
func (s *Service) ReleaseAllocation(ctx context.Context, m Meta, projectID,
	allocationID string,
) (capacity.Allocation, error) {
	check := access.Project(m.Principal, iam.AllocationRelease, projectID)
	return once(ctx, s, m, check, func(tx db.Tx, project iam.Project) (capacity.Allocation, error) {
		before, err := capacity.Get(ctx, tx, project.ID, allocationID)
		if err != nil {
			return capacity.Allocation{}, err
		}
		live, err := instance.LiveInAllocation(ctx, tx, before.ID)
		if err != nil {
			return capacity.Allocation{}, err
		}
		return change.ReleaseAllocation(ctx, tx, m.by(), before, len(live))
	})
}

// capacityNodes says of each node what it has, and whether it may get something new.
func capacityNodes(m Meta, nodes []fleet.Node) []capacity.Node {
	out := make([]capacity.Node, 0, len(nodes))
	for _, n := range nodes {
		out = append(out, capacity.Node{
			ID:          n.ID,
			CPUCores:    n.CPUCores,
			MemoryBytes: n.MemoryBytes,
			Usable:      n.TakesNew() && n.Connected(m.Now),
			OneOrg:      len(n.SingleOrgConditions()) > 0,
		})
	}
	return out
}
