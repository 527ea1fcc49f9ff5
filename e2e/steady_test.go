package e2e_test

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

// askEvery is the pause between two calls of an app that is asked all the time: short against everything that happens
// to it.
const askEvery = 50 * time.Millisecond

// steadyNode is a node with an app that is to go on whatever happens around it.
type steadyNode struct {
	w          *world
	agent      *devcluster.Agent
	truth      *truth
	allocation api.Allocation
	kept       api.AppInstance
	pid        uint32
	serving    func() error
	all        []api.AppInstance
}

// keep launches the app on the node, and begins to ask it.
func (w *world) keep(a *devcluster.Agent) *steadyNode {
	w.t.Helper()
	n := &steadyNode{w: w, agent: a, truth: w.listen(a.Config.ContainerdNamespace)}
	var err error
	n.allocation, err = w.tenant.Allocate(w.ctx, w.tenant.Admin, a.Ready.NodeID, 1, 512)
	require.NoError(w.t, err)
	n.kept = n.running(n.request("kept"))
	n.ask()
	return n
}

// ask begins to ask the app that is kept.
func (n *steadyNode) ask() {
	n.w.t.Helper()
	n.pid = n.w.pidOn(n.agent, n.kept)
	n.serving = n.w.keepGetting(func(ctx context.Context) error { return n.get(ctx, n.kept) })
}

// request asks for an instance on the node and waits for nothing.
func (n *steadyNode) request(name string) (id string) {
	n.w.t.Helper()
	i, err := api.Read[api.AppInstance](n.w.operator.CreateAppInstance(n.w.ctx, n.w.tenant.Project.ID,
		api.AppInstanceCreate{
			AppSlug: appSlug, Version: "1.0.0", DisplayName: name, PlacementIntent: api.PlacementIntent{
				AllocationIds: []string{n.allocation.ID},
			},
		}))
	require.NoError(n.w.t, err)
	return i.ID
}

// running waits until the instance runs and answers on its node.
func (n *steadyNode) running(id string) api.AppInstance {
	n.w.t.Helper()
	i, err := n.w.operator.WaitInstance(n.w.ctx, n.w.tenant.Project.ID, id, api.AppInstanceStatusRunning, nil)
	require.NoError(n.w.t, err)
	require.NoError(n.w.t, n.get(n.w.ctx, i))
	n.all = append(n.all, i)
	return i
}

// get calls the instance's private endpoint from its node.
func (n *steadyNode) get(ctx context.Context, i api.AppInstance) error {
	dialer := &net.Dialer{}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context,
		network, addr string,
	) (conn net.Conn, err error) {
		err = netem.Within(n.agent.Config.NetNS, func() (err error) {
			conn, err = dialer.DialContext(ctx, network, addr)
			return err
		})
		return conn, err
	}}}
	_, err := scenario.GetWith(ctx, client, i.Endpoints[0].URL+"/")
	return err
}

// untouched holds that what was running runs on.
func (n *steadyNode) untouched() {
	n.w.t.Helper()
	require.Equal(n.w.t, n.pid, n.w.pidOn(n.agent, n.kept), "the very process goes on")
}

// usageGrows waits until the hub has more usage of the node than now.
func (n *steadyNode) usageGrows() {
	n.w.t.Helper()
	before, err := n.w.tenant.Usage(n.w.ctx, n.kept.ID)
	require.NoError(n.w.t, err)
	n.w.eventually("usage arrives", func() error {
		after, err := n.w.tenant.Usage(n.w.ctx, n.kept.ID)
		return orMissing(err, len(after) > len(before))
	})
}

// finalPostings waits until nothing more can be billed for an instance that was decommissioned.
func (w *world) finalPostings(i api.AppInstance) (postings []api.Posting) {
	w.t.Helper()
	w.eventually("the bill of "+i.DisplayName+" is final", func() (err error) {
		postings, err = w.tenant.Postings(w.ctx, i.ID)
		return orMissing(err, hasKind(postings, api.PostingKindHoldClosed))
	})
	return postings
}

// keepGetting gets again and again until the returned function is called, which tells of the first failure.
func (w *world) keepGetting(get func(ctx context.Context) error) (stop func() error) {
	ctx, cancel := context.WithCancel(w.ctx)
	done := make(chan error, 1)
	go func() {
		tick := time.NewTicker(askEvery)
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
