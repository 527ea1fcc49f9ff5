package power_test

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	api "github.com/gpuaas/gpuaas/pkg/client"
)

// Laws 3 and 5: the power of a whole machine is cut, with systemd, containerd and agent as their units start them. The
// next boot has another id, an empty /run and none of the old network namespaces; what is leased runs again without
// anybody's help, also without the hub, and the time without power is not billed.
func TestLaw03AMachineThatRebootsRunsWhatIsLeased(t *testing.T) {
	w := harness.NewAlone(t)
	m, address := newMachine(w)
	t.Cleanup(func() {
		if t.Failed() {
			m.showLogs()
		}
	})
	hub := w.HubConfig()
	hub.Listen, hub.SessionListen = address+":8443", address+":7843"
	hub.AdvertiseAPI, hub.AdvertiseSession = hub.Listen, hub.SessionListen
	w.StartHub(hub)
	w.NewTenant("acme")
	token, err := scenario.JoinToken(w.Ctx, w.Admin())
	require.NoError(t, err)
	m.write("etc/gpuaas/join-token", token)
	m.write("etc/gpuaas/agent.env", `GPUAAS_AGENT_JOIN_TOKEN_FILE=/etc/gpuaas/join-token
GPUAAS_AGENT_METERING_INTERVAL=1s
GPUAAS_AGENT_USAGE_INTERVAL=3s
GPUAAS_AGENT_RESYNC=5s
GPUAAS_AGENT_REPORT_INTERVAL=5s
GPUAAS_AGENT_DIAL_RETRY_MAX=1s
GPUAAS_AGENT_API_URL=`+w.Hub.Ready.APIURL+`
GPUAAS_AGENT_ROOT_FINGERPRINT=`+w.Hub.RootFingerprint+"\n")
	outside := networks()
	m.boot()
	w.Agent = &devcluster.Agent{Ready: devcluster.AgentReady{NodeID: m.nodeID()}}
	w.AwaitOnline(w.Agent.Ready.NodeID)
	w.ShipApp()
	w.Allocate(w.Agent)
	n := &node{Testbed: w}
	i := w.Launch("kept")
	m.awaitAnswer(i)
	_, err = w.Tenant.AwaitCharge(w.Ctx, i.ID)
	require.NoError(t, err)

	boot := m.bootID()
	host, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	require.NoError(t, err)
	require.NotContains(t, string(host), boot)
	require.NoError(t, os.WriteFile(m.path("run/before"), nil, 0o600))
	require.Greater(t, len(networks()), len(outside)+1, "the machine's, and that of the app")
	require.NoError(t, w.Hub.Kill9())
	n.outages = append(n.outages, m.cutAndBoot(outside))

	require.NotEqual(t, boot, m.bootID())
	_, err = os.Stat(m.path("run/before"))
	require.ErrorIs(t, err, os.ErrNotExist, "what was in /run")
	m.awaitAnswer(i)
	w.RestartHub()
	w.Eventually("the hub sees the app run again", func() error {
		now := w.Instance(i.ID)
		return harness.Pending(nil, now.Status == api.AppInstanceStatusRunning &&
			now.Health == api.AppInstanceHealthHealthy)
	})
	n.requireBilledOnce([]string{i.ID})
}
