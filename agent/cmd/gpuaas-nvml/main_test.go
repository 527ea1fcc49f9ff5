package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// What the driver is asked is tested with the program itself, in agent/internal/accelerator: it needs cgo.
func TestQuestionsThatAreNoneAreRefused(t *testing.T) {
	for _, args := range [][]string{{"cdi"}, {"mps"}, {"mps", "GPU-a", "dir", "50"}, {"other", "GPU-a"}} {
		_, err := answer(t.TempDir(), args)
		require.ErrorContains(t, err, "usage: gpuaas-nvml", "%q", args)
	}
}
