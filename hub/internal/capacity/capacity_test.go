package capacity_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

type world struct {
	t       *testing.T
	d       *db.DB
	seconds atomic.Int64
	project string
	org     string
	gpu     capacity.Node
	cpu     capacity.Node
}

func newWorld(t *testing.T) *world {
	w := &world{
		t: t, d: dbtest.New(t), project: db.NewID(), org: db.NewID(),
		gpu: capacity.Node{ID: db.NewID(), CPUCores: 16, MemoryBytes: 64 << 30, Usable: true},
		cpu: capacity.Node{ID: db.NewID(), CPUCores: 4, MemoryBytes: 8 << 30, Usable: true},
	}
	w.inventory(gpus(4)...)
	return w
}

func gpus(n int) (out []*protocol.Accelerator) {
	for i := range n {
		out = append(out, &protocol.Accelerator{
			Id: fmt.Sprintf("GPU-%d", i), Vendor: "nvidia", Model: "H200",
			MemoryBytes: 141 << 30, Health: "ok",
		})
	}
	return out
}

func (w *world) inventory(list ...*protocol.Accelerator) {
	w.t.Helper()
	require.NoError(w.t, w.try(func(ctx context.Context, tx db.Tx) error {
		_, err := capacity.ApplyInventory(ctx, tx, w.gpu.ID, list, w.now())
		return err
	}))
}

// now is later for each transaction.
func (w *world) now() time.Time { return time.Unix(1_800_000_000+w.seconds.Load(), 0).UTC() }

func (w *world) try(fn func(context.Context, db.Tx) error) error {
	w.seconds.Add(1)
	_, err := db.RunTx(w.t.Context(), w.d, func(tx db.Tx) (struct{}, error) {
		return struct{}{}, fn(w.t.Context(), tx)
	})
	return err
}

func (w *world) create(change func(*capacity.NewAllocation)) (a capacity.Allocation, err error) {
	n := capacity.NewAllocation{
		ID: db.NewID(), OrgID: w.org, ProjectID: w.project, Shape: capacity.GPUSlice, CPUCores: 2, MemoryMiB: 4096,
		RequestedBy: principal.Actor{Type: principal.User, ID: "u"}, CorrelationID: "corr",
	}
	change(&n)
	err = w.try(func(ctx context.Context, tx db.Tx) (err error) {
		a, err = capacity.Create(ctx, tx, n, []capacity.Node{w.gpu, w.cpu}, w.now())
		return err
	})
	return a, err
}

func code(err error) string { return string(fault.As(err).Code) }

func TestACPUNodeGivesASliceWithoutAccelerators(t *testing.T) {
	w := newWorld(t)
	a, err := w.create(func(*capacity.NewAllocation) {})
	require.NoError(t, err)
	require.Equal(t, w.cpu.ID, a.NodeID, "the node without accelerators is the tighter fit")
	require.Equal(t, capacity.Active, a.Status)
	require.Empty(t, a.AcceleratorIDs)
	_, err = w.create(func(n *capacity.NewAllocation) { n.NodeID, n.CPUCores = w.cpu.ID, 3 })
	require.Equal(t, "insufficient_capacity", code(err), "two of four cores are held")
}

// A node that isolates weakly takes allocations of one org; what another org holds there keeps it out until it is
// released.
func TestAWeaklyIsolatedNodeTakesOneOrg(t *testing.T) {
	w := newWorld(t)
	w.cpu.OneOrg = true
	first, err := w.create(func(n *capacity.NewAllocation) { n.NodeID, n.CPUCores, n.MemoryMiB = w.cpu.ID, 1, 1024 })
	require.NoError(t, err)
	_, err = w.create(func(n *capacity.NewAllocation) { n.NodeID, n.CPUCores, n.MemoryMiB = w.cpu.ID, 1, 1024 })
	require.NoError(t, err, "the same org")
	stranger := func(n *capacity.NewAllocation) {
		n.NodeID, n.CPUCores, n.MemoryMiB, n.OrgID, n.ProjectID = w.cpu.ID, 1, 1024, db.NewID(), db.NewID()
	}
	_, err = w.create(stranger)
	require.Equal(t, "insufficient_capacity", code(err))
	elsewhere, err := w.create(func(n *capacity.NewAllocation) { stranger(n); n.NodeID = "" })
	require.NoError(t, err)
	require.Equal(t, w.gpu.ID, elsewhere.NodeID)
	w.cpu.OneOrg = false
	_, err = w.create(stranger)
	require.NoError(t, err, "its owner shares it")
	require.NotEmpty(t, first.ID)
}

func TestShapesNodesAndSKUsThatDoNotFitAreRefusedByName(t *testing.T) {
	w := newWorld(t)
	cases := []struct {
		name    string
		change  func(*capacity.NewAllocation)
		code    string
		pointer string
	}{
		{"unknown node", func(n *capacity.NewAllocation) { n.NodeID = db.NewID() }, "node_unknown", "/node_id"},
		{"unknown sku", func(n *capacity.NewAllocation) { n.SKU = "h200-8" }, "sku_unknown", "/sku"},
		{
			"another shape than the sku's", func(n *capacity.NewAllocation) { n.SKU, n.CPUCores = "cpu-2", 3 }, "sku_mismatch",
			"/cpu_cores",
		},
		{"too many accelerators", func(n *capacity.NewAllocation) { n.AcceleratorCount = 5 }, "insufficient_capacity", ""},
		{
			"another model", func(n *capacity.NewAllocation) { n.AcceleratorCount, n.AcceleratorModel = 1, "MI300X" },
			"insufficient_capacity", "",
		},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			_, err := w.create(c.change)
			require.Equal(t, c.code, code(err))
			if c.pointer != "" {
				require.Equal(t, c.pointer, fault.As(err).Fields[0].Pointer)
			}
		})
	}
	a, err := w.create(func(n *capacity.NewAllocation) { n.SKU = "cpu-2" })
	require.NoError(t, err)
	require.Equal(t, "cpu-2", a.SKU)
}

// TestLaw14AnAcceleratorHasOneActiveClaim: the index prevents a second claim without placement.
func TestLaw14AnAcceleratorHasOneActiveClaim(t *testing.T) {
	w := newWorld(t)
	a, err := w.create(func(n *capacity.NewAllocation) { n.AcceleratorCount = 3 })
	require.NoError(t, err)
	require.Equal(t, []string{"GPU-0", "GPU-1", "GPU-2"}, a.AcceleratorIDs)
	_, err = w.create(func(n *capacity.NewAllocation) { n.AcceleratorCount = 2 })
	require.Equal(t, "insufficient_capacity", code(err))

	err = w.try(func(ctx context.Context, tx db.Tx) error {
		_, err := tx.Exec(ctx,
			`INSERT INTO claims (allocation_id, node_id, accelerator_id, claimed_at) VALUES ($1, $2, 'GPU-0', $3)`, db.NewID(),
			w.gpu.ID, w.now())
		return err
	})
	require.True(t, db.IsUniqueViolation(err))

	_, err = w.release(a.ID, 0)
	require.NoError(t, err)
	b, err := w.create(func(n *capacity.NewAllocation) { n.AcceleratorCount = 4 })
	require.NoError(t, err)
	require.Len(t, b.AcceleratorIDs, 4)
}

func (w *world) release(id string, live int) (a capacity.Allocation, err error) {
	err = w.try(func(ctx context.Context, tx db.Tx) error {
		before, err := capacity.Get(ctx, tx, w.project, id)
		if err != nil {
			return err
		}
		a, err = capacity.Release(ctx, tx, before, live, w.now())
		return err
	})
	return a, err
}

// TestLaw14ConcurrentRequestsNeverShareAnAccelerator: as many as fit win, the others are told so.
func TestLaw14ConcurrentRequestsNeverShareAnAccelerator(t *testing.T) {
	w := newWorld(t)
	type outcome struct {
		a   capacity.Allocation
		err error
	}
	results := make(chan outcome)
	for range 8 {
		n := capacity.NewAllocation{
			ID: db.NewID(), OrgID: w.org, ProjectID: w.project, Shape: capacity.GPUSlice,
			AcceleratorCount: 1, CPUCores: 1, MemoryMiB: 64,
		}
		go func() {
			a, err := db.RunTx(t.Context(), w.d, func(tx db.Tx) (capacity.Allocation, error) {
				return capacity.Create(t.Context(), tx, n, []capacity.Node{w.gpu}, w.now())
			})
			results <- outcome{a, err}
		}()
	}
	taken := map[string]bool{}
	for range 8 {
		r := <-results
		if r.err != nil {
			require.Equal(t, "insufficient_capacity", code(r.err), r.err.Error())
			continue
		}
		require.Len(t, r.a.AcceleratorIDs, 1)
		require.False(t, taken[r.a.AcceleratorIDs[0]])
		taken[r.a.AcceleratorIDs[0]] = true
	}
	require.Len(t, taken, 4)
}

func TestASliceAndAnInstanceGetAcceleratorsThatAreLinked(t *testing.T) {
	w := newWorld(t)
	all := gpus(6)
	link := func(a, b int) {
		all[a].Links = append(all[a].Links, &protocol.AcceleratorLink{PeerId: all[b].GetId(), Kind: "nvlink", Count: 4})
	}
	link(0, 4)
	link(1, 3)
	link(2, 5)
	for i, a := range all {
		a.NumaNode, a.DriverVersion = new(uint32(i/3)), "570.86.15"
	}
	w.inventory(all...)
	first, err := w.create(func(n *capacity.NewAllocation) { n.AcceleratorCount = 2 })
	require.NoError(t, err)
	require.Equal(t, []string{"GPU-0", "GPU-4"}, first.AcceleratorIDs)
	second, err := w.create(func(n *capacity.NewAllocation) { n.AcceleratorCount = 4 })
	require.NoError(t, err)
	require.Equal(t, []string{"GPU-1", "GPU-2", "GPU-3", "GPU-5"}, second.AcceleratorIDs)
	suits := func(driver string) []plan.Need {
		return []plan.Need{{Accelerators: 2, Variant: manifest.Variant{
			Name: "cuda", Accelerator: "nvidia", MinMemoryMiB: 140 << 10, Driver: manifest.VersionRange{Min: driver},
		}}}
	}
	_, err = w.reserve(suits("580"), second.ID)
	require.Equal(t, "insufficient_capacity", code(err))
	_, err = w.reserve(suits("570"), second.ID)
	require.NoError(t, err)
	require.NoError(t, w.try(func(ctx context.Context, tx db.Tx) error {
		left, err := capacity.AllocationCandidates(ctx, tx, w.project, []string{second.ID})
		require.NoError(t, err)
		require.Equal(t, "GPU-2", left[0].Accelerators[0].ID, "GPU-1 and GPU-3 are a pair")
		require.Equal(t, "GPU-5", left[0].Accelerators[1].ID)
		return nil
	}))
}

func TestBareMetalTakesTheWholeNodeAndOnlyAnEmptyOne(t *testing.T) {
	w := newWorld(t)
	a, err := w.create(func(n *capacity.NewAllocation) { n.Shape, n.AcceleratorCount = capacity.Baremetal, 4 })
	require.NoError(t, err)
	require.Equal(t, w.gpu.ID, a.NodeID)
	require.Equal(t, int64(16), a.CPUCores)
	require.Equal(t, int64(64<<10), a.MemoryMiB)
	_, err = w.create(func(n *capacity.NewAllocation) { n.NodeID = w.gpu.ID })
	require.Equal(t, "insufficient_capacity", code(err))
	_, err = w.create(func(n *capacity.NewAllocation) { n.NodeID = w.cpu.ID })
	require.NoError(t, err)
	_, err = w.create(func(n *capacity.NewAllocation) { n.NodeID, n.Shape = w.cpu.ID, capacity.Baremetal })
	require.Equal(t, "insufficient_capacity", code(err), "something is on it")
}

func TestAnAllocationHoldsInstancesWhileTheyFit(t *testing.T) {
	w := newWorld(t)
	a, err := w.create(func(n *capacity.NewAllocation) { n.AcceleratorCount = 2; n.CPUCores = 3 })
	require.NoError(t, err)
	needs := []plan.Need{{
		CPUMillis: 1500, MemoryBytes: 1 << 30, Accelerators: 1,
		Variant: manifest.Variant{Name: "cuda", Accelerator: "nvidia"},
	}}

	first, err := w.reserve(needs, a.ID)
	require.NoError(t, err)
	second, err := w.reserve(needs)
	require.NoError(t, err, "the only active allocation with room is found by itself")
	_, err = w.reserve(needs)
	require.Equal(t, "placement_required", code(err))
	_, err = w.reserve(needs, a.ID)
	require.Equal(t, "insufficient_capacity", code(err))

	got := w.get(a.ID)
	require.Equal(t, int64(0), got.FreeCPUMillis)
	require.Equal(t, int64(2<<30), got.FreeMemoryBytes)

	_, err = w.release(a.ID, 2)
	require.Equal(t, "allocation_in_use", code(err))
	releasing, err := w.release(a.ID, 0)
	require.NoError(t, err)
	require.Equal(t, capacity.Releasing, releasing.Status)
	_, err = w.release(a.ID, 0)
	require.Equal(t, "allocation_releasing", code(err))
	require.Nil(t, w.free(first))
	require.Nil(t, w.free(first), "freeing twice changes nothing")
	released := w.free(second)
	require.Equal(t, capacity.Released, released.Status)
	require.Equal(t, "capacity.allocation.released", released.EventType())
	require.Equal(t, []string{"GPU-0", "GPU-1"}, w.get(a.ID).AcceleratorIDs, "what it held stays readable")
	_, err = w.reserve(needs, a.ID)
	require.Equal(t, "insufficient_capacity", code(err))
}

func (w *world) reserve(needs []plan.Need, ids ...string) (member string, err error) {
	member = db.NewID()
	err = w.try(func(ctx context.Context, tx db.Tx) error {
		candidates, err := capacity.AllocationCandidates(ctx, tx, w.project, ids)
		if err != nil {
			return err
		}
		room, choice, err := capacity.Choose(needs, candidates, len(ids) > 0)
		if err != nil {
			return err
		}
		return capacity.Reserve(ctx, tx, capacity.Reservation{
			MemberID: member, AllocationID: room.ID, NodeID: room.NodeID,
			Choice: choice,
		}, w.now())
	})
	return member, err
}

func (w *world) free(member string) (a *capacity.Allocation) {
	w.t.Helper()
	require.NoError(w.t, w.try(func(ctx context.Context, tx db.Tx) (err error) {
		a, err = capacity.Free(ctx, tx, member, w.now())
		return err
	}))
	return a
}

func (w *world) get(id string) (a capacity.Allocation) {
	w.t.Helper()
	require.NoError(w.t, w.try(func(ctx context.Context, tx db.Tx) (err error) {
		a, err = capacity.Get(ctx, tx, w.project, id)
		return err
	}))
	return a
}

func TestPlacementNamesWhatIsMissing(t *testing.T) {
	w := newWorld(t)
	needs := []plan.Need{{CPUMillis: 100, MemoryBytes: 1 << 20}}
	_, err := w.reserve(needs)
	require.Equal(t, "placement_required", code(err), "no allocation at all")
	a, err := w.create(func(*capacity.NewAllocation) {})
	require.NoError(t, err)
	b, err := w.create(func(n *capacity.NewAllocation) { n.ProjectID = db.NewID() })
	require.NoError(t, err)
	_, err = w.reserve(needs, b.ID)
	require.Equal(t, "allocation_unknown", code(err), "another project's answers like none")
	_, err = w.reserve(needs, a.ID, a.ID)
	require.Equal(t, "placement_unsupported", code(err))
	_, err = w.create(func(*capacity.NewAllocation) {})
	require.NoError(t, err)
	_, err = w.reserve(needs)
	require.Equal(t, "placement_required", code(err), "two would do")
}

func TestAnAcceleratorThatIsNotReportedAnyMoreStaysAsMissing(t *testing.T) {
	w := newWorld(t)
	a, err := w.create(func(n *capacity.NewAllocation) { n.AcceleratorCount = 1 })
	require.NoError(t, err)
	w.inventory(gpus(4)[1:]...)
	require.NoError(t, w.try(func(ctx context.Context, tx db.Tx) error {
		held, ids, err := capacity.SnapshotFor(ctx, tx, w.gpu.ID)
		require.Equal(t, a.ID, held[0].ID)
		require.Equal(t, []string{"GPU-0"}, held[0].AcceleratorIDs)
		require.Len(t, ids, 4)
		return err
	}))
	_, err = w.release(a.ID, 0)
	require.NoError(t, err)
	b, err := w.create(func(n *capacity.NewAllocation) { n.AcceleratorCount = 1 })
	require.NoError(t, err)
	require.Equal(t, []string{"GPU-1"}, b.AcceleratorIDs, "a missing one is given to nobody")
}

func TestAnotherProjectsAllocationAnswersLikeNone(t *testing.T) {
	w := newWorld(t)
	a, err := w.create(func(*capacity.NewAllocation) {})
	require.NoError(t, err)
	for _, at := range [][2]string{{db.NewID(), a.ID}, {w.project, db.NewID()}, {w.project, "'; --"}} {
		err := w.try(func(ctx context.Context, tx db.Tx) error {
			_, err := capacity.Get(ctx, tx, at[0], at[1])
			return err
		})
		require.True(t, fault.Is(err, fault.NotFound))
	}
	var list []capacity.Allocation
	var after []capacity.Allocation
	require.NoError(t, w.try(func(ctx context.Context, tx db.Tx) (err error) {
		list, err = capacity.List(ctx, tx, capacity.Filter{ProjectID: w.project, Status: capacity.Active, Limit: 5})
		if err != nil {
			return err
		}
		after, err = capacity.List(ctx, tx, capacity.Filter{ProjectID: w.project, After: a.ID, Limit: 5})
		return err
	}))
	require.Empty(t, after)
	require.Len(t, list, 1)
}

// A node whose old allocation lost an accelerator to a newer one is compiled all the same: only active claims count.
func TestAnAcceleratorThatWasTakenOverIsClaimedOnceInTheSnapshot(t *testing.T) {
	w := newWorld(t)
	old, err := w.create(func(n *capacity.NewAllocation) { n.AcceleratorCount, n.NodeID = 2, w.gpu.ID })
	require.NoError(t, err)
	adopted := capacity.Adopted{
		MemberID: db.NewID(), AllocationID: db.NewID(), NodeID: w.gpu.ID, OrgID: w.org, ProjectID: w.project,
		CorrelationID: "corr",
		Use:           capacity.Use{CPUMillis: 1000, MemoryBytes: 1 << 30, AcceleratorIDs: old.AcceleratorIDs[:1]},
	}
	require.NoError(t, w.try(func(ctx context.Context, tx db.Tx) error {
		_, _, err := capacity.Adopt(ctx, tx, adopted, w.now())
		return err
	}))
	snap := plan.Snapshot{Node: plan.Node{ID: w.gpu.ID}}
	require.NoError(t, w.try(func(ctx context.Context, tx db.Tx) (err error) {
		snap.Allocations, snap.Node.AcceleratorIDs, err = capacity.SnapshotFor(ctx, tx, w.gpu.ID)
		return err
	}))
	require.Len(t, snap.Allocations, 2)
	state, err := plan.Compile(snap)
	require.NoError(t, err)
	require.NoError(t, plan.Check(snap, state))
	require.NoError(t, w.try(func(ctx context.Context, tx db.Tx) error {
		a, err := capacity.Get(ctx, tx, w.project, old.ID)
		require.Equal(t, old.AcceleratorIDs[1:], a.AcceleratorIDs)
		return err
	}))
}

func TestAWholeAllocationIsGivenOnlyWhileNothingUsesIt(t *testing.T) {
	whole := capacity.Candidate{
		Allocation: capacity.Allocation{
			CPUCores: 2, FreeCPUMillis: 2000, MemoryMiB: 1, FreeMemoryBytes: 1 << 20, AcceleratorIDs: []string{"GPU-0"},
		},
		Candidate: plan.Candidate{Usable: true, Accelerators: []plan.Accelerator{{ID: "GPU-0"}}},
	}
	choice, err := whole.Whole()
	require.NoError(t, err)
	require.Equal(t, []string{"GPU-0"}, choice.AcceleratorIDs)
	require.Equal(t, plan.Need{CPUMillis: 2000, MemoryBytes: 1 << 20}, choice.Need)
	for name, spoil := range map[string]func(*capacity.Candidate){
		"its node is away":           func(c *capacity.Candidate) { c.Usable = false },
		"some processors are in use": func(c *capacity.Candidate) { c.Allocation.FreeCPUMillis-- },
		"some memory is in use":      func(c *capacity.Candidate) { c.Allocation.FreeMemoryBytes-- },
		"an accelerator is in use":   func(c *capacity.Candidate) { c.Accelerators = nil },
	} {
		c := whole
		spoil(&c)
		_, err := c.Whole()
		require.Equal(t, string(capacity.CodeInsufficient), code(err), name)
	}
}

func TestASnapshotIsDeletedOnce(t *testing.T) {
	for _, status := range []capacity.VolumeStatus{capacity.VolumeDeleting, capacity.VolumeDeleted} {
		asked := capacity.Snapshot{ID: "s", Status: status, ResourceVersion: 3}
		got, err := capacity.DeleteSnapshot(t.Context(), nil, capacity.Volume{}, asked, time.Now())
		require.NoError(t, err)
		require.Equal(t, asked, got)
	}
	_, err := capacity.DeleteSnapshot(t.Context(), nil, capacity.Volume{
		Status: capacity.VolumeRestoring, RestoreSnapshotID: "s",
	}, capacity.Snapshot{ID: "s", Status: capacity.VolumeReady}, time.Now())
	require.Equal(t, "volume_status", code(err))
}

func TestLaw16AVolumeThatTheRowsDoNotKnowIsAdopted(t *testing.T) {
	w := newWorld(t)
	named := []*protocol.ProjectVolume{
		{Id: db.NewID(), OrgId: w.org, ProjectId: w.project, SizeBytes: 1 << 30, Made: true},
		{Id: db.NewID(), OrgId: w.org, ProjectId: w.project, SizeBytes: 1 << 30},
		{Id: db.NewID(), OrgId: w.org, ProjectId: w.project, SizeBytes: 1 << 30, Deleted: true},
	}
	for _, want := range []int{2, 0} {
		var adopted []capacity.VolumeChange
		require.NoError(t, w.try(func(ctx context.Context, tx db.Tx) (err error) {
			adopted, err = capacity.AdoptVolumes(ctx, tx, w.gpu.ID, named, false, "corr", w.now())
			return err
		}))
		require.Len(t, adopted, want, "again, nothing is new")
		if want > 0 {
			require.Equal(t, []bool{false, true}, []bool{adopted[0].Volume.ReadyAt.IsZero(), adopted[1].Volume.ReadyAt.IsZero()})
		}
	}
}
