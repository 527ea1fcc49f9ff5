package manifest_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// withSharing is a version whose instances may share an accelerator by MPS.
func withSharing(t *testing.T) string {
	t.Helper()
	const accelerators = "accelerators: {min: 1, default: 2, max: 4}"
	require.Contains(t, withChoices(t), accelerators)
	return strings.Replace(withChoices(t), accelerators, accelerators+"\n      accelerator_sharing: [mps]", 1)
}

func TestSharingIsWhatManifestAndTenantBothAllow(t *testing.T) {
	m, err := manifest.Parse([]byte(withSharing(t)))
	require.NoError(t, err)
	require.Contains(t, m.Features(), manifest.FeatureSharing)
	one, two := 1, 2
	for name, c := range map[string]struct {
		choice manifest.Choice
		at     string
	}{
		"MPS":        {manifest.Choice{AcceleratorSharing: protocol.SharingMPS, Accelerators: &one}, ""},
		"not shared": {manifest.Choice{Accelerators: &two}, ""},
		"time slices": {
			manifest.Choice{AcceleratorSharing: protocol.SharingTimeSlices, Accelerators: &one},
			"accelerator_sharing",
		},
		"two slices":      {manifest.Choice{AcceleratorSharing: protocol.SharingMPS, Accelerators: &two}, "accelerators"},
		"the default two": {manifest.Choice{AcceleratorSharing: protocol.SharingMPS}, "accelerators"},
	} {
		err := m.CheckChoice(c.choice)
		if c.at == "" {
			require.NoError(t, err, name)
			continue
		}
		require.Equal(t, []string{"/resources/" + c.at}, pointers(fault.As(err)), name)
	}
	in := manifest.Inputs{Parameters: map[string]any{"password_hash": goodHash}}
	shape := manifest.Shape{
		AcceleratorVendor: "nvidia", AcceleratorIDs: []string{"GPU-1-mps2-0"}, AcceleratorSharing: protocol.SharingMPS,
	}
	services, err := manifest.Lower(m, in, shape)
	require.NoError(t, err)
	require.Equal(t, protocol.SharingMPS, m.ChoiceOf(services).AcceleratorSharing, "an upgrade keeps it")
	shape.AcceleratorSharing = protocol.SharingTimeSlices
	_, err = manifest.Lower(m, in, shape)
	require.Equal(t, manifest.CodeShapeRefused, fault.As(err).Code)
}

// A hub whose online keys are stolen cannot put a workload beside others that its publisher wants alone.
func TestANodeAdmitsNoSharingThatThePublisherDidNotAllow(t *testing.T) {
	w := newWorld(t, "org/acme/", "acme")
	for yaml, admitted := range map[string]bool{withSharing(t): true, withChoices(t): false} {
		env, v := w.verify(t, yaml)
		workload := admittedWorkload(t, env, v)
		s := workload.GetServices()[0]
		m, err := manifest.Parse([]byte(yaml))
		require.NoError(t, err)
		for _, variant := range m.Version.RuntimeProfile.ImageVariants {
			if variant.Accelerator == manifest.AcceleratorNVIDIA {
				s.Image, s.ImageVariant = variant.ImageRef, variant.Name
			}
		}
		s.Resources.AcceleratorIds, s.Resources.AcceleratorSharing = []string{"GPU-1-mps2-0"}, protocol.SharingMPS
		err = manifest.Admits(v, workload)
		if admitted {
			require.NoError(t, err)
			continue
		}
		require.Equal(t, manifest.CodeNotAdmitted, fault.As(err).Code, "%v", err)
	}
}

func TestSharingThatNoVariantCanDoIsRefused(t *testing.T) {
	const at = "/version/runtime_profile/resources/accelerator_sharing"
	_, err := manifest.Parse([]byte(strings.Replace(withSharing(t), "min: 1, default: 2, max: 4",
		"min: 2, default: 2, max: 4", 1)))
	require.Equal(t, []string{at}, pointers(fault.As(err)))
	_, err = manifest.Parse([]byte(strings.Replace(withSharing(t), "[mps]", "[mig]", 1)))
	require.Equal(t, manifest.CodeMalformed, fault.As(err).Code)
}
