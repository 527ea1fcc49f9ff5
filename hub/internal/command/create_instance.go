package command

import (
	"context"
	"encoding/json"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/quota"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// CreateInstanceInput is the request. Modes are hints.
type CreateInstanceInput struct {
	ProjectID         string
	AppSlug           string
	Version           string
	DisplayName       string
	OperatingMode     string
	ControlPlaneScope string
	// AllocationIDs are those that the request names for placement; empty where the hub chooses.
	AllocationIDs []string
	Resources     manifest.Choice
	Parameters    map[string]any
	Config        map[string]any
}

// CreateInstance deploys an app: it decides what runs, where, and that it can be paid, and asks the node for it. It
// creates the instance in status requested; the node's reports move it on.
func (s *Service) CreateInstance(ctx context.Context, m Meta, in CreateInstanceInput) (instance.Instance, error) {
	return inProject(ctx, s, m, iam.InstanceCreate, in.ProjectID, func(tx db.Tx,
		project iam.Project,
	) (instance.Instance, error) {
		return s.createInstance(ctx, tx, m, project, in)
	})
}

func (s *Service) createInstance(ctx context.Context, tx db.Tx, m Meta, project iam.Project,
	in CreateInstanceInput,
) (instance.Instance, error) {
	var version resolvedVersion
	if err := db.Together(ctx, tx, func(tx db.Tx) error {
		return quota.CheckInstance(ctx, tx, project.OrgID)
	}, func(tx db.Tx) (err error) {
		version, err = s.resolve(ctx, tx, m, project, in)
		return err
	}); err != nil {
		return instance.Instance{}, err
	}
	if manifest.IsExternal(version.RuntimeBackend) {
		return s.createExternal(ctx, tx, m, project, in, version)
	}
	member, err := placeMember(ctx, tx, m, project, in, version)
	if err != nil {
		return instance.Instance{}, err
	}
	id := db.NewID()
	to := sealFor{project.OrgID, project.ID, id, member.candidate.NodeID, member.id}
	version, err = s.seal(ctx, tx, m, version, to, in.Resources.Environment)
	if err != nil {
		return instance.Instance{}, err
	}
	if err := db.Together(ctx, tx, func(tx db.Tx) error {
		return artifact.CheckRunnable(ctx, tx, version.Version.Version, member.services)
	}, func(tx db.Tx) error {
		return s.fund(ctx, tx, m, project, id, member, version)
	}); err != nil {
		return instance.Instance{}, err
	}
	failpoint.Hit("hub/create/lease_issued")
	first := newRevision(version, member.chosen)
	first.Resources = kept(version.Version.Manifest, member.chosen, member.services)
	first.Services = map[string][]*protocol.Service{member.id: member.services}
	c, err := instance.Create(ctx, tx, newInstance(id, m, project, in, version, member), first, db.NewID(), m.Now)
	if err != nil {
		return instance.Instance{}, err
	}
	if err := checkMembers(ctx, tx, c, "/parameters"); err != nil {
		return instance.Instance{}, err
	}
	return c.Instance, change.CompleteInstance(ctx, tx, m.by(), iam.InstanceCreate, c)
}

// resolvedVersion is the version that was decided on, with the documents as they are stored.
type resolvedVersion struct {
	catalog.Resolved
	parametersJSON string
	configJSON     string
}

// inputs are what the services are made with.
func (w resolvedVersion) inputs() manifest.Inputs {
	return manifest.Inputs{Parameters: w.Parameters, ConfigJSON: w.configJSON}
}

func (s *Service) resolve(ctx context.Context, tx db.Tx, m Meta, project iam.Project,
	in CreateInstanceInput,
) (resolvedVersion, error) {
	if err := manifest.RefuseSealed(in.Parameters); err != nil {
		return resolvedVersion{}, err
	}
	parameters, err := object(in.Parameters)
	if err != nil {
		return resolvedVersion{}, err
	}
	config, err := object(in.Config)
	if err != nil {
		return resolvedVersion{}, err
	}
	resolved, err := catalog.Resolve(ctx, tx, catalog.Want{
		AppSlug: in.AppSlug, Version: in.Version, OrgID: project.OrgID, ProjectID: project.ID,
		OperatingMode: in.OperatingMode, ControlPlaneScope: in.ControlPlaneScope,
		Trial: m.Principal.PlatformAdmin, ParametersJSON: parameters, ConfigJSON: config, Now: m.Now, Revoked: s.revoked,
		MinVersion: s.minVersion,
	})
	return resolvedVersion{resolved, string(parameters), string(config)}, err
}

// object encodes what the contract calls an object; an absent one is an empty one.
func object(v map[string]any) ([]byte, error) {
	if v == nil {
		return []byte(`{}`), nil
	}
	return json.Marshal(v)
}

// fund opens what is billed and gives the member its first lease: no money, no instance.
func (s *Service) fund(ctx context.Context, tx db.Tx, m Meta, project iam.Project, instanceID string,
	member placement, w resolvedVersion,
) error {
	need := member.choice.Need
	subject := ledger.Subject{
		ID: member.id, OrgID: project.OrgID, ProjectID: project.ID, AppInstanceID: instanceID, AppSlug: w.App.Slug,
		AllocationID: member.candidate.ID, NodeID: member.candidate.NodeID, SKU: member.candidate.Allocation.SKU,
		OperatingMode: w.OperatingMode, ControlPlaneScope: w.ControlPlaneScope, RuntimeBackend: w.RuntimeBackend,
		CorrelationID: m.CorrelationID, CPUMillis: need.CPUMillis, MemoryBytes: need.MemoryBytes, OpenedAt: m.Now,
	}
	subject.SetAccelerators(member.choice.AcceleratorIDs)
	_, err := ledger.OpenMember(ctx, tx, subject, s.LeaseDuration)
	return err
}

func newInstance(id string, m Meta, project iam.Project, in CreateInstanceInput, w resolvedVersion,
	member placement,
) instance.Instance {
	i := instance.Instance{
		ID: id, OrgID: project.OrgID, OrgSlug: project.OrgSlug, ProjectID: project.ID, AppSlug: w.App.Slug,
		DisplayName: in.DisplayName,
		Modes: instance.Modes{
			OperatingMode: w.OperatingMode, ControlPlaneScope: w.ControlPlaneScope,
			RuntimeBackend: w.RuntimeBackend, TenantBoundaryMode: w.TenantBoundaryMode,
		},
		PlacementAllocationIDs: in.AllocationIDs,
		RequestedBy:            m.Principal.Actor(), CorrelationID: m.CorrelationID,
		Members: []instance.Member{{
			ID: member.id, AllocationID: member.candidate.ID, NodeID: member.candidate.NodeID,
			Member: lifecycle.Member{Unreachable: member.unreachable},
		}},
	}
	for _, h := range w.HintResults {
		i.HintResults = append(i.HintResults, instance.HintResult(h))
	}
	return i
}

// kept is what an instance keeps of its resources when it is upgraded: what was chosen, and the CPU, memory,
// accelerators and ports that it has. Disk, shared memory and sizes of volumes that were not chosen follow the version.
func kept(m manifest.Manifest, chosen manifest.Choice, services []*protocol.Service) manifest.Choice {
	has := m.ChoiceOf(services)
	has.AcceleratorModel, has.DiskMiB, has.ShmMiB = chosen.AcceleratorModel, chosen.DiskMiB, chosen.ShmMiB
	has.Volumes = chosen.Volumes
	return has
}

// newRevision is the content of a version that was decided on, without the services of its members and what is kept of
// the choice.
func newRevision(v resolvedVersion, chosen manifest.Choice) instance.NewRevision {
	return instance.NewRevision{
		AppVersion:         v.Version.Version,
		ParametersJSON:     v.parametersJSON,
		ConfigJSON:         v.configJSON,
		ManifestEnvelope:   v.ManifestEnvelope,
		DelegationEnvelope: v.DelegationEnvelope,
		Features:           v.Version.Manifest.FeaturesFor(chosen),
		ReadinessTimeout:   time.Duration(v.Version.Manifest.Version.RuntimeProfile.ReadinessTimeoutSeconds) * time.Second,
	}
}
