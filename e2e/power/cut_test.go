package power_test

import (
	"math/rand/v2"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/e2e/powerloss"
	api "github.com/gpuaas/gpuaas/pkg/client"
)

const (
	nodeDiskMiB = 2048
	// maxWork is how long after a change the power is cut at the latest: most changes have been made by then.
	maxWork = 1500 * time.Millisecond
)

// Laws 3, 5, 9 and 13: the power of a node is cut while it pulls, starts, upgrades, stops and removes, and its disk
// loses what agent and containerd did not flush. After each boot the node gets to what its signed state says, and no
// second is billed twice, nor one without power.
func TestLaw13ANodeWhosePowerIsCutAtWorkConverges(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	moments := rand.New(rand.NewPCG(seed, 0))
	w := harness.New(t)
	disk, err := powerloss.New(filepath.Join(w.Dir, "disk"), filepath.Join(w.Dir, "node"), nodeDiskMiB)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, disk.Close()) })
	n := newNode(w)
	n.shipImage("2.0.0")
	n.shipImage("3.0.0")
	kept := n.request("kept", "1.0.0")
	n.awaitServing(kept)

	cut := func() {
		time.Sleep(time.Duration(moments.Int64N(int64(maxWork)))) // the moment
		off := n.CutPower(n.Agent, disk, moments)
		require.NoError(t, disk.PowerOn())
		n.outages = append(n.outages, outage{off, n.Boot(n.Agent)})
		n.awaitServing(kept)
	}
	do := func(i api.AppInstance, err error) {
		t.Helper()
		require.NoError(t, err, i.ID)
		cut()
	}
	project := n.Tenant.Project.ID
	changed := n.request("changed", "2.0.0")
	cut()
	n.awaitServing(changed)
	do(api.Read[api.AppInstance](n.Operator.UpgradeAppInstance(n.Ctx, project, changed,
		api.AppInstanceUpgrade{TargetVersion: "3.0.0"})))
	n.awaitServing(changed)
	do(api.Read[api.AppInstance](n.Operator.StopAppInstance(n.Ctx, project, changed)))
	n.Eventually("it is stopped", func() error {
		return harness.Pending(nil, n.Instance(changed).Status == api.AppInstanceStatusStopped)
	})
	require.Empty(t, n.Running(n.Instance(changed)))
	do(api.Read[api.AppInstance](n.Operator.StartAppInstance(n.Ctx, project, changed)))
	n.awaitServing(changed)
	do(api.Read[api.AppInstance](n.Operator.DecommissionAppInstance(n.Ctx, project, changed)))
	n.Eventually("it is decommissioned", func() error {
		return harness.Pending(nil, n.Instance(changed).Status == api.AppInstanceStatusDecommissioned)
	})
	n.awaitGone(changed)
	n.requireBilledOnce([]string{kept}, changed)
}
