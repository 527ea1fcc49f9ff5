package accelerator_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/accelerator"
	"github.com/gpuaas/gpuaas/agent/internal/cdi"
	"github.com/gpuaas/gpuaas/e2e/nvmltest"
	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// NVIDIA's toolkit takes only ids of the form that real ones have.
const (
	firstUUID  = "GPU-8f6d2e1a-73c1-4a0e-9d53-0c5b1f2a6d01"
	secondUUID = "GPU-8f6d2e1a-73c1-4a0e-9d53-0c5b1f2a6d02"
)

// The real child asks the library, and NVIDIA's own toolkit searches the driver's files in a directory.
func TestNVIDIAGPUsAreGivenWithTheirNodesAndLibraries(t *testing.T) {
	skip.Root(t, "device nodes")
	library := nvmltest.New(t)
	library.Setenv()
	library.Set(driver, strings.Replace(first, firstID, firstUUID, 1), strings.Replace(second, secondID, secondUUID, 1))
	root := t.TempDir()
	library.Driver(root, 2)
	i := start(t, accelerator.Config{Root: withDriver(t), NVML: nvmltest.Program(t), DriverRoot: root})
	edits, err := i.Edits(t.Context(), []string{secondUUID}, "org")
	require.NoError(t, err)
	require.Equal(t, []string{secondUUID}, edits.Claims)
	require.ElementsMatch(t, nvidiaNodes(1), edits.Nodes)
	libraries := filepath.Join(root, "usr/lib/x86_64-linux-gnu")
	cuda, nvml := filepath.Join(libraries, "libcuda.so.550.54.15"), filepath.Join(libraries, "libnvidia-ml.so.550.54.15")
	require.ElementsMatch(t, []cdi.Mount{
		{Source: cuda, Destination: cdi.LibraryDir + "/libcuda.so"},
		{Source: cuda, Destination: cdi.LibraryDir + "/libcuda.so.1"},
		{Source: cuda, Destination: cdi.LibraryDir + "/libcuda.so.550.54.15"},
		{Source: nvml, Destination: cdi.LibraryDir + "/libnvidia-ml.so.1"},
		{Source: nvml, Destination: cdi.LibraryDir + "/libnvidia-ml.so.550.54.15"},
		{Source: filepath.Join(root, "usr/bin/nvidia-smi"), Destination: "/usr/bin/nvidia-smi"},
	}, edits.Mounts)
	require.Equal(t, []string{cdi.LibraryDir}, edits.LibraryDirs)

	both, err := i.Edits(t.Context(), []string{firstUUID, secondUUID}, "org")
	require.NoError(t, err)
	require.ElementsMatch(t, nvidiaNodes(0, 1), both.Nodes)
	_, err = i.Edits(t.Context(), []string{secondUUID, firstUUID, secondUUID}, "org")
	require.Equal(t, agent.CodeAcceleratorUnusable, fault.As(err).Code, "none is given, and billed, twice")

	require.NoError(t, os.Remove(filepath.Join(root, "dev/nvidia1")))
	_, err = i.Edits(t.Context(), []string{secondUUID}, "org")
	require.Equal(t, agent.CodeAcceleratorUnusable, fault.As(err).Code, "a GPU without a node is not given")
}

func nvidiaNodes(minors ...uint32) []cdi.Node {
	nodes := []cdi.Node{
		{Path: "/dev/nvidiactl", Major: 195, Minor: 255},
		{Path: "/dev/nvidia-uvm", Major: 511},
		{Path: "/dev/nvidia-uvm-tools", Major: 511, Minor: 1},
	}
	for _, minor := range minors {
		nodes = append(nodes, cdi.Node{
			Path: "/dev/nvidia" + strconv.FormatUint(uint64(minor), 10), Major: 195, Minor: minor,
		})
	}
	return nodes
}

func TestAGPUInMIGModeIsNotGivenWhole(t *testing.T) {
	library := nvmltest.New(t)
	library.Setenv()
	library.Set(driver, first, "mig MIG-0aa4 11008 1g.12gb")
	i := start(t, accelerator.Config{Root: withDriver(t), NVML: nvmltest.Program(t)})
	_, err := i.Edits(t.Context(), []string{firstID}, "org")
	require.Equal(t, agent.CodeAcceleratorUnusable, fault.As(err).Code)
	require.ErrorContains(t, err, "MIG")
}

// A MIG device is given by the GPU's node and the nodes of its two instances, whose numbers the kernel module says in
// /proc: a mount that only the child has stands in for that.
func TestAMIGDeviceIsGivenWithItsInstances(t *testing.T) {
	skip.Root(t, "device nodes and mounts")
	const firstMIG, secondMIG = "MIG-0aa4c2d1-5b1e-4c61-8f0a-1d2e3f405161", "MIG-0aa4c2d1-5b1e-4c61-8f0a-1d2e3f405162"
	library := nvmltest.New(t)
	library.Setenv()
	library.Set(driver, strings.Replace(first, firstID, firstUUID, 1), "mig "+firstMIG+" 11008 1g.12gb",
		"mig "+secondMIG+" 11008 1g.12gb")
	root, proc := t.TempDir(), t.TempDir()
	library.Driver(root, 1)
	require.NoError(t, os.Mkdir(filepath.Join(root, "dev/nvidia-caps"), 0o755))
	require.NoError(t, os.Mkdir(filepath.Join(proc, "nvidia-caps"), 0o755))
	var minors strings.Builder
	for n, instance := range []string{"gi1", "gi1/ci0", "gi2", "gi2/ci0"} {
		_, _ = fmt.Fprintf(&minors, "gpu0/%s/access %d\n", instance, n+21)
		require.NoError(t, unix.Mknod(filepath.Join(root, fmt.Sprintf("dev/nvidia-caps/nvidia-cap%d", n+21)),
			unix.S_IFCHR|0o600, int(unix.Mkdev(237, uint32(n+21)))))
	}
	require.NoError(t, os.WriteFile(filepath.Join(proc, "nvidia-caps/mig-minors"), []byte(minors.String()), 0o600))
	child := filepath.Join(t.TempDir(), "gpuaas-nvml")
	require.NoError(t, os.WriteFile(child, []byte("#!/bin/sh\nexec unshare --mount sh -c 'mount --bind "+proc+
		" /proc/driver && exec "+nvmltest.Program(t)+" \"$@\"' sh \"$@\"\n"), 0o700))

	i := start(t, accelerator.Config{Root: withDriver(t), NVML: child, DriverRoot: root})
	edits, err := i.Edits(t.Context(), []string{secondMIG}, "org")
	require.NoError(t, err)
	require.Equal(t, []string{secondMIG}, edits.Claims)
	require.ElementsMatch(t, append(nvidiaNodes(0),
		cdi.Node{Path: "/dev/nvidia-caps/nvidia-cap23", Major: 237, Minor: 23},
		cdi.Node{Path: "/dev/nvidia-caps/nvidia-cap24", Major: 237, Minor: 24}), edits.Nodes)
	both, err := i.Edits(t.Context(), []string{secondMIG, firstMIG}, "org")
	require.NoError(t, err)
	require.Len(t, both.Nodes, len(edits.Nodes)+2, "the GPU's own node is there once")
}

// Whatever the child says, a container gets nothing else than the driver's devices and files.
func TestWhatTheChildSaysIsChecked(t *testing.T) {
	skip.Root(t, "device nodes")
	library := nvmltest.New(t)
	root := t.TempDir()
	library.Driver(root, 1)
	secret := filepath.Join(root, "usr/bin/secret")
	require.NoError(t, os.WriteFile(secret, nil, 0o600))
	outside := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(outside, nil, 0o644))
	require.NoError(t, os.Symlink(outside, filepath.Join(root, "usr/bin/link")))
	socket := filepath.Join(root, "usr/bin/daemon.sock")
	require.NoError(t, os.Mkdir(socket, 0o755))
	program := filepath.Join(root, "usr/bin/nvidia-smi")
	part := filepath.Join(root, "dev/nvidia-caps/nvidia-cap21")
	require.NoError(t, os.Mkdir(filepath.Dir(part), 0o755))
	require.NoError(t, unix.Mknod(part, unix.S_IFCHR|0o600, int(unix.Mkdev(237, 21))))
	nodes := []cdi.Node{
		{Path: "/dev/nvidia0", Major: 195},
		{Path: "/dev/nvidia-caps/nvidia-cap21", Major: 237, Minor: 21},
	}
	node := func(path, host string) specs.ContainerEdits {
		return specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: path, HostPath: host}}}
	}
	mount := func(host, path string) specs.ContainerEdits {
		return specs.ContainerEdits{Mounts: []*specs.Mount{{HostPath: host, ContainerPath: path}}}
	}
	hook := func(args ...string) specs.ContainerEdits {
		return specs.ContainerEdits{Hooks: []*specs.Hook{{HookName: "createContainer", Path: "/bin/sh", Args: args}}}
	}
	for name, c := range map[string]struct {
		edits   specs.ContainerEdits
		refused bool
	}{
		"a node":              {node("/dev/nvidia0", filepath.Join(root, "dev/nvidia0")), false},
		"a MIG device":        {node("/dev/nvidia-caps/nvidia-cap21", part), false},
		"memory":              {node("/dev/mem", ""), false},
		"a stranger as a GPU": {node("/dev/nvidia0", "/dev/null"), true}, // a node that each machine has
		"no node":             {node("/dev/nvidia0", ""), true},
		"a program":           {mount(program, "/usr/bin/nvidia-smi"), false},
		"a directory":         {mount(socket, "/usr/bin/daemon.sock"), false},
		"into /proc":          {mount(program, "/proc/sys/kernel/core_pattern"), false},
		"a secret":            {mount(secret, "/usr/bin/secret"), true},
		"a file elsewhere":    {mount(outside, "/usr/bin/x"), true},
		"a link to elsewhere": {mount(filepath.Join(root, "usr/bin/link"), "/usr/bin/x"), true},
		"a way out":           {mount(root+"/../x", "/usr/bin/x"), true},
		"a hook": {
			hook("nvidia-cdi-hook", "create-symlinks", "--link", "nvidia-smi::/usr/bin/smi"), false,
		},
		"another hook": {hook("nvidia-cdi-hook", "chmod", "--path", "/"), true},
		"no hook":      {hook("sh"), true},
	} {
		edits, err := cdi.FromSpec(&specs.Spec{ContainerEdits: c.edits}, nil, root)
		if c.refused {
			require.Error(t, err, name)
			continue
		}
		require.NoError(t, err, name)
		require.NoError(t, edits.Check(), name)
		require.Subset(t, nodes, edits.Nodes, name)
		require.Equal(t, strings.HasPrefix(name, "a ") && len(c.edits.DeviceNodes) > 0, len(edits.Nodes) == 1, name)
	}
	_, err := cdi.FromSpec(&specs.Spec{}, []string{"GPU-unknown"}, root)
	require.ErrorContains(t, err, "does not describe")
}

func FuzzSpecsNeverReachMoreThanTheDriver(f *testing.F) {
	f.Add([]byte(`{"containerEdits":{"mounts":[{"hostPath":"/etc/passwd","containerPath":"/usr/lib/libx.so.1"}],` +
		`"hooks":[{"args":["h","create-symlinks","--link","libx.so.1::/usr/lib/libx.so"]},` +
		`{"args":["h","update-ldcache","--folder","/usr/lib"]}]}}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		spec := &specs.Spec{}
		if json.Unmarshal(raw, spec) != nil {
			return
		}
		edits, err := cdi.FromSpec(spec, nil, "/")
		if err == nil {
			require.NoError(t, edits.Check())
		}
	})
}
