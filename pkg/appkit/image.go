package appkit

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// ImageConfig is what an image says about how it runs. The manifest decides in the end; this is what `docker run` and
// friends would do.
type ImageConfig struct {
	// Architecture is Go's name for it; empty means this machine's.
	Architecture string
	Entrypoint   []string
	Cmd          []string
	Env          []string
	// User is uid:gid.
	User       string
	WorkingDir string
	Labels     map[string]string
}

// File is one file of an image.
type File struct {
	// Path is where it lies in the image; absolute.
	Path string
	// Source is the file to copy; Content is used where it is empty.
	Source  string
	Content []byte
	Mode    int64
}

// epoch is the time of every file in an image: the same input gives the same digest on every day.
func epoch() time.Time { return time.Unix(0, 0).UTC() }

// ImageFromFiles makes an image of one layer. The same files give the same digest.
func ImageFromFiles(files []File, c ImageConfig) (v1.Image, error) {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	sorted := slices.SortedFunc(slices.Values(files), func(a, b File) int { return strings.Compare(a.Path, b.Path) })
	made := map[string]bool{"/": true}
	for _, f := range sorted {
		clean := path.Clean("/" + f.Path)
		if made[clean] {
			return nil, fmt.Errorf("image: %s stands twice", clean)
		}
		if err := addParents(w, clean, made); err != nil {
			return nil, err
		}
		content := f.Content
		if f.Source != "" {
			var err error
			if content, err = os.ReadFile(f.Source); err != nil {
				return nil, fmt.Errorf("image: %w", err)
			}
		}
		header := &tar.Header{
			Typeflag: tar.TypeReg, Name: clean[1:], Size: int64(len(content)), Mode: f.Mode,
			ModTime: epoch(), Format: tar.FormatPAX,
		}
		if err := w.WriteHeader(header); err != nil {
			return nil, fmt.Errorf("image: %w", err)
		}
		if _, err := w.Write(content); err != nil {
			return nil, fmt.Errorf("image: %w", err)
		}
		made[clean] = true
	}
	if err := w.Close(); err != nil {
		return nil, fmt.Errorf("image: %w", err)
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(buf.Bytes())), nil
	},
		tarball.WithMediaType(types.OCILayer), tarball.WithCompressedCaching)
	if err != nil {
		return nil, fmt.Errorf("image layer: %w", err)
	}
	return imageOf(layer, c)
}

func addParents(w *tar.Writer, file string, made map[string]bool) error {
	dir := path.Dir(file)
	if made[dir] {
		return nil
	}
	if err := addParents(w, dir, made); err != nil {
		return err
	}
	made[dir] = true
	return w.WriteHeader(&tar.Header{
		Typeflag: tar.TypeDir, Name: dir[1:] + "/", Mode: 0o755, ModTime: epoch(),
		Format: tar.FormatPAX,
	})
}

// ImageFromTar makes an image of one layer from a root file system's tar, such as mmdebstrap writes. The compressed
// layer is kept in workDir for as long as the image is used.
func ImageFromTar(tarPath, workDir string, c ImageConfig) (v1.Image, error) {
	layerPath := filepath.Join(workDir, "layer.tar.gz")
	if err := CompressLayer(tarPath, layerPath); err != nil {
		return nil, err
	}
	return ImageFromLayer(layerPath, c)
}

// CompressLayer makes a layer of a root file system's tar. Device nodes, extended attributes, times and names of owners
// are left out. The layer is there as a whole or not at all.
func CompressLayer(tarPath, layerPath string) error {
	in, err := os.Open(tarPath)
	if err != nil {
		return fmt.Errorf("root file system: %w", err)
	}
	defer func() { _ = in.Close() }() // opened for reading
	out, err := os.CreateTemp(filepath.Dir(layerPath), ".layer-*")
	if err != nil {
		return fmt.Errorf("image layer: %w", err)
	}
	defer func() { _ = os.Remove(out.Name()) }() // gone already when it was renamed
	if err := errors.Join(compressTar(in, out), out.Close()); err != nil {
		return fmt.Errorf("image layer: %w", err)
	}
	if err := os.Rename(out.Name(), layerPath); err != nil {
		return fmt.Errorf("image layer: %w", err)
	}
	return nil
}

// ImageFromLayer makes an image of a compressed layer, which must stay where it is for as long as the image is used.
func ImageFromLayer(layerPath string, c ImageConfig) (v1.Image, error) {
	layer, err := tarball.LayerFromFile(layerPath, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, fmt.Errorf("image layer: %w", err)
	}
	return imageOf(layer, c)
}

func compressTar(in io.Reader, out io.Writer) error {
	// A layer travels once to the hub and once to each node, on a fast network: speed is worth more than size.
	z, err := gzip.NewWriterLevel(out, gzip.BestSpeed)
	if err != nil {
		return err
	}
	r, w := tar.NewReader(in), tar.NewWriter(z)
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("read the root file system: %w", err)
		}
		name := strings.TrimPrefix(path.Clean("/"+h.Name), "/")
		if name == "" || h.Typeflag == tar.TypeChar || h.Typeflag == tar.TypeBlock || h.Typeflag == tar.TypeFifo {
			continue
		}
		if h.Typeflag == tar.TypeDir {
			name += "/"
		}
		clean := &tar.Header{
			Typeflag: h.Typeflag, Name: name, Linkname: h.Linkname, Size: h.Size, Mode: h.Mode & 0o7777, Uid: h.Uid, Gid: h.Gid,
			ModTime: epoch(), Format: tar.FormatPAX,
		}
		if h.Typeflag == tar.TypeLink {
			clean.Linkname = strings.TrimPrefix(path.Clean("/"+h.Linkname), "/")
		}
		if err := w.WriteHeader(clean); err != nil {
			return err
		}
		if _, err := io.Copy(w, r); err != nil { //nolint:gosec // the input is not compressed, and the app team's own
			return err
		}
	}
	return errors.Join(w.Close(), z.Close())
}

func imageOf(layer v1.Layer, c ImageConfig) (v1.Image, error) {
	if c.Architecture == "" {
		c.Architecture = runtime.GOARCH
	}
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	img, err := mutate.Append(img, mutate.Addendum{
		Layer: layer, MediaType: types.OCILayer,
		History: v1.History{Created: v1.Time{Time: epoch()}, CreatedBy: "gpuaas appkit"},
	})
	if err != nil {
		return nil, fmt.Errorf("image: %w", err)
	}
	file, err := img.ConfigFile()
	if err != nil {
		return nil, fmt.Errorf("image: %w", err)
	}
	file = file.DeepCopy()
	file.OS, file.Architecture, file.Created = "linux", c.Architecture, v1.Time{Time: epoch()}
	file.Config = v1.Config{
		Entrypoint: c.Entrypoint, Cmd: c.Cmd, Env: c.Env, User: c.User, WorkingDir: c.WorkingDir,
		Labels: c.Labels,
	}
	if img, err = mutate.ConfigFile(img, file); err != nil {
		return nil, fmt.Errorf("image: %w", err)
	}
	return img, nil
}

// Digest returns sha256:<hex> of an image, before or after its push.
func Digest(img v1.Image) (string, error) {
	d, err := img.Digest()
	if err != nil {
		return "", fmt.Errorf("image digest: %w", err)
	}
	return d.String(), nil
}
