package runtime

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuaas/gpuaas/pkg/failpoint"
)

// Limits of a pull.
const (
	pullTimeout       = 60 * time.Minute
	pullDialTimeout   = 15 * time.Second
	pullHeaderTimeout = 30 * time.Second
	parallelDownloads = 3
	// leaseDuration ends the lease of a pull that a crash of the agent interrupted.
	leaseDuration = 2 * pullTimeout
	// unpackedFactor is how much larger than its compressed layers an image is assumed to be, twice over with the copy for
	// the user namespace, when the free space is checked beforehand.
	unpackedFactor = 4
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

// Credentials gives user and password for pulling from one repository. It is asked when the registry wants them.
type Credentials func(ctx context.Context, repository string) (user, password string, err error)

// EnsureImage makes the image ready to start from: pulled, every byte checked against its digest, unpacked, and copied
// into the containers' user ids. It does nothing when that is so already; it then needs no registry.
func (r *Runtime) EnsureImage(ctx context.Context, ref ImageRef, creds Credentials, tlsConf *tls.Config) error {
	if err := ref.check(); err != nil {
		return err
	}
	// Several members may start from one image at once: one pull serves them all. It has its own time limit, so that the
	// first caller's leaving does not fail the others.
	done := r.pulls.DoChan(ref.name(), func() (any, error) {
		pull, cancel := context.WithTimeout(context.WithoutCancel(r.ns(ctx)), pullTimeout)
		defer cancel()
		return nil, r.ensureImage(pull, ref, creds, tlsConf)
	})
	select {
	case res := <-done:
		return res.Err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// HasImage reports whether a container can start from the image without any pull.
func (r *Runtime) HasImage(ctx context.Context, ref ImageRef) (bool, error) {
	if err := ref.check(); err != nil {
		return false, err
	}
	_, err := r.readyImage(r.ns(ctx), ref.name())
	switch {
	case err == nil:
		return true, nil
	case errdefs.IsNotFound(err):
		return false, nil
	}
	return false, fmt.Errorf("find image %s: %w", ref.name(), err)
}

// maxReadyImages bounds the memory of images that are ready; it is emptied when full.
const maxReadyImages = 256

// readyImage is all that a start needs to know of an image. It never changes: the name holds the digest.
type readyImage struct {
	client.Image
	config ocispec.ImageConfig
	// snapshot is what a container's own is made upon: the image unpacked, in the containers' user ids.
	snapshot string
}

// readyImage finds an image that is whole, unpacked and remapped; otherwise its error is errdefs' not found. What was
// found once is remembered until a start finds it gone.
func (r *Runtime) readyImage(ctx context.Context, name string) (readyImage, error) {
	r.mu.Lock()
	ready, known := r.ready[name]
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
	if len(r.ready) >= maxReadyImages {
		clear(r.ready)
	}
	r.ready[name] = ready
	return ready, nil
}

// forgetImages is called when an image may be gone.
func (r *Runtime) forgetImages() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.ready)
}

func (r *Runtime) findImage(ctx context.Context, name string) (ready readyImage, err error) {
	if ready.Image, err = r.client.GetImage(ctx, name); err != nil {
		return readyImage{}, err
	}
	unpacked, err := ready.IsUnpacked(ctx, r.cfg.Snapshotter)
	if err != nil {
		return readyImage{}, err
	}
	if !unpacked {
		return readyImage{}, fmt.Errorf("image is not unpacked: %w", errdefs.ErrNotFound)
	}
	if ready.snapshot, err = r.remapped(ctx, ready.Image); err != nil {
		return readyImage{}, err
	}
	if ready.snapshot == "" {
		if ready.snapshot, err = rootSnapshot(ctx, ready.Image); err != nil {
			return readyImage{}, err
		}
	}
	ready.config, err = imageConfig(ctx, ready.Image)
	return ready, err
}

// remapped finds the copy of an image in the containers' user ids, by the reference that its configuration holds.
func (r *Runtime) remapped(ctx context.Context, image client.Image) (string, error) {
	if !r.host.userNamespaces {
		return "", nil
	}
	config, err := image.Config(ctx)
	if err != nil {
		return "", err
	}
	info, err := r.client.ContentStore().Info(ctx, config.Digest)
	if err != nil {
		return "", err
	}
	key := info.Labels[r.remapLabel()]
	if key == "" {
		return "", fmt.Errorf("image is not remapped: %w", errdefs.ErrNotFound)
	}
	_, err = r.client.SnapshotService(r.cfg.Snapshotter).Stat(ctx, key)
	return key, err
}

// remapLabel on an image's configuration keeps containerd from collecting the remapped copy as garbage, as long as the
// image is there.
func (r *Runtime) remapLabel() string {
	return fmt.Sprintf("containerd.io/gc.ref.snapshot.%s/%d-%d", r.cfg.Snapshotter, r.cfg.UIDMapBase, r.cfg.UIDMapSize)
}

func (r *Runtime) ensureImage(ctx context.Context, ref ImageRef, creds Credentials, tlsConf *tls.Config) (err error) {
	if _, err := r.readyImage(ctx, ref.name()); err == nil {
		return nil
	} else if !errdefs.IsNotFound(err) {
		return pullFault(ref, err)
	}
	// Without a lease, the garbage collection that any deletion starts would take what has been fetched so far.
	lease, err := r.client.LeasesService().Create(ctx, leases.WithRandomID(), leases.WithExpiration(leaseDuration))
	if err != nil {
		return pullFault(ref, err)
	}
	defer func() {
		end, cancel := r.detached(ctx)
		defer cancel()
		var opts []leases.DeleteOpt
		if err != nil {
			// A half-made remapped copy blocks the next attempt: it must be gone when this returns.
			opts = append(opts, leases.SynchronousDelete)
		}
		if e := r.client.LeasesService().Delete(end, lease, opts...); e != nil && !errdefs.IsNotFound(e) {
			r.cfg.Log.Warn("cannot end the lease of a pull; it expires", slog.Any("error", e))
		}
	}()
	failpoint.Hit("agent/pull/leased")
	image, err := r.pullWatched(leases.WithLease(ctx, lease.ID), lease.ID, ref, creds, tlsConf)
	if err != nil {
		return pullFault(ref, err)
	}
	failpoint.Hit("agent/pull/fetched")
	if err := r.remap(leases.WithLease(ctx, lease.ID), image); err != nil {
		return pullFault(ref, err)
	}
	failpoint.Hit("agent/pull/remapped")
	return nil
}

// errNotInRegistry says that a registry that answers does not have the manifest.
var errNotInRegistry = errors.New("the registry does not have the image")

// errImageTooLarge stops a pull.
var errImageTooLarge = errors.New("image is larger than this node allows")

// maxRedirects is how often a registry may send a pull elsewhere, as object stores do.
const maxRedirects = 5

// remap makes the image's copy in the containers' user ids. containerd's client does it as a part of making a
// container's snapshot, so one is made and thrown away.
func (r *Runtime) remap(ctx context.Context, image client.Image) error {
	if !r.host.userNamespaces {
		return nil
	}
	key := "remap-" + image.Target().Digest.Encoded()
	service := r.client.SnapshotService(r.cfg.Snapshotter)
	if err := service.Remove(ctx, key); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	if err := client.WithNewSnapshot(key, image, r.remapOption())(ctx, r.client,
		&containers.Container{Snapshotter: r.cfg.Snapshotter}); err != nil {
		return err
	}
	info, err := service.Stat(ctx, key)
	if err != nil {
		return err
	}
	if err := service.Remove(ctx, key); err != nil {
		return err
	}
	config, err := image.Config(ctx)
	if err != nil {
		return err
	}
	_, err = r.client.ContentStore().Update(ctx,
		content.Info{Digest: config.Digest, Labels: map[string]string{r.remapLabel(): info.Parent}}, "labels."+r.remapLabel())
	return err
}

func (r *Runtime) uidMap() specs.LinuxIDMapping {
	return specs.LinuxIDMapping{ContainerID: 0, HostID: r.cfg.UIDMapBase, Size: r.cfg.UIDMapSize}
}

func (r *Runtime) remapOption() snapshots.Opt {
	m := []specs.LinuxIDMapping{r.uidMap()}
	return client.WithUserNSRemapperLabels(m, m)
}

// Image is one cached image.
type Image struct {
	Name      string
	Digest    string
	SizeBytes int64
	CreatedAt time.Time
	// InUse is set while a container was made from it.
	InUse bool
}

// Images lists what is cached.
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
	var out []Image
	for _, i := range all {
		// An image whose content is incomplete has no size; it is still listed, so that it can be removed.
		size, _ := i.Size(ctx)
		out = append(out, Image{
			Name: i.Name(), Digest: i.Target().Digest.String(), SizeBytes: size,
			CreatedAt: i.Metadata().CreatedAt, InUse: used[i.Name()],
		})
	}
	slices.SortFunc(out, func(a, b Image) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

func (r *Runtime) usedImages(ctx context.Context) (map[string]bool, error) {
	all, err := r.client.ContainerService().List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	used := map[string]bool{}
	for _, c := range all {
		used[c.Image] = true
	}
	return used, nil
}

// RemoveUnusedImages removes every cached image that no container was made from and that is not to be kept, with its
// content and its unpacked and remapped copies.
func (r *Runtime) RemoveUnusedImages(ctx context.Context, keep ...ImageRef) error {
	all, err := r.Images(ctx)
	if err != nil {
		return err
	}
	for _, i := range all {
		if i.InUse || slices.ContainsFunc(keep, func(k ImageRef) bool { return k.name() == i.Name }) {
			continue
		}
		r.forgetImages()
		err := r.client.ImageService().Delete(r.ns(ctx), i.Name, images.SynchronousDelete())
		if err != nil && !errdefs.IsNotFound(err) {
			return fmt.Errorf("remove image %s: %w", i.Name, err)
		}
	}
	return nil
}

// imageConfig reads what the image says about running it, and the digest that this reading can be remembered by.
func imageConfig(ctx context.Context, image client.Image) (ocispec.ImageConfig, error) {
	spec, err := image.Spec(ctx)
	if err != nil {
		return ocispec.ImageConfig{}, fmt.Errorf("read the image's configuration: %w", err)
	}
	return spec.Config, nil
}

// rootSnapshot is the unpacked image itself, not remapped, for inspection.
func rootSnapshot(ctx context.Context, image client.Image) (string, error) {
	diffs, err := image.RootFS(ctx)
	if err != nil {
		return "", err
	}
	return identity.ChainID(diffs).String(), nil
}
