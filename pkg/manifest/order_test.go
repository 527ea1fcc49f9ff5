package manifest_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/pkg/manifest"
)

func TestVersionsAreOrderedAsPeopleReadThem(t *testing.T) {
	inOrder := []string{
		"0.9", "1.0.0-alpha", "1.0.0-alpha.1", "1.0.0-alpha.beta", "1.0.0-beta.2", "1.0.0-beta.11",
		"1.0.0-rc.1", "1.0.0", "1.0.1", "1.2", "1.9.3", "1.10.0", "2", "2026.11.22",
	}
	for i, older := range inOrder {
		for j, newer := range inOrder {
			require.Equal(t, i < j, manifest.Older(older, newer), "%s before %s", older, newer)
		}
	}
	for _, same := range [][2]string{{"1", "1.0.0"}, {"v1.2", "1.2"}, {"1.0+build7", "1.0.0+build9"}, {"1.01", "1.1"}} {
		require.False(t, manifest.Older(same[0], same[1]), same)
		require.False(t, manifest.Older(same[1], same[0]), same)
	}
}

func TestTheOrderOfVersionsIsAnOrder(t *testing.T) {
	version := rapid.StringMatching(`[A-Za-z0-9]([A-Za-z0-9._+-]{0,8}[A-Za-z0-9])?`)
	rapid.Check(t, func(t *rapid.T) {
		a, b, c := version.Draw(t, "a"), version.Draw(t, "b"), version.Draw(t, "c")
		require.False(t, manifest.Older(a, a))
		require.False(t, manifest.Older(a, b) && manifest.Older(b, a))
		if manifest.Older(a, b) && manifest.Older(b, c) {
			require.True(t, manifest.Older(a, c))
		}
	})
}
