package runtime

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
)

const (
	// freePart is the part of the file system that CollectImages keeps free.
	freePart = 7
	// unpackReservePart and unpackReserveBytes are what unpacking leaves free of the disk, the smaller of both.
	unpackReservePart  = 20
	unpackReserveBytes = 2 << 30
	// unpackReserveFiles does the same for inodes: empty files take no other space.
	unpackReserveFiles = 64 << 10
	// unpackRatio is how much larger than its compressed layers an image may be.
	unpackRatio = 16
	// DefaultMinUnpackBytes is the default of Config.MinUnpackBytes.
	DefaultMinUnpackBytes = 1 << 30
	unpackCheckEvery      = 250 * time.Millisecond
	// labelUnusedSince on an image says since when no container was made from it.
	labelUnusedSince = labelPrefix + "unused-since"
	// labelPinned on an image says that it stays without a container.
	labelPinned = labelPrefix + "pinned"
)

// spaceMissingError stops a pull for want of space.
type spaceMissingError struct{ bytes int64 }

func (e *spaceMissingError) Error() string {
	return fmt.Sprintf("not enough free space for the image: %d MiB are needed", e.bytes>>20)
}

// SpaceMissing returns how many bytes must be free for a pull that failed for want of space; zero for other errors.
func SpaceMissing(err error) int64 {
	if e, is := errors.AsType[*spaceMissingError](err); is {
		return e.bytes
	}
	return 0
}

// unpacking guards the disk while one image is pulled and unpacked.
type unpacking struct {
	r     *Runtime
	lease string
	// target is the digest by which the image is named.
	target digest.Digest
	// progress is what others see of the pull.
	progress *pullState
	// compressed is set before a layer is fetched.
	compressed atomic.Int64
	before     unix.Statfs_t
	// layers are those of the manifest; fetcher fetches them.
	layers  []ocispec.Descriptor
	fetcher remotes.Fetcher
	// writeback is there while layers are unpacked.
	writeback *writeback
}

func (u *unpacking) limit() int64 {
	return max(u.r.cfg.MinUnpackBytes, unpackRatio*u.compressed.Load())
}

// watch cancels the pull when its image unpacks to much more than its compressed size, or fills the disk. The sizes in
// a manifest are those of compressed layers: a few megabytes of them can hold terabytes.
func (u *unpacking) watch(ctx context.Context, cancel context.CancelCauseFunc) {
	tick := time.NewTicker(unpackCheckEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if err := u.check(ctx); err != nil {
			cancel(err)
			return
		}
	}
}

func (u *unpacking) check(ctx context.Context) error {
	var now unix.Statfs_t
	if err := unix.Statfs(u.r.host.contentRoot, &now); err != nil {
		return fmt.Errorf("check free space: %w", err)
	}
	reserve := min(now.Blocks/unpackReservePart, unpackReserveBytes/uint64(now.Bsize))
	if now.Bavail < reserve && now.Bavail < u.before.Bavail {
		return &spaceMissingError{int64(2*reserve) * now.Bsize}
	}
	if now.Ffree < min(now.Files/unpackReservePart, unpackReserveFiles) && now.Ffree < u.before.Ffree {
		return fmt.Errorf("the image has more files than the file system has inodes for: %w", unix.ENOSPC)
	}
	if int64(u.before.Bfree)-int64(now.Bfree) < u.limit()/now.Bsize {
		return nil // this image does not need too much
	}
	return u.checkSize(ctx)
}

// checkSize compares the snapshots under the lease of the pull with the limit.
func (u *unpacking) checkSize(ctx context.Context) error {
	resources, err := u.r.client.LeasesService().ListResources(ctx, leases.Lease{ID: u.lease})
	if err != nil {
		return fmt.Errorf("list the resources of a pull: %w", err)
	}
	var total int64
	for _, one := range resources {
		if one.Type != "snapshots/"+snapshotter {
			continue
		}
		if used, err := u.r.client.SnapshotService(snapshotter).Usage(ctx, one.ID); err == nil {
			total += used.Size
		}
	}
	if total > u.limit() {
		return fmt.Errorf("%w: its layers of %d MiB unpack to more than %d MiB", errImageTooLarge, u.compressed.Load()>>20,
			u.limit()>>20)
	}
	return nil
}

// CollectImages removes images without a container, but those to keep and pinned ones, the longest unused first, until
// the file system has a seventh and at least need bytes free and all images together stay within MaxImageStoreBytes.
func (r *Runtime) CollectImages(ctx context.Context, need int64, keep ...ImageRef) error {
	ctx = r.ns(ctx)
	unused, err := r.unusedImages(ctx, keep)
	if err != nil {
		return err
	}
	for _, image := range unused {
		if image.Labels[labelPinned] != "" {
			continue
		}
		enough, err := r.spaceForImages(ctx, need)
		if err != nil || enough {
			return err
		}
		if err := r.removeImage(ctx, image.Name); err != nil {
			return err
		}
		r.cfg.Log.Info("an image that nothing uses was removed for its space", slog.String("image", image.Name))
	}
	return nil
}

// unusedImages are sorted by how long they have been unused. The time is a label on the image, which outlives a restart
// of the agent.
func (r *Runtime) unusedImages(ctx context.Context, keep []ImageRef) ([]images.Image, error) {
	all, err := r.client.ImageService().List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	used, err := r.usedImages(ctx)
	if err != nil {
		return nil, err
	}
	var unused []images.Image
	for _, i := range all {
		inUse := used[i.Name] || slices.ContainsFunc(keep, func(k ImageRef) bool { return k.name() == i.Name })
		_, noted := i.Labels[labelUnusedSince]
		if inUse != noted {
			if !inUse {
				unused = append(unused, i)
			}
			continue
		}
		i.Labels = map[string]string{labelUnusedSince: "", labelPinned: i.Labels[labelPinned]}
		if !inUse {
			i.Labels[labelUnusedSince] = time.Now().UTC().Format(time.RFC3339Nano)
			unused = append(unused, i)
		}
		if _, err := r.client.ImageService().Update(ctx, i, "labels."+labelUnusedSince); err != nil &&
			!errdefs.IsNotFound(err) {
			// On a full disk containerd notes nothing; removing comes first.
			r.cfg.Log.Warn("cannot note since when an image is unused", slog.String("image", i.Name), slog.Any("error", err))
		}
	}
	slices.SortFunc(unused, func(a, b images.Image) int {
		return cmp.Or(cmp.Compare(a.Labels[labelUnusedSince], b.Labels[labelUnusedSince]), cmp.Compare(a.Name, b.Name))
	})
	return unused, nil
}

// Image is one stored image.
type Image struct {
	// Name is <repository>@<digest>.
	Name string `json:"name"`
	// SizeBytes is the size of its compressed layers.
	SizeBytes int64 `json:"size_bytes"`
	// InUse says that a container has it.
	InUse bool `json:"in_use"`
	// Pinned says that it stays where space is short.
	Pinned bool `json:"pinned"`
}

// Images lists the stored images.
func (r *Runtime) Images(ctx context.Context) ([]Image, error) {
	ctx = r.ns(ctx)
	all, err := r.client.ListImages(ctx)
	if err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	used, err := r.usedImages(ctx)
	if err != nil {
		return nil, err
	}
	out := []Image{}
	for _, i := range all {
		size, _ := i.Size(ctx) // an incomplete image has no size
		out = append(out, Image{
			Name: i.Name(), SizeBytes: size, InUse: used[i.Name()], Pinned: i.Labels()[labelPinned] != "",
		})
	}
	return out, nil
}

// PinImage keeps an image on the node while no container has it, or ends that.
func (r *Runtime) PinImage(ctx context.Context, name string, pinned bool) error {
	pin := images.Image{Name: name, Labels: map[string]string{labelPinned: ""}}
	if pinned {
		pin.Labels[labelPinned] = "yes"
	}
	_, err := r.client.ImageService().Update(r.ns(ctx), pin, "labels."+labelPinned)
	switch {
	case errdefs.IsNotFound(err), errdefs.IsInvalidArgument(err):
		return imageMissing(name, err)
	case err != nil:
		return fmt.Errorf("pin image %s: %w", name, err)
	}
	return nil
}

func (r *Runtime) spaceForImages(ctx context.Context, need int64) (enough bool, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(r.host.contentRoot, &st); err != nil {
		return false, err
	}
	if st.Bavail < st.Blocks/freePart || int64(st.Bavail)*st.Bsize < need {
		return false, nil
	}
	if r.cfg.MaxImageStoreBytes == 0 {
		return true, nil
	}
	stored, err := r.ImageStoreBytes(ctx)
	return stored <= r.cfg.MaxImageStoreBytes, err
}

// ImageStoreBytes is the size of all images together, compressed and unpacked.
func (r *Runtime) ImageStoreBytes(ctx context.Context) (total int64, err error) {
	ctx = r.ns(ctx)
	err = r.client.ContentStore().Walk(ctx, func(info content.Info) error {
		total += info.Size
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("list content: %w", err)
	}
	service := r.client.SnapshotService(snapshotter)
	err = service.Walk(ctx, func(ctx context.Context, info snapshots.Info) error {
		if info.Kind != snapshots.KindCommitted {
			return nil
		}
		used, err := service.Usage(ctx, info.Name)
		if errdefs.IsNotFound(err) {
			return nil
		}
		total += used.Size
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("list snapshots: %w", err)
	}
	return total, nil
}
