package command

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// UpgradeInstanceInput is the request; what is nil or zero stays as it is.
type UpgradeInstanceInput struct {
	ProjectID  string
	InstanceID string
	Version    string
	Resources  manifest.Choice
	Parameters map[string]any
	Config     map[string]any
}

// UpgradeInstance moves an app instance to another version, or to other resources, parameters or config, in the place
// that it has, and answers with it in status upgrading. Members and ports stay.
func (s *Service) UpgradeInstance(ctx context.Context, m Meta, in UpgradeInstanceInput) (instance.Instance, error) {
	i, err := s.act(ctx, m, iam.InstanceUpgrade, in.ProjectID, in.InstanceID, func(ctx context.Context, tx db.Tx,
		i instance.Instance, r instance.Request, _ time.Time,
	) (instance.Change, error) {
		return s.upgrade(ctx, tx, m, i, r, in)
	})
	return i, targetVersion(err)
}

func (s *Service) upgrade(ctx context.Context, tx db.Tx, m Meta, i instance.Instance, r instance.Request,
	in UpgradeInstanceInput,
) (instance.Change, error) {
	next, err := s.resolveNext(ctx, tx, m, i, in)
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
	if i.External() {
		return s.upgradeExternal(ctx, tx, m, i, r, next, in.Resources)
	}
	chosen := in.Resources.Else(i.Resources.For(next.Version.Manifest))
	for _, member := range i.Members {
		if member.Gone {
			continue
		}
		to := sealFor{i.OrgID, i.ProjectID, i.ID, member.NodeID, member.ID}
		if next, err = s.seal(ctx, tx, m, next, to, chosen.Environment); err != nil {
			return instance.Change{}, err
		}
	}
	if err := checkNodesOf(ctx, tx, i, next.Version.Manifest, in.Resources); err != nil {
		return instance.Change{}, err
	}
	if chosen, err = chooseVolumesInPlace(ctx, tx, i, in.Resources, chosen); err != nil {
		return instance.Change{}, err
	}
	made := newRevision(next, chosen)
	fallback, err := instance.Fallback(ctx, tx, i)
	if err != nil {
		return instance.Change{}, err
	}
	var why string
	if made.Services, why, err = s.lowerInPlace(ctx, tx, m, i, fallback, next, chosen); err != nil {
		return instance.Change{}, err
	}
	made.Resources = chosen
	for _, services := range made.Services {
		made.Resources = kept(next.Version.Manifest, chosen, services)
	}
	back, err := s.fallbackDelegation(ctx, tx, m, i, fallback)
	if err != nil {
		return instance.Change{}, err
	}
	c, err := instance.RequestUpgrade(ctx, tx, i, r, made, back, m.Now)
	if next.Version.Manifest.Version.Upgrade.Strategy == manifest.UpgradeStartFirst {
		c.Strategy, c.StrategyReason = strategyOf(why), why
	}
	return c, err
}

// resolveNext decides on the version of an upgrade, with the parameters and the config that it gets.
func (s *Service) resolveNext(ctx context.Context, tx db.Tx, m Meta, i instance.Instance,
	in UpgradeInstanceInput,
) (resolvedVersion, error) {
	parameters, config := []byte(i.ParametersJSON), []byte(i.ConfigJSON)
	var err error
	if in.Parameters != nil {
		if parameters, err = keepSealed(in.Parameters, i.ParametersJSON); err != nil {
			return resolvedVersion{}, err
		}
	}
	// seal adds what the platform puts beside them now.
	if parameters, err = withPlatforms(parameters, nil); err != nil {
		return resolvedVersion{}, err
	}
	if in.Config != nil {
		if config, err = object(in.Config); err != nil {
			return resolvedVersion{}, err
		}
	}
	next, err := catalog.Resolve(ctx, tx, catalog.Want{
		AppSlug: i.AppSlug, Version: in.Version, OrgID: i.OrgID, ProjectID: i.ProjectID,
		OperatingMode: i.Modes.OperatingMode, ControlPlaneScope: i.Modes.ControlPlaneScope,
		Trial: m.Principal.PlatformAdmin, ParametersJSON: parameters, ConfigJSON: config, Now: m.Now, Revoked: s.revoked,
		MinVersion: s.minVersion,
	})
	return resolvedVersion{next, string(parameters), string(config)}, err
}

// checkNodesOf refuses a version that uses what the agent of a member's node does not know, and a port of the node that
// the owner lets nobody choose. Ports that the instance has stay allowed.
func checkNodesOf(ctx context.Context, tx db.Tx, i instance.Instance, next manifest.Manifest,
	chosen manifest.Choice,
) error {
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
	added := chosen.HostPorts()
	for n, p := range chosen.Ports {
		if slices.Contains(i.Resources.Ports, p) {
			added[n] = 0
		}
	}
	for _, node := range nodes {
		if len(plan.MissingFeatures(next.FeaturesFor(chosen), node.Features)) > 0 {
			return capacity.FeatureMissing()
		}
	}
	if len(added) == 0 {
		return nil
	}
	allowed, err := fleet.HostPorts(ctx, tx, nodes)
	for _, ports := range allowed {
		at := plan.HostPorts{Allowed: ports}
		if slices.ContainsFunc(added, func(p uint32) bool { return at.Refuses(p) != "" }) {
			return capacity.PortUnavailable(added, at)
		}
	}
	return err
}

// fallbackDelegation gives the delegation under which the revision that the nodes may go back to could start now; nil
// where it could not be started anew, which leaves it with the one that it was admitted under.
func (s *Service) fallbackDelegation(ctx context.Context, tx db.Tx, m Meta,
	i instance.Instance, back instance.Revision,
) ([]byte, error) {
	if back.No == 0 {
		return nil, nil
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

// lowerInPlace gives what each member runs of the new version, and reserves what that uses of the member's allocation.
// Where a member cannot start it beside the fallback, why says so.
func (s *Service) lowerInPlace(ctx context.Context, tx db.Tx, m Meta, i instance.Instance, back instance.Revision,
	next resolvedVersion, chosen manifest.Choice,
) (out map[string][]*protocol.Service, why string, err error) {
	needs, err := needsOf(next, chosen)
	if err != nil {
		return nil, "", err
	}
	for n := range needs {
		needs[n].Features = nil // checkNodesOf has asked the nodes
	}
	out = map[string][]*protocol.Service{}
	for _, member := range i.Members {
		if member.Gone {
			continue
		}
		serves, err := servingWorkload(ctx, tx, i, member.ID, back)
		if err != nil {
			return nil, "", err
		}
		choice, against, err := capacity.Resize(ctx, tx, member.ID, needs, func(c plan.Choice) (capacity.Use, string, error) {
			services, err := lower(next, chosen, c)
			if err != nil {
				return capacity.Use{}, "", err
			}
			if err := artifact.CheckRunnable(ctx, tx, next.Version.Version, services); err != nil {
				return capacity.Use{}, "", err
			}
			out[member.ID] = services
			use, against := useBeside(next.Version.Manifest, serves, next.workload(services))
			return use, against, nil
		})
		if err != nil {
			return nil, "", err
		}
		why = cmp.Or(why, against)
		recreate(out[member.ID], against != "")
		if err := capacity.ReserveVolumes(ctx, tx, member.ID, member.AllocationID, out[member.ID]); err != nil {
			return nil, "", err
		}
		if err := ledger.RaiseLimits(ctx, tx, ledger.LeaseRequest{
			SubjectID: member.ID,
			NodeID:    member.NodeID,
			Now:       m.Now,
			Duration:  s.LeaseDuration,
			AppSlug:   i.AppSlug,
		}, choice.Need.CPUMillis, choice.Need.MemoryBytes, choice.AcceleratorIDs); err != nil {
			return nil, "", err
		}
	}
	return out, why, nil
}
