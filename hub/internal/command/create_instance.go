package command

import (
	"context"
	"encoding/json"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
)

// CreateInstanceInput is the request. Modes are hints.
type CreateInstanceInput struct {
	ProjectID         string
	AppSlug           string
	Version           string
	DisplayName       string
	OperatingMode     string
	ControlPlaneScope string
	// AllocationIDs where the request names a place.
	AllocationIDs []string
	Parameters    map[string]any
	Config        map[string]any
}

// CreateInstance deploys an app: it decides what runs, where, and that it can be paid, and asks the node for it. It
// creates the instance in status requested; the node's reports move it on.
func (s *Service) CreateInstance(ctx context.Context, m Meta, in CreateInstanceInput) (instance.Instance, error) {
	out, err := s.withProjectLock(ctx, in.ProjectID, func(tx db.Tx) (instanceResult, error) {
		return s.createInstance(ctx, tx, m, in)
	})
	if err != nil {
		return instance.Instance{}, err
	}
	return s.enqueueNodes(out), nil
}

func (s *Service) createInstance(ctx context.Context, tx db.Tx, m Meta,
	in CreateInstanceInput,
) (instanceResult, error) {
	project, err := iam.InProject(ctx, tx, m.Principal, iam.InstanceCreate, in.ProjectID)
	if err != nil {
		return instanceResult{}, err
	}
	return Idempotent(ctx, tx, m, func() (instanceResult, error) {
		if err := checkInstanceQuota(ctx, tx, project.OrgID); err != nil {
			return instanceResult{}, err
		}
		wanted, err := s.resolve(ctx, tx, m, project, in)
		if err != nil {
			return instanceResult{}, err
		}
		member, err := placeMember(ctx, tx, m, project, in, wanted)
		if err != nil {
			return instanceResult{}, err
		}
		id := db.NewID()
		if err := s.fund(ctx, tx, m, project, id, member, wanted); err != nil {
			return instanceResult{}, err
		}
		failpoint.Hit("hub/create/funded")
		change, err := instance.Create(ctx, tx, newInstance(id, m, project, in, wanted, member), m.Now)
		if err != nil {
			return instanceResult{}, err
		}
		if err := checkMembers(ctx, tx, change, "/parameters"); err != nil {
			return instanceResult{}, err
		}
		nodes, err := bumpIntents(ctx, tx, change, m.Now)
		if err != nil {
			return instanceResult{}, err
		}
		return instanceResult{change.Instance, nodes}, m.RecordInstance(ctx, tx, iam.InstanceCreate, change)
	})
}

// wanted is the version that was decided on, with the documents as they are stored.
type wanted struct {
	catalog.Resolved
	parametersJSON string
	configJSON     string
}

func (s *Service) resolve(ctx context.Context, tx db.Tx, m Meta, project iam.Project,
	in CreateInstanceInput,
) (wanted, error) {
	parameters, err := object(in.Parameters)
	if err != nil {
		return wanted{}, err
	}
	config, err := object(in.Config)
	if err != nil {
		return wanted{}, err
	}
	resolved, err := catalog.Resolve(ctx, tx, catalog.Want{
		AppSlug: in.AppSlug, Version: in.Version, OrgID: project.OrgID, ProjectID: project.ID,
		OperatingMode: in.OperatingMode, ControlPlaneScope: in.ControlPlaneScope,
		ParametersJSON: parameters, ConfigJSON: config, Now: m.Now, Revoked: s.revoked, MinVersion: s.minVersion,
	})
	return wanted{resolved, string(parameters), string(config)}, err
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
	member placement, w wanted,
) error {
	need := member.choice.Need
	_, err := ledger.OpenMember(ctx, tx, ledger.Subject{
		ID: member.id, OrgID: project.OrgID, ProjectID: project.ID, AppInstanceID: instanceID, AppSlug: w.App.Slug,
		AllocationID: member.room.ID, NodeID: member.room.NodeID, SKU: member.room.Allocation.SKU,
		OperatingMode: w.OperatingMode, ControlPlaneScope: w.ControlPlaneScope, RuntimeBackend: w.RuntimeBackend,
		CorrelationID: m.CorrelationID, CPUMillis: need.CPUMillis, MemoryBytes: need.MemoryBytes, OpenedAt: m.Now,
	}, s.LeaseDuration)
	return err
}

func newInstance(id string, m Meta, project iam.Project, in CreateInstanceInput, w wanted,
	member placement,
) instance.NewInstance {
	n := instance.NewInstance{
		ID: id, OrgID: project.OrgID, OrgSlug: project.OrgSlug, ProjectID: project.ID, AppSlug: w.App.Slug,
		DisplayName: in.DisplayName,
		Modes: instance.Modes{
			OperatingMode: w.OperatingMode, ControlPlaneScope: w.ControlPlaneScope,
			RuntimeBackend: w.RuntimeBackend, TenantBoundaryMode: w.TenantBoundaryMode,
		},
		ConfigJSON: w.configJSON, PlacementAllocationIDs: in.AllocationIDs,
		RequestedBy:   m.Principal.Actor(),
		CorrelationID: m.CorrelationID, OperationID: db.NewID(),
		Revision: instance.NewRevision{
			AppVersion: w.Version.Version, ParametersJSON: w.parametersJSON, ManifestEnvelope: w.ManifestEnvelope,
			DelegationEnvelope: w.DelegationEnvelope,
			ReadinessTimeout:   time.Duration(w.Version.Manifest.Version.RuntimeProfile.ReadinessTimeoutSeconds) * time.Second,
		},
		Members: []instance.NewMember{{
			ID: member.id, AllocationID: member.room.ID, NodeID: member.room.NodeID, Unreachable: member.unreachable,
			Services: member.services,
		}},
	}
	for _, h := range w.HintResults {
		n.HintResults = append(n.HintResults, instance.HintResult(h))
	}
	return n
}
