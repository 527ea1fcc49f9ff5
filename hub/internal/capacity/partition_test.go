package capacity_test

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/protocol"
)

const mig10 = "H200 MIG 1g.18gb"

// partitioned splits the n-th GPU into parts.
func partitioned(list []*protocol.Accelerator, n, parts int, profile string) []*protocol.Accelerator {
	for i := range parts {
		list[n].Partitions = append(list[n].Partitions, &protocol.AcceleratorPartition{
			Id: fmt.Sprintf("PART-%d-%d", n, i), Profile: profile, MemoryBytes: 18 << 30,
		})
	}
	return list
}

func slice(model string, n int) func(*capacity.NewAllocation) {
	return func(a *capacity.NewAllocation) {
		a.AcceleratorModel, a.AcceleratorCount, a.CPUCores, a.MemoryMiB = model, n, 1, 1024
	}
}

func (w *world) count(query string) (n int) {
	w.t.Helper()
	require.NoError(w.t, w.try(func(ctx context.Context, tx db.Tx) error {
		return tx.QueryRow(ctx, query).Scan(&n)
	}))
	return n
}

func ofAnotherOrg(ask func(*capacity.NewAllocation)) func(*capacity.NewAllocation) {
	return func(a *capacity.NewAllocation) {
		ask(a)
		a.OrgID, a.ProjectID = db.NewID(), db.NewID()
	}
}

func TestAMIGInstanceIsASliceOfItsOwn(t *testing.T) {
	w := newWorld(t)
	w.inventory(partitioned(gpus(2), 0, 2, "1g.18gb")...)
	require.Len(t, w.stored(), 4, "two GPUs, whose first lists its parts, and two that are missing")
	require.Len(t, w.stored()[0].GetPartitions(), 2)

	first, err := w.create(slice(mig10, 1))
	require.NoError(t, err)
	require.Equal(t, []string{"PART-0-0"}, first.AcceleratorIDs)
	second, err := w.create(ofAnotherOrg(slice(mig10, 1)))
	require.NoError(t, err, "MIG instances of one GPU may belong to different orgs")
	require.Equal(t, []string{"PART-0-1"}, second.AcceleratorIDs)
	_, err = w.create(slice(mig10, 1))
	require.Equal(t, "insufficient_capacity", code(err))

	whole, err := w.create(slice("", 1))
	require.NoError(t, err)
	require.Equal(t, []string{"GPU-1"}, whole.AcceleratorIDs, "who names no model gets a whole GPU")
	_, err = w.create(slice("H200", 1))
	require.Equal(t, "insufficient_capacity", code(err), "a GPU in MIG mode cannot be had as a whole")
}

func TestARepartitionedGPUIsFreeOnceItsClaimsHaveEnded(t *testing.T) {
	w := newWorld(t)
	w.inventory(gpus(1)...)
	whole, err := w.create(slice("", 1))
	require.NoError(t, err)
	w.inventory(partitioned(gpus(1), 0, 2, "1g.18gb")...)
	_, err = w.create(slice(mig10, 1))
	require.Equal(t, "insufficient_capacity", code(err), "another instance has the whole GPU")
	_, err = w.release(whole.ID, 0)
	require.NoError(t, err)
	part, err := w.create(slice(mig10, 1))
	require.NoError(t, err)

	w.inventory(gpus(1)...)
	require.Empty(t, w.stored()[0].GetPartitions())
	_, err = w.create(slice("", 1))
	require.Equal(t, "insufficient_capacity", code(err), "another instance has a part that is gone")
	_, err = w.create(slice(mig10, 1))
	require.Equal(t, "insufficient_capacity", code(err), "the parts are gone")
	_, err = w.release(part.ID, 0)
	require.NoError(t, err)
	_, err = w.create(slice("", 1))
	require.NoError(t, err)
}

// The partitions of an AMD GPU share its memory and have no hardware between them that NVIDIA's MIG has.
func TestPartitionsOfAnAMDGPUHaveOneOrg(t *testing.T) {
	w := newWorld(t)
	list := partitioned(partitioned(gpus(2), 0, 2, "CPX/NPS4"), 1, 1, "CPX/NPS4")
	for _, a := range list {
		a.Vendor, a.Model = protocol.VendorAMD, "MI300X"
	}
	w.inventory(list...)
	ask := slice("MI300X CPX/NPS4", 1)
	mine, err := w.create(ask)
	require.NoError(t, err)
	theirs, err := w.create(ofAnotherOrg(ask))
	require.NoError(t, err)
	require.NotEqual(t, mine.AcceleratorIDs[0][:len("PART-0")], theirs.AcceleratorIDs[0][:len("PART-0")])
	if mine.AcceleratorIDs[0] == "PART-1-0" {
		mine, theirs = theirs, mine
	}
	_, err = w.create(ofAnotherOrg(ask))
	require.Equal(t, "insufficient_capacity", code(err))
	more, err := w.create(func(n *capacity.NewAllocation) { ask(n); n.OrgID, n.ProjectID = mine.OrgID, mine.ProjectID })
	require.NoError(t, err)
	require.Equal(t, []string{"PART-0-1"}, more.AcceleratorIDs)
}

// shared splits the n-th GPU into slices that no hardware keeps apart.
func shared(list []*protocol.Accelerator, n, parts int) []*protocol.Accelerator {
	list = partitioned(list, n, parts, "1/2 time slice")
	for _, p := range list[n].GetPartitions() {
		p.Id, p.Sharing = "TS-"+p.GetId(), protocol.SharingTimeSlices
	}
	return list
}

func TestLaw14SlicesOfASharedGPUHaveOneOrg(t *testing.T) {
	w := newWorld(t)
	w.inventory(shared(gpus(1), 0, 2)...)
	ask := slice("H200 1/2 time slice", 1)
	mine, err := w.create(ask)
	require.NoError(t, err)
	require.Equal(t, []string{"TS-PART-0-0"}, mine.AcceleratorIDs)
	_, err = w.create(ofAnotherOrg(ask))
	require.Equal(t, "insufficient_capacity", code(err))
	also := func(n *capacity.NewAllocation) { ask(n); n.OrgID, n.ProjectID = mine.OrgID, mine.ProjectID }
	second, err := w.create(also)
	require.NoError(t, err)
	require.Equal(t, []string{"TS-PART-0-1"}, second.AcceleratorIDs)
	_, err = w.create(also)
	require.Equal(t, "insufficient_capacity", code(err), "a slice has one claim")
	require.NoError(t, w.try(func(ctx context.Context, tx db.Tx) error {
		oneOrg, err := capacity.OneOrg(ctx, tx, w.gpu.ID)
		require.Equal(t, map[string]string{"TS-PART-0-0": "GPU-0", "TS-PART-0-1": "GPU-0"}, oneOrg)
		return err
	}))

	w.inventory(partitioned(gpus(1), 0, 2, "1g.18gb")...)
	_, err = w.create(ofAnotherOrg(slice(mig10, 1)))
	require.Equal(t, "insufficient_capacity", code(err), "the slices are gone, and the org still runs on the GPU")
	for _, a := range []capacity.Allocation{mine, second} {
		_, err = w.release(a.ID, 0)
		require.NoError(t, err)
	}
	_, err = w.create(ofAnotherOrg(slice(mig10, 1)))
	require.NoError(t, err)
}

// A claim that has ended is not made again: that of the member's own allocation has to stay.
func TestLaw14AnAdoptedMemberLeavesItsAllocationItsClaim(t *testing.T) {
	w := newWorld(t)
	w.inventory(gpus(1)...)
	a, err := w.create(slice("", 1))
	require.NoError(t, err)
	require.NoError(t, w.try(func(ctx context.Context, tx db.Tx) error {
		made, _, err := capacity.Adopt(ctx, tx, capacity.Adopted{
			MemberID: db.NewID(), AllocationID: a.ID, NodeID: w.gpu.ID, OrgID: w.org, ProjectID: w.project,
			CorrelationID: "corr",
			Use:           capacity.Use{CPUMillis: 1000, MemoryBytes: 1 << 30, AcceleratorIDs: a.AcceleratorIDs},
		}, w.now())
		require.False(t, made)
		return err
	}))
	require.Equal(t, a.AcceleratorIDs, w.get(a.ID).AcceleratorIDs)
	_, err = w.create(ofAnotherOrg(slice("", 1)))
	require.Equal(t, "insufficient_capacity", code(err))
}

// Only MIG instances of one GPU are lent to other orgs than the one that has the allocation.
func TestLaw14PartsThatNoHardwareKeepsApartAreLentToNoOtherOrg(t *testing.T) {
	amd := func() []*protocol.Accelerator {
		list := partitioned(gpus(1), 0, 1, "CPX/NPS4")
		list[0].Vendor, list[0].Model = protocol.VendorAMD, "MI300X"
		return list
	}
	for name, c := range map[string]struct {
		inventory []*protocol.Accelerator
		model     string
		lent      int
	}{
		"a whole GPU":               {gpus(1), "H200", 1},
		"a MIG instance":            {partitioned(gpus(1), 0, 1, "1g.18gb"), mig10, 1},
		"a slice":                   {shared(gpus(1), 0, 1), "H200 1/2 time slice", 0},
		"a partition of an AMD GPU": {amd(), "MI300X CPX/NPS4", 0},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.inventory(c.inventory...)
			_, err := w.create(slice(c.model, 1))
			require.NoError(t, err)
			for org, lent := range map[string]int{w.org: 1, db.NewID(): c.lent} {
				require.NoError(t, w.try(func(ctx context.Context, tx db.Tx) error {
					candidates, err := capacity.LentCandidates(ctx, tx, w.project, org)
					require.Len(t, candidates, 1)
					require.Len(t, candidates[0].Accelerators, lent)
					return err
				}))
			}
		})
	}
}

// A restored hub ends the claims that a newer state supersedes: the GPU is then another org's.
func TestAnEndedClaimLeavesTheGPUToAnotherOrg(t *testing.T) {
	w := newWorld(t)
	w.inventory(shared(gpus(1), 0, 2)...)
	ask := slice("H200 1/2 time slice", 1)
	before, err := w.create(ask)
	require.NoError(t, err)
	claim := plan.RecordedClaim{AcceleratorID: before.AcceleratorIDs[0], AllocationID: before.ID, OrgID: before.OrgID}
	for range 2 {
		require.NoError(t, w.try(func(ctx context.Context, tx db.Tx) error {
			return capacity.EndClaim(ctx, tx, w.gpu.ID, claim, w.now())
		}))
	}
	_, err = w.create(ofAnotherOrg(ask))
	require.NoError(t, err)
	_, err = w.create(ask)
	require.Equal(t, "insufficient_capacity", code(err))
}

func TestConcurrentOrgsNeverShareAGPU(t *testing.T) {
	w := newWorld(t)
	w.inventory(shared(gpus(1), 0, 8)...)
	orgs := make(chan string, 8)
	var asking sync.WaitGroup
	for range 8 {
		asking.Go(func() {
			if a, err := w.create(ofAnotherOrg(slice("H200 1/2 time slice", 1))); err == nil {
				orgs <- a.OrgID
			}
		})
	}
	asking.Wait()
	require.Len(t, orgs, 1)
}

func TestMIGInstancesAreOfferedOneAtATime(t *testing.T) {
	w := newWorld(t)
	list := gpus(2)
	w.inventory(partitioned(partitioned(list, 0, 4, "1g.18gb"), 1, 4, "1g.18gb")...)
	slugs, all := w.suggested(w.gpu)
	require.Equal(t, []string{"h200-mig-1g-18gb-x1"}, slugs)
	require.Equal(t, int64(2), all[0].CPUCores)
	require.Equal(t, mig10, all[0].AcceleratorModel)
	w.inventory(partitioned(gpus(2), 0, 4, "1g.18gb")...)
	slugs, _ = w.suggested(w.gpu)
	require.Empty(t, slugs, "a node with several models is for the admin")
}

// A node that makes up more and more partitions fills no table, and keeps its whole GPUs.
func TestPartitionsAreBounded(t *testing.T) {
	w := newWorld(t)
	for round := range 20 {
		list := gpus(2)
		for i := range 64 {
			list[0].Partitions = append(list[0].Partitions, &protocol.AcceleratorPartition{
				Id: fmt.Sprintf("PART-%d-%d", round, i), Profile: "1g",
			})
		}
		w.inventory(list...)
	}
	require.Equal(t, 4*protocol.MaxAccelerators, w.count(`SELECT count(*) FROM accelerators WHERE part_of <> ''`))
	a, err := w.create(slice("H200", 1))
	require.NoError(t, err)
	require.Equal(t, []string{"GPU-1"}, a.AcceleratorIDs)
}
