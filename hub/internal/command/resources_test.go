package command_test

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// sized deploys the demo with chosen resources, in the only allocation.
func (w *world) sized(c manifest.Choice) (instance.Instance, error) {
	in := w.InstanceInput()
	in.Resources = c
	return w.Commands().CreateInstance(w.T.Context(), w.Meta("instance"+db.NewID()), in)
}

func (w *world) upgrade(i instance.Instance, in command.UpgradeInstanceInput) (instance.Instance, error) {
	in.ProjectID, in.InstanceID = w.Project.ID, i.ID
	return w.Commands().UpgradeInstance(w.T.Context(), w.Meta("upgrade"+db.NewID()), in)
}

// ready reports that an instance is ready in its desired revision.
func (w *world) ready(i instance.Instance) instance.Instance {
	w.T.Helper()
	s := w.Says(i, protocol.WorkloadStatus_READY)
	s.Revision = uint64(i.Revision)
	w.Report(uint64(i.Revision), s)
	return w.Get(i.ID)
}

// free is what is left of the allocation of an instance, and its services in the desired revision.
func (w *world) free(i instance.Instance) (a capacity.Allocation, services []*protocol.Service) {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) (err error) {
		if a, err = capacity.GetAny(ctx, tx, i.Members[0].AllocationID); err != nil {
			return err
		}
		services, err = instance.Services(ctx, tx, i.Members[0].ID, i.Revision)
		return err
	})
	return a, services
}

// consistent checks that what is stored is what the node may be told.
func (w *world) consistent() {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		members, err := instance.SnapshotFor(ctx, tx, w.Node)
		require.NoError(w.T, err)
		allocations, accelerators, err := capacity.SnapshotFor(ctx, tx, w.Node)
		require.NoError(w.T, err)
		volumes, err := capacity.DesiredVolumes(ctx, tx, w.Node)
		require.NoError(w.T, err)
		snap := plan.Snapshot{
			Node: plan.Node{ID: w.Node, AcceleratorIDs: accelerators}, Allocations: allocations, Members: members,
			Volumes: volumes,
		}
		state, err := plan.Compile(snap)
		require.NoError(w.T, err)
		require.NoError(w.T, plan.Check(snap, state))
		return nil
	})
}

// limits are what bounds a member's bill, and the most that an hour of it costs.
func (w *world) limits(i instance.Instance) (cpu, memory int, perHour int64) {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		cost, err := ledger.CostOf(ctx, tx, i.ID)
		perHour = cost.PerHourNanos
		return err
	})
	return w.Count(`SELECT cpu_millis FROM subjects WHERE id = $1`, i.Members[0].ID),
		w.Count(`SELECT memory_bytes FROM subjects WHERE id = $1`, i.Members[0].ID), perHour
}

func (w *world) priceMemory() {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, err := ledger.CreatePrice(ctx, tx, ledger.Price{
			ID: db.NewID(), Meter: protocol.MeterMemoryByteSeconds, Currency: "EUR", Nanos: 1_000_000_000, Per: "hour",
			From: w.Now,
		}, w.Now)
		return err
	})
}

func TestAnInstanceUsesAndPaysForTheResourcesThatWereChosen(t *testing.T) {
	w := newWorld(t)
	w.priceMemory()
	w.Allocation()
	i, err := w.sized(manifest.Choice{CPUMillis: 250, MemoryMiB: 256})
	require.NoError(t, err)
	a, services := w.free(i)
	require.EqualValues(t, 750, a.FreeCPUMillis)
	require.EqualValues(t, 256<<20, a.FreeMemoryBytes)
	require.EqualValues(t, 250, services[0].GetResources().GetCpuMillis())
	require.EqualValues(t, 256<<20, services[0].GetResources().GetMemoryBytes())
	cpu, memory, perHour := w.limits(i)
	require.Equal(t, 250, cpu)
	require.Equal(t, 256<<20, memory)
	require.EqualValues(t, 3_600_000_000+250_000_000, perHour, "a session and a quarter of a GiB")
	require.Equal(t, manifest.Manifest{}.ChoiceOf(services), w.Get(i.ID).Resources)
	w.consistent()

	before := w.Contents()
	for pointer, choice := range map[string]manifest.Choice{
		"/resources/cpu_millis": {CPUMillis: 2001},
		"/resources/memory_mib": {MemoryMiB: 15},
		"/resources/disk_mib":   {DiskMiB: 64},
	} {
		_, err := w.sized(choice)
		require.Equal(t, manifest.CodeResourcesInvalid, fault.As(err).Code, "%v", err)
		require.Equal(t, pointer, fault.As(err).Fields[0].Pointer)
	}
	_, err = w.sized(manifest.Choice{MemoryMiB: 257})
	require.EqualValues(t, "placement_required", fault.As(err).Code, "the rest of the allocation is less")
	require.Equal(t, before, w.Contents())
}

func TestAnUpgradeKeepsResourcesAndParametersOrChangesThem(t *testing.T) {
	w := newWorld(t)
	w.priceMemory()
	w.Allocation()
	i, err := w.sized(manifest.Choice{CPUMillis: 250, MemoryMiB: 128})
	require.NoError(t, err)
	i = w.ready(i)
	neighbour, err := w.sized(manifest.Choice{CPUMillis: 100, MemoryMiB: 64})
	require.NoError(t, err)
	_, err = w.upgrade(i, command.UpgradeInstanceInput{Version: "1.0.0"})
	require.EqualValues(t, "version_unchanged", fault.As(err).Code)
	before := w.Contents()
	_, err = w.upgrade(i, command.UpgradeInstanceInput{Version: "1.0.0", Resources: manifest.Choice{MemoryMiB: 449}})
	require.Equal(t, capacity.CodeInsufficient, fault.As(err).Code, "its neighbour has 64 of the 512 MiB")
	require.Equal(t, "/resources/memory_mib", fault.As(err).Fields[0].Pointer)
	_, err = w.upgrade(i, command.UpgradeInstanceInput{Version: "1.0.0", Parameters: map[string]any{"greeting": 1}})
	require.Equal(t, manifest.CodeParametersInvalid, fault.As(err).Code)
	require.Equal(t, before, w.Contents())

	w.Release("2.0.0")
	i, err = w.upgrade(i, command.UpgradeInstanceInput{
		Version: "2.0.0", Resources: manifest.Choice{MemoryMiB: 448}, Parameters: map[string]any{"greeting": "larger"},
	})
	require.NoError(t, err)
	a, services := w.free(i)
	require.Zero(t, a.FreeMemoryBytes)
	require.EqualValues(t, 250, services[0].GetResources().GetCpuMillis(), "what is not named stays")
	require.JSONEq(t, `{"greeting":"larger"}`, i.ParametersJSON)
	_, memory, perHour := w.limits(i)
	require.Equal(t, 448<<20, memory)
	require.EqualValues(t, 3_600_000_000+437_500_000, perHour)
	w.consistent()

	back := w.Says(i, protocol.WorkloadStatus_READY)
	back.Revision, back.FallbackFromRevision, back.Reason = 1, 2, protocol.WorkloadStatus_CRASH_LOOP
	w.Report(2, back)
	i = w.Get(i.ID)
	require.Equal(t, lifecycle.Running, i.Lifecycle.Status)
	require.Equal(t, "1.0.0", i.Version)
	require.JSONEq(t, `{"greeting":"hello"}`, i.ParametersJSON)
	require.EqualValues(t, 128, i.Resources.MemoryMiB)
	a, _ = w.free(i)
	require.EqualValues(t, 320<<20, a.FreeMemoryBytes, "the failed upgrade holds nothing any more")

	smaller, err := w.upgrade(i, command.UpgradeInstanceInput{Version: "1.0.0", Resources: manifest.Choice{MemoryMiB: 16}})
	require.NoError(t, err)
	a, _ = w.free(smaller)
	require.EqualValues(t, 320<<20, a.FreeMemoryBytes, "the node may still go back")
	w.consistent()
	i = w.ready(smaller)
	a, _ = w.free(i)
	require.EqualValues(t, 432<<20, a.FreeMemoryBytes)
	third, err := w.sized(manifest.Choice{CPUMillis: 100, MemoryMiB: 400})
	require.NoError(t, err)
	_, err = w.Commands().RollbackInstance(t.Context(), w.Meta("back"), w.Project.ID, i.ID, "")
	require.Equal(t, capacity.CodeInsufficient, fault.As(err).Code, "another instance has that memory now")
	w.consistent()
	require.NotEqual(t, neighbour.ID, third.ID)
}

// reportGPUs stores the accelerators of the node: a report of the world's names none.
func (w *world) reportGPUs() {
	w.T.Helper()
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, err := capacity.ApplyInventory(ctx, tx, w.Node, []*protocol.Accelerator{
			{Id: "GPU-0", Vendor: "nvidia", Model: "A100", Health: "ok"},
			{Id: "GPU-1", Vendor: "nvidia", Model: "H200", Health: "ok"},
			{Id: "GPU-2", Vendor: "nvidia", Model: "H200", Health: "ok"},
		}, w.Now)
		return err
	})
}

// withGPUs makes the demo one that may use accelerators, on a node with two models, all in one allocation.
func (w *world) withGPUs() {
	w.T.Helper()
	doc := strings.Replace(commandtest.Manifest(), `accelerator: none, image_ref: "`+commandtest.Image+`"}]`,
		`accelerator: none, image_ref: "`+commandtest.Image+`"}, {name: cuda, accelerator: nvidia, image_ref: "`+
			commandtest.Image+`"}]`, 1)
	doc = strings.Replace(doc, "memory_mib:", "accelerators: {min: 1, default: 1, max: 3}, memory_mib:", 1)
	verified, env := w.Sign(strings.Replace(doc, "version: 1.0.0", "version: 3.0.0", 1))
	w.PublishVersion("3.0.0", verified, env)
	w.reportGPUs()
	in := w.AllocationInput()
	in.AcceleratorCount = 3
	_, err := (&command.Service{DB: w.DB}).CreateAllocation(w.T.Context(), w.Meta("gpus"), in)
	require.NoError(w.T, err)
}

// Law 14: however instances choose, grow and shrink, no accelerator is given twice.
func TestLaw14ChosenAcceleratorsAreNeverGivenTwice(t *testing.T) {
	w := newWorld(t)
	w.withGPUs()
	count := func(n int) *int { return &n }
	create := func(c manifest.Choice) (instance.Instance, error) {
		in := w.InstanceInput()
		in.Version, in.Resources, in.Resources.CPUMillis, in.Resources.MemoryMiB = "3.0.0", c, 100, 64
		return w.Commands().CreateInstance(t.Context(), w.Meta("instance"+db.NewID()), in)
	}
	given := func(i instance.Instance) []string {
		_, services := w.free(i)
		return services[0].GetResources().GetAcceleratorIds()
	}
	_, err := create(manifest.Choice{Accelerators: count(3), AcceleratorModel: "H200"})
	require.EqualValues(t, "placement_required", fault.As(err).Code, "there are two of this model")
	_, err = create(manifest.Choice{Accelerators: count(4)})
	require.Equal(t, "/resources/accelerators", fault.As(err).Fields[0].Pointer)
	i, err := create(manifest.Choice{Accelerators: count(1), AcceleratorModel: "H200"})
	require.NoError(t, err)
	i = w.ready(i)
	w.reportGPUs()
	require.Equal(t, []string{"GPU-1"}, given(i))
	none, err := create(manifest.Choice{Accelerators: count(0)})
	require.NoError(t, err)
	require.Empty(t, given(none))

	i, err = w.upgrade(i, command.UpgradeInstanceInput{
		Version:   "3.0.0",
		Resources: manifest.Choice{Accelerators: count(2)},
	})
	require.NoError(t, err)
	require.Equal(t, []string{"GPU-1", "GPU-2"}, given(i), "its own and one more of its model")
	w.consistent()
	i = w.ready(i)
	w.reportGPUs()
	i, err = w.upgrade(i, command.UpgradeInstanceInput{
		Version:   "3.0.0",
		Resources: manifest.Choice{Accelerators: count(1)},
	})
	require.NoError(t, err)
	require.Equal(t, []string{"GPU-1"}, given(i))
	w.consistent()
	_, err = create(manifest.Choice{Accelerators: count(1), AcceleratorModel: "H200"})
	require.EqualValues(t, "placement_required", fault.As(err).Code, "the node may still go back to both")
	i = w.ready(i)
	w.reportGPUs()
	other, err := create(manifest.Choice{Accelerators: count(1), AcceleratorModel: "H200"})
	require.NoError(t, err)
	require.Equal(t, []string{"GPU-2"}, given(other))
	_, err = w.Commands().RollbackInstance(t.Context(), w.Meta("back"), w.Project.ID, i.ID, "")
	require.Equal(t, capacity.CodeInsufficient, fault.As(err).Code)
	w.consistent()

	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, _, err := catalog.PutEntitlement(ctx, tx, catalog.Entitlement{
			ProjectID: w.Project.ID, OrgID: w.Project.OrgID, AppSlug: "demo", Enabled: true, UpdatedBy: db.NewID(),
			Policy: catalog.Policy{MaxAccelerators: 1},
		}, w.Now)
		return err
	})
	_, err = create(manifest.Choice{Accelerators: count(2)})
	require.Equal(t, catalog.CodePolicyRefused, fault.As(err).Code)
	require.Equal(t, []fault.Field{{Pointer: "/resources/accelerators", Reason: "must be at most 1"}},
		fault.As(err).Fields)
}

// A change of size is no repair: the member keeps an accelerator that does not work, and gets no other of that kind.
func TestAnUpgradeKeepsTheUnhealthyAcceleratorThatTheMemberHas(t *testing.T) {
	w := newWorld(t)
	w.withGPUs()
	in, one, two := w.InstanceInput(), 1, 2
	in.Version, in.Resources = "3.0.0", manifest.Choice{
		Accelerators: &one, AcceleratorModel: "H200", CPUMillis: 100, MemoryMiB: 64,
	}
	i, err := w.Commands().CreateInstance(t.Context(), w.Meta("create"), in)
	require.NoError(t, err)
	i = w.ready(i) // by a report that names no accelerator: all are missing
	resize := func(c manifest.Choice) (instance.Instance, error) {
		return w.upgrade(i, command.UpgradeInstanceInput{Version: "3.0.0", Resources: c})
	}
	_, err = resize(manifest.Choice{Accelerators: &two})
	require.Equal(t, capacity.CodeInsufficient, fault.As(err).Code)
	i, err = resize(manifest.Choice{MemoryMiB: 128})
	require.NoError(t, err)
	_, services := w.free(i)
	require.Equal(t, []string{"GPU-1"}, services[0].GetResources().GetAcceleratorIds())
	w.consistent()
}
