package cluster_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/starter/rke2"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// TestAnRKE2ShapedClusterThroughItsLife takes the reference program whose steps on the cluster are stand-ins through
// the tasks of the Slurm one. It shows the tasks and members; that Kubernetes runs, it does not show.
func TestAnRKE2ShapedClusterThroughItsLife(t *testing.T) {
	c := newCluster(t, "rke2-reference", rke2.Manifest)
	one, two := c.machines[0], c.machines[1]
	c.operate("rke2")
	c.await(client.AppInstanceStatusRunning)
	added := c.add(1)
	node := rke2.Dir + "/nodes/n" + added[len(added)-12:]
	require.Equal(t, "Ready", one.run(t, "cat", node))
	require.Contains(t, two.run(t, "cat", rke2.Dir+"/config.yaml"), "server: https://10.77.0.1:9345")

	two.run(t, "rm", "-r", rke2.Dir)
	c.report(added, client.MemberReportStatusFailed, client.WorkerReasonNodeUnreachable)
	c.recover(added)
	require.NoError(t, two.has(rke2.Dir+"/rke2-agent"))

	c.remove(added)
	c.awaitMember(added, client.MemberStatusRemoved)
	require.Error(t, one.has(node))
	require.Error(t, two.has(rke2.Dir), "nothing of the cluster is left")
	c.decommission()
	require.Error(t, one.has(rke2.Dir))
}
