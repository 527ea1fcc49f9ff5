package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/cdi"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	// deviceDirPrefix, followed by the containerd namespace, is where the containers' device nodes lie. The file system of
	// /dev allows device nodes on every machine, is seen by agent and containerd alike, and is empty after a reboot.
	deviceDirPrefix = "/dev/gpuaas-"
	// libraryPath is where programs search libraries before the system's directories (ld.so(8)).
	libraryPath = "LD_LIBRARY_PATH"
	// visibleDevices asks NVIDIA's runtime hook for GPUs where the machine has that hook; noDevices keeps it from acting.
	visibleDevices = "NVIDIA_VISIBLE_DEVICES"
	noDevices      = "void"
)

// checkDevices refuses a container whose edits are not for what its service names: a caller forgot one or the other.
func (s Spec) checkDevices() error {
	for _, id := range s.Service.GetResources().GetAcceleratorIds() {
		if !slices.Contains(s.Devices.Claims, id) {
			return badSpec("The run has no edits for accelerator " + id + ".")
		}
	}
	if len(s.Service.GetResources().GetAcceleratorIds()) == 0 && len(s.Devices.Nodes)+len(s.Devices.Claims) > 0 {
		return badSpec("The run has edits for accelerators that its service does not name.")
	}
	if err := s.Devices.Check(); err != nil {
		return fault.New(fault.Unprocessable, codeBadWorkload, "The run's edits for accelerators are refused.",
			err).Permanent()
	}
	return nil
}

// checkClaims refuses accelerators that another container holds, whatever its status. The caller holds claims until the
// container is recorded: the records are the one place that says who holds what.
func (r *Runtime) checkClaims(ctx context.Context, spec Spec) error {
	records, err := r.client.ContainerService().List(ctx)
	if err != nil {
		return fmt.Errorf("list containers: %w", err)
	}
	for _, c := range records {
		for _, id := range spec.Devices.Claims {
			if _, held := c.Labels[labelAccelerator+id]; held && c.ID != spec.ID {
				return fault.New(fault.Conflict, agent.CodeAcceleratorInUse, "Another container of this node holds accelerator "+
					id+".", nil)
			}
		}
	}
	return nil
}

// acceleratorsOf are the accelerators that a container holds, by its labels.
func acceleratorsOf(labels map[string]string) []string {
	var ids []string
	for name := range labels {
		if id, is := strings.CutPrefix(name, labelAccelerator); is {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// makeNodes makes a container's own device nodes. The host's cannot be used: their groups do not exist in the user
// namespace. Every user of the container may open them; on the host, only the container's root reaches the directory.
func (r *Runtime) makeNodes(spec Spec) error {
	if len(spec.Devices.Nodes) == 0 {
		return nil
	}
	dir := r.files(spec.ID).devices
	err := os.MkdirAll(r.cfg.DeviceDir, 0o711) //nolint:gosec // remapped containers walk through it
	if err == nil {
		err = os.Chmod(r.cfg.DeviceDir, 0o711) //nolint:gosec // the unit's mask of file modes would keep them out
	}
	if err != nil {
		return directoryFault(r.cfg.DeviceDir, err)
	}
	// A crash may have left nodes with other numbers.
	if err := errors.Join(os.RemoveAll(dir), os.Mkdir(dir, 0o700)); err != nil {
		return directoryFault(dir, err)
	}
	if r.host.userNamespaces {
		if err := os.Chown(dir, int(r.cfg.UIDMapBase), int(r.cfg.UIDMapBase)); err != nil {
			return directoryFault(dir, err)
		}
	}
	for _, n := range spec.Devices.Nodes {
		path := nodeFile(dir, n)
		err := unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(n.Major, n.Minor)))
		if err == nil {
			err = os.Chmod(path, 0o666) //nolint:gosec // each user of the one container, and nobody else, reaches it
		}
		if err != nil {
			return directoryFault(path, err)
		}
	}
	return nil
}

// nodeFile is the host's path of a container's own device node.
func nodeFile(dir string, n cdi.Node) string {
	return filepath.Join(dir, strings.ReplaceAll(strings.TrimPrefix(n.Path, "/dev/"), "/", "_"))
}

// deviceMounts bind the container's device nodes, and the files of the driver. A device node among the devices of the
// spec would be the host's, of the same path.
func deviceMounts(devices cdi.Edits, dir string) []specs.Mount {
	all := make([]specs.Mount, 0, len(devices.Nodes)+len(devices.Mounts))
	for _, n := range devices.Nodes {
		m := mountOf("bind", n.Path, "bind,rw,nosuid,noexec")
		m.Source = nodeFile(dir, n)
		all = append(all, m)
	}
	for _, f := range devices.Mounts {
		m := mountOf("bind", f.Destination, "bind,ro,nosuid,nodev")
		m.Source = f.Source
		all = append(all, m)
	}
	return all
}

// deviceRules allow the use of the devices and not the making of nodes for them.
func deviceRules(devices cdi.Edits) []specs.LinuxDeviceCgroup {
	var rules []specs.LinuxDeviceCgroup
	for _, n := range devices.Nodes {
		major, minor := int64(n.Major), int64(n.Minor)
		rules = append(rules, specs.LinuxDeviceCgroup{Allow: true, Type: "c", Major: &major, Minor: &minor, Access: "rw"})
	}
	return rules
}

// setDeviceVariables makes the driver's libraries found, behind those that the app itself names, and overrules an image
// that asks a hook of the host for all GPUs.
func setDeviceVariables(env []string, devices cdi.Edits, set func(name, value string)) {
	var present, asks bool
	for _, e := range env {
		name, value, _ := strings.Cut(e, "=")
		asks = asks || name == visibleDevices
		if name == libraryPath && len(devices.LibraryDirs) > 0 {
			present = true
			set(libraryPath, strings.Trim(value+":"+strings.Join(devices.LibraryDirs, ":"), ":"))
		}
	}
	if !present && len(devices.LibraryDirs) > 0 {
		set(libraryPath, strings.Join(devices.LibraryDirs, ":"))
	}
	if asks || len(devices.Nodes) > 0 {
		set(visibleDevices, noDevices)
	}
}
