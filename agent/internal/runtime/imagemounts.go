package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuaas/gpuaas/agent/internal/mountpoint"
	"github.com/gpuaas/gpuaas/protocol"
)

// mountedImages is the directory below the state directory at which images are mounted for containers.
const mountedImages = ".images"

// maxImageMounts bounds the image mounts of one service.
const maxImageMounts = 8

// imageMount is a mounted image, and where a container has it.
type imageMount struct{ dir, path string }

func (m imageMount) mount() specs.Mount {
	out := mountOf("bind", m.path, "rbind,ro,nosuid,nodev")
	out.Source = m.dir
	return out
}

func checkImageMounts(s *protocol.Service) error {
	if len(s.GetImageMounts()) > maxImageMounts {
		return badSpec(fmt.Sprintf("A service may mount %d images.", maxImageMounts))
	}
	for _, m := range s.GetImageMounts() {
		if at := m.GetPath(); !path.IsAbs(at) || path.Clean(at) != at || forbiddenMount(at) {
			return badSpec("An image needs an absolute, clean path of its own that is not part of the system.")
		}
	}
	return nil
}

// mountImages mounts what a service mounts beside its own image. An image is mounted once for all containers, read-only
// and in their user ids, and stays mounted as long as it is on the node.
func (r *Runtime) mountImages(ctx context.Context, s *protocol.Service) ([]imageMount, error) {
	out := make([]imageMount, 0, len(s.GetImageMounts()))
	for _, m := range s.GetImageMounts() {
		ref, err := ParseImage(m.GetImage())
		if err != nil {
			return nil, err
		}
		image, err := r.readyImage(ctx, ref.name())
		if errdefs.IsNotFound(err) {
			return nil, imageMissing(ref.name(), err)
		}
		if err != nil {
			return nil, fmt.Errorf("find image %s: %w", ref.name(), err)
		}
		dir, err := r.mountImage(ctx, image)
		if err != nil {
			return nil, fmt.Errorf("mount image %s: %w", ref.name(), err)
		}
		out = append(out, imageMount{dir, m.GetPath()})
	}
	return out, nil
}

func (r *Runtime) mountImage(ctx context.Context, image readyImage) (dir string, err error) {
	dir = r.imageDir(image.Name())
	r.imageMounts.Lock()
	defer r.imageMounts.Unlock()
	mounted, err := mountpoint.Is(dir)
	if err != nil || mounted {
		return dir, err
	}
	layers, err := r.rootfs.layers(ctx, image.snapshot)
	if errdefs.IsNotFound(err) {
		r.forgetImages() // another program has removed it
		return "", imageMissing(image.Name(), err)
	}
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", directoryFault(dir, err)
	}
	m := mount.Mount{Type: "bind", Source: layers[0], Options: []string{"rbind", "ro", "nosuid", "nodev"}}
	if len(layers) > 1 {
		m = mount.Mount{Type: "overlay", Source: "overlay", Options: []string{
			"ro", "nosuid", "nodev", "lowerdir=" + strings.Join(layers, ":"),
		}}
	}
	return dir, m.Mount(dir)
}

// imageDir is where the image of this name is mounted.
func (r *Runtime) imageDir(name string) string {
	_, digest, _ := strings.Cut(name, "@sha256:")
	return filepath.Join(r.cfg.StateDir, mountedImages, fmt.Sprintf("%s-%d", digest, r.rootfs.shift().base))
}

// unmountImage ends the mount of an image that no container has.
func (r *Runtime) unmountImage(name string) error {
	r.imageMounts.Lock()
	defer r.imageMounts.Unlock()
	return mountpoint.Remove(r.imageDir(name))
}

// unmountImages ends the mounts of all images. Containers that have them go on.
func (r *Runtime) unmountImages() error {
	parent := filepath.Join(r.cfg.StateDir, mountedImages)
	entries, err := os.ReadDir(parent)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, e := range entries {
		errs = append(errs, mountpoint.Remove(filepath.Join(parent, e.Name())))
	}
	return errors.Join(errs...)
}

// layersKey names the snapshot that tells the directories of an image's layers; it is removed at once.
const layersKey = "layers"

// layers returns the directories of an unpacked image's layers, the topmost first. They stay while the image does.
func (u unpackedRootfs) layers(ctx context.Context, parent string) ([]string, error) {
	key := layersKey + "-" + parent
	mounts, err := u.snapshots.View(ctx, key, parent, snapshots.WithLabels(map[string]string{
		"containerd.io/gc.root": "layers", // no garbage collection comes in between
	}))
	if errdefs.IsAlreadyExists(err) { // a crash left it
		mounts, err = u.snapshots.Mounts(ctx, key)
	}
	if err != nil {
		return nil, err
	}
	if err := u.snapshots.Remove(ctx, key); err != nil {
		return nil, err
	}
	only, lower := mountedDirs(mounts) // an image of one layer is no overlay
	if only != "" {
		lower = []string{only}
	}
	if len(lower) == 0 {
		return nil, fmt.Errorf("the snapshotter's mounts are no overlay: %v", mounts)
	}
	return lower, nil
}

func (m *idmappedRootfs) layers(ctx context.Context, parent string) ([]string, error) {
	if err := m.ensureMounted(); err != nil {
		return nil, fmt.Errorf("map the user ids of images: %w", err)
	}
	dirs, err := m.unpackedRootfs.layers(ctx, parent)
	if err != nil {
		return nil, err
	}
	return m.mapped(dirs)
}
