package manifest_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

const choiceRanges = `disk_mib: {min: 64, default: 128, max: 512}
      shm_mib: {min: 1, default: 8, max: 64}
      accelerators: {min: 1, default: 2, max: 4}
      memory_mib:`

// withChoices is the sample with a range for each resource.
func withChoices(t testing.TB) string {
	return strings.Replace(document(t), "memory_mib:", choiceRanges, 1)
}

func TestResourcesOfAnInstanceLieWithinTheBoundsOfItsVersion(t *testing.T) {
	m, err := manifest.Parse([]byte(withChoices(t)))
	require.NoError(t, err)
	require.Contains(t, m.Features(), manifest.FeatureResources)
	require.Equal(t, manifest.Range{Min: 1, Default: 2, Max: 4}, m.AcceleratorBounds())
	count := func(n int) *int { return &n }
	plain := parsed(t)
	require.NotContains(t, plain.Features(), manifest.FeatureResources)
	for name, c := range map[string]struct {
		of      manifest.Manifest
		choice  manifest.Choice
		pointer string
		reason  string
	}{
		"nothing":        {m, manifest.Choice{}, "", ""},
		"all of it":      {m, manifest.Choice{count(4), "H200", "", 8000, 256, 512, 64, nil, nil, nil}, "", ""},
		"no accelerator": {m, manifest.Choice{Accelerators: count(0)}, "", ""},
		"CPU":            {m, manifest.Choice{CPUMillis: 8001}, "/resources/cpu_millis", "must lie between 250 and 8000"},
		"memory":         {m, manifest.Choice{MemoryMiB: 255}, "/resources/memory_mib", "must lie between 256 and 65536"},
		"disk":           {m, manifest.Choice{DiskMiB: 513}, "/resources/disk_mib", "must lie between 64 and 512"},
		"shared memory":  {m, manifest.Choice{ShmMiB: 65}, "/resources/shm_mib", "must lie between 1 and 64"},
		"accelerators":   {m, manifest.Choice{Accelerators: count(5)}, "/resources/accelerators", "must lie between 1 and 4"},
		"a model of nothing": {
			m,
			manifest.Choice{Accelerators: count(0), AcceleratorModel: "H200"},
			"/resources/accelerator_model",
			"needs at least one accelerator",
		},
		"disk of a version without": {
			plain, manifest.Choice{DiskMiB: 64}, "/resources/disk_mib", "the version leaves no choice",
		},
	} {
		t.Run(name, func(t *testing.T) {
			err := c.of.CheckChoice(c.choice)
			if c.pointer == "" {
				require.NoError(t, err)
				return
			}
			require.True(t, fault.Is(err, fault.Unprocessable), "%v", err)
			require.Equal(t, manifest.CodeResourcesInvalid, fault.As(err).Code)
			require.Equal(t, []fault.Field{{Pointer: c.pointer, Reason: c.reason}}, fault.As(err).Fields)
		})
	}
}

func TestChosenSizesAreThoseOfTheService(t *testing.T) {
	m, err := manifest.Parse([]byte(withChoices(t)))
	require.NoError(t, err)
	stored, err := m.JSON()
	require.NoError(t, err)
	again, err := manifest.Parse(stored)
	require.NoError(t, err)
	require.Equal(t, m, again)
	in := manifest.Inputs{Parameters: map[string]any{"password_hash": goodHash}}
	defaults, err := manifest.Lower(m, in, manifest.Shape{})
	require.NoError(t, err)
	require.Equal(t, uint64(128<<20), defaults[0].GetResources().GetDiskBytes())
	require.Equal(t, uint64(8<<20), defaults[0].GetResources().GetShmBytes())
	chosen, err := manifest.Lower(m, in, manifest.Shape{
		CPUMillis: 500, MemoryBytes: 512 << 20, DiskBytes: 256 << 20, ShmBytes: 64 << 20,
		AcceleratorVendor: "nvidia", AcceleratorIDs: []string{"GPU-1", "GPU-2"},
	})
	require.NoError(t, err)
	two := 2
	require.Equal(t, manifest.Choice{&two, "", "", 500, 512, 256, 64, nil, nil, nil}, m.ChoiceOf(chosen))
	for _, ids := range [][]string{{"1", "2", "3", "4", "5"}, {}} {
		_, err = manifest.Lower(m, in, manifest.Shape{AcceleratorVendor: "nvidia", AcceleratorIDs: ids})
		require.Equal(t, manifest.CodeShapeRefused, fault.As(err).Code)
	}
}

// A hub whose online keys are stolen cannot leave the bounds either: a node reads the choices back and checks them.
func TestANodeAdmitsNoResourcesOutsideTheBounds(t *testing.T) {
	w := newWorld(t, "org/acme/", "acme")
	env, v := w.verify(t, withChoices(t))
	for name, c := range map[string]struct {
		change  func(*protocol.Resources)
		pointer string
	}{
		"as lowered":       {func(*protocol.Resources) {}, ""},
		"chosen":           {func(r *protocol.Resources) { r.DiskBytes, r.ShmBytes = 64<<20, 64<<20 }, ""},
		"more disk":        {func(r *protocol.Resources) { r.DiskBytes = 513 << 20 }, "/disk_bytes"},
		"no disk limit":    {func(r *protocol.Resources) { r.DiskBytes = 0 }, "/services/0/resources"},
		"more shm":         {func(r *protocol.Resources) { r.ShmBytes = 65 << 20 }, "/shm_bytes"},
		"the node's shm":   {func(r *protocol.Resources) { r.ShmBytes = 0 }, "/services/0/resources"},
		"less than a page": {func(r *protocol.Resources) { r.ShmBytes = 1 }, "/shm_bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			workload := admittedWorkload(t, env, v)
			c.change(workload.GetServices()[0].GetResources())
			err := manifest.Admits(v, workload)
			if c.pointer == "" {
				require.NoError(t, err)
				return
			}
			require.Equal(t, manifest.CodeNotAdmitted, fault.As(err).Code, "%v", err)
			require.Equal(t, strings.TrimPrefix(c.pointer, "/"), strings.TrimPrefix(pointers(fault.As(err))[0], "/"))
		})
	}
}

func TestRangesThatContradictTheManifestAreRefused(t *testing.T) {
	for pointer, change := range map[string][2]string{
		"/version/runtime_profile/resources/disk_mib": {
			"{min: 64, default: 128, max: 512}",
			"{min: 64, default: 32, max: 512}",
		},
		"/version/runtime_profile/resources/shm_mib/max":      {"default: 8, max: 64}", "default: 8, max: 100000}"},
		"/version/runtime_profile/resources/accelerators/max": {"default: 2, max: 4}", "default: 2, max: 65}"},
		"/version/runtime_profile/resources/accelerators": {
			"{min: 1, default: 2, max: 4}",
			"{min: 3, default: 2, max: 4}",
		},
	} {
		t.Run(pointer, func(t *testing.T) {
			require.Contains(t, withChoices(t), change[0])
			_, err := manifest.Parse([]byte(strings.Replace(withChoices(t), change[0], change[1], 1)))
			require.Equal(t, manifest.CodeInvalid, fault.As(err).Code, "%v", err)
			require.Equal(t, []string{pointer}, pointers(fault.As(err)))
		})
	}
}
