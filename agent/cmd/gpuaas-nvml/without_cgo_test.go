//go:build !cgo

package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAProgramWithoutCgoSaysSoInsteadOfFindingNoGPUs(t *testing.T) {
	for _, args := range [][]string{nil, {"cdi", "GPU-a"}} {
		_, err := answer("/", args)
		require.ErrorIs(t, err, errWithoutCgo, "%q", args)
	}
	require.ErrorIs(t, runMPS("/", "GPU-a", t.TempDir(), "50", "1024"), errWithoutCgo)
}
