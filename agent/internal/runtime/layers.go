package runtime

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	goruntime "runtime"
	"strings"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/pkg/failpoint"
)

const (
	// parallelLayers is how many layers of one image are fetched and unpacked at the same time.
	parallelLayers = 4
	// maxLayers is how many lower directories the kernel's overlay file system stacks.
	maxLayers = 500
	// maxDecoders is how many blocks of one layer are decoded at once.
	maxDecoders = 4
	// commitAttempts bounds how often a layer is committed while other pulls commit and remove the same one.
	commitAttempts = 3
)

// imageLayer is a layer that is not yet in the snapshotter.
type imageLayer struct {
	desc   ocispec.Descriptor
	diffID digest.Digest
	// chainID is of the layer and those below it; name is its committed snapshot, parent the one below it. The lowest
	// layer has no parent.
	chainID, name, parent string
	// staging is an active snapshot without a parent, and dir its directory. The layer is unpacked there, so that it need
	// not wait for the layers below it.
	staging, dir string
	inherited    inheritedDirs
	// decoders is how many blocks of it are decoded at once.
	decoders int
	// committed is closed when the layer is a committed snapshot.
	committed chan struct{}
}

// streamLayers takes the layers out of what containerd's client fetches, and unpacks them as soon as the image's
// configuration is known.
func (u *unpacking) streamLayers(next images.Handler) images.Handler {
	return images.HandlerFunc(func(ctx context.Context, desc ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		children, err := next.Handle(ctx, desc)
		if err != nil {
			return nil, err
		}
		switch {
		case images.IsManifestType(desc.MediaType):
			var rest []ocispec.Descriptor
			u.layers = nil
			for _, c := range children {
				if images.IsLayerType(c.MediaType) {
					u.layers = append(u.layers, c)
				} else {
					rest = append(rest, c)
				}
			}
			return rest, nil
		case images.IsConfigType(desc.MediaType):
			return children, u.unpack(ctx, desc)
		}
		return children, nil
	})
}

// unpack makes the snapshots that containerd's own unpacking would make. An error leaves snapshots to the lease.
func (u *unpacking) unpack(ctx context.Context, config ocispec.Descriptor) error {
	store := u.r.client.ContentStore()
	raw, err := content.ReadBlob(ctx, store, config)
	if err != nil {
		return err
	}
	var image ocispec.Image
	if err := json.Unmarshal(raw, &image); err != nil {
		return fmt.Errorf("%w: its configuration is not JSON: %w", errBadImage, err)
	}
	diffIDs := image.RootFS.DiffIDs
	if len(diffIDs) != len(u.layers) || len(diffIDs) == 0 {
		return fmt.Errorf("%w: %d layers, but %d diff ids", errBadImage, len(u.layers), len(diffIDs))
	}
	for _, id := range diffIDs {
		if err := id.Validate(); err != nil {
			return fmt.Errorf("%w: diff id: %w", errBadImage, err)
		}
	}
	missing, err := u.stageMissing(ctx, diffIDs)
	if err != nil {
		return err
	}
	var bytes int64
	for _, l := range missing {
		bytes += l.desc.Size
	}
	u.progress.fetching(bytes)
	if err := u.unpackMissing(ctx, missing); err != nil {
		return err
	}
	_, err = store.Update(ctx, content.Info{
		Digest: config.Digest,
		Labels: map[string]string{snapshotLabel: u.r.rootfs.snapshotName(identity.ChainID(diffIDs).String())},
	}, "labels."+snapshotLabel)
	return err
}

// stageMissing prepares a staging snapshot for each layer above the highest one that exists.
func (u *unpacking) stageMissing(ctx context.Context, diffIDs []digest.Digest) ([]*imageLayer, error) {
	missing := make([]*imageLayer, len(diffIDs))
	chain := identity.ChainIDs(append([]digest.Digest(nil), diffIDs...))
	for i := len(diffIDs) - 1; i >= 0; i-- {
		l := &imageLayer{
			desc: u.layers[i], diffID: diffIDs[i], chainID: chain[i].String(), committed: make(chan struct{}),
		}
		l.name = u.r.rootfs.snapshotName(l.chainID)
		l.desc.URLs = nil // the node asks no host but the registry
		if i > 0 {
			l.parent = u.r.rootfs.snapshotName(chain[i-1].String())
		}
		l.staging = u.key("stage", l)
		mounts, err := u.prepare(ctx, l.staging, "", l)
		if errdefs.IsAlreadyExists(err) {
			return missing[i+1:], nil
		}
		if err != nil {
			return nil, err
		}
		if l.dir, _, err = overlayDirs(mounts); err != nil {
			return nil, err
		}
		missing[i] = l
	}
	return missing, nil
}

func (u *unpacking) key(purpose string, l *imageLayer) string {
	return fmt.Sprintf("extract-%s-%s-%s", purpose, u.lease, l.name)
}

// prepare makes an active snapshot. If the layer is committed already, prepare puts it under the lease of the pull and
// returns errdefs' already exists.
func (u *unpacking) prepare(ctx context.Context, key, parent string, l *imageLayer) ([]mount.Mount, error) {
	return u.snapshots().Prepare(ctx, key, parent, l.labels())
}

// labels are those that containerd's client gives to the snapshot of a layer.
func (l *imageLayer) labels() snapshots.Opt {
	labels := snapshots.FilterInheritedLabels(l.desc.Annotations)
	if labels == nil {
		labels = map[string]string{}
	}
	// A manifest does not choose whose user ids its files get.
	delete(labels, snapshots.LabelSnapshotUIDMapping)
	delete(labels, snapshots.LabelSnapshotGIDMapping)
	labels[snapshots.LabelSnapshotRef] = l.name
	labels[snapshots.LabelSnapshotDiffID] = l.diffID.String()
	return snapshots.WithLabels(labels)
}

func (u *unpacking) snapshots() snapshots.Snapshotter {
	return u.r.client.SnapshotService(snapshotter)
}

// overlayDirs returns the directory that a snapshot is written to, and those below it, the nearest first.
func overlayDirs(mounts []mount.Mount) (upper string, lower []string, err error) {
	if upper, lower = mountedDirs(mounts); upper == "" {
		return "", nil, fmt.Errorf("the snapshotter's mounts are no overlay: %v", mounts)
	}
	return upper, lower, nil
}

// mountedDirs returns the directories of a snapshot's mounts: of one layer, that alone as upper; of a read-only
// snapshot of several, no upper.
func mountedDirs(mounts []mount.Mount) (upper string, lower []string) {
	if len(mounts) == 1 && mounts[0].Type == "bind" {
		return mounts[0].Source, nil
	}
	if len(mounts) == 1 && mounts[0].Type == "overlay" {
		for _, o := range mounts[0].Options {
			if dir, is := strings.CutPrefix(o, "upperdir="); is {
				upper = dir
			} else if dirs, is := strings.CutPrefix(o, "lowerdir="); is {
				lower = strings.Split(dirs, ":")
			}
		}
	}
	return upper, lower
}

// unpackMissing fetches and unpacks layers side by side, and commits each after its parent.
func (u *unpacking) unpackMissing(ctx context.Context, missing []*imageLayer) error {
	group, ctx := errgroup.WithContext(ctx)
	slots := semaphore.NewWeighted(parallelLayers)
	below := make(chan struct{})
	close(below)
	atOnce := min(len(missing), parallelLayers)
	for _, l := range missing {
		// Several decoders cost more processor time: they are for a layer that has several processors to itself.
		l.decoders = min(max(goruntime.GOMAXPROCS(0)/atOnce, 1), maxDecoders)
		parentCommitted := below
		below = l.committed
		group.Go(func() error {
			if err := slots.Acquire(ctx, 1); err != nil {
				return err
			}
			err := u.apply(ctx, l)
			slots.Release(1)
			if err != nil {
				return fmt.Errorf("layer %s: %w", l.desc.Digest, err)
			}
			select {
			case <-parentCommitted:
			case <-ctx.Done():
				return ctx.Err()
			}
			if err := u.commit(ctx, l); err != nil {
				return fmt.Errorf("commit layer %s: %w", l.desc.Digest, err)
			}
			failpoint.Hit("agent/pull/layer_committed")
			close(l.committed)
			return nil
		})
	}
	return group.Wait()
}

// commit makes a checked layer a snapshot on its parent.
func (u *unpacking) commit(ctx context.Context, l *imageLayer) (err error) {
	service := u.snapshots()
	if l.parent == "" {
		if err := l.inherited.complete(l.dir, nil, u.r.rootfs.shift()); err != nil {
			return err
		}
		err = service.Commit(ctx, l.name, l.staging, l.labels())
		if !errdefs.IsAlreadyExists(err) {
			return err
		}
	}
	for range commitAttempts {
		if err = u.commitOn(ctx, l); !errdefs.IsAlreadyExists(err) {
			break
		}
	}
	if err != nil {
		return err
	}
	return service.Remove(ctx, l.staging)
}

// commitOn moves what is staged to a snapshot that has the parent.
func (u *unpacking) commitOn(ctx context.Context, l *imageLayer) error {
	key := u.key("final", l)
	mounts, err := u.prepare(ctx, key, l.parent, l)
	if errdefs.IsAlreadyExists(err) {
		return nil // another pull has committed the layer
	}
	if err != nil {
		return err
	}
	upper, lower, err := overlayDirs(mounts)
	if err != nil {
		return err
	}
	root, err := os.Stat(upper)
	if err != nil {
		return err
	}
	// rename(2), unlike os.Rename, replaces an empty directory. Its owner, the parent's, is kept.
	if err := unix.Rename(l.dir, upper); err != nil {
		return fmt.Errorf("move %s to %s: %w", l.dir, upper, err)
	}
	if err := inherit(root, upper); err != nil {
		return err
	}
	if err := l.inherited.complete(upper, lower, u.r.rootfs.shift()); err != nil {
		return err
	}
	if err := u.snapshots().Commit(ctx, l.name, key, l.labels()); err != nil {
		if errdefs.IsAlreadyExists(err) {
			_ = u.snapshots().Remove(ctx, key)
		}
		return err
	}
	return nil
}
