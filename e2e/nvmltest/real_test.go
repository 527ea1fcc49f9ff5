package nvmltest

import (
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/pkg/appkit"
)

func TestTheComputersImageHasTheLibrariesOnce(t *testing.T) {
	if _, err := exec.LookPath("gcc"); err != nil {
		skip.Lacking(t, "there is no gcc to compile the program: install gcc")
	}
	program, err := exec.LookPath("ls")
	require.NoError(t, err)
	files := ComputerFiles(t, program)
	require.Equal(t, "/compute", files[0].Path)
	count := func(name string) (n int) {
		for _, f := range files {
			if filepath.Base(f.Path) == name {
				n++
			}
		}
		return n
	}
	require.Equal(t, 1, count("libc.so.6"), "what both need")
	require.True(t, slices.ContainsFunc(files, func(f appkit.File) bool {
		return filepath.Base(f.Path) == "libselinux.so.1"
	}), "what ls alone needs: %v", files)
}

func TestTheComputersOutputNamesItsGPU(t *testing.T) {
	RequireComputed(t, "computed on 1 GPUs: 0ed6d948-56d2-24dc-bc52-3c0586c63659 150109880320 NVIDIA H200\n",
		"GPU-0ed6d948-56d2-24dc-bc52-3c0586c63659", 150_754_820_096)
}
