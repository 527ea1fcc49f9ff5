package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/e2e/baseline"
)

// coldRounds is the number of cold launches of an image, each with one of the baseline before or after it.
const coldRounds = 5

// maxDiskRatio is what an image may take of the disk, to its files and compressed layers together.
const maxDiskRatio = 1.1

// coldImage is an image whose launch is measured without any of it on the node.
type coldImage struct {
	name   string
	layers int
	// files of fileBytes each are in a layer.
	files, fileBytes int
	zstd             bool
	// ratio to the baseline that must not be exceeded.
	ratio float64
}

func coldImages() []coldImage {
	return []coldImage{
		{name: "image-gzip", layers: 4, files: 256, fileBytes: 2 << 20, ratio: 0.5},
		{name: "image-zstd", layers: 4, files: 256, fileBytes: 2 << 20, zstd: true, ratio: 0.25},
		{name: "image-small", layers: 6, files: 1000, fileBytes: 32 << 10, ratio: 1},
	}
}

// imageRows measure launches whose image is not on the node.
func imageRows() (rows []Row) {
	for i, c := range coldImages() {
		rows = append(rows, Row{Name: c.name, Measure: func(ctx context.Context, e *Env) ([]Result, error) {
			return measureImage(ctx, e, c, 2+i)
		}})
	}
	return rows
}

// measureImage launches an image again and again, under versions with this major number.
func measureImage(ctx context.Context, e *Env, c coldImage, major int) (_ []Result, err error) {
	s, err := e.Testbed(ctx)
	if err != nil {
		return nil, err
	}
	bench, end, err := s.Baseline(ctx)
	if err != nil {
		return nil, err
	}
	defer func(image v1.Image, version string) {
		s.image, s.version = image, version
		err = errors.Join(err, end())
	}(s.image, s.version)
	return s.measureCold(ctx, e, bench, c, major)
}

// measureCold launches the same layers under a new digest each time: the node knows none of them any more.
func (s *Testbed) measureCold(ctx context.Context, e *Env, bench *baseline.Bench, c coldImage, major int) ([]Result,
	error,
) {
	dir, err := e.Dir(c.name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	image, compressed, err := c.build(dir, s.image)
	if err != nil {
		return nil, err
	}
	if err := os.Mkdir(filepath.Join(dir, "blobs"), 0o700); err != nil {
		return nil, err
	}
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0)),
		registry.WithBlobHandler(registry.NewDiskBlobHandler(filepath.Join(dir, "blobs")))))
	defer server.Close()
	ref := strings.TrimPrefix(server.URL, "http://") + "/bench/cold:latest"
	tag, err := name.ParseReference(ref, name.Insecure)
	if err != nil {
		return nil, err
	}
	if err := remote.Write(tag, image, remote.WithContext(ctx)); err != nil {
		return nil, err
	}
	var ours, theirs, pulls, runs, disk Samples
	measures := []func(round int) error{
		func(round int) error {
			took, stored, err := s.coldLaunch(ctx, image, fmt.Sprintf("%d.0.%d", major, round))
			ours.Add(took)
			disk = append(disk, float64(stored)/(1<<20))
			return err
		},
		func(int) error {
			unix.Sync()
			if err := touchMemory(); err != nil {
				return err
			}
			t, err := bench.MeasureCold(ctx, ref)
			theirs.Add(t.Total())
			pulls.Add(t.Pull)
			runs.Add(t.Run.Total())
			return err
		},
	}
	for round := range e.Samples(coldRounds) {
		for i := range measures {
			if err := measures[(round+i)%len(measures)](round); err != nil {
				return nil, err
			}
		}
	}
	unpacked := int64(c.layers) * int64(c.files) * int64(c.fileBytes)
	launch := ours.Into(Result{
		Name: c.name, What: "POST app-instance → running, seen by a watching client, nothing of the image on the node",
		Unit: "ms", Target: fmt.Sprintf("p50 ≤ %g × baseline", c.ratio),
		Parts: []Part{
			{"baseline: pull and unpack", pulls.P50()},
			{"baseline: container, task, network", runs.P50()},
		},
		Note: fmt.Sprintf("%d layers of %d files of %d KiB, %d MiB compressed; registries and node on the one machine, "+
			"everything in the page cache and synced, and %d GiB of free memory touched, before each launch; "+
			"baseline n = %d, in turn", c.layers, c.files, c.fileBytes>>10, compressed>>20, touchedBytes>>30, len(theirs)),
	}).against(theirs.P50())
	launch.Reached = launch.Ratio <= c.ratio
	stored := disk.Into(Result{
		Name: c.name + ".disk", What: "what containerd keeps of the image while an instance runs, its content and snapshots",
		Unit: "MiB", Target: fmt.Sprintf("p50 ≤ %g × baseline", maxDiskRatio),
		Note: fmt.Sprintf("baseline: %d MiB of files and %d MiB compressed", unpacked>>20, compressed>>20),
	}).against(float64(unpacked+compressed) / (1 << 20))
	stored.Reached = stored.Ratio <= maxDiskRatio
	return []Result{launch, stored}, nil
}

// touchedBytes is more than a launch and the baseline use.
const touchedBytes = 6 << 30

// touchMemory touches free memory and frees it again. The host of a virtual machine takes free memory back, and the
// next touch of it costs up to some seconds for each GiB, which would count for the program that is measured.
func touchMemory() error {
	memory, err := unix.Mmap(-1, 0, touchedBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	for i := 0; i < len(memory); i += os.Getpagesize() {
		memory[i] = 1
	}
	return unix.Munmap(memory)
}

// coldLaunch ships the image under a version of its own, launches it, and removes instance and image. stored is how
// many bytes containerd keeps more while the instance runs.
func (s *Testbed) coldLaunch(ctx context.Context, image v1.Image, version string) (took time.Duration, stored int64,
	err error,
) {
	file, err := image.ConfigFile()
	if err != nil {
		return 0, 0, err
	}
	config := *file.Config.DeepCopy()
	config.Env = append(config.Env, "BENCH_VERSION="+version)
	s.image, err = mutate.Config(image, config)
	if err != nil {
		return 0, 0, err
	}
	if err := s.release(ctx, version, appManifest); err != nil {
		return 0, 0, err
	}
	c, err := client.New(s.Agent.Config.ContainerdAddress,
		client.WithDefaultNamespace(s.Agent.Config.ContainerdNamespace))
	if err != nil {
		return 0, 0, err
	}
	defer func() { _ = c.Close() }()
	before, err := storedBytes(ctx, c)
	if err != nil {
		return 0, 0, err
	}
	unix.Sync() // what the preparation has written must not wait for the disk beside the launch
	if err := touchMemory(); err != nil {
		return 0, 0, err
	}
	i, took, err := s.Launch(ctx, "cold-"+version)
	if err != nil {
		return 0, 0, err
	}
	after, err := storedBytes(ctx, c)
	if err != nil {
		return 0, 0, err
	}
	if _, err := s.Decommission(ctx, i.ID); err != nil {
		return 0, 0, err
	}
	digest, err := s.image.Digest()
	if err != nil {
		return 0, 0, err
	}
	return took, after - before, forgetImage(ctx, c, digest.String())
}

// storedBytes is the size of all content and snapshots.
func storedBytes(ctx context.Context, c *client.Client) (total int64, err error) {
	err = c.ContentStore().Walk(ctx, func(info content.Info) error {
		total += info.Size
		return nil
	})
	if err != nil {
		return 0, err
	}
	service := c.SnapshotService("overlayfs")
	err = service.Walk(ctx, func(ctx context.Context, info snapshots.Info) error {
		used, err := service.Usage(ctx, info.Name)
		total += used.Size
		return err
	})
	return total, err
}

// forgetImage removes an image with its layers from the node.
func forgetImage(ctx context.Context, c *client.Client, digest string) error {
	all, err := c.ImageService().List(ctx)
	if err != nil {
		return err
	}
	for _, image := range all {
		if image.Target.Digest.String() == digest {
			return c.ImageService().Delete(ctx, image.Name, images.SynchronousDelete())
		}
	}
	return fmt.Errorf("the node does not have the image %s", digest)
}

// build adds layers to an image. Half of each file is noise, half repeats, so that it compresses as programs do.
func (c coldImage) build(dir string, on v1.Image) (_ v1.Image, compressed int64, err error) {
	var opts []tarball.LayerOption
	if c.zstd {
		opts = append(opts, tarball.WithMediaType(types.OCILayerZStd))
	}
	for i := range c.layers {
		path := filepath.Join(dir, fmt.Sprintf("layer%d", i))
		if err := c.writeLayer(path, i); err != nil {
			return nil, 0, err
		}
		layer, err := tarball.LayerFromFile(path, opts...)
		if err != nil {
			return nil, 0, err
		}
		size, err := layer.Size()
		if err != nil {
			return nil, 0, err
		}
		compressed += size
		if on, err = mutate.AppendLayers(on, layer); err != nil {
			return nil, 0, err
		}
	}
	return mutate.MediaType(on, types.OCIManifestSchema1), compressed, nil
}

func (c coldImage) writeLayer(path string, n int) (err error) {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	var out io.WriteCloser = gzip.NewWriter(file)
	if c.zstd {
		if out, err = zstd.NewWriter(file); err != nil {
			return err
		}
	}
	w := tar.NewWriter(out)
	noise := rand.NewChaCha8([32]byte{byte(n)})
	content := make([]byte, c.fileBytes)
	const block = 4096
	for f := range c.files {
		for at := 0; at < len(content); at += 2 * block {
			_, _ = noise.Read(content[at : at+block])
			copy(content[at+block:], bytes.Repeat(content[at:at+64], block/64))
		}
		if err := w.WriteHeader(&tar.Header{
			Name: fmt.Sprintf("data%d-%d", n, f), Mode: 0o644, Size: int64(len(content)),
		}); err != nil {
			return err
		}
		if _, err := w.Write(content); err != nil {
			return err
		}
	}
	return errors.Join(w.Close(), out.Close())
}
