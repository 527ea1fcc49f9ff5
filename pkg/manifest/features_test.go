package manifest_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/pkg/manifest/manifesttest"
)

func TestAManifestNeedsTheFeaturesOfTheKeysThatItUses(t *testing.T) {
	plain, err := manifest.Parse([]byte(manifesttest.Document("web", "org/acme/web/app@sha256:"+strings.Repeat("1", 64))))
	require.NoError(t, err)
	require.Equal(t, []string{manifest.SchemaV1}, plain.Features())
	withConfig := parsed(t)
	require.Equal(t, []string{manifest.FeatureConfig, manifest.SchemaV1}, withConfig.Features())
	for _, m := range []manifest.Manifest{plain, withConfig} {
		stored, err := m.JSON()
		require.NoError(t, err)
		again, err := manifest.FromJSON(stored)
		require.NoError(t, err)
		require.Equal(t, m.Features(), again.Features(), "what is filled in adds no feature")
		require.Subset(t, manifest.KnownFeatures(), m.Features())
	}
}

func TestDocumentOfAnotherSchemaIsToldApartFromABrokenOne(t *testing.T) {
	for name, c := range map[string]struct {
		from, to string
		newer    bool
	}{
		"a later key":    {"category: notebook", "category: notebook\n  holograms: true", true},
		"a later value":  {"kind: http", "kind: telepathy", true},
		"a later schema": {"schema: gpuaas.app/v1", "schema: gpuaas.app/v2", true},
		"no schema":      {"schema: gpuaas.app/v1\n", "", true},
		"no YAML":        {"schema: gpuaas.app/v1", "schema: [", false},
		"contradiction":  {"{min: 250, default: 1000, max: 8000}", "{min: 250, default: 1000, max: 500}", false},
	} {
		t.Run(name, func(t *testing.T) {
			require.Contains(t, document(t), c.from)
			_, err := manifest.Parse([]byte(strings.Replace(document(t), c.from, c.to, 1)))
			require.Error(t, err)
			if c.newer {
				require.ErrorIs(t, err, manifest.ErrSchema)
			} else {
				require.NotErrorIs(t, err, manifest.ErrSchema)
			}
		})
	}
}
