package cdi_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpuaas/gpuaas/agent/internal/cdi"
)

// The name of a directory beside the driver's may begin with that of the driver's.
func TestAFileBesideTheDriversRootIsNotGiven(t *testing.T) {
	dir := t.TempDir()
	root, beside := filepath.Join(dir, "driver"), filepath.Join(dir, "driver-of-before")
	file := filepath.Join(root, "smi")
	for _, path := range []string{file, filepath.Join(beside, "smi")} {
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, nil, 0o644))
	}
	link := filepath.Join(root, "link")
	require.NoError(t, os.Symlink(filepath.Join(beside, "smi"), link))
	given := func(path string) error {
		_, err := cdi.FromSpec(&specs.Spec{ContainerEdits: specs.ContainerEdits{
			Mounts: []*specs.Mount{{HostPath: path, ContainerPath: "/usr/bin/smi"}},
		}}, nil, root)
		return err
	}
	require.NoError(t, given(file))
	require.ErrorContains(t, given(filepath.Join(beside, "smi")), "not below the driver's root")
	require.ErrorContains(t, given(link), "not below the driver's root")
}

// By the time a container starts, a link may lead to another file than the one that was checked.
func TestTheFileThatWasCheckedIsGivenAndNotALinkToIt(t *testing.T) {
	root, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	file, link := filepath.Join(root, "libcuda.so.550"), filepath.Join(root, "libcuda.so.1")
	require.NoError(t, os.WriteFile(file, nil, 0o644))
	require.NoError(t, os.Symlink("libcuda.so.550", link))
	edits, err := cdi.FromSpec(&specs.Spec{ContainerEdits: specs.ContainerEdits{
		Mounts: []*specs.Mount{{HostPath: link, ContainerPath: "/usr/lib/libcuda.so.1"}},
	}}, nil, root)
	require.NoError(t, err)
	require.Equal(t, []cdi.Mount{{Source: file, Destination: "/usr/lib/libcuda.so.1"}}, edits.Mounts)
}
