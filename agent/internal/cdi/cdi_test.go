package cdi_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/cdi"
)

func TestOnlyComputeNodesAndFilesOfDriversAreGiven(t *testing.T) {
	good := cdi.Edits{
		Claims: []string{"GPU-1"},
		Nodes: []cdi.Node{
			{Path: "/dev/kfd", Major: 235},
			{Path: "/dev/dri/renderD128", Major: 226, Minor: 128},
			{Path: "/dev/nvidia-caps/nvidia-cap21", Major: 237, Minor: 21},
		},
		Mounts:      []cdi.Mount{{Source: "/driver/lib/libcuda.so.550", Destination: "/usr/lib/libcuda.so.1"}},
		LibraryDirs: []string{"/usr/lib"},
	}
	require.NoError(t, good.Check())
	require.NoError(t, cdi.Edits{}.Check())
	for _, node := range []string{
		"/dev/mem", "/dev/dri/card0", "/dev/nvidia-modeset", "/dev/dri/../mem", "/dev/nvidia0/../mem", "dev/kfd",
		"/dev/kfd\n", "/dev/sda", "/tmp/dev/kfd",
	} {
		require.Error(t, cdi.Edits{Nodes: []cdi.Node{{Path: node}}}.Check(), node)
	}
	require.Error(t, cdi.Edits{Nodes: []cdi.Node{{Path: "/dev/kfd"}, {Path: "/dev/kfd", Minor: 1}}}.Check(), "twice")
	for _, destination := range []string{
		"/", "/usr", "/proc/sys/kernel/core_pattern", "/sys/fs/x", "/dev/mem", "/run/gpuaas/config.json",
		"/usr/../etc/passwd", "usr/lib/x", "", "/usr/lib/",
	} {
		require.Error(t, cdi.Edits{Mounts: []cdi.Mount{{Source: "/x", Destination: destination}}}.Check(), destination)
	}
	require.Error(t, cdi.Edits{Mounts: []cdi.Mount{{Source: "x", Destination: "/usr/lib/x"}}}.Check())
	require.Error(t, cdi.Edits{LibraryDirs: []string{"/usr/lib:/tmp"}}.Check())
	require.Error(t, cdi.Edits{Mounts: make([]cdi.Mount, 1000)}.Check())
}
