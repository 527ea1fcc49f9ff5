// Package baseline measures what containerd and CNI alone need to launch and to remove a container: NewContainer,
// NewTask, Start and go-cni's Setup with a published port, for the byte-identical spec and image of a running one. The
// benchmark compares launches through the product with it.
package baseline

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/go-cni"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/netnamespace"
)

// Parts are the times of one launch and of its removal.
type Parts struct {
	NewContainer, NewTask, Start, Network            time.Duration
	Kill, DeleteTask, DeleteContainer, RemoveNetwork time.Duration
}

// Total is the time of one launch.
func (p Parts) Total() time.Duration { return p.NewContainer + p.NewTask + p.Start + p.Network }

// Removal is the time of one removal; the process is killed with SIGKILL.
func (p Parts) Removal() time.Duration {
	return p.Kill + p.DeleteTask + p.DeleteContainer + p.RemoveNetwork
}

// Config names a running container to measure again, and the network of its node.
type Config struct {
	Address     string
	Namespace   string
	ContainerID string
	// Image is the container's; the node does not keep its compressed layers.
	Image v1.Image
	// Bridge and CIDR are the node's; the same is made by CNI's plugins, which are in PluginDir.
	Bridge, CIDR string
	PluginDir    string
	// Dir must exist. It holds runc's state and the mount points of the network namespaces, also of the one that stands in
	// for the host: the chains and links that the plugins leave there are removed with it.
	Dir string
	// ContainerPort is published on a free port of 127.0.0.1.
	ContainerPort int32
}

// namespace is containerd's namespace for the measurement: an agent removes unknown containers from its own.
const namespace = "gpuaas-baseline"

// Bench launches one container's image and spec again and again.
type Bench struct {
	conf  Config
	cl    *client.Client
	image client.Image
	spec  *oci.Spec
	// plugins make a network like the node's.
	plugins cni.CNI
	// host is the network namespace that stands in for the host's.
	host pinned
	// snapshotHolder never runs. It keeps the image's uid-mapped snapshot, which each launch would otherwise make again.
	snapshotHolder client.Container
	round          int
}

// New puts the running container's image and spec into a namespace of its own, and launches it once without counting.
func New(ctx context.Context, c Config) (*Bench, error) {
	cl, err := client.New(c.Address)
	if err != nil {
		return nil, err
	}
	b := &Bench{conf: c, cl: cl}
	if err := errors.Join(b.load(ctx), b.prepareNetwork()); err != nil {
		return nil, errors.Join(err, b.Close(ctx))
	}
	if _, err := b.Measure(ctx); err != nil {
		return nil, errors.Join(err, b.Close(ctx))
	}
	return b, nil
}

func (b *Bench) load(ctx context.Context) error {
	theirs := namespaces.WithNamespace(ctx, b.conf.Namespace)
	model, err := b.cl.LoadContainer(theirs, b.conf.ContainerID)
	if err != nil {
		return fmt.Errorf("load %s: %w", b.conf.ContainerID, err)
	}
	if b.spec, err = model.Spec(theirs); err != nil {
		return err
	}
	tag, err := name.NewTag("gpuaas/baseline:latest")
	if err != nil {
		return err
	}
	pr, pw := io.Pipe()
	go func() { pw.CloseWithError(tarball.Write(tag, b.conf.Image, pw)) }()
	ours := namespaces.WithNamespace(ctx, namespace)
	imported, err := b.cl.Import(ours, pr)
	if err != nil {
		return fmt.Errorf("copy the image: %w", err)
	}
	b.image = client.NewImage(b.cl, imported[0])
	if err := b.image.Unpack(ours, "overlayfs"); err != nil {
		return fmt.Errorf("unpack the image: %w", err)
	}
	b.snapshotHolder, err = b.newContainer(ours, fmt.Sprintf("baseline-%d-snapshot-holder", os.Getpid()), pinned{})
	return err
}

func (b *Bench) prepareNetwork() (err error) {
	data, err := b.conflist()
	if err != nil {
		return err
	}
	b.plugins, err = cni.New(cni.WithPluginDir([]string{b.conf.PluginDir}), cni.WithMinNetworkCount(1),
		cni.WithConfListBytes(data))
	if err != nil {
		return err
	}
	b.host, err = newNamespaces(filepath.Join(b.conf.Dir, fmt.Sprintf("baseline-%d-host", os.Getpid())), nil)
	return err
}

// conflist configures CNI's plugins to make a network with the same addresses and packet size as the node's.
func (b *Bench) conflist() ([]byte, error) {
	bridge, err := netlink.LinkByName(b.conf.Bridge)
	if err != nil {
		return nil, fmt.Errorf("find the node's bridge: %w", err)
	}
	return json.Marshal(map[string]any{
		"cniVersion": "1.0.0",
		"name":       b.conf.Bridge,
		"plugins": []map[string]any{
			{
				"type": "bridge", "bridge": b.conf.Bridge, "isGateway": true, "ipMasq": false, "hairpinMode": false,
				"mtu": bridge.Attrs().MTU,
				"ipam": map[string]any{
					"type": "host-local", "dataDir": filepath.Join(b.conf.Dir, "ipam"),
					"ranges": [][]map[string]any{{{"subnet": b.conf.CIDR}}}, "routes": []map[string]any{{"dst": "0.0.0.0/0"}},
				},
			},
			{"type": "portmap", "capabilities": map[string]bool{"portMappings": true}, "snat": true},
		},
	})
}

func (b *Bench) newContainer(ctx context.Context, id string, ns pinned) (client.Container, error) {
	var snapshotOpts []snapshots.Opt
	if maps := b.spec.Linux.UIDMappings; len(maps) == 1 {
		snapshotOpts = append(snapshotOpts, client.WithUserNSRemapperLabels(maps, b.spec.Linux.GIDMappings))
	}
	return b.cl.NewContainer(ctx, id, client.WithSnapshotter("overlayfs"), client.WithNewSnapshot(id, b.image,
		snapshotOpts...),
		client.WithRuntime("io.containerd.runc.v2", &runcoptions.Options{Root: filepath.Join(b.conf.Dir, "runc")}),
		client.WithSpec(b.spec, ns.join, ownCgroup(id)))
}

// Close removes what the measurement left in containerd.
func (b *Bench) Close(ctx context.Context) error {
	defer func() { _ = b.cl.Close() }()
	b.host.close()
	ctx = namespaces.WithNamespace(ctx, namespace)
	var errs []error
	if b.snapshotHolder != nil {
		errs = append(errs, b.snapshotHolder.Delete(ctx, client.WithSnapshotCleanup))
	}
	if b.image != nil {
		errs = append(errs, b.cl.ImageService().Delete(ctx, b.image.Name(), images.SynchronousDelete()))
	}
	store := b.cl.SnapshotService("overlayfs")
	for range maxDepth { // children before parents
		var left []string
		if err := store.Walk(ctx, func(_ context.Context, i snapshots.Info) error {
			left = append(left, i.Name)
			return nil
		}); err != nil || len(left) == 0 {
			errs = append(errs, err)
			break
		}
		for _, name := range left {
			_ = store.Remove(ctx, name) // a parent goes in a later pass
		}
	}
	for _, dir := range []string{cniCacheDir + "/results", cniCacheDir} {
		_ = os.Remove(dir) // only an empty one goes
	}
	errs = append(errs, b.cl.NamespaceService().Delete(ctx, namespace))
	return errors.Join(errs...)
}

// cniCacheDir is where libcni keeps the plugins' results; go-cni cannot set another place.
const cniCacheDir = "/var/lib/cni"

// maxDepth bounds the number of snapshots of one chain.
const maxDepth = 130

// Measure launches the container once more and removes it again.
func (b *Bench) Measure(ctx context.Context) (p Parts, err error) {
	ctx = namespaces.WithNamespace(ctx, namespace)
	b.round++
	id := fmt.Sprintf("baseline-%d-%d", os.Getpid(), b.round)
	ns, err := newNamespaces(filepath.Join(b.conf.Dir, id), b.spec.Linux.UIDMappings)
	if err != nil {
		return Parts{}, err
	}
	defer ns.close()
	port, err := freePort()
	if err != nil {
		return Parts{}, err
	}
	mapping := cni.WithCapabilityPortMap([]cni.PortMapping{{
		HostPort: port, ContainerPort: b.conf.ContainerPort,
		Protocol: "tcp", HostIP: "127.0.0.1",
	}})
	// A plugin is a child process of the calling thread and inherits that thread's network namespace.
	err = netnamespace.Run(b.host.net, func() error {
		return timed(&p.Network, func() error {
			_, err := b.plugins.SetupSerially(ctx, id, ns.net, mapping)
			return err
		})
	})
	if err != nil {
		return Parts{}, fmt.Errorf("network: %w", err)
	}
	err = b.measureContainer(ctx, id, ns, &p)
	return p, errors.Join(err, netnamespace.Run(b.host.net, func() error {
		return timed(&p.RemoveNetwork, func() error { return b.plugins.Remove(ctx, id, ns.net, mapping) })
	}))
}

func (b *Bench) measureContainer(ctx context.Context, id string, ns pinned, p *Parts) (err error) {
	var container client.Container
	err = timed(&p.NewContainer, func() (err error) { container, err = b.newContainer(ctx, id, ns); return err })
	if err != nil {
		return fmt.Errorf("container: %w", err)
	}
	defer func() {
		err = errors.Join(err, timed(&p.DeleteContainer, func() error {
			return container.Delete(ctx, client.WithSnapshotCleanup)
		}))
	}()
	var task client.Task
	if err = timed(&p.NewTask, func() (err error) {
		task, err = container.NewTask(ctx, cio.NullIO)
		return err
	}); err != nil {
		return fmt.Errorf("task: %w", err)
	}
	ended, err := task.Wait(ctx)
	if err != nil {
		return errors.Join(err, deleted(task.Delete(ctx, client.WithProcessKill)))
	}
	if err := timed(&p.Start, func() error { return task.Start(ctx) }); err != nil {
		return errors.Join(fmt.Errorf("start: %w", err), deleted(task.Delete(ctx, client.WithProcessKill)))
	}
	err = timed(&p.Kill, func() error {
		err := task.Kill(ctx, syscall.SIGKILL)
		if err == nil {
			<-ended
		}
		return err
	})
	return errors.Join(err, timed(&p.DeleteTask, func() error { return deleted(task.Delete(ctx)) }))
}

func deleted(_ *client.ExitStatus, err error) error { return err }

func timed(took *time.Duration, do func() error) error {
	start := time.Now()
	err := do()
	*took = time.Since(start)
	return err
}

func ownCgroup(id string) oci.SpecOpts {
	return func(_ context.Context, _ oci.Client, _ *containers.Container, s *specs.Spec) error {
		s.Linux.CgroupsPath = filepath.Join(filepath.Dir(s.Linux.CgroupsPath), id)
		return nil
	}
}

// pinned names the files that keep a network namespace alive, and the user namespace that owns it where the spec has
// one.
type pinned struct{ net, user string }

func newNamespaces(path string, mappings []specs.LinuxIDMapping) (pinned, error) {
	k := pinned{net: path + ".net"}
	holder := exec.Command("cat") // it waits until its input ends
	holder.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if len(mappings) > 0 {
		k.user = path + ".user"
		holder.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		for _, m := range mappings {
			id := syscall.SysProcIDMap{ContainerID: int(m.ContainerID), HostID: int(m.HostID), Size: int(m.Size)}
			holder.SysProcAttr.UidMappings = append(holder.SysProcAttr.UidMappings, id)
			holder.SysProcAttr.GidMappings = append(holder.SysProcAttr.GidMappings, id)
		}
	}
	stdin, err := holder.StdinPipe()
	if err != nil {
		return pinned{}, err
	}
	if err := holder.Start(); err != nil {
		return pinned{}, fmt.Errorf("namespaces: %w", err)
	}
	defer func() {
		_ = stdin.Close()
		_ = holder.Wait()
	}()
	for name, file := range map[string]string{"net": k.net, "user": k.user} {
		if file == "" {
			continue
		}
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			k.close()
			return pinned{}, err
		}
		if err := unix.Mount(fmt.Sprintf("/proc/%d/ns/%s", holder.Process.Pid, name), file, "", unix.MS_BIND,
			""); err != nil {
			k.close()
			return pinned{}, fmt.Errorf("keep the %s namespace: %w", name, err)
		}
	}
	return k, nil
}

func (k pinned) close() {
	for _, file := range []string{k.net, k.user} {
		if file != "" {
			_ = unix.Unmount(file, unix.MNT_DETACH)
			_ = os.Remove(file)
		}
	}
}

// join points the spec at the namespaces; nothing else in it differs from the container's.
func (k pinned) join(_ context.Context, _ oci.Client, _ *containers.Container, s *specs.Spec) error {
	for i, ns := range s.Linux.Namespaces {
		switch ns.Type {
		case specs.NetworkNamespace:
			s.Linux.Namespaces[i].Path = k.net
		case specs.UserNamespace:
			s.Linux.Namespaces[i].Path = k.user
		default:
		}
	}
	return nil
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
	list, err := cl.Containers(namespaces.WithNamespace(ctx, namespace), fmt.Sprintf("labels.%q==%q", "gpuaas.instance",
		instanceID))
	if err != nil {
		return "", err
	}
	if len(list) != 1 {
		return "", fmt.Errorf("instance %s has %d containers, not one", instanceID, len(list))
	}
	return list[0].ID(), nil
}
