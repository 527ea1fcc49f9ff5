package runtime_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/internal/runtime"
)

func (f *fixture) ns() context.Context {
	return namespaces.WithNamespace(f.t.Context(), f.cfg.Namespace)
}

// makeContainer does the first steps of Start the way a crash in the middle would leave them.
func (f *fixture) makeContainer(spec runtime.Spec, withTask bool) {
	f.t.Helper()
	c := f.daemon.Client(f.t)
	oci, err := f.rt.BuildSpec(f.t.Context(), spec)
	require.NoError(f.t, err)
	// The files that Start would have bound are not there: this container is only half made.
	var keep []specs.Mount
	for _, m := range oci.Mounts {
		if m.Type != "bind" {
			keep = append(keep, m)
		}
	}
	oci.Mounts = keep
	container, err := c.NewContainer(f.ns(), spec.ID, withSnapshotOf(spec.Service.Image),
		client.WithContainerLabels(map[string]string{"gpuaas.member": spec.MemberID}),
		client.WithRuntime("io.containerd.runc.v2", &runcoptions.Options{Root: f.cfg.RuncRoot}), client.WithSpec(oci))
	require.NoError(f.t, err)
	if withTask {
		_, err := container.NewTask(f.ns(), cio.NullIO)
		require.NoError(f.t, err)
	}
}

// withSnapshotOf does what client.WithNewSnapshot with WithUserNSRemapperLabels does, but finds the image's snapshot as
// the runtime names it.
func withSnapshotOf(image string) client.NewContainerOpts {
	return func(ctx context.Context, c *client.Client, record *containers.Container) error {
		img, err := c.GetImage(ctx, image)
		if err != nil {
			return err
		}
		manifest, err := c.ContentStore().Info(ctx, img.Target().Digest)
		if err != nil {
			return err
		}
		record.Snapshotter, record.SnapshotKey, record.Image = "overlayfs", record.ID, image
		mounts, err := c.SnapshotService("overlayfs").Prepare(ctx, record.ID,
			manifest.Labels["containerd.io/gc.ref.snapshot.overlayfs"])
		if err != nil {
			return err
		}
		return mount.WithTempMount(ctx, mounts, func(root string) error {
			return filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
				return errors.Join(err, os.Lchown(path, runtime.DefaultUIDMapBase, runtime.DefaultUIDMapBase))
			})
		})
	}
}

// collectGarbage makes containerd collect garbage and waits until it has.
func (f *fixture) collectGarbage() {
	f.t.Helper()
	service := f.daemon.Client(f.t).LeasesService()
	l, err := service.Create(f.ns(), leases.WithRandomID())
	require.NoError(f.t, err)
	require.NoError(f.t, service.Delete(f.ns(), l, leases.SynchronousDelete))
}

func (f *fixture) snapshots() []string {
	f.t.Helper()
	f.collectGarbage()
	var names []string
	require.NoError(f.t, f.daemon.Client(f.t).SnapshotService("overlayfs").Walk(f.ns(),
		func(_ context.Context, info snapshots.Info) error {
			names = append(names, info.Name)
			return nil
		}))
	return names
}

// inspectSnapshots are the views through which images are inspected.
func (f *fixture) inspectSnapshots() []string {
	return slices.DeleteFunc(f.snapshots(), func(name string) bool { return !strings.HasPrefix(name, "inspect-") })
}

// cgroupFile reads a limit of a container, under its name in cgroup version 1 or 2.
func (f *fixture) cgroupFile(controller, id, nameV1, nameV2 string) string {
	f.t.Helper()
	path := filepath.Join("/sys/fs/cgroup", controller, runtime.CgroupOf(f.cfg.CgroupParent, id), nameV1)
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		path = filepath.Join("/sys/fs/cgroup", runtime.CgroupOf(f.cfg.CgroupParent, id), nameV2)
	}
	data, err := os.ReadFile(path)
	require.NoError(f.t, err)
	first, _, _ := strings.Cut(strings.TrimSpace(string(data)), " ")
	return first
}

func (f *fixture) cgroupProcesses(id string) string {
	f.t.Helper()
	var n string
	require.Eventually(f.t, func() bool {
		cgroup := runtime.CgroupOf(f.cfg.CgroupParent, id)
		data, err := os.ReadFile(filepath.Join("/sys/fs/cgroup/pids", cgroup, "cgroup.procs"))
		if err != nil {
			data, err = os.ReadFile(filepath.Join("/sys/fs/cgroup", cgroup, "cgroup.procs"))
		}
		require.NoError(f.t, err)
		n = strconv.Itoa(len(strings.Fields(string(data))))
		return n == "1"
	}, time.Minute, 10*time.Millisecond)
	return n
}

// pidOf reads a container's first process from its bundle, without containerd.
func (f *fixture) pidOf(id string) int {
	f.t.Helper()
	data, err := os.ReadFile(filepath.Join(f.daemon.Dir, "state/io.containerd.runtime.v2.task", f.cfg.Namespace, id,
		"init.pid"))
	require.NoError(f.t, err)
	pid, err := strconv.Atoi(string(data))
	require.NoError(f.t, err)
	return pid
}

// exit32 is what program32 exits with.
const exit32 = 7

// program32 is a whole i386 program: an ELF header, one segment, and exit(exit32) by the kernel's entry for 32 bits.
func program32() []byte {
	const base, headers = 0x08048000, 52 + 32
	code := []byte{0xb8, 1, 0, 0, 0, 0xbb, exit32, 0, 0, 0, 0xcd, 0x80} // mov eax, SYS_exit; mov ebx, exit32; int 0x80
	size := uint32(headers + len(code))
	b := append([]byte("\x7fELF"), 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0)
	for _, half := range []uint16{2, 3} { // ET_EXEC, EM_386
		b = binary.LittleEndian.AppendUint16(b, half)
	}
	for _, word := range []uint32{1, base + headers, 52, 0, 0} { // version, entry, program headers, no sections, no flags
		b = binary.LittleEndian.AppendUint32(b, word)
	}
	for _, half := range []uint16{52, 32, 1, 0, 0, 0} { // the headers' sizes and numbers
		b = binary.LittleEndian.AppendUint16(b, half)
	}
	for _, word := range []uint32{1, 0, base, base, size, size, 5, 0x1000} { // PT_LOAD of all of it, to read and execute
		b = binary.LittleEndian.AppendUint32(b, word)
	}
	return append(b, code...)
}

func processAlive(pid uint32) error { return unix.Kill(int(pid), 0) }

func killProcess(pid int) error { return unix.Kill(pid, unix.SIGKILL) }

func waitGone(pid int) error {
	deadline := time.Now().Add(time.Minute)
	for time.Now().Before(deadline) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil || strings.Contains(string(stat), ") Z ") {
			return nil //nolint:nilerr // it is gone
		}
		time.Sleep(2 * time.Millisecond)
	}
	return errors.New("the process does not end")
}
