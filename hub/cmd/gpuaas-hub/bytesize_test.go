package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSizesAreReadAndWrittenInTheirUnits(t *testing.T) {
	for text, want := range map[string]byteSize{"0": 0, "17": 17, "5GiB": 5 << 30, "500MiB": 500 << 20, "1 TiB": 1 << 40} {
		var b byteSize
		require.NoError(t, b.Set(text))
		require.Equal(t, want, b)
		var again byteSize
		require.NoError(t, again.Set(b.String()))
		require.Equal(t, want, again)
	}
	for _, text := range []string{"", "GiB", "-1", "5GB", "9999999999TiB", "1.5GiB"} {
		var b byteSize
		require.Error(t, b.Set(text), text)
	}
	require.Equal(t, "5GiB", func() string { b := defaultRegistryMinFree; return b.String() }())
}
