package runtime

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/cdi"
	"github.com/gpuaas/gpuaas/agent/internal/containerfiles"
	"github.com/gpuaas/gpuaas/pkg/execstream"
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
	// mpsPipeDir is where a container finds the sockets of its MPS daemon.
	mpsPipeDir = "/run/nvidia-mps"
	// labelAccelerator, followed by an id, marks a container that holds this accelerator or partition alone.
	labelAccelerator = labelPrefix + "accelerator."
	// labelShared, followed by an id, marks a container that has a part of this accelerator, for whom and how.
	labelShared = labelPrefix + "shared-accelerator."
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
	sharing := ""
	for _, slice := range s.Devices.Shared {
		sharing = slice.Sharing
	}
	if sharing != s.Service.GetResources().GetAcceleratorSharing() {
		return badSpec("The run's accelerators are not shared as its service says.")
	}
	if len(s.Devices.Shared) > 0 && s.OrgID == "" {
		return badSpec("The run names no org, and has a part of an accelerator.")
	}
	if err := s.Devices.Check(); err != nil {
		return fault.New(fault.Unprocessable, codeBadWorkload, "The run's edits for accelerators are refused.",
			err).Permanent()
	}
	return nil
}

// checkClaims refuses accelerators that another container holds, whatever its status, and those of which a container of
// another org has a part. The caller holds claims until the container is recorded: the records are the one place that
// says who holds what.
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
		if id := spec.sharedWith(c.Labels); id != "" && c.ID != spec.ID {
			return fault.New(fault.Conflict, agent.CodeAcceleratorInUse, "Another container of this node has accelerator "+id+
				", or a part of it for another org or shared in another way.", nil)
		}
	}
	return nil
}

// sharedWith returns an accelerator of which the container and the one with these labels must not both have something.
func (s Spec) sharedWith(labels map[string]string) string {
	for _, slice := range s.Devices.Shared {
		_, whole := labels[labelAccelerator+slice.Accelerator]
		if value, part := labels[labelShared+slice.Accelerator]; whole || part && value != s.sharedBy(slice) {
			return slice.Accelerator
		}
	}
	for _, id := range s.Devices.Claims {
		if _, part := labels[labelShared+id]; part {
			return id
		}
	}
	return ""
}

// sharedBy is the value of the label for a part of an accelerator: all its containers have the same.
func (s Spec) sharedBy(slice cdi.Slice) string { return s.OrgID + " " + slice.Sharing }

// addClaims adds the labels that say what the container holds.
func (s Spec) addClaims(labels map[string]string) {
	for _, id := range s.Devices.Claims {
		labels[labelAccelerator+id] = "held"
	}
	for _, slice := range s.Devices.Shared {
		labels[labelShared+slice.Accelerator] = s.sharedBy(slice)
	}
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

// shmMount is the container's /dev/shm: its own, or that of the MPS daemon, which passes work through it.
func shmMount(devices cdi.Edits, size uint64) specs.Mount {
	if devices.MPS == nil {
		return mountOf("tmpfs", "/dev/shm", fmt.Sprintf("nosuid,noexec,nodev,mode=1777,size=%d", size))
	}
	m := mountOf("bind", "/dev/shm", "bind,rw,nosuid,nodev,noexec")
	m.Source = devices.MPS.ShmDir
	return m
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
	if devices.MPS != nil {
		m := mountOf("bind", mpsPipeDir, "bind,rw,nosuid,nodev,noexec")
		m.Source = devices.MPS.PipeDir
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

// LostDevices opens the container's device nodes as the container does: with its user, in its cgroup. It says which of
// them the container cannot open any more and why; empty where it can open all.
func (r *Runtime) LostDevices(ctx context.Context, id string) (lost string, err error) {
	ctx = r.ns(ctx)
	task, spec, err := r.taskOf(ctx, id)
	if err != nil {
		return "", err
	}
	args := []string{containerfiles.Devices}
	for _, m := range spec.Mounts {
		if filepath.Dir(m.Source) == r.files(id).devices {
			args = append(args, m.Destination)
		}
	}
	if len(args) == 1 {
		return "", nil
	}
	root, err := r.openRoot(ctx, id, task.Pid())
	if err != nil {
		return "", err
	}
	defer func() { _ = root.Close() }()
	var notes bytes.Buffer
	code, err := r.processIn(ctx, id, root, hostIDs(spec.Process.User, spec.Linux), args, execstream.Command{
		Stdin: strings.NewReader(""), Stdout: io.Discard, Stderr: &notes,
	})
	switch {
	case err != nil:
		return "", err
	case code == containerfiles.DeviceLost:
		return strings.ReplaceAll(strings.TrimSpace(notes.String()), "\n", ", "), nil
	case code != 0:
		return "", fmt.Errorf("open the devices of container %s: %s", id, notes.String())
	}
	return "", nil
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
	if mps := devices.MPS; mps != nil {
		// The daemon holds each client to the same limits; in the environment the app's framework can read them.
		set("CUDA_MPS_PIPE_DIRECTORY", mpsPipeDir)
		set("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", strconv.FormatUint(mps.ThreadPercent, 10))
		set("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", fmt.Sprintf("0=%dM", mps.MemoryMiB))
	}
	if !present && len(devices.LibraryDirs) > 0 {
		set(libraryPath, strings.Join(devices.LibraryDirs, ":"))
	}
	if asks || len(devices.Nodes) > 0 {
		set(visibleDevices, noDevices)
	}
}
