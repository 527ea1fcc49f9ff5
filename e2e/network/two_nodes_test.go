package network_test

import (
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
)

// Two nodes: the hub in one network namespace, a node in another, addresses and ports set as for a remote site.
func TestTwoNodesAcrossNetworkNamespaces(t *testing.T) {
	w := harness.New(t)
	net := w.NewNetwork("hub", "far")
	w.StartContainerd()
	w.StartHub(w.HubConfigIn(net))
	w.NewTenant("acme")
	w.Agent = w.StartAgent(w.AgentConfig("here"))
	far := w.AgentConfig("far")
	far.NetNS = net.Path("far")
	remote := w.StartAgent(far)
	w.ShipApp()

	for _, node := range []*devcluster.Agent{w.Agent, remote} {
		w.Allocate(node)
		i := w.Launch("on-" + filepath.Base(node.Config.Dir))
		require.Equal(t, node.Ready.NodeID, i.Endpoints[0].NodeID)
		if node == remote {
			_, err := scenario.Get(w.Ctx, i.Endpoints[0].URL+"/")
			require.Error(t, err, "a private endpoint is on its own node only")
			out, err := exec.Command("nsenter", "--net="+far.NetNS, "curl", "-sf", i.Endpoints[0].URL+"/").CombinedOutput()
			require.NoError(t, err, "%s", out)
		} else {
			w.RequireAnswer(i)
		}
		_, err := w.Tenant.AwaitCharge(w.Ctx, i.ID)
		require.NoError(t, err)
		w.Decommission(i)
	}
}
