package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// AddMember gives a running app of an external worker another member, with an allocation of its own, where the project
// could start the app anew; an empty role is the last one of the version.
func (s *Service) AddMember(ctx context.Context, m Meta, projectID, instanceID, allocationID, role string,
) (instance.Instance, error) {
	return s.onMembers(ctx, m, projectID, instanceID, manifest.TaskMemberAdd, func(tx db.Tx, project iam.Project,
		i instance.Instance, contract manifest.WorkerContract,
	) (instance.Change, string, error) {
		if _, err := s.checkRestartable(ctx, tx, m, i, i.Revision, i.Version); err != nil {
			return instance.Change{}, "", err
		}
		if role == "" && len(contract.Components) > 0 {
			role = contract.Components[len(contract.Components)-1].Role
		}
		component := contract.Component(role)
		if component == nil {
			return instance.Change{}, "", fault.New(fault.Unprocessable, codeMembersOutOfBounds, "The version has no "+
				"component of this role.", nil).WithField("/role", "is not a role of the version").Permanent()
		}
		candidates, err := capacity.CandidatesFor(ctx, tx, project.ID, []string{allocationID})
		if err != nil {
			return instance.Change{}, "", ofMember(err)
		}
		has, limit, err := acceleratorsOf(ctx, tx, i)
		if err != nil {
			return instance.Change{}, "", err
		}
		if err := checkAccelerators(limit, has, candidates); err != nil {
			return instance.Change{}, "", ofMember(err)
		}
		if _, err := checkNodes(ctx, tx, candidates, manifest.Choice{}, project.OrgID); err != nil {
			return instance.Change{}, "", err
		}
		added, err := reserveWhole(ctx, tx, candidates[0], role, m.Now)
		if err != nil {
			return instance.Change{}, "", ofMember(err)
		}
		c, err := instance.AddMember(ctx, tx, i, *component, added, m.Now)
		return c, added.ID, err
	})
}

// ofMember points the fields of a fault at what the request calls the allocation.
func ofMember(err error) error {
	f := fault.As(err)
	for n := range f.Fields {
		f.Fields[n].Pointer = "/allocation_id"
	}
	return f
}

// RemoveMember takes a member out of a running app of an external worker; its allocation is free once that is done.
func (s *Service) RemoveMember(ctx context.Context, m Meta, projectID, instanceID, memberID string,
) (instance.Instance, error) {
	return s.onMembers(ctx, m, projectID, instanceID, manifest.TaskMemberRemove, func(tx db.Tx, _ iam.Project,
		i instance.Instance, contract manifest.WorkerContract,
	) (instance.Change, string, error) {
		var component *manifest.Component
		for _, member := range i.Members {
			if member.ID == memberID {
				component = contract.Component(member.Role)
			}
		}
		c, err := instance.RemoveMember(ctx, tx, i, component, memberID, m.Now)
		return c, memberID, err
	})
}

// RecoverMember has the external worker recover a member that failed or is degraded.
func (s *Service) RecoverMember(ctx context.Context, m Meta, projectID, instanceID, memberID string,
) (instance.Instance, error) {
	return s.onMembers(ctx, m, projectID, instanceID, manifest.TaskMemberRecover, func(tx db.Tx, _ iam.Project,
		i instance.Instance, _ manifest.WorkerContract,
	) (instance.Change, string, error) {
		c, err := instance.RecoverMember(ctx, tx, i, memberID, m.Now)
		return c, memberID, err
	})
}

// onMembers changes a member of an app, and adds the task for it.
func (s *Service) onMembers(ctx context.Context, m Meta, projectID, instanceID, kind string,
	do func(tx db.Tx, project iam.Project, i instance.Instance, contract manifest.WorkerContract) (c instance.Change,
		memberID string, err error),
) (instance.Instance, error) {
	return inProject(ctx, s, m, iam.InstanceMembers, projectID, func(tx db.Tx, project iam.Project,
	) (instance.Instance, error) {
		i, err := instance.Get(ctx, tx, project.ID, instanceID)
		if err != nil {
			return instance.Instance{}, err
		}
		contract, err := change.WorkerContract(ctx, tx, i)
		if err != nil {
			return instance.Instance{}, err
		}
		if contract.Task(kind) == nil {
			return instance.Instance{}, instance.ErrTaskUnsupported()
		}
		c, memberID, err := do(tx, project, i, contract)
		if err != nil {
			return instance.Instance{}, err
		}
		return change.AddTask(ctx, tx, m.by(), iam.InstanceMembers, c, contract.Task(kind), memberID)
	})
}

// ReportMember records what an external worker says of a member.
func (s *Service) ReportMember(ctx context.Context, m Meta, projectID, instanceID string, r instance.MemberReport,
	reason string,
) (instance.Instance, error) {
	check := access.Instance(m.Principal, iam.InstanceWork, projectID, instanceID)
	return run(ctx, s, check, func(tx db.Tx, project iam.Project) (instance.Instance, error) {
		i, err := instance.Get(ctx, tx, project.ID, instanceID)
		if err != nil {
			return instance.Instance{}, err
		}
		if reason != "" {
			if r.Reason, err = workerReason(reason); err != nil {
				return instance.Instance{}, err
			}
		}
		if (r.Status == protocol.WorkloadStatus_READY) != (r.Reason == 0) {
			return instance.Instance{}, fault.New(fault.Unprocessable, codeReasonUnknown, "A member that is not ready has a "+
				"reason, and a ready one has none.", nil).WithField("/reason", "does not fit the status").Permanent()
		}
		c, news, err := instance.ReportMember(ctx, tx, i, r, m.Now)
		if err != nil || !news {
			return c.Instance, err
		}
		return c.Instance, change.CompleteMember(ctx, tx, m.by(), iam.InstanceWork, c, r)
	})
}
