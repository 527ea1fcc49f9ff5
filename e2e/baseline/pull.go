package baseline

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// Cold are the times of one launch whose image is not there.
type Cold struct {
	Pull time.Duration
	Run  Parts
}

// Total is the time of the whole launch.
func (c Cold) Total() time.Duration { return c.Pull + c.Run.Total() }

// withHostIDs is the spec without its user namespace.
func withHostIDs(s *oci.Spec) *oci.Spec {
	linux := *s.Linux
	linux.UIDMappings, linux.GIDMappings = nil, nil
	linux.Namespaces = slices.DeleteFunc(slices.Clone(linux.Namespaces), func(n specs.LinuxNamespace) bool {
		return n.Type == specs.UserNamespace
	})
	plain := *s
	plain.Linux = &linux
	return &plain
}

// MeasureCold pulls and unpacks an image from a registry on this machine that speaks plain HTTP, as containerd does by
// itself, launches the container's spec from it, and removes container and image again. The container has the host's
// user ids, because containerd would copy the image for others first.
func (b *Bench) MeasureCold(ctx context.Context, ref string) (c Cold, err error) {
	ours := namespaces.WithNamespace(ctx, namespace)
	cold := *b
	defer func() {
		b.round = cold.round
		if cold.image != nil {
			err = errors.Join(err, b.cl.ImageService().Delete(ours, ref, images.SynchronousDelete()))
		}
	}()
	resolver := docker.NewResolver(docker.ResolverOptions{
		Hosts: docker.ConfigureDefaultRegistries(docker.WithPlainHTTP(docker.MatchAllHosts)),
	})
	cold.image = nil
	cold.spec = withHostIDs(b.spec)
	if err := timed(&c.Pull, func() (err error) {
		cold.image, err = b.cl.Pull(ours, ref, client.WithPullUnpack, client.WithPullSnapshotter("overlayfs"),
			client.WithResolver(resolver))
		return err
	}); err != nil {
		return Cold{}, fmt.Errorf("pull %s: %w", ref, err)
	}
	c.Run, err = cold.Measure(ours)
	return c, err
}
