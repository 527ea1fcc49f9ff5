package command

import (
	"cmp"
	"context"
	"slices"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// strategyOf is how nodes replace a version that asks for start_first; why says what is against that.
func strategyOf(why string) string {
	if why != "" {
		return manifest.UpgradeRecreate
	}
	return manifest.UpgradeStartFirst
}

// useBeside is what a member uses besides while the services that differ start beside those that serve, and what is
// against that.
func useBeside(m manifest.Manifest, serves, next *protocol.Workload) (use capacity.Use, why string) {
	if m.Version.Upgrade.Strategy != manifest.UpgradeStartFirst {
		return use, "the manifest does not ask for it"
	}
	changed, why := manifest.Changed(serves, next)
	return capacity.UseOf(changed), why
}

// recreate has the services that start first wait for the end of those before, or not.
func recreate(services []*protocol.Service, wait bool) {
	for _, s := range services {
		s.Recreate = s.GetStartFirst() && wait
	}
}

// workload is what of a member's document its containers depend on.
func (v resolvedVersion) workload(services []*protocol.Service) *protocol.Workload {
	return &protocol.Workload{AppVersion: v.Version.Version, ParametersJson: v.parametersJSON, Services: services}
}

// servingWorkload is the same of the revision that a member serves with; without services where it does not serve.
func servingWorkload(ctx context.Context, tx db.Tx, i instance.Instance, memberID string, back instance.Revision,
) (*protocol.Workload, error) {
	if back.No == 0 || i.Lifecycle.Status != lifecycle.Running {
		return &protocol.Workload{}, nil
	}
	services, err := instance.Services(ctx, tx, memberID, back.No)
	return &protocol.Workload{AppVersion: i.Version, ParametersJson: i.ParametersJSON, Services: services}, err
}

// regain reserves what the members used at an earlier revision, beside what they use now where they start first.
// It returns the services of that revision; asks says that it asks for start_first, why what is against that.
func regain(ctx context.Context, tx db.Tx, i instance.Instance, target instance.Revision,
) (out map[string][]*protocol.Service, asks bool, why string, err error) {
	back, err := instance.Fallback(ctx, tx, i)
	if err != nil {
		return nil, false, "", err
	}
	parameters, err := instance.ParametersOf(ctx, tx, i.ID, target.No)
	if err != nil {
		return nil, false, "", err
	}
	out = map[string][]*protocol.Service{}
	for _, member := range i.Members {
		if member.Gone || member.External {
			continue
		}
		services, err := instance.Services(ctx, tx, member.ID, target.No)
		if err != nil {
			return nil, false, "", err
		}
		serves, err := servingWorkload(ctx, tx, i, member.ID, back)
		if err != nil {
			return nil, false, "", err
		}
		changed, against := manifest.Changed(serves, &protocol.Workload{
			AppVersion: target.AppVersion, ParametersJson: parameters, Services: services,
		})
		if !slices.ContainsFunc(services, (*protocol.Service).GetStartFirst) {
			against = cmp.Or(against, "the manifest does not ask for it")
		} else {
			asks = true
		}
		against, err = capacity.Regain(ctx, tx, member.ID, capacity.UseOf(services), capacity.UseOf(changed), against)
		if err != nil {
			return nil, false, "", err
		}
		recreate(services, against != "")
		out[member.ID], why = services, cmp.Or(why, against)
	}
	return out, asks, why, nil
}
