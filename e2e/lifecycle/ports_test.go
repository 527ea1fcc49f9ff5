package lifecycle_test

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// choosing names a port of the node for the app's only one.
func choosing(port int) client.PortChoices {
	return client.PortChoices{{Name: "http", HostPort: int32(port)}}
}

// published is the port of the node that an instance is published on.
func published(t *testing.T, i client.AppInstance) (port int) {
	t.Helper()
	require.Len(t, i.Endpoints, 1)
	_, err := fmt.Sscanf(i.Endpoints[0].URL, "http://127.0.0.1:%d", &port)
	require.NoError(t, err)
	return port
}

// withChosenPorts is a platform whose node lets tenants choose three ports; its owner may say something else later.
// They are the first of the node's own range: it would give them to the first members.
func withChosenPorts(t *testing.T) (w *harness.Testbed, first int, says func(format string, args ...any)) {
	t.Helper()
	w = harness.New(t)
	w.StartContainerd()
	w.StartHub(w.HubConfig())
	w.NewTenant("acme")
	node := w.AgentConfig("node")
	var last int
	_, err := fmt.Sscanf(node.PortRange, "%d-%d", &first, &last)
	require.NoError(t, err)
	file := filepath.Join(w.Dir, "policy.yaml")
	says = func(format string, args ...any) {
		require.NoError(t, os.WriteFile(file+".next", fmt.Appendf(nil, format, args...), 0o600))
		require.NoError(t, os.Rename(file+".next", file))
	}
	says("host_ports: %d-%d\n", first, first+2)
	node.ExtraArgs = append(node.ExtraArgs, "--policy", file)
	w.Agent = w.StartAgent(node)
	w.ShipApp()
	w.Allocate(w.Agent)
	return w, first, says
}

// The tenant chooses a port of the node where its owner allows that; nobody else gets it, and neither does the node
// give it away by itself.
func TestATenantChoosesAPortOfTheNode(t *testing.T) {
	w, first, says := withChosenPorts(t)
	create := func(name string, ports client.PortChoices) client.AppInstanceCreate {
		return client.AppInstanceCreate{
			AppSlug: harness.AppSlug, Version: "1.0.0", DisplayName: name, Ports: ports,
			Resources: client.InstanceResources{CPUMillis: 250, MemoryMib: 96},
		}
	}
	left, _, err := w.Tenant.Launch(w.Ctx, w.Operator, create("left to the node", nil), nil)
	require.NoError(t, err)
	require.Greater(t, published(t, left), first+2)

	chosen, _, err := w.Tenant.Launch(w.Ctx, w.Operator, create("chosen", choosing(first)), nil)
	require.NoError(t, err)
	require.Equal(t, first, published(t, chosen))
	require.Equal(t, choosing(first), chosen.Ports)
	w.RequireAnswer(chosen)
	for reason, port := range map[string]int{"is in use on this node": first, "must lie between": first + 3} {
		_, _, err = w.Tenant.Launch(w.Ctx, w.Operator, create("refused", choosing(port)), nil)
		require.ErrorContains(t, err, "port_unavailable")
		require.ErrorContains(t, err, reason)
	}

	var program net.ListenConfig
	listener, err := program.Listen(w.Ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", first+1))
	require.NoError(t, err)
	waiting, err := client.Read[client.AppInstance](w.Operator.CreateAppInstance(w.Ctx, w.Tenant.Project.ID,
		create("waits", choosing(first+1))))
	require.NoError(t, err)
	w.Eventually("the tenant sees why it waits", func() error {
		waiting = w.Instance(waiting.ID)
		return harness.Pending(nil, waiting.StatusReason == client.StatusReasonInsufficientCapacity)
	})
	require.NoError(t, listener.Close())
	waiting, err = w.Tenant.AwaitStatus(w.Ctx, w.Operator, waiting.ID, client.AppInstanceStatusRunning, nil)
	require.NoError(t, err)
	require.Equal(t, first+1, published(t, waiting))

	moved, err := client.Read[client.AppInstance](w.Operator.UpgradeAppInstance(w.Ctx, w.Tenant.Project.ID, chosen.ID,
		client.AppInstanceUpgrade{TargetVersion: "1.0.0", Ports: choosing(first + 2)}))
	require.NoError(t, err)
	moved, err = w.Tenant.AwaitStatus(w.Ctx, w.Operator, moved.ID, client.AppInstanceStatusRunning, nil)
	require.NoError(t, err)
	require.Equal(t, first+2, published(t, moved))
	w.RequireAnswer(moved)
	_, err = scenario.Get(w.Ctx, strings.Replace(moved.Endpoints[0].URL, fmt.Sprint(first+2), fmt.Sprint(first), 1)+"/")
	require.Error(t, err, "it has left the old one")

	says("host_ports: %d\n", first+2)
	w.Eventually("the owner takes a port back", func() error {
		return harness.Pending(nil, w.Instance(waiting.ID).StatusReason == client.StatusReasonOwnerRefused)
	})
	w.RequireAnswer(moved)
	for _, i := range []client.AppInstance{left, waiting, moved} {
		w.Decommission(i)
	}
}
