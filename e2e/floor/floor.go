// Package floor measures what containerd and CNI need by themselves for a container that already runs: NewContainer, NewTask,
// Start and go-cni's Setup, of the byte-identical spec and image, and nothing else. It is what launch times are held against.
package floor

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/go-cni"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// Parts are the times of one launch.
type Parts struct {
	NewContainer, NewTask, Start, Network time.Duration
}

// Total is the floor of one launch.
func (p Parts) Total() time.Duration { return p.NewContainer + p.NewTask + p.Start + p.Network }

// Config names a running container to measure again, and the network configuration that its node uses.
type Config struct {
	Address     string
	Namespace   string
	ContainerID string
	Conflist    string
	PluginDir   string
	// Dir holds the network namespaces' mount points while measuring; it must exist.
	Dir string
	// ContainerPort is published on a free port of 127.0.0.1.
	ContainerPort int32
}

// Measure launches the container once more and removes it again.
func Measure(ctx context.Context, c Config, round int) (p Parts, err error) {
	cl, err := client.New(c.Address, client.WithDefaultNamespace(c.Namespace))
	if err != nil {
		return Parts{}, err
	}
	defer func() { _ = cl.Close() }()
	ctx = namespaces.WithNamespace(ctx, c.Namespace)

	model, err := cl.LoadContainer(ctx, c.ContainerID)
	if err != nil {
		return Parts{}, fmt.Errorf("load %s: %w", c.ContainerID, err)
	}
	info, err := model.Info(ctx)
	if err != nil {
		return Parts{}, err
	}
	spec, err := model.Spec(ctx)
	if err != nil {
		return Parts{}, err
	}
	snapshot, err := cl.SnapshotService(info.Snapshotter).Stat(ctx, info.SnapshotKey)
	if err != nil {
		return Parts{}, err
	}
	id := fmt.Sprintf("floor-%d-%d", os.Getpid(), round)
	netns, closeNS, err := newNetNS(filepath.Join(c.Dir, id))
	if err != nil {
		return Parts{}, err
	}
	defer closeNS()

	plugins, err := cni.New(cni.WithPluginDir([]string{c.PluginDir}), cni.WithMinNetworkCount(1), cni.WithConfListFile(c.Conflist))
	if err != nil {
		return Parts{}, err
	}
	port, err := freePort()
	if err != nil {
		return Parts{}, err
	}
	mapping := cni.WithCapabilityPortMap([]cni.PortMapping{{HostPort: port, ContainerPort: c.ContainerPort, Protocol: "tcp", HostIP: "127.0.0.1"}})
	start := time.Now()
	if _, err := plugins.Setup(ctx, id, netns, mapping); err != nil {
		return Parts{}, fmt.Errorf("network: %w", err)
	}
	p.Network = time.Since(start)
	defer func() { _ = plugins.Remove(ctx, id, netns, mapping) }()

	start = time.Now()
	container, err := cl.NewContainer(ctx, id, withSnapshotOf(cl, info, snapshot.Parent, id), client.WithRuntime(info.Runtime.Name, nil),
		client.WithSpec(spec, inNetNS(netns), ownCgroup(id)))
	if err != nil {
		return Parts{}, fmt.Errorf("container: %w", err)
	}
	p.NewContainer = time.Since(start)
	defer func() { _ = container.Delete(ctx, client.WithSnapshotCleanup) }()

	start = time.Now()
	task, err := container.NewTask(ctx, cio.NullIO)
	if err != nil {
		return Parts{}, fmt.Errorf("task: %w", err)
	}
	p.NewTask = time.Since(start)
	defer func() { _, _ = task.Delete(ctx, client.WithProcessKill) }()

	start = time.Now()
	if err := task.Start(ctx); err != nil {
		return Parts{}, fmt.Errorf("start: %w", err)
	}
	p.Start = time.Since(start)
	return p, nil
}

// withSnapshotOf prepares a writable snapshot on the very parent that the model container stands on, remapped ids included.
func withSnapshotOf(cl *client.Client, info containers.Container, parent, id string) client.NewContainerOpts {
	return func(ctx context.Context, _ *client.Client, c *containers.Container) error {
		if _, err := cl.SnapshotService(info.Snapshotter).Prepare(ctx, id, parent); err != nil {
			return err
		}
		c.Snapshotter, c.SnapshotKey, c.Image = info.Snapshotter, id, info.Image
		return nil
	}
}

func inNetNS(path string) oci.SpecOpts {
	return func(_ context.Context, _ oci.Client, _ *containers.Container, s *specs.Spec) error {
		for i, ns := range s.Linux.Namespaces {
			if ns.Type == specs.NetworkNamespace {
				s.Linux.Namespaces[i].Path = path
			}
		}
		return nil
	}
}

func ownCgroup(id string) oci.SpecOpts {
	return func(_ context.Context, _ oci.Client, _ *containers.Container, s *specs.Spec) error {
		s.Linux.CgroupsPath = filepath.Join(filepath.Dir(s.Linux.CgroupsPath), id)
		return nil
	}
}

// newNetNS makes a network namespace that a file keeps alive.
func newNetNS(path string) (string, func(), error) {
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		return "", nil, err
	}
	done := make(chan error, 1)
	go func() {
		// The thread is not unlocked: it ends with the goroutine, and no other goroutine ever runs in its namespace.
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- err
			return
		}
		done <- unix.Mount(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()), path, "", unix.MS_BIND, "")
	}()
	if err := <-done; err != nil {
		_ = os.Remove(path)
		return "", nil, fmt.Errorf("network namespace: %w", err)
	}
	return path, func() {
		_ = unix.Unmount(path, syscall.MNT_DETACH)
		_ = os.Remove(path)
	}, nil
}

func freePort() (int32, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer func() { _ = l.Close() }()
	addr, ok := l.Addr().(*net.TCPAddr)
	if !ok {
		return 0, fmt.Errorf("%v is no TCP address", l.Addr())
	}
	return int32(addr.Port), nil
}

// Find returns the id of the running container of an app instance.
func Find(ctx context.Context, address, namespace, instanceID string) (string, error) {
	cl, err := client.New(address, client.WithDefaultNamespace(namespace))
	if err != nil {
		return "", err
	}
	defer func() { _ = cl.Close() }()
	list, err := cl.Containers(namespaces.WithNamespace(ctx, namespace), fmt.Sprintf("labels.%q==%q", "gpuaas.instance", instanceID))
	if err != nil {
		return "", err
	}
	if len(list) != 1 {
		return "", fmt.Errorf("instance %s has %d containers, not one", instanceID, len(list))
	}
	return list[0].ID(), nil
}
