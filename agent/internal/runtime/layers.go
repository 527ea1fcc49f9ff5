package runtime

import (
	"context"
	"encoding/json"
	"errors"
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
	desc ocispec.Descriptor
	// name is the committed snapshot of the layer on those below it, parent that of the layer below. The lowest layer has
	// no parent.
	name, parent string
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

// unpack makes a snapshot of each layer on those below it. Names are made of the layers' digests as the manifest states
// them, which the image's own digest covers, and not of the configuration's diff ids: to check these would take a
// second digest of each byte, and unchecked they would let an image take the name of another's layer. An error leaves
// snapshots to the lease.
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
	if n := len(image.RootFS.DiffIDs); n != len(u.layers) || n == 0 {
		return fmt.Errorf("%w: %d layers, but %d diff ids", errBadImage, len(u.layers), n)
	}
	chain := make([]digest.Digest, len(u.layers))
	for i, l := range u.layers {
		if err := l.Digest.Validate(); err != nil {
			return fmt.Errorf("%w: digest of layer %d: %w", errBadImage, i, err)
		}
		chain[i] = l.Digest
	}
	chain = identity.ChainIDs(chain)
	missing, err := u.stageMissing(ctx, chain)
	if err != nil {
		return err
	}
	var bytes int64
	for _, l := range missing {
		bytes += l.desc.Size
	}
	var st unix.Statfs_t
	if unix.Statfs(u.r.host.contentRoot, &st) == nil && int64(st.Bavail)*st.Bsize < unpackedFactor*bytes {
		return &spaceMissingError{unpackedFactor * bytes}
	}
	u.progress.fetching(bytes)
	if err := u.unpackMissing(ctx, missing); err != nil {
		return err
	}
	_, err = store.Update(ctx, content.Info{
		Digest: u.target,
		Labels: map[string]string{snapshotLabel: u.r.rootfs.snapshotName(chain[len(chain)-1].String())},
	}, "labels."+snapshotLabel)
	return err
}

// stageMissing prepares a staging snapshot for each layer above the highest one that exists.
func (u *unpacking) stageMissing(ctx context.Context, chain []digest.Digest) ([]*imageLayer, error) {
	missing := make([]*imageLayer, len(chain))
	for i := len(chain) - 1; i >= 0; i-- {
		l := &imageLayer{desc: u.layers[i], committed: make(chan struct{})}
		l.name = u.r.rootfs.snapshotName(chain[i].String())
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

// labels are those that containerd's client gives to the snapshot of a layer, but for its diff id.
func (l *imageLayer) labels() snapshots.Opt {
	labels := snapshots.FilterInheritedLabels(l.desc.Annotations)
	if labels == nil {
		labels = map[string]string{}
	}
	// A manifest does not choose whose user ids its files get.
	delete(labels, snapshots.LabelSnapshotUIDMapping)
	delete(labels, snapshots.LabelSnapshotGIDMapping)
	labels[snapshots.LabelSnapshotRef] = l.name
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
func (u *unpacking) unpackMissing(ctx context.Context, missing []*imageLayer) (err error) {
	if len(missing) == 0 {
		return nil
	}
	if u.writeback, err = startWriteback(missing[0].dir); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, u.writeback.close()) }()
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

// record makes a snapshot of what is unpacked, which is on the disk by then: containerd syncs its records, not the
// files, and after a power cut a record of files that were never written would count as the layer.
func (u *unpacking) record(ctx context.Context, l *imageLayer, key string) error {
	if err := u.writeback.sync(); err != nil {
		return err
	}
	return u.snapshots().Commit(ctx, l.name, key, l.labels())
}

// commit makes a checked layer a snapshot on its parent.
func (u *unpacking) commit(ctx context.Context, l *imageLayer) (err error) {
	service := u.snapshots()
	if l.parent == "" {
		if err := l.inherited.complete(l.dir, nil, u.r.rootfs.shift()); err != nil {
			return err
		}
		err = u.record(ctx, l, l.staging)
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
	if err := u.record(ctx, l, key); err != nil {
		if errdefs.IsAlreadyExists(err) {
			_ = u.snapshots().Remove(ctx, key)
		}
		return err
	}
	return nil
}
