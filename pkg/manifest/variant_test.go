package manifest_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
)

func TestVariantSuitsModelMemoryAndDriver(t *testing.T) {
	const gib = uint64(1) << 30
	between := manifest.VersionRange{Min: "550.54", Max: "570"}
	for name, c := range map[string]struct {
		v      manifest.Variant
		model  string
		memory uint64
		driver string
		suits  bool
	}{
		"asks for nothing":          {manifest.Variant{}, "", 0, "", true},
		"a model":                   {manifest.Variant{Models: []string{"A100*", "H200*"}}, "H200 NVL", gib, "", true},
		"case does not count":       {manifest.Variant{Models: []string{"mi3??x*"}}, "MI300X OAM", gib, "", true},
		"a star passes a slash":     {manifest.Variant{Models: []string{"Radeon*"}}, "Radeon Pro W6800/W6900", gib, "", true},
		"part of a model":           {manifest.Variant{Models: []string{"H200"}}, "H200 NVL", gib, "", false},
		"another model":             {manifest.Variant{Models: []string{"A100*"}}, "H200", gib, "", false},
		"memory, exactly":           {manifest.Variant{MinMemoryMiB: 1024}, "", gib, "", true},
		"too little memory":         {manifest.Variant{MinMemoryMiB: 1025}, "", gib, "", false},
		"driver within":             {manifest.Variant{Driver: between}, "", 0, "560.35.03", true},
		"driver at the lower end":   {manifest.Variant{Driver: between}, "", 0, "550.54", true},
		"driver below":              {manifest.Variant{Driver: between}, "", 0, "550.9", false},
		"driver of the upper end":   {manifest.Variant{Driver: between}, "", 0, "570.86.15", true},
		"driver above":              {manifest.Variant{Driver: between}, "", 0, "571", false},
		"driver with fewer numbers": {manifest.Variant{Driver: between}, "", 0, "551", true},
		"driver with a suffix":      {manifest.Variant{Driver: manifest.VersionRange{Min: "6.10"}}, "", 0, "6.12-1012", true},
		"no driver":                 {manifest.Variant{Driver: manifest.VersionRange{Max: "9"}}, "", 0, "", false},
		"a driver without numbers":  {manifest.Variant{Driver: manifest.VersionRange{Max: "9"}}, "", 0, "unknown", false},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, c.suits, c.v.Suits(c.model, c.memory, c.driver))
		})
	}
}

// withVariants puts image variants before that for NVIDIA, each in one line without its image.
func withVariants(t *testing.T, variants ...string) string {
	t.Helper()
	before, after, found := strings.Cut(document(t), "      - name: cuda\n")
	require.True(t, found)
	for _, v := range variants {
		before += "      - {image_ref: \"org/acme/jupyter/runtime-cuda@sha256:" + strings.Repeat("3", 64) + "\", " + v + "}\n"
	}
	return before + "      - name: cuda\n" + after
}

func TestVariantsOfOneVendorAreToldApartByTheirAccelerators(t *testing.T) {
	m, err := manifest.Parse([]byte(withVariants(t,
		"name: hopper, accelerator: nvidia, models: [\"H?00*\"], driver: {min: \"550\"}",
		"name: large, accelerator: nvidia, min_memory_mib: 81000",
	)))
	require.NoError(t, err)
	require.Contains(t, m.Features(), manifest.FeatureVariants)
	in := manifest.Inputs{Parameters: map[string]any{"password_hash": goodHash}}
	image := func(variant string) string {
		services, err := manifest.Lower(m, in, manifest.Shape{
			Variant: variant, AcceleratorVendor: "nvidia", AcceleratorIDs: []string{"GPU-1"},
		})
		require.NoError(t, err)
		require.Equal(t, variant, services[0].GetImageVariant())
		return services[0].GetImage()
	}
	require.Equal(t, image("hopper"), image("large"))
	require.NotEqual(t, image("hopper"), image("cuda"))
	_, err = manifest.Lower(m, in, manifest.Shape{Variant: "hopper"})
	require.Error(t, err, "it is for accelerators")

	for name, c := range map[string]struct{ pointer, variant string }{
		"one that is never reached": {
			"/version/runtime_profile/image_variants/2/accelerator", "name: all, accelerator: nvidia",
		},
		"none has no model": {
			"/version/runtime_profile/image_variants/1/accelerator", "name: odd, accelerator: none, models: [\"H200\"]",
		},
		"a slash in a pattern": {
			"/version/runtime_profile/image_variants/1/models/0", "name: odd, accelerator: nvidia, models: [\"a/b\"]",
		},
		"a class in a pattern": {
			"/version/runtime_profile/image_variants/1/models/0", "name: odd, accelerator: nvidia, models: [\"H[12]00\"]",
		},
		"a driver that is no version": {
			"/version/runtime_profile/image_variants/1/driver/min", "name: odd, accelerator: nvidia, driver: {min: latest}",
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := manifest.Parse([]byte(withVariants(t, c.variant)))
			require.Error(t, err)
			require.Contains(t, fault.As(err).Error()+fieldsOf(err), c.pointer)
		})
	}
}

func fieldsOf(err error) (out string) {
	for _, f := range fault.As(err).Fields {
		out += " " + f.Pointer
	}
	return out
}
