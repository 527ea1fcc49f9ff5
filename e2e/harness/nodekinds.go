package harness

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// NodeKind is a kind of node, by its accelerators.
type NodeKind struct {
	Name string
	// GPUs of the model are granted to an instance, of those that the machine has.
	GPUs  int32
	Model string

	machine func(w *Testbed, c *devcluster.AgentConfig)
	// devices are the device nodes of these GPUs; foreign is the number of another GPU's.
	devices func(ids []string) []string
	foreign func(ids []string) uint64
}

// NodeKinds are nodes without GPUs, with AMD's and, where make build found a C compiler, with NVIDIA's.
func NodeKinds(t *testing.T) []NodeKind {
	t.Helper()
	kinds := []NodeKind{{
		Name:    "cpu",
		machine: func(*Testbed, *devcluster.AgentConfig) {},
		devices: func([]string) []string { return nil },
		foreign: func([]string) uint64 { return unix.Mkdev(226, 128) },
	}, {
		Name: "amd", GPUs: 1, Model: "AMD Radeon RX 7900",
		machine: func(w *Testbed, c *devcluster.AgentConfig) { w.Machine(c, "radeon.txtar") },
		devices: func([]string) []string { return []string{"dri/renderD128", "kfd"} },
		foreign: func([]string) uint64 { return unix.Mkdev(226, 129) },
	}}
	if !HasNVML(t) {
		t.Run("nvidia", NeedsNVML)
		return kinds
	}
	return append(kinds, NodeKind{
		Name: "nvidia", GPUs: 2, Model: NVIDIAModel, machine: (*Testbed).NVIDIAMachine,
		devices: func(ids []string) []string {
			found := []string{"nvidia-uvm", "nvidia-uvm-tools", "nvidiactl"}
			for _, id := range ids {
				found = append(found, "nvidia"+string(id[len(id)-1]))
			}
			return found
		},
		foreign: func(ids []string) uint64 {
			minor := slices.IndexFunc(NVIDIAGPUs(), func(id string) bool { return !slices.Contains(ids, id) })
			return unix.Mkdev(195, uint32(minor))
		},
	})
}

// StartNode starts a node of the kind, with a containerd of its own and further arguments, that can be rebooted. The
// testbed that it returns has it as its agent.
func (w *Testbed) StartNode(kind NodeKind, args ...string) *Testbed {
	w.T.Helper()
	w.StartContainerdIn(kind.Name)
	c := w.AgentConfig(kind.Name)
	c.ExtraArgs = append(c.ExtraArgs, args...)
	w.Rebootable(&c)
	kind.machine(w, &c)
	w.Agent = w.StartAgent(c)
	own := *w
	return &own
}

// AllocateOn reserves what an instance needs on the testbed's node of the kind.
func (w *Testbed) AllocateOn(kind NodeKind) {
	w.T.Helper()
	if kind.GPUs == 0 {
		w.Allocate(w.Agent)
		return
	}
	w.Allocation = w.AllocateGPUs(w.Agent.Ready.NodeID, kind.Model, kind.GPUs, 512)
}

// RequireDevices checks that the service of an instance has the device nodes of the allocation's GPUs, the other
// services have none, and the kernel refuses the service another GPU, and the others those of the service.
func (w *Testbed) RequireDevices(kind NodeKind, i client.AppInstance, service string) {
	w.T.Helper()
	const refused = "Operation not permitted"
	found := w.Running(i)
	own, granted := found[service], kind.devices(w.Allocation.AcceleratorIds)
	require.ElementsMatch(w.T, granted, w.deviceNodes(own))
	require.Contains(w.T, w.openDevice(own, kind.foreign(w.Allocation.AcceleratorIds)), refused, "another GPU")
	require.NotContains(w.T, w.openDevice(own, unix.Mkdev(1, 3)), refused, "/dev/null")
	delete(found, service)
	for _, other := range found {
		require.Empty(w.T, w.deviceNodes(other))
	}
	for _, name := range granted {
		var st unix.Stat_t
		require.NoError(w.T, unix.Stat(filepath.Join(dev(own), name), &st))
		require.NotContains(w.T, w.openDevice(own, st.Rdev), refused, name)
		for _, other := range found {
			require.Contains(w.T, w.openDevice(other, st.Rdev), refused, "%s is another service's", name)
		}
	}
}

// RequireNoDevices checks that no container of the node has device nodes.
func (w *Testbed) RequireNoDevices() {
	w.T.Helper()
	left, err := filepath.Glob("/dev/gpuaas-" + w.Agent.Config.ContainerdNamespace + "/*")
	require.NoError(w.T, err)
	require.Empty(w.T, left)
}

func dev(c ServiceContainer) string { return fmt.Sprintf("/proc/%d/root/dev", c.PID) }

// deviceNodes are the names of a container's device nodes beside those that every container has (OCI runtime
// specification, default devices).
func (w *Testbed) deviceNodes(c ServiceContainer) (names []string) {
	w.T.Helper()
	require.NoError(w.T, filepath.WalkDir(dev(c), func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		// The directory has plain files, on which the devices are mounted.
		info, err := os.Lstat(path)
		if err == nil && info.Mode()&os.ModeCharDevice != 0 {
			names = append(names, strings.TrimPrefix(path, dev(c)+"/"))
		}
		return err
	}))
	everywhere := []string{"null", "zero", "full", "random", "urandom", "tty", "pts/ptmx"}
	require.Subset(w.T, names, everywhere)
	return slices.DeleteFunc(names, func(n string) bool { return slices.Contains(everywhere, n) })
}

// openDevice is what the kernel answers to a process in the cgroup of a container that opens a device.
func (w *Testbed) openDevice(c ServiceContainer, number uint64) string {
	w.T.Helper()
	dir, err := os.MkdirTemp("/dev", "gpuaas-e2e-")
	require.NoError(w.T, err)
	defer func() { require.NoError(w.T, os.RemoveAll(dir)) }()
	node := filepath.Join(dir, "node")
	require.NoError(w.T, unix.Mknod(node, unix.S_IFCHR|0o600, int(number)))
	below := filepath.Join(w.Agent.Config.CgroupParent, MemberOf(c.ID), c.ID)
	cgroup := filepath.Join("/sys/fs/cgroup", below)
	if _, err := os.Stat(cgroup); err != nil {
		cgroup = filepath.Join("/sys/fs/cgroup/devices", below)
	}
	out, _ := exec.CommandContext(w.Ctx, "sh", "-c", "echo $$ > "+cgroup+"/cgroup.procs && : < "+node).CombinedOutput()
	return string(out)
}
