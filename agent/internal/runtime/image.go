package runtime

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"regexp"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuaas/gpuaas/pkg/failpoint"
)

// Limits of a pull.
const (
	pullTimeout       = 60 * time.Minute
	pullDialTimeout   = 15 * time.Second
	pullHeaderTimeout = 30 * time.Second
	// maxDocumentBytes bounds the manifest and the configuration of an image. The OCI distribution specification asks of
	// registries that they take manifests of this size.
	maxDocumentBytes = 4 << 20
	// leaseDuration ends the lease of a pull that a crash of the agent interrupted.
	leaseDuration = 2 * pullTimeout
	// unpackedFactor is how much larger than its compressed layers an image is assumed to be when free space is checked
	// beforehand.
	unpackedFactor = 3
)

// ImageRef names one image by digest. The host is where it is pulled from now; it is no part of the image's name, so a
// hub that moves does not make nodes pull again.
type ImageRef struct {
	RegistryHost string
	Repository   string
	// Digest is sha256:<hex>.
	Digest string
}

// repositoryPattern is the path of a repository (OCI distribution specification).
var repositoryPattern = regexp.MustCompile(
	`^[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*$`)

// ParseImage reads <repository>@sha256:<hex>, as a Service names its image.
func ParseImage(name string) (ImageRef, error) {
	repository, dgst, ok := strings.Cut(name, "@")
	ref := ImageRef{Repository: repository, Digest: dgst}
	if !ok || ref.check() != nil {
		return ImageRef{}, badSpec("The image is not named as repository@sha256:digest.")
	}
	return ref, nil
}

func (i ImageRef) check() error {
	d := digest.Digest(i.Digest)
	if d.Validate() != nil || d.Algorithm() != digest.SHA256 || !repositoryPattern.MatchString(i.Repository) ||
		len(i.Repository) > 255 {
		return badSpec("The image is not named as repository@sha256:digest.")
	}
	return nil
}

func (i ImageRef) name() string { return i.Repository + "@" + i.Digest }

// Credentials returns user and password for pulling from one repository. It is called when the registry asks.
type Credentials func(ctx context.Context, repository string) (user, password string, err error)

// EnsureImage makes the image ready to start from: pulled, every byte checked against its digest, and unpacked. One
// that is ready needs no registry.
func (r *Runtime) EnsureImage(ctx context.Context, ref ImageRef, creds Credentials, tlsConf *tls.Config) error {
	if err := ref.check(); err != nil {
		return err
	}
	// One pull serves all members that start from one image.
	return r.sharePull(r.ns(ctx), ref.name(), func(ctx context.Context) error {
		return r.ensureImage(ctx, ref, creds, tlsConf)
	})
}

// HasImage reports whether a container can start from the image without any pull.
func (r *Runtime) HasImage(ctx context.Context, ref ImageRef) (bool, error) {
	if err := ref.check(); err != nil {
		return false, err
	}
	_, err := r.readyImage(r.ns(ctx), ref.name())
	if err != nil && !errdefs.IsNotFound(err) {
		return false, fmt.Errorf("find image %s: %w", ref.name(), err)
	}
	return err == nil, nil
}

// maxReadyImages bounds the memory of images that are ready; it is emptied when full.
const maxReadyImages = 256

// readyImage is an image that a container can start from. It never changes: the name contains the digest.
type readyImage struct {
	client.Image
	config ocispec.ImageConfig
	// snapshot is the parent of a container's snapshot.
	snapshot string
}

// readyImage finds an image that containers can start from; otherwise it returns errdefs' not found. Images are
// remembered until a start finds one missing.
func (r *Runtime) readyImage(ctx context.Context, name string) (readyImage, error) {
	r.mu.Lock()
	ready, known := r.ready[name]
	forgotten := r.forgotten
	r.mu.Unlock()
	if known {
		return ready, nil
	}
	ready, err := r.findImage(ctx, name)
	if err != nil {
		return readyImage{}, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.forgotten != forgotten {
		return ready, nil // it may have gone since it was found
	}
	if len(r.ready) >= maxReadyImages {
		clear(r.ready)
	}
	r.ready[name] = ready
	return ready, nil
}

// forgetImages is called after an image may have gone.
func (r *Runtime) forgetImages() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.forgotten++
	clear(r.ready)
}

// snapshotLabel of an image's manifest names the snapshot that containerd's garbage collection spares for it.
const snapshotLabel = "containerd.io/gc.ref.snapshot." + snapshotter

// findImage finds an image whose snapshot containerd keeps. One of other user ids may still be there, but not for long.
func (r *Runtime) findImage(ctx context.Context, name string) (ready readyImage, err error) {
	if ready.Image, err = r.client.GetImage(ctx, name); err != nil {
		return readyImage{}, err
	}
	if ready.snapshot, err = r.imageSnapshot(ctx, ready.Image); err != nil {
		return readyImage{}, err
	}
	spec, err := ready.Spec(ctx)
	if err != nil {
		return readyImage{}, fmt.Errorf("read the image's configuration: %w", err)
	}
	ready.config = spec.Config
	return ready, nil
}

// imageSnapshot returns the snapshot that containers of an image start from; errdefs' not found unless it is unpacked
// for their user ids.
func (r *Runtime) imageSnapshot(ctx context.Context, image client.Image) (string, error) {
	info, err := r.client.ContentStore().Info(ctx, image.Target().Digest)
	if err != nil {
		return "", err
	}
	name := info.Labels[snapshotLabel]
	return name, r.rootfs.find(ctx, name)
}

// isDamaged reports whether the manifest or the configuration of a stored image is not what its digest says.
func (r *Runtime) isDamaged(ctx context.Context, name string) bool {
	image, err := r.client.GetImage(ctx, name)
	if err != nil {
		return false
	}
	damaged := func(desc ocispec.Descriptor) bool {
		blob, err := content.ReadBlob(ctx, r.client.ContentStore(), desc)
		return errors.Is(err, io.ErrUnexpectedEOF) || err == nil && digest.FromBytes(blob) != desc.Digest
	}
	if damaged(image.Target()) {
		return true
	}
	config, err := image.Config(ctx)
	return err == nil && damaged(config)
}

func (r *Runtime) ensureImage(ctx context.Context, ref ImageRef, creds Credentials, tlsConf *tls.Config) (err error) {
	_, err = r.readyImage(ctx, ref.name())
	switch {
	case err == nil:
		return nil
	case errdefs.IsNotFound(err):
	case r.isDamaged(ctx, ref.name()):
		// Only without it does containerd take its content again.
		r.cfg.Log.WarnContext(ctx, "an image is damaged and is pulled anew", slog.String("image", ref.name()),
			slog.Any("error", err))
		if err := r.removeImage(ctx, ref.name()); err != nil {
			return pullFault(ref, err)
		}
	default:
		return pullFault(ref, err)
	}
	progress := &pullState{}
	r.pulling.Store(ref.name(), progress)
	defer r.pulling.Delete(ref.name())
	// Without a lease, the garbage collection after any deletion would remove what has been fetched so far.
	lease, err := r.client.LeasesService().Create(ctx, leases.WithRandomID(), leases.WithExpiration(leaseDuration))
	if err != nil {
		return pullFault(ref, err)
	}
	defer func() {
		end, cancel := r.detached(ctx)
		defer cancel()
		var opts []leases.DeleteOpt
		if err != nil {
			// A half-made snapshot blocks the next attempt: it must be gone when this returns.
			opts = append(opts, leases.SynchronousDelete)
		}
		if e := r.client.LeasesService().Delete(end, lease, opts...); e != nil && !errdefs.IsNotFound(e) {
			r.cfg.Log.Warn("cannot end the lease of a pull; it expires", slog.Any("error", e))
		}
	}()
	failpoint.Hit("agent/pull/content_leased")
	u := &unpacking{r: r, lease: lease.ID, target: digest.Digest(ref.Digest), progress: progress}
	if err := u.pullWatched(leases.WithLease(ctx, lease.ID), ref, creds, tlsConf); err != nil {
		return pullFault(ref, err)
	}
	failpoint.Hit("agent/pull/fetched")
	// Another program may have removed the image before, with the layers of its mount.
	return r.unmountImage(ref.name())
}

// errNotInRegistry says that a registry that answers does not have the manifest.
var errNotInRegistry = errors.New("the registry does not have the image")

// errImageTooLarge stops a pull.
var errImageTooLarge = errors.New("image is larger than this node allows")

// maxRedirects is how often a registry may send a pull elsewhere, as object stores do.
const maxRedirects = 5

func (r *Runtime) uidMap() specs.LinuxIDMapping {
	return specs.LinuxIDMapping{ContainerID: 0, HostID: r.cfg.UIDMapBase, Size: r.cfg.UIDMapSize}
}

func (r *Runtime) usedImages(ctx context.Context) (map[string]bool, error) {
	all, err := r.client.ContainerService().List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	used := map[string]bool{}
	for _, c := range all {
		used[c.Image] = true
		for name := range strings.FieldsSeq(c.Labels[labelImageMounts]) {
			used[name] = true
		}
	}
	return used, nil
}

// RemoveUnusedImages removes the images without a container, but those to keep, with their content and snapshots.
func (r *Runtime) RemoveUnusedImages(ctx context.Context, keep ...ImageRef) error {
	ctx = r.ns(ctx)
	unused, err := r.unusedImages(ctx, keep)
	if err != nil {
		return err
	}
	for _, image := range unused {
		if err := r.removeImage(ctx, image.Name); err != nil {
			return err
		}
	}
	return nil
}

func (r *Runtime) removeImage(ctx context.Context, name string) error {
	defer r.forgetImages()
	if err := r.unmountImage(name); err != nil {
		return err
	}
	err := r.client.ImageService().Delete(ctx, name, images.SynchronousDelete())
	if err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("remove image %s: %w", name, err)
	}
	return nil
}
