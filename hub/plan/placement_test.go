package plan_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestPlacement(t *testing.T) {
	gpu := func(id string) plan.Accelerator {
		return plan.Accelerator{ID: id, Vendor: "nvidia", Model: "H200", Healthy: true}
	}
	candidate := plan.Candidate{
		ID: "r", Usable: true, CPUMillis: 4000, MemoryBytes: 8 << 30,
		Accelerators: []plan.Accelerator{gpu("GPU-2"), gpu("GPU-1"), {ID: "GPU-0", Vendor: "nvidia", Model: "H200"}},
	}
	empty := candidate
	empty.Empty = true
	knows := func(features ...string) plan.Candidate {
		older := candidate
		older.Features = features
		return older
	}
	open := candidate
	open.HostPorts = plan.HostPorts{Allowed: &protocol.PortRange{First: 30001, Last: 30003}, Taken: []uint32{30002}}
	cases := []struct {
		name      string
		need      plan.Need
		candidate plan.Candidate
		want      []string
		misfit    plan.Misfit
	}{
		{
			"a CPU node gives a slice with no accelerators",
			plan.Need{CPUMillis: 1000, MemoryBytes: 1 << 30},
			plan.Candidate{ID: "r", Usable: true, CPUMillis: 1000, MemoryBytes: 1 << 30},
			nil, plan.Fits,
		},
		{"the lowest healthy accelerators are taken", plan.Need{Accelerators: 1}, candidate, []string{"GPU-1"}, plan.Fits},
		{"an unhealthy one is not given", plan.Need{Accelerators: 3}, candidate, nil, plan.LacksAccelerators},
		{
			"another model does not match",
			plan.Need{Accelerators: 1, AcceleratorModel: "MI300X"},
			candidate, nil,
			plan.LacksAccelerators,
		},
		{
			"another vendor does not match",
			plan.Need{Accelerators: 1, Variant: manifest.Variant{Name: "rocm", Accelerator: "amd"}},
			candidate, nil,
			plan.LacksAccelerators,
		},
		{"too much CPU", plan.Need{CPUMillis: 4001}, candidate, nil, plan.LacksCPU},
		{"too much memory", plan.Need{MemoryBytes: 8<<30 + 1}, candidate, nil, plan.LacksMemory},
		{"not usable", plan.Need{}, plan.Candidate{ID: "r", CPUMillis: 1}, nil, plan.NotUsable},
		{"bare metal needs an empty node", plan.Need{Whole: true}, candidate, nil, plan.NotEmpty},
		{"bare metal takes every accelerator", plan.Need{Whole: true}, empty, []string{"GPU-0", "GPU-1", "GPU-2"}, plan.Fits},
		{"another shape", plan.Need{Shapes: []string{plan.ShapeBaremetal}}, candidate, nil, plan.WrongShape},
		{"an agent that knows more", plan.Need{Features: []string{"a"}}, knows("a", "b"), nil, plan.Fits},
		{"ports that are left to the node", plan.Need{HostPorts: []uint32{0, 0}}, candidate, nil, plan.Fits},
		{"a port of an owner who allows none", plan.Need{HostPorts: []uint32{0, 30001}}, candidate, nil, plan.LacksPort},
		{"ports that are allowed and free", plan.Need{HostPorts: []uint32{30001, 30003}}, open, nil, plan.Fits},
		{"a port that another has", plan.Need{HostPorts: []uint32{30001, 30002}}, open, nil, plan.LacksPort},
		{"a port that is not allowed", plan.Need{HostPorts: []uint32{30004}}, open, nil, plan.LacksPort},
		{"an agent that is too old", plan.Need{Features: []string{"a", "c"}}, knows("a", "b"), nil, plan.LacksFeature},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			got, misfit := plan.Fit(c.need, c.candidate)
			require.Equal(t, c.misfit, misfit)
			require.ElementsMatch(t, c.want, got.AcceleratorIDs)
		})
	}
}

func TestAMisfitNamesTheWayOfSharingThatWouldFit(t *testing.T) {
	slice := func(id, sharing string) plan.Accelerator {
		return plan.Accelerator{ID: id, Vendor: "nvidia", Healthy: true, PartOf: "GPU-0", Sharing: sharing}
	}
	turns, mps := slice("GPU-0-ts2-0", protocol.SharingTimeSlices), slice("GPU-1-mps2-0", protocol.SharingMPS)
	broken := turns
	broken.Healthy = false
	whole := plan.Accelerator{ID: "GPU-2", Vendor: "nvidia", Healthy: true}
	const lacks, otherwise = plan.LacksAccelerators, plan.SharedOtherwise
	for name, c := range map[string]struct {
		has           []plan.Accelerator
		count         int
		asked, better string
		misfit        plan.Misfit
	}{
		"a slice for who wants a GPU": {[]plan.Accelerator{turns}, 1, "", protocol.SharingTimeSlices, otherwise},
		"MPS for who wants time slices": {
			[]plan.Accelerator{mps}, 1, protocol.SharingTimeSlices, protocol.SharingMPS, otherwise,
		},
		"a GPU for who wants a slice":   {[]plan.Accelerator{whole}, 1, protocol.SharingMPS, "", otherwise},
		"the slice that is wanted":      {[]plan.Accelerator{turns}, 1, protocol.SharingTimeSlices, "", plan.Fits},
		"slices for who wants two GPUs": {[]plan.Accelerator{turns, turns}, 2, "", "", lacks},
		"a slice of an unhealthy GPU":   {[]plan.Accelerator{broken}, 1, "", "", lacks},
		"nothing":                       {nil, 1, "", "", lacks},
	} {
		at := plan.Candidate{ID: "r", Usable: true, Shape: plan.ShapeGPUSlice, Accelerators: c.has}
		need := plan.Need{
			Accelerators: c.count, Sharing: c.asked, Variant: manifest.Variant{Name: "cuda", Accelerator: "nvidia"},
		}
		other := need
		other.Variant = manifest.Variant{Name: "rocm", Accelerator: "amd"}
		_, misfit := plan.FirstFit([]plan.Need{need, other}, at)
		require.Equal(t, c.misfit, misfit, name)
		sharing, ok := plan.SharingThatFits([]plan.Need{need, other}, at)
		require.Equal(t, c.misfit == plan.SharedOtherwise, ok, name)
		require.Equal(t, c.better, sharing, name)
	}
}

func TestNeedsPreferAnAcceleratorAndKeepToTheVersionsShapes(t *testing.T) {
	version := func(minimum int, exclusive bool, accelerators ...string) manifest.Manifest {
		var m manifest.Manifest
		m.Version.Compatibility = manifest.Compatibility{
			MinGPUCount: minimum, RequiresExclusiveNode: exclusive,
			SupportedAccelerators: accelerators,
		}
		m.Version.RuntimeProfile.Resources = manifest.Resources{
			CPUMillis: manifest.Range{Default: 500},
			MemoryMiB: manifest.Range{Default: 64},
		}
		for _, a := range accelerators {
			m.Version.RuntimeProfile.ImageVariants = append(m.Version.RuntimeProfile.ImageVariants,
				manifest.Variant{Name: "for-" + a, Accelerator: a})
		}
		return m
	}
	cpuOnly := plan.Candidate{ID: "cpu", Usable: true, Shape: plan.ShapeGPUSlice, CPUMillis: 500, MemoryBytes: 64 << 20}
	withGPU := cpuOnly
	withGPU.Accelerators = []plan.Accelerator{{ID: "GPU-1", Vendor: "nvidia", Healthy: true}}

	both := plan.Needs(version(0, false, "none", "nvidia"), manifest.Choice{}, 0)
	got, misfit := plan.FirstFit(both, withGPU)
	require.Equal(t, plan.Fits, misfit)
	require.Equal(t, []string{"GPU-1"}, got.AcceleratorIDs)
	require.Equal(t, "nvidia", got.Need.Variant.Accelerator)
	got, misfit = plan.FirstFit(both, cpuOnly)
	require.Equal(t, plan.Fits, misfit)
	require.Empty(t, got.AcceleratorIDs)
	require.Equal(t, manifest.AcceleratorNone, got.Need.Variant.Accelerator)

	_, misfit = plan.FirstFit(plan.Needs(version(2, false, "none", "nvidia"), manifest.Choice{}, 0), withGPU)
	require.Equal(t, plan.LacksAccelerators, misfit, "it needs two")
	_, misfit = plan.FirstFit(plan.Needs(version(0, true, "none"), manifest.Choice{}, 0), cpuOnly)
	require.Equal(t, plan.WrongShape, misfit, "it needs a node of its own")
	require.Empty(t, plan.Needs(version(2, false, "nvidia"), manifest.Choice{}, 1), "it may not have two")
	require.Len(t, plan.Needs(version(2, false, "nvidia"), manifest.Choice{}, 2), 1, "it may have two")
}

func TestPlacementTakesTheTightestRoomAndNeverMoreThanItHas(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		candidates := make([]plan.Candidate, rapid.IntRange(0, 6).Draw(t, "candidates"))
		for i := range candidates {
			candidates[i] = plan.Candidate{
				ID: fmt.Sprintf("candidate-%d", i), Usable: rapid.Bool().Draw(t, "usable"), Empty: rapid.Bool().Draw(t, "empty"),
				CPUMillis:   rapid.Int64Range(0, 8).Draw(t, "cpu") * 1000,
				MemoryBytes: rapid.Int64Range(0, 8).Draw(t, "memory") << 30,
			}
			for j := range rapid.IntRange(0, 4).Draw(t, "accelerators") {
				candidates[i].Accelerators = append(candidates[i].Accelerators, plan.Accelerator{
					ID: fmt.Sprintf("GPU-%d-%d", i, j), Model: rapid.SampledFrom([]string{"H200", "MI300X"}).Draw(t, "model"),
					Healthy: rapid.Bool().Draw(t, "healthy"),
				})
			}
		}
		need := plan.Need{
			CPUMillis: rapid.Int64Range(0, 8).Draw(t, "needCPU") * 1000, MemoryBytes: rapid.Int64Range(0, 8).Draw(t,
				"needMemory") << 30,
			Accelerators:     rapid.IntRange(0, 4).Draw(t, "needAccelerators"),
			AcceleratorModel: rapid.SampledFrom([]string{"", "H200"}).Draw(t, "needModel"),
			Whole:            rapid.Bool().Draw(t, "whole"),
		}
		choices := plan.Fitting(need, candidates)
		byID := map[string]plan.Candidate{}
		for _, r := range candidates {
			byID[r.ID] = r
		}
		last := -1
		for _, c := range choices {
			r := byID[c.ID]
			require.True(t, r.Usable)
			require.LessOrEqual(t, need.CPUMillis, r.CPUMillis)
			require.LessOrEqual(t, need.MemoryBytes, r.MemoryBytes)
			require.GreaterOrEqual(t, len(r.Accelerators), last, "a tighter candidate came later")
			last = len(r.Accelerators)
			if need.Whole {
				require.Len(t, c.AcceleratorIDs, len(r.Accelerators))
			} else {
				require.Len(t, c.AcceleratorIDs, need.Accelerators)
			}
		}
		require.Equal(t, choices, plan.Fitting(need, rapid.Permutation(candidates).Draw(t, "shuffled")))
	})
}
