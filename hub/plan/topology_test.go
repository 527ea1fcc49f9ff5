package plan_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// gpus are n healthy accelerators GPU-0, GPU-1, …, half of them on each of two NUMA nodes.
func gpus(n int) []plan.Accelerator {
	out := make([]plan.Accelerator, 0, n)
	for i := range n {
		numa := i * 2 / n
		out = append(out, plan.Accelerator{
			ID: fmt.Sprint("GPU-", i), Vendor: "nvidia", Model: "H200", MemoryBytes: 141 << 30, DriverVersion: "570.86.15",
			NUMANode: &numa, Healthy: true,
		})
	}
	return out
}

// linked joins pairs of accelerators; the first of a pair reports it.
func linked(all []plan.Accelerator, count int, pairs ...[2]int) []plan.Accelerator {
	for _, p := range pairs {
		all[p[0]].Links = append(all[p[0]].Links, plan.Link{Peer: all[p[1]].ID, Count: count})
	}
	return all
}

// without leaves out the accelerators that are in use.
func without(all []plan.Accelerator, used ...int) []plan.Accelerator {
	return slices.DeleteFunc(all, func(a plan.Accelerator) bool {
		return slices.ContainsFunc(used, func(i int) bool { return a.ID == fmt.Sprint("GPU-", i) })
	})
}

func chosen(t require.TestingT, all []plan.Accelerator, n int) []string {
	got, misfit := plan.Fit(plan.Need{Accelerators: n}, plan.Candidate{ID: "node", Usable: true, Accelerators: all})
	require.Equal(t, plan.Fits, misfit)
	return got.AcceleratorIDs
}

func TestAcceleratorsThatReachEachOtherAreChosen(t *testing.T) {
	switched := func(all []plan.Accelerator, which ...int) []plan.Accelerator {
		for _, i := range which {
			all[i].Links = append(all[i].Links, plan.Link{Count: 18})
		}
		return all
	}
	other := gpus(4)
	other[1].Model, other[2].Model = "A100", "A100"
	smaller := gpus(3)
	smaller[0].MemoryBytes = 94 << 30
	bridged := [][2]int{{0, 5}, {1, 4}, {2, 7}, {3, 6}}
	quads := [][2]int{{0, 1}, {0, 2}, {0, 3}, {1, 2}, {1, 3}, {2, 3}, {4, 5}, {4, 6}, {4, 7}, {5, 6}, {5, 7}, {6, 7}}
	for name, c := range map[string]struct {
		free []plan.Accelerator
		n    int
		want []int
	}{
		"nothing is linked: one NUMA node":        {without(gpus(8), 0), 4, []int{4, 5, 6, 7}},
		"an odd one leaves the full node whole":   {without(gpus(8), 0), 1, []int{1}},
		"a bridged pair, across NUMA nodes":       {linked(gpus(8), 4, bridged...), 2, []int{0, 5}},
		"a pair of which half is used is no pair": {without(linked(gpus(8), 4, bridged...), 5), 2, []int{1, 4}},
		"one accelerator breaks up no pair":       {without(linked(gpus(8), 4, bridged...), 5), 1, []int{0}},
		"two pairs":                               {linked(gpus(8), 4, bridged...), 4, []int{0, 1, 4, 5}},
		"a quad that is whole":                    {without(linked(gpus(8), 1, quads...), 2), 4, []int{4, 5, 6, 7}},
		"what is left of a quad":                  {without(linked(gpus(8), 1, quads...), 2), 3, []int{0, 1, 3}},
		"behind one switch, not beside it":        {switched(gpus(4), 1, 2), 2, []int{1, 2}},
		"more links win": {
			linked(linked(gpus(3), 2, [2]int{0, 1}), 6, [2]int{1, 2}), 2,
			[]int{1, 2},
		},
		"one model":                      {other, 2, []int{1, 2}},
		"one size of memory":             {smaller, 2, []int{1, 2}},
		"one of what fewest are free of": {smaller, 1, []int{0}},
	} {
		t.Run(name, func(t *testing.T) {
			var want []string
			for _, i := range c.want {
				want = append(want, fmt.Sprint("GPU-", i))
			}
			require.Equal(t, want, chosen(t, c.free, c.n))
		})
	}
	require.Len(t, chosen(t, other, 3), 3, "an allocation may hold both models")
	image := manifest.Variant{Name: "cuda", Accelerator: "nvidia"}
	_, misfit := plan.Fit(plan.Need{Accelerators: 3, Variant: image}, plan.Candidate{Usable: true, Accelerators: other})
	require.Equal(t, plan.LacksAccelerators, misfit, "an instance needs one")
}

func TestAMembersOwnAcceleratorsStayAndTheNextAreNearThem(t *testing.T) {
	all := linked(gpus(8), 4, [2]int{0, 5}, [2]int{1, 4}, [2]int{2, 7}, [2]int{3, 6})
	all[3].Mine = true
	require.Equal(t, []string{"GPU-3", "GPU-6"}, chosen(t, all, 2))
	all[6].Mine, all[1].Mine = true, true
	require.Equal(t, []string{"GPU-3", "GPU-6"}, chosen(t, all, 2), "of its own, the pair")
	require.Equal(t, []string{"GPU-1", "GPU-3", "GPU-4", "GPU-6"}, chosen(t, all, 4))
}

// The choice is compared with the best of all sets.
func TestPairsAreChosenAsWellAsByTryingEach(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		all := gpus(rapid.IntRange(2, 8).Draw(t, "accelerators"))
		weight := map[[2]int]int{}
		for i := range all {
			for j := range i {
				count := rapid.SampledFrom([]int{0, 0, 1, 4}).Draw(t, "links")
				weight[[2]int{j, i}] = 16 * count
				if count > 0 {
					linked(all, count, [2]int{i, j})
				}
				if *all[i].NUMANode == *all[j].NUMANode {
					weight[[2]int{j, i}]++
				}
			}
		}
		ids := chosen(t, all, 2)
		at := func(id string) int {
			return slices.IndexFunc(all, func(a plan.Accelerator) bool { return a.ID == id })
		}
		best := 0
		for _, w := range weight {
			best = max(best, w)
		}
		require.Equal(t, best, weight[[2]int{at(ids[0]), at(ids[1])}])
	})
}

func TestAcceleratorsSuitTheImage(t *testing.T) {
	v := manifest.Variant{
		Name: "hopper", Accelerator: "nvidia", Models: []string{"h?00*"}, MinMemoryMiB: 100 << 10,
		Driver: manifest.VersionRange{Min: "550"},
	}
	free := gpus(6)
	free[0].Vendor = "amd"
	free[1].Model = "A100"
	free[2].MemoryBytes = 80 << 30
	free[3].DriverVersion = "535.1"
	need := plan.Need{Accelerators: 2, Variant: v}
	got, misfit := plan.Fit(need, plan.Candidate{Usable: true, Accelerators: free})
	require.Equal(t, plan.Fits, misfit)
	require.Equal(t, []string{"GPU-4", "GPU-5"}, got.AcceleratorIDs)
	need.Accelerators = 3
	_, misfit = plan.Fit(need, plan.Candidate{Usable: true, Accelerators: free})
	require.Equal(t, plan.LacksAccelerators, misfit)
}

func TestSlicesOfSharedGPUsAreGivenToWhoAsksForThem(t *testing.T) {
	free := gpus(4)
	for i, sharing := range []string{protocol.SharingMPS, protocol.SharingTimeSlices, ""} {
		free[i].PartOf, free[i].Sharing = "GPU-9", sharing
	}
	nvidia := manifest.Variant{Name: "n", Accelerator: manifest.AcceleratorNVIDIA}
	fit := func(n plan.Need) []string {
		n.Variant = nvidia
		got, _ := plan.Fit(n, plan.Candidate{ID: "x", Usable: true, Shape: plan.ShapeGPUSlice, Accelerators: free})
		return got.AcceleratorIDs
	}
	require.Equal(t, []string{"GPU-0"}, fit(plan.Need{Accelerators: 1, Sharing: protocol.SharingMPS}))
	require.Equal(t, []string{"GPU-1"}, fit(plan.Need{Accelerators: 1, Sharing: protocol.SharingTimeSlices}))
	require.Nil(t, fit(plan.Need{Accelerators: 2, Sharing: protocol.SharingTimeSlices}))
	free = free[:2]
	require.Nil(t, fit(plan.Need{Accelerators: 1}), "who does not ask has accelerators alone")
}

func TestPartitionsAreGivenByNameAndToOneInstance(t *testing.T) {
	parts := gpus(3)
	for i := range parts[:2] {
		parts[i].PartOf, parts[i].Model = "GPU-9", "H200 MIG 1g.18gb"
	}
	fit := func(n plan.Need, shape string) ([]string, plan.Misfit) {
		got, misfit := plan.Fit(n, plan.Candidate{ID: "x", Usable: true, Shape: shape, Accelerators: parts})
		return got.AcceleratorIDs, misfit
	}
	nvidia := manifest.Variant{Name: "n", Accelerator: manifest.AcceleratorNVIDIA}

	ids, _ := fit(plan.Need{Accelerators: 1}, "")
	require.Equal(t, []string{"GPU-2"}, ids, "of a node, without a name")
	ids, _ = fit(plan.Need{Accelerators: 2, AcceleratorModel: "H200 MIG 1g.18gb"}, "")
	require.Equal(t, []string{"GPU-0", "GPU-1"}, ids, "an allocation may have several")
	_, misfit := fit(plan.Need{Accelerators: 2}, "")
	require.Equal(t, plan.LacksAccelerators, misfit)
	_, misfit = fit(plan.Need{Accelerators: 2, Variant: nvidia}, plan.ShapeGPUSlice)
	require.Equal(t, plan.LacksAccelerators, misfit, "CUDA would see one of two MIG instances")
	parts = parts[:2]
	ids, _ = fit(plan.Need{Accelerators: 1, Variant: nvidia}, plan.ShapeGPUSlice)
	require.Len(t, ids, 1, "of an allocation, whatever it is")
	for i := range parts {
		parts[i].Vendor = manifest.AcceleratorAMD
	}
	amd := manifest.Variant{Name: "a", Accelerator: manifest.AcceleratorAMD}
	ids, _ = fit(plan.Need{Accelerators: 2, Variant: amd}, plan.ShapeGPUSlice)
	require.Len(t, ids, 2, "ROCm sees each")
}
