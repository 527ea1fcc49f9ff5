package cluster_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/starter/slurm"
	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// slurmCommand runs a client of Slurm on the machine.
func (m machine) slurmCommand(t *testing.T, words ...string) string {
	t.Helper()
	return m.run(t, append([]string{"env", "SLURM_CONF=" + slurm.Dir + "/slurm.conf", "timeout", "60"}, words...)...)
}

// TestASlurmClusterThroughItsLife has the reference program operate a real Slurm on two machines: it forms a cluster of
// one member, adds the other, runs jobs on both, recovers the one whose daemons were killed, drains it while a job
// still runs there, removes it, and decommissions.
func TestASlurmClusterThroughItsLife(t *testing.T) {
	c := newCluster(t, "slurm-reference", slurm.Manifest)
	one, two := c.machines[0], c.machines[1]
	c.operate("slurm", "--report-every", "1s")
	c.await(client.AppInstanceStatusRunning)
	require.Equal(t, "m1", one.slurmCommand(t, "srun", "hostname"))

	added := c.add(1)
	both := func() {
		t.Helper()
		require.ElementsMatch(t, []string{"m1", "m2"}, strings.Fields(one.slurmCommand(t, "srun", "-N2", "hostname")))
	}
	both()
	one.slurmCommand(t, "sbatch", "--wait", "-N2", "--chdir=/srv", "--output=/srv/hosts", "--wrap", "srun hostname")
	const outputs = "if [ -e /srv/hosts ]; then cat /srv/hosts; fi"
	// Slurm chooses the machine that runs the script, and so which of them has the output.
	hosts := one.run(t, "sh", "-c", outputs) + two.run(t, "sh", "-c", outputs)
	require.ElementsMatch(t, []string{"m1", "m2"}, strings.Fields(hosts))

	two.run(t, "pkill", "-KILL", "slurmd|munged")
	c.awaitMember(added, client.MemberStatusFailed)
	c.recover(added)
	both()

	name := "n" + added[len(added)-12:]
	one.slurmCommand(t, "sbatch", "--nodelist="+name, "--chdir=/srv", "--output=/srv/last", "--wrap",
		"touch begun; until [ -e go ]; do sleep 0.1; done; hostname")
	c.Eventually("the job runs", func() error { return two.has("/srv/begun") })
	c.remove(added)
	c.Eventually("the node is drained", func() error {
		state := one.slurmCommand(t, "sinfo", "-h", "-n", name, "-o", "%T")
		return harness.Pending(nil, state == "draining")
	})
	two.run(t, "touch", "/srv/go")
	c.awaitMember(added, client.MemberStatusRemoved)
	require.Equal(t, "m2", two.run(t, "cat", "/srv/last"), "the job went on to its end")
	require.NotContains(t, one.slurmCommand(t, "sinfo", "-h", "-N"), name)
	require.Error(t, two.has(slurm.Dir), "nothing of the cluster is left")
	require.Equal(t, "m1", one.slurmCommand(t, "srun", "hostname"))

	c.decommission()
	require.Error(t, one.has(slurm.Dir))
}
