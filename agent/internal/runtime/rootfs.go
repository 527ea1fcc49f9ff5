package runtime

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/internal/mountpoint"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
)

// rootfs makes containers' root file systems from unpacked images, in the user ids of containers. It is all that the
// runtime knows of how snapshots become root file systems.
type rootfs interface {
	// snapshotName names the snapshot of an unpacked chain of layers.
	snapshotName(chainID string) string
	// shift is what unpacking does to the owners of files.
	shift() idShift
	// find returns errdefs' not found unless there is a snapshot of that name, unpacked for the user ids of containers.
	find(ctx context.Context, name string) error
	// prepare makes the writable snapshot of a container and returns the mounts of its root file system.
	prepare(ctx context.Context, key, parent string, labels map[string]string) ([]mount.Mount, error)
	// layers returns the directories of an unpacked image's layers in the ids of containers, the topmost first.
	layers(ctx context.Context, snapshot string) ([]string, error)
	// close removes what is held outside the snapshotter. Containers go on.
	close() error
}

// snapshotter is the one of containerd that the agent uses: it moves unpacked layers as overlayfs keeps them.
const snapshotter = "overlayfs"

// newRootfs chooses the way that the host allows. The second result says why it is not idmapped mounts.
func newRootfs(ctx context.Context, r *Runtime) (rootfs, error) {
	plain := unpackedRootfs{snapshots: r.client.SnapshotService(snapshotter)}
	if !r.host.userNamespaces {
		return plain, nil
	}
	plain.ids.size = r.cfg.UIDMapSize
	err := errors.New("switched off")
	if !r.cfg.NoIDMappedMounts {
		mapped := &idmappedRootfs{
			unpackedRootfs: plain,
			snapshotsDir:   filepath.Join(r.host.contentRoot, "snapshots"),
			dir:            filepath.Join(r.cfg.StateDir, mappedSnapshots),
			base:           r.cfg.UIDMapBase,
		}
		if err = mapped.probe(ctx, r.cfg); err == nil {
			return mapped, nil
		}
	}
	plain.ids.base = r.cfg.UIDMapBase
	plain.suffix = fmt.Sprintf("-%d-%d", r.cfg.UIDMapBase, r.cfg.UIDMapSize)
	return plain, err
}

// unpackedRootfs starts containers from the unpacked layers as they are: their owners were shifted while they were
// unpacked, or containers have the host's user ids.
type unpackedRootfs struct {
	snapshots snapshots.Snapshotter
	ids       idShift
	// suffix keeps shifted snapshots apart from others of the same layers.
	suffix string
}

func (u unpackedRootfs) snapshotName(chainID string) string { return chainID + u.suffix }

func (u unpackedRootfs) shift() idShift { return u.ids }

func (u unpackedRootfs) find(ctx context.Context, name string) error {
	chain, ours := strings.CutSuffix(name, u.suffix)
	if !ours || digest.Digest(chain).Validate() != nil {
		return fmt.Errorf("snapshot %q: %w", name, errdefs.ErrNotFound)
	}
	_, err := u.snapshots.Stat(ctx, name)
	return err
}

func (u unpackedRootfs) prepare(ctx context.Context, key, parent string,
	labels map[string]string,
) ([]mount.Mount, error) {
	mounts, err := u.snapshots.Prepare(ctx, key, parent, snapshots.WithLabels(labels))
	if err == nil {
		failpoint.Hit("agent/start/snapshot_made")
	}
	return mounts, err
}

func (u unpackedRootfs) close() error { return nil }

// mappedSnapshots is the directory below the state directory at which idmappedRootfs mounts.
const mappedSnapshots = ".snapshots"

// idmappedRootfs gives overlay's lower directories the ids of containers by one read-only idmapped mount of all
// snapshots. The kernel clones it into each container's overlay, so containers do not need it once they are mounted.
type idmappedRootfs struct {
	unpackedRootfs
	// snapshotsDir is where containerd keeps snapshots, dir where they are mounted with the ids of containers.
	snapshotsDir, dir string
	base              uint32

	mu sync.Mutex
}

// probe reports why containers cannot have idmapped lower directories here: the kernel is older than Linux 5.19, the
// file system cannot, or containerd does not see the agent's mounts.
func (m *idmappedRootfs) probe(ctx context.Context, cfg Config) (err error) {
	if err := m.ensureMounted(); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.close())
		}
	}()
	pid, err := socketOwner(ctx, cfg.Address)
	if err != nil {
		return err
	}
	if !m.isMountedAt(filepath.Join(cfg.ProcDir, strconv.Itoa(pid), "root", m.dir)) {
		return errors.New("containerd does not see the mounts of the agent: their mount namespaces are apart")
	}
	return mount.WithTempMount(ctx, []mount.Mount{{
		Type: "overlay", Source: "overlay", Options: []string{"ro", "lowerdir=" + m.dir + ":" + filepath.Dir(m.dir)},
	}}, func(root string) error {
		var st unix.Stat_t
		if err := unix.Stat(root, &st); err != nil {
			return err
		}
		if st.Uid != m.base || st.Gid != m.base {
			return fmt.Errorf("overlay shows the owner %d:%d instead of %d:%d", st.Uid, st.Gid, m.base, m.base)
		}
		return nil
	})
}

// socketOwner is the process that listens at a Unix socket.
func socketOwner(ctx context.Context, address string) (pid int, err error) {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", address)
	if err != nil {
		return 0, err
	}
	defer func() { _ = conn.Close() }()
	unixConn, is := conn.(*net.UnixConn)
	if !is {
		return 0, fmt.Errorf("%s is no Unix socket", address)
	}
	raw, err := unixConn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var peer *unix.Ucred
	e := raw.Control(func(fd uintptr) { peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err := errors.Join(e, err); err != nil {
		return 0, err
	}
	return int(peer.Pid), nil
}

// ensureMounted mounts the snapshots unless they are mounted.
func (m *idmappedRootfs) ensureMounted() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.isMountedAt(m.dir) {
		return nil
	}
	if err := mountpoint.Unmount(m.dir); err != nil {
		return err
	}
	if err := os.MkdirAll(m.dir, 0o700); err != nil {
		return directoryFault(m.dir, err)
	}
	ids := fmt.Sprintf("0:%d:%d", m.base, m.ids.size)
	userns, err := mount.GetUsernsFD(ids, ids)
	if err != nil {
		return err
	}
	defer func() { _ = userns.Close() }()
	return mount.IDMapMountWithAttrs(m.snapshotsDir, m.dir, int(userns.Fd()),
		unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV, 0)
}

// isMountedAt compares a directory with that of the snapshots: a mount may be of another containerd or other ids.
func (m *idmappedRootfs) isMountedAt(dir string) bool {
	var from, to unix.Stat_t
	return unix.Stat(m.snapshotsDir, &from) == nil && unix.Stat(dir, &to) == nil &&
		from.Dev == to.Dev && from.Ino == to.Ino && to.Uid == from.Uid+m.base && to.Gid == from.Gid+m.base
}

func (m *idmappedRootfs) prepare(ctx context.Context, key, parent string,
	labels map[string]string,
) ([]mount.Mount, error) {
	if err := m.ensureMounted(); err != nil {
		return nil, fmt.Errorf("map the user ids of images: %w", err)
	}
	mounts, err := m.unpackedRootfs.prepare(ctx, key, parent, labels)
	if err != nil {
		return nil, err
	}
	upper, lower, err := overlayDirs(mounts)
	if err != nil {
		return nil, err
	}
	if len(lower) == 0 {
		return nil, fmt.Errorf("the snapshot %s has no lower directory", key)
	}
	// The writable directory has the image's owner of /, in the ids of the image.
	var top unix.Stat_t
	if err := unix.Stat(lower[0], &top); err != nil {
		return nil, err
	}
	if err := os.Chown(upper, int(top.Uid+m.base), int(top.Gid+m.base)); err != nil {
		return nil, err
	}
	if lower, err = m.mapped(lower); err != nil {
		return nil, err
	}
	for i, option := range mounts[0].Options {
		if strings.HasPrefix(option, "lowerdir=") {
			mounts[0].Options[i] = "lowerdir=" + strings.Join(lower, ":")
		}
	}
	return mounts, nil
}

// mapped returns directories of snapshots as they are in the ids of containers.
func (m *idmappedRootfs) mapped(dirs []string) ([]string, error) {
	out := make([]string, len(dirs))
	for i, dir := range dirs {
		below, is := strings.CutPrefix(dir, m.snapshotsDir+"/")
		if !is {
			return nil, fmt.Errorf("a snapshot has the directory %s outside %s", dir, m.snapshotsDir)
		}
		out[i] = filepath.Join(m.dir, below)
	}
	return out, nil
}

func (m *idmappedRootfs) close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return mountpoint.Remove(m.dir)
}
