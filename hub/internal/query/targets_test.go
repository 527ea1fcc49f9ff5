package query_test

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/query"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// The node that keeps the volume counts as for a launch.
func TestTargetsKnowVolumes(t *testing.T) {
	w := commandtest.New(t)
	there := w.Allocation()
	node := w.Node
	v, err := w.Commands().CreateVolume(t.Context(), w.Meta("volume"), capacity.NewVolume{
		ProjectID: w.Project.ID, Name: "data", SizeBytes: 64 << 20,
	})
	require.NoError(t, err)
	w.Exec(`UPDATE volumes SET status = 'ready', ready_at = now()`)
	w.EnrollNode()
	ask := func(volumes ...string) (map[string]plan.Misfit, error) {
		list, err := (&query.Service{DB: w.DB}).Targets(t.Context(), w.User, query.TargetsInput{
			ProjectID: w.Project.ID, AppSlug: "demo", Version: "1.0.0", VolumeIDs: volumes, Now: w.Now,
		})
		got := map[string]plan.Misfit{}
		for _, target := range list {
			got[target.ID] = target.Misfit
		}
		return got, err
	}
	got, err := ask(v.ID)
	require.NoError(t, err)
	require.Equal(t, map[string]plan.Misfit{
		there.ID: plan.Fits, node: plan.Fits, w.Node: plan.VolumeElsewhere,
	}, got)
	_, err = ask(db.NewID())
	require.Equal(t, "query/volume_id", fault.As(err).Fields[0].Pointer)
	w.Exec(`UPDATE volumes SET status = 'restoring'`)
	_, err = ask(v.ID)
	require.EqualValues(t, "volume_status", fault.As(err).Code)
}

// publishWith publishes a version of the demo with other modes.
func publishWith(w *commandtest.World, version, modes string) {
	w.T.Helper()
	verified, env := w.Sign(strings.NewReplacer("version: 1.0.0", "version: "+version,
		"runtime_backend: launchable_oci", "runtime_backend: launchable_oci, supported_modes: "+modes,
	).Replace(commandtest.Manifest()))
	w.PublishVersion(version, verified, env)
}

func TestTheEstimateOfWhatThePlatformManagesIsWithoutItsAllocation(t *testing.T) {
	w := commandtest.New(t)
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, err := ledger.CreatePrice(ctx, tx, ledger.Price{
			Meter: ledger.MeterAllocationSeconds, Currency: "EUR", Nanos: 1_000_000_000, Per: "hour", From: w.Now,
		}, w.Now)
		return err
	})
	perHour := func(version, modes string) int64 {
		t.Helper()
		publishWith(w, version, modes)
		e, err := (&query.Service{DB: w.DB}).Estimate(t.Context(), w.User, query.EstimateInput{
			ProjectID: w.Project.ID, AppSlug: "demo", Version: version, Now: w.Now,
		})
		require.NoError(t, err)
		return e.PerHourNanos
	}
	require.Zero(t, perHour("2.0.0", "{operating_modes: [tenant_dedicated, platform_managed], "+
		"control_plane_scopes: [project, platform]}"), "the allocation is paid for")
	require.Positive(t, perHour("3.0.0", "{operating_modes: [platform_managed], control_plane_scopes: [platform]}"))
}

func TestAnAppThatThePlatformManagesHasNoTargets(t *testing.T) {
	w := commandtest.New(t)
	w.Allocation()
	targets := func(version, modes string) []query.Target {
		t.Helper()
		publishWith(w, version, modes)
		list, err := (&query.Service{DB: w.DB}).Targets(t.Context(), w.User, query.TargetsInput{
			ProjectID: w.Project.ID, AppSlug: "demo", Version: version, Now: w.Now,
		})
		require.NoError(t, err)
		return list
	}
	require.Empty(t, targets("2.0.0", "{operating_modes: [platform_managed], control_plane_scopes: [platform]}"))
	require.NotEmpty(t, targets("3.0.0", "{operating_modes: [tenant_dedicated, platform_managed], "+
		"control_plane_scopes: [project, platform]}"))
}

const slicesModel = "H200 1/2 time slice"

// withSlices makes version 2.0.0 of the demo one that needs a GPU and may share it, and allocates a slice of the
// node's.
func withSlices(t *testing.T) (*commandtest.World, capacity.Allocation) {
	t.Helper()
	w := commandtest.New(t)
	verified, env := w.Sign(strings.NewReplacer(
		"accelerator: none", "accelerator: nvidia",
		"version: 1.0.0", "version: 2.0.0\n  compatibility: {min_gpu_count: 1}", "memory_mib:",
		"accelerators: {min: 1, default: 1, max: 2}, accelerator_sharing: [time_slices], memory_mib:",
	).Replace(commandtest.Manifest()))
	w.PublishVersion("2.0.0", verified, env)
	shared := &protocol.Accelerator{Id: "GPU-0", Vendor: "nvidia", Model: "H200", Health: "ok"}
	for n := range 2 {
		shared.Partitions = append(shared.Partitions, &protocol.AcceleratorPartition{
			Id: protocol.SliceID("GPU-0", protocol.SharingTimeSlices, 2, n), Profile: "1/2 time slice",
			Sharing: protocol.SharingTimeSlices,
		})
	}
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, err := capacity.ApplyInventory(ctx, tx, w.Node, []*protocol.Accelerator{shared}, w.Now)
		return err
	})
	in := w.AllocationInput()
	in.AcceleratorCount, in.AcceleratorModel = 1, slicesModel
	a, err := w.Commands().CreateAllocation(t.Context(), w.Meta("slice"), in)
	require.NoError(t, err)
	return w, a
}

// What is free is slices of a shared GPU, and the entitlement allows one accelerator.
func TestTargetsNameTheWayOfSharingAndTheEntitlement(t *testing.T) {
	w, a := withSlices(t)
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, _, err := catalog.PutEntitlement(ctx, tx, catalog.Entitlement{
			ProjectID: w.Project.ID, OrgID: w.Project.OrgID, AppSlug: "demo", Enabled: true, UpdatedBy: db.NewID(),
			Policy: catalog.Policy{MaxAccelerators: 1},
		}, w.Now)
		return err
	})
	two := 2
	for _, c := range []struct {
		choice         manifest.Choice
		allocated, new plan.Misfit
	}{
		{manifest.Choice{}, plan.SharedOtherwise, plan.LacksAccelerators},
		{manifest.Choice{AcceleratorModel: slicesModel}, plan.SharedOtherwise, plan.SharedOtherwise},
		{
			manifest.Choice{AcceleratorModel: slicesModel, AcceleratorSharing: protocol.SharingTimeSlices},
			plan.Fits,
			plan.Fits,
		},
		{manifest.Choice{Accelerators: &two}, plan.NotEntitled, plan.NotEntitled},
	} {
		list, err := (&query.Service{DB: w.DB}).Targets(t.Context(), w.User, query.TargetsInput{
			ProjectID: w.Project.ID, AppSlug: "demo", Version: "2.0.0", Resources: c.choice, Now: w.Now,
		})
		require.NoError(t, err)
		got := map[string]plan.Misfit{}
		for _, target := range list {
			got[target.ID] = target.Misfit
		}
		require.Equal(t, map[string]plan.Misfit{a.ID: c.allocated, w.Node: c.new}, got, "%+v", c.choice)
	}
}

func TestTargetsSayWhereAnInstanceFitsAndWhyNotElsewhere(t *testing.T) {
	w := commandtest.New(t)
	full := w.Allocation()
	in := w.InstanceInput()
	in.Resources = manifest.Choice{CPUMillis: 900, MemoryMiB: 448}
	_, err := w.Commands().CreateInstance(t.Context(), w.Meta("first"), in)
	require.NoError(t, err)
	empty := w.Allocation()
	node := w.Node
	w.EnrollNode()
	w.SetFeatures("none_of_these")
	ask := func(p iam.Principal, c manifest.Choice) (map[string]plan.Misfit, error) {
		list, err := (&query.Service{DB: w.DB}).Targets(t.Context(), p, query.TargetsInput{
			ProjectID: w.Project.ID, AppSlug: "demo", Version: "1.0.0", Resources: c, Now: w.Now,
		})
		got := map[string]plan.Misfit{}
		for _, target := range list {
			got[target.Kind+" "+target.ID] = target.Misfit
		}
		return got, err
	}
	got, err := ask(w.User, manifest.Choice{CPUMillis: 200, MemoryMiB: 256})
	require.NoError(t, err)
	require.Equal(t, map[string]plan.Misfit{
		"allocation " + full.ID: plan.LacksCPU, "allocation " + empty.ID: plan.Fits,
		"node " + node: plan.Fits, "node " + w.Node: plan.LacksFeature,
	}, got)
	got, err = ask(w.User, manifest.Choice{CPUMillis: 100, MemoryMiB: 513})
	require.NoError(t, err)
	require.Equal(t, plan.LacksMemory, got["allocation "+empty.ID])
	operator := w.User
	operator.Bindings = []iam.Binding{{Role: iam.Viewer, ProjectID: w.Project.ID}}
	got, err = ask(operator, manifest.Choice{})
	require.NoError(t, err)
	require.Len(t, got, 2, "a viewer sees no nodes")
	_, err = ask(w.User, manifest.Choice{MemoryMiB: 1})
	require.Equal(t, "query/memory_mib", fault.As(err).Fields[0].Pointer)
	_, stranger := w.NewTenant("other")
	_, err = ask(stranger, manifest.Choice{})
	require.True(t, fault.Is(err, fault.NotFound), "%v", err)
}
