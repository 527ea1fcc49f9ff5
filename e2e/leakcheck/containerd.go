package leakcheck

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/namespaces"
)

// containerdTimeout bounds all questions to one containerd.
const containerdTimeout = 30 * time.Second

// takeContainerd lists the objects of all namespaces of the scope's containerd.
func takeContainerd(s *Snapshot) error {
	address := s.scope.ContainerdAddress
	if address == "" {
		return nil
	}
	if _, err := os.Stat(address); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	c, err := client.New(address, client.WithTimeout(containerdTimeout))
	if err != nil {
		return fmt.Errorf("ask containerd at %s: %w", address, err)
	}
	defer func() { _ = c.Close() }()
	ctx, cancel := context.WithTimeout(context.Background(), containerdTimeout)
	defer cancel()
	names, err := c.NamespaceService().List(ctx)
	if err != nil {
		return fmt.Errorf("list containerd's namespaces: %w", err)
	}
	for _, name := range names {
		s.add(Containerd, "namespace "+name, "")
		if err := takeNamespace(namespaces.WithNamespace(ctx, name), s, c, name+"/"); err != nil {
			return fmt.Errorf("list containerd's namespace %s: %w", name, err)
		}
	}
	return nil
}

func takeNamespace(ctx context.Context, s *Snapshot, c *client.Client, ns string) error {
	containers, err := c.ContainerService().List(ctx)
	if err != nil {
		return err
	}
	for _, one := range containers {
		s.add(Containerd, "container "+ns+one.ID, fmt.Sprint(one.Labels))
	}
	running, err := c.TaskService().List(ctx, &tasks.ListTasksRequest{})
	if err != nil {
		return err
	}
	for _, one := range running.Tasks {
		s.add(Containerd, "task "+ns+one.ID, fmt.Sprintf("pid %d %s", one.Pid, one.Status))
	}
	held, err := c.LeasesService().List(ctx)
	if err != nil {
		return err
	}
	for _, one := range held {
		s.add(Containerd, "lease "+ns+one.ID, fmt.Sprint(one.Labels))
	}
	// A snapshotter that this containerd does not have answers with an error, and holds nothing.
	for _, name := range []string{"overlayfs", "native"} {
		_ = c.SnapshotService(name).Walk(ctx, func(_ context.Context, info snapshots.Info) error {
			if !s.scope.KeepImages || info.Kind != snapshots.KindCommitted {
				s.add(Containerd, "snapshot "+ns+name+"/"+info.Name, info.Kind.String()+" of "+info.Parent)
			}
			return nil
		})
	}
	if s.scope.KeepImages {
		return nil
	}
	images, err := c.ImageService().List(ctx)
	if err != nil {
		return err
	}
	for _, one := range images {
		s.add(Containerd, "image "+ns+one.Name, one.Target.Digest.String())
	}
	return c.ContentStore().Walk(ctx, func(info content.Info) error {
		s.add(Containerd, "content "+ns+info.Digest.String(), "")
		return nil
	})
}
