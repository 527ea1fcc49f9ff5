package command

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
)

// createExternal deploys an app that an external worker operates: its members get whole allocations, and the worker a
// task. Only the allocations are billed.
func (s *Service) createExternal(ctx context.Context, tx db.Tx, m Meta, project iam.Project, in CreateInstanceInput,
	version resolvedVersion,
) (instance.Instance, error) {
	contract := version.Version.Manifest.Version.ExternalWorkerContract
	if err := refuseChoice(in.Resources); err != nil {
		return instance.Instance{}, err
	}
	candidates, err := capacity.CandidatesFor(ctx, tx, project.ID, in.AllocationIDs)
	if err != nil {
		return instance.Instance{}, err
	}
	roles := contract.Roles(len(candidates))
	if roles == nil {
		return instance.Instance{}, fault.New(fault.Unprocessable, codeMembersOutOfBounds, "The version allows another "+
			"number of members; its external_worker_contract says how many of each component.", nil).
			WithField("/placement_intent/allocation_ids", "names too few or too many").Permanent()
	}
	if err := checkAccelerators(version.MaxAccelerators, 0, candidates); err != nil {
		return instance.Instance{}, err
	}
	if _, err := checkNodes(ctx, tx, candidates, manifest.Choice{}, project.OrgID); err != nil {
		return instance.Instance{}, err
	}
	i := newInstance(db.NewID(), m, project, in, version, placement{})
	i.Members = nil
	for n, candidate := range candidates {
		member, err := reserveWhole(ctx, tx, candidate, roles[n], m.Now)
		if err != nil {
			return instance.Instance{}, err
		}
		i.Members = append(i.Members, member)
	}
	c, err := instance.Create(ctx, tx, i, newRevision(version, manifest.Choice{}), db.NewID(), m.Now)
	if err != nil {
		return instance.Instance{}, err
	}
	return change.AddTask(ctx, tx, m.by(), iam.InstanceCreate, c, contract.Task(manifest.TaskDeploy), "")
}

// checkRoles refuses a version whose components are not those of an instance's members.
func checkRoles(contract manifest.WorkerContract, members []instance.Member) error {
	has := map[string]int{}
	for _, c := range contract.Components {
		has[c.Role] = 0
	}
	for _, m := range members {
		if !m.Gone {
			has[m.Role]++
		}
	}
	for _, role := range slices.Sorted(maps.Keys(has)) {
		c := contract.Component(role)
		if c == nil {
			c = &manifest.Component{}
		}
		if n := has[role]; n < c.Min || n > c.Max {
			return fault.New(fault.Unprocessable, codeMembersOutOfBounds, "The version allows another number of members: add "+
				"or remove some first.", nil).WithField("/version", fmt.Sprintf("allows %d to %d members of the role %s; the "+
				"instance has %d", c.Min, c.Max, role, n)).Permanent()
		}
	}
	return nil
}

// refuseChoice refuses what only containers have.
func refuseChoice(c manifest.Choice) error {
	if c.Accelerators != nil || c.CPUMillis > 0 || c.MemoryMiB > 0 || c.DiskMiB > 0 || c.ShmMiB > 0 ||
		c.AcceleratorModel != "" || c.AcceleratorSharing != "" || len(c.Ports)+len(c.Volumes)+len(c.Environment) > 0 {
		return fault.New(fault.Unprocessable, manifest.CodeResourcesInvalid, "A member of this app has its whole "+
			"allocation; resources, ports, volumes and environment belong to apps that nodes run.", nil).
			WithField("/resources", "must be absent").Permanent()
	}
	return nil
}

// checkAccelerators refuses allocations that would give an instance, beside the accelerators that it has, more than the
// project's entitlement allows; a limit of 0 is none.
func checkAccelerators(limit, has int, candidates []capacity.Candidate) error {
	for _, c := range candidates {
		has += len(c.Allocation.AcceleratorIDs)
	}
	if limit == 0 || has <= limit {
		return nil
	}
	return fault.New(fault.Forbidden, catalog.CodePolicyRefused, "The instance would have more accelerators than the "+
		"project's entitlement allows.", nil).WithField("/placement_intent/allocation_ids", fmt.Sprintf("makes them %d; at "+
		"most %d are allowed", has, limit)).Permanent()
}

// acceleratorsOf is how many accelerators the members of an instance have, and how many the entitlement allows.
func acceleratorsOf(ctx context.Context, tx db.Tx, i instance.Instance) (has, limit int, err error) {
	e, err := catalog.GetEntitlement(ctx, tx, i.ProjectID, i.AppSlug)
	if err != nil {
		return 0, 0, err
	}
	for _, m := range i.Members {
		if m.Gone {
			continue
		}
		a, err := capacity.GetAny(ctx, tx, m.AllocationID)
		if err != nil {
			return 0, 0, err
		}
		has += len(a.AcceleratorIDs)
	}
	return has, e.Policy.MaxAccelerators, nil
}

// reserveWhole gives a new member all of an allocation.
func reserveWhole(ctx context.Context, tx db.Tx, at capacity.Candidate, role string, now time.Time,
) (instance.Member, error) {
	choice, err := at.Whole()
	if err != nil {
		return instance.Member{}, err
	}
	m := instance.Member{ID: db.NewID(), AllocationID: at.ID, NodeID: at.NodeID, Role: role, External: true}
	return m, capacity.Reserve(ctx, tx, capacity.Reservation{
		MemberID: m.ID, AllocationID: m.AllocationID, NodeID: m.NodeID, Choice: choice,
	}, now)
}

// actExternal turns an action that has begun into a task.
func (s *Service) actExternal(ctx context.Context, tx db.Tx, m Meta, permission iam.Permission, c instance.Change,
) (instance.Instance, error) {
	contract, err := change.WorkerContract(ctx, tx, c.Instance)
	if err != nil {
		return instance.Instance{}, err
	}
	return change.AddTask(ctx, tx, m.by(), string(permission), c, contract.Task(c.Instance.Operation.Kind), "")
}

// upgradeExternal is upgrade for an app that an external worker operates.
func (s *Service) upgradeExternal(ctx context.Context, tx db.Tx, m Meta, i instance.Instance, r instance.Request,
	next resolvedVersion, chosen manifest.Choice,
) (instance.Change, error) {
	if err := refuseChoice(chosen); err != nil {
		return instance.Change{}, err
	}
	if err := checkRoles(*next.Version.Manifest.Version.ExternalWorkerContract, i.Members); err != nil {
		return instance.Change{}, err
	}
	return instance.RequestUpgrade(ctx, tx, i, r, newRevision(next, manifest.Choice{}), nil, m.Now)
}
