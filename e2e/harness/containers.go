package harness

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	api "github.com/gpuaas/gpuaas/pkg/client"
)

// ContainerdClient opens a node's namespace of containerd; the caller closes it.
func (w *Testbed) ContainerdClient(a *devcluster.Agent) *client.Client {
	w.T.Helper()
	cl, err := client.New(a.Config.ContainerdAddress, client.WithDefaultNamespace(a.Config.ContainerdNamespace))
	require.NoError(w.T, err)
	return cl
}

// RemoveContainersOf removes a node's containers, as a power cut does that has ended the agent at a time.
func (w *Testbed) RemoveContainersOf(a *devcluster.Agent, cut time.Time) {
	w.T.Helper()
	cl := w.ContainerdClient(a)
	defer func() { require.NoError(w.T, cl.Close()) }()
	containers, err := cl.Containers(w.Ctx)
	require.NoError(w.T, err)
	require.NotEmpty(w.T, containers)
	w.cutPower(a, cut, func() {
		for _, c := range containers {
			task, err := c.Task(w.Ctx, nil)
			require.NoError(w.T, err)
			_, err = task.Delete(w.Ctx, client.WithProcessKill)
			require.NoError(w.T, err)
			require.NoError(w.T, c.Delete(w.Ctx, client.WithSnapshotCleanup))
		}
	})
}

// ServiceContainer is the running container of a service.
type ServiceContainer struct {
	ID, Image string
	PID       uint32
	Revision  string
}

// Running are the containers of the instance that run on the node, by their services.
func (w *Testbed) Running(i api.AppInstance) map[string]ServiceContainer {
	w.T.Helper()
	cl := w.ContainerdClient(w.Agent)
	defer func() { require.NoError(w.T, cl.Close()) }()
	containers, err := cl.Containers(w.Ctx, fmt.Sprintf("labels.%q==%q", "gpuaas.instance", i.ID))
	require.NoError(w.T, err)
	found := map[string]ServiceContainer{}
	for _, c := range containers {
		task, err := c.Task(w.Ctx, nil)
		if err != nil {
			continue // it is on its way up or down
		}
		info, infoErr := c.Info(w.Ctx)
		if s, err := task.Status(w.Ctx); err == nil && infoErr == nil && s.Status == client.Running {
			found[info.Labels["gpuaas.service"]] = ServiceContainer{
				ID: c.ID(), Image: info.Image, PID: task.Pid(), Revision: info.Labels["gpuaas.revision"],
			}
		}
	}
	return found
}

// PidOf is the process of the instance's one container.
func (w *Testbed) PidOf(i api.AppInstance) uint32 {
	w.T.Helper()
	return w.PidOn(w.Agent, i)
}

// PidOn is PidOf on another node.
func (w *Testbed) PidOn(a *devcluster.Agent, i api.AppInstance) uint32 {
	w.T.Helper()
	cl := w.ContainerdClient(a)
	defer func() { require.NoError(w.T, cl.Close()) }()
	containers, err := cl.Containers(w.Ctx, fmt.Sprintf("labels.%q==%q", "gpuaas.instance", i.ID))
	require.NoError(w.T, err)
	require.Len(w.T, containers, 1)
	task, err := containers[0].Task(w.Ctx, nil)
	require.NoError(w.T, err)
	return task.Pid()
}

// KeepCalling calls the app repeatedly until stop is called, which returns the first failure.
func (w *Testbed) KeepCalling(i api.AppInstance) (stop func() error) {
	return w.repeatUntilStopped(func(ctx context.Context) error {
		_, err := scenario.Get(ctx, i.Endpoints[0].URL+"/")
		return err
	})
}

// AdminShell is the platform admin at a terminal, logged in.
func (w *Testbed) AdminShell() *Shell {
	w.T.Helper()
	s := w.Shell("admin")
	s.MustRun("login", "--name", "e2e", "--url", w.Hub.Ready.APIURL, "--ca-file", w.Hub.Ready.CAFile, "--token-file",
		w.Hub.Ready.TokenFile)
	return s
}

// ContainersOn counts the containers that an instance has on a node.
func (w *Testbed) ContainersOn(a *devcluster.Agent, i api.AppInstance) int {
	w.T.Helper()
	cl := w.ContainerdClient(a)
	defer func() { require.NoError(w.T, cl.Close()) }()
	list, err := cl.Containers(w.Ctx, fmt.Sprintf("labels.%q==%q", "gpuaas.instance", i.ID))
	require.NoError(w.T, err)
	return len(list)
}
