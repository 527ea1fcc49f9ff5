package command

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

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

// UpgradeInstance moves an app instance to another version, in the place that it has, and answers with it in status
// upgrading: members, ports, capacity, parameters and what is billed stay.
func (s *Service) UpgradeInstance(ctx context.Context, m Meta, projectID, instanceID,
	version string,
) (instance.Instance, error) {
	i, err := s.act(ctx, m, iam.InstanceUpgrade, projectID, instanceID, func(ctx context.Context, tx db.Tx,
		i instance.Instance, r instance.Request, _ time.Time,
	) (instance.Change, error) {
		return s.upgrade(ctx, tx, m, i, r, version)
	})
	return i, targetVersion(err)
}

func (s *Service) upgrade(ctx context.Context, tx db.Tx, m Meta, i instance.Instance, r instance.Request,
	version string,
) (instance.Change, error) {
	next, err := catalog.Resolve(ctx, tx, catalog.Want{
		AppSlug: i.AppSlug, Version: version, OrgID: i.OrgID, ProjectID: i.ProjectID,
		OperatingMode: i.Modes.OperatingMode, ControlPlaneScope: i.Modes.ControlPlaneScope,
		ParametersJSON: []byte(i.ParametersJSON), ConfigJSON: []byte(i.ConfigJSON), Now: m.Now, Revoked: s.revoked,
		MinVersion: s.minVersion,
	})
	if err != nil {
		return instance.Change{}, err
	}
	// What is billed is frozen with the modes.
	if next.OperatingMode != i.Modes.OperatingMode || next.ControlPlaneScope != i.Modes.ControlPlaneScope ||
		next.RuntimeBackend != i.Modes.RuntimeBackend {
		return instance.Change{}, fault.New(fault.Unprocessable, codeModeUnsupported, "The version does not support the "+
			"modes that the app instance runs in; deploy it anew.", nil).
			WithField("/version", "does not support the modes of the app instance").Permanent()
	}
	if err := checkFeatures(ctx, tx, i, next.Version.Manifest.Features()); err != nil {
		return instance.Change{}, err
	}
	made := newRevision(next, i.ParametersJSON, i.ConfigJSON)
	if made.Services, err = lowerInPlace(ctx, tx, i, next); err != nil {
		return instance.Change{}, err
	}
	back, err := s.fallbackDelegation(ctx, tx, m, i)
	if err != nil {
		return instance.Change{}, err
	}
	return instance.RequestUpgrade(ctx, tx, i, r, made, back, m.Now)
}

// checkFeatures refuses a version that uses what the agent of a member's node does not know.
func checkFeatures(ctx context.Context, tx db.Tx, i instance.Instance, features []string) error {
	var ids []string
	for _, member := range i.Members {
		if !member.Gone {
			ids = append(ids, member.NodeID)
		}
	}
	nodes, err := fleet.GetAll(ctx, tx, ids)
	if err != nil {
		return err
	}
	for _, node := range nodes {
		if len(plan.MissingFeatures(features, node.Features)) > 0 {
			return capacity.FeatureMissing()
		}
	}
	return nil
}

// fallbackDelegation gives the delegation under which the revision that the nodes may go back to could start now; nil
// where it could not be started anew, which leaves it with the one that it was admitted under.
func (s *Service) fallbackDelegation(ctx context.Context, tx db.Tx, m Meta,
	i instance.Instance,
) ([]byte, error) {
	back, err := instance.Fallback(ctx, tx, i)
	if err != nil || back.No == 0 {
		return nil, err
	}
	delegation, err := catalog.CheckRestartable(ctx, tx, catalog.Want{
		AppSlug: i.AppSlug, Version: back.AppVersion, OrgID: i.OrgID, ProjectID: i.ProjectID, Now: m.Now, Revoked: s.revoked,
		MinVersion: s.minVersion,
	})
	if fault.Is(err, fault.Conflict) || fault.Is(err, fault.Forbidden) || fault.Is(err, fault.Unprocessable) {
		return nil, nil
	}
	return delegation, err
}

// lowerInPlace gives what each member runs of the new version in the room that it has now.
func lowerInPlace(ctx context.Context, tx db.Tx, i instance.Instance,
	next catalog.Resolved,
) (map[string][]*protocol.Service, error) {
	now, err := catalog.GetVersion(ctx, tx, i.AppSlug, i.Version)
	if err != nil {
		return nil, fmt.Errorf("version %s of instance %s: %w", i.Version, i.ID, err)
	}
	out := map[string][]*protocol.Service{}
	for _, member := range i.Members {
		if member.Gone {
			continue
		}
		old, err := instance.Services(ctx, tx, member.ID, i.Revision)
		if err != nil {
			return nil, err
		}
		shape := shapeOf(now.Manifest, old)
		if next.MaxAccelerators > 0 && len(shape.AcceleratorIDs) > next.MaxAccelerators {
			return nil, fault.New(fault.Forbidden, catalog.CodePolicyRefused, "The app instance has more accelerators than "+
				"the project's entitlement allows.", nil).Permanent()
		}
		services, err := manifest.Lower(next.Version.Manifest,
			manifest.Inputs{Parameters: next.Parameters, ConfigJSON: i.ConfigJSON}, shape)
		if err != nil {
			return nil, err
		}
		if err := artifact.CheckRunnable(ctx, tx, next.Version.Version, services); err != nil {
			return nil, err
		}
		out[member.ID] = services
	}
	return out, nil
}

// shapeOf reads from what a member runs the room that it has.
func shapeOf(m manifest.Manifest, services []*protocol.Service) manifest.Shape {
	var shape manifest.Shape
	for _, s := range services {
		r := proto.CloneOf(s.GetResources())
		shape.CPUMillis += r.GetCpuMillis()
		shape.MemoryBytes += r.GetMemoryBytes()
		shape.AcceleratorIDs = append(shape.AcceleratorIDs, r.GetAcceleratorIds()...)
		for _, v := range m.Version.RuntimeProfile.ImageVariants {
			if v.Name == s.GetImageVariant() {
				shape.AcceleratorVendor = v.Accelerator
			}
		}
	}
	return shape
}
