package harness

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/netem"
	api "github.com/gpuaas/gpuaas/pkg/client"
)

// callInterval is the pause between two calls of a monitored app.
const callInterval = 50 * time.Millisecond

// MonitoredNode is a node with an app that is called all the time and must not fail.
type MonitoredNode struct {
	Testbed     *Testbed
	Agent       *devcluster.Agent
	Oracle      *ContainerdOracle
	allocation  api.Allocation
	App         api.AppInstance
	PID         uint32
	StopCalling func() error
	Instances   []api.AppInstance
}

// MonitorApp launches the app on the node and starts calling it.
func (w *Testbed) MonitorApp(a *devcluster.Agent) *MonitoredNode {
	w.T.Helper()
	n := &MonitoredNode{Testbed: w, Agent: a, Oracle: w.WatchContainerd(a.Config.ContainerdNamespace)}
	var err error
	n.allocation, err = w.Tenant.Allocate(w.Ctx, w.Tenant.Admin, a.Ready.NodeID, 1, 512)
	require.NoError(w.T, err)
	n.App = n.AwaitRunning(n.Request("kept"))
	n.StartCalling()
	return n
}

// StartCalling starts calling the monitored app.
func (n *MonitoredNode) StartCalling() {
	n.Testbed.T.Helper()
	n.PID = n.Testbed.PidOn(n.Agent, n.App)
	n.StopCalling = n.Testbed.repeatUntilStopped(func(ctx context.Context) error { return n.Get(ctx, n.App) })
}

// Request creates an instance on the node and does not wait for it.
func (n *MonitoredNode) Request(name string) (id string) {
	n.Testbed.T.Helper()
	i, err := api.Read[api.AppInstance](n.Testbed.Operator.CreateAppInstance(n.Testbed.Ctx, n.Testbed.Tenant.Project.ID,
		api.AppInstanceCreate{
			AppSlug: AppSlug, Version: "1.0.0", DisplayName: name, PlacementIntent: api.PlacementIntent{
				AllocationIds: []string{n.allocation.ID},
			},
		}))
	require.NoError(n.Testbed.T, err)
	return i.ID
}

// AwaitRunning waits until the instance runs and answers on its node.
func (n *MonitoredNode) AwaitRunning(id string) api.AppInstance {
	n.Testbed.T.Helper()
	i, err := n.Testbed.Tenant.AwaitStatus(n.Testbed.Ctx, n.Testbed.Operator, id, api.AppInstanceStatusRunning, nil)
	require.NoError(n.Testbed.T, err)
	require.NoError(n.Testbed.T, n.Get(n.Testbed.Ctx, i))
	n.Instances = append(n.Instances, i)
	return i
}

// Get calls the instance's private endpoint from its node.
func (n *MonitoredNode) Get(ctx context.Context, i api.AppInstance) error {
	dialer := &net.Dialer{}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context,
		network, addr string,
	) (conn net.Conn, err error) {
		err = netem.Within(n.Agent.Config.NetNS, func() (err error) {
			conn, err = dialer.DialContext(ctx, network, addr)
			return err
		})
		return conn, err
	}}}
	_, err := scenario.GetWith(ctx, client, i.Endpoints[0].URL+"/")
	return err
}

// RequireSameProcess checks that the monitored app was not restarted.
func (n *MonitoredNode) RequireSameProcess() {
	n.Testbed.T.Helper()
	require.Equal(n.Testbed.T, n.PID, n.Testbed.PidOn(n.Agent, n.App), "the very process goes on")
}

// AwaitUsage waits until the hub has more usage of the node than now.
func (n *MonitoredNode) AwaitUsage() {
	n.Testbed.T.Helper()
	before, err := n.Testbed.Tenant.Usage(n.Testbed.Ctx, n.App.ID)
	require.NoError(n.Testbed.T, err)
	n.Testbed.Eventually("usage arrives", func() error {
		after, err := n.Testbed.Tenant.Usage(n.Testbed.Ctx, n.App.ID)
		return Pending(err, len(after) > len(before))
	})
}

// repeatUntilStopped calls get repeatedly until stop is called, which returns the first failure.
func (w *Testbed) repeatUntilStopped(get func(ctx context.Context) error) (stop func() error) {
	ctx, cancel := context.WithCancel(w.Ctx)
	done := make(chan error, 1)
	go func() {
		tick := time.NewTicker(callInterval)
		defer tick.Stop()
		for asked := 0; ; asked++ {
			err := get(ctx)
			switch {
			case ctx.Err() != nil && asked == 0:
				done <- errors.New("the app was never asked")
				return
			case ctx.Err() != nil:
				done <- nil
				return
			case err != nil:
				done <- fmt.Errorf("after %d answers: %w", asked, err)
				return
			}
			<-tick.C
		}
	}()
	return func() error {
		cancel()
		return <-done
	}
}
