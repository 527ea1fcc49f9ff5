package cluster_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// cluster is an instance of an app that an external worker operates, with an allocation for each machine; the first is
// its controller's.
type cluster struct {
	*harness.Testbed
	id          string
	allocations []string
	machines    []machine
	ended       chan error
}

// newCluster sets up a hub and a node for each of two machines, publishes the app and launches it on the first.
func newCluster(t *testing.T, slug string, doc []byte) *cluster {
	t.Helper()
	w := harness.New(t)
	w.StartContainerd()
	w.StartHub(w.HubConfig())
	w.NewTenant("acme")
	publisher, err := w.Tenant.NewPublisher(w.Ctx)
	require.NoError(t, err)
	machines := newMachines(w, 2)
	c := &cluster{Testbed: w, machines: machines, ended: make(chan error, 1)}
	for n := range machines {
		node := w.StartAgent(w.AgentConfig(fmt.Sprintf("node%d", n)))
		a, err := w.Tenant.Allocate(w.Ctx, w.Tenant.Admin, node.Ready.NodeID, 1, 64)
		require.NoError(t, err)
		c.allocations = append(c.allocations, a.ID)
	}
	require.NoError(t, w.Tenant.Publish(w.Ctx, publisher, slug, "1.0.0", doc))
	require.NoError(t, w.Tenant.Entitle(w.Ctx, slug))
	c.id = c.changed(w.Operator.CreateAppInstance(w.Ctx, w.Tenant.Project.ID, client.AppInstanceCreate{
		AppSlug: slug, Version: "1.0.0", DisplayName: "cluster",
		PlacementIntent: client.PlacementIntent{AllocationIds: c.allocations[:1]},
	})).ID
	return c
}

// operate has the program of the reference controllers work off the tasks until the instance has ended, with a service
// account of its own.
func (c *cluster) operate(controller string, flags ...string) {
	c.T.Helper()
	dir := c.T.TempDir()
	write := func(name string, value any) (path string) {
		text, err := json.Marshal(value)
		require.NoError(c.T, err)
		path = filepath.Join(dir, name)
		require.NoError(c.T, os.WriteFile(path, text, 0o600))
		return path
	}
	account, err := client.Read[client.ServiceAccount](c.Tenant.Admin.CreateServiceAccount(c.Ctx, c.Tenant.Project.ID,
		client.ServiceAccountCreate{Name: controller, Slug: controller, Role: client.ServiceAccountRoleAppOperator}))
	require.NoError(c.T, err)
	machines := map[string]any{}
	for n, id := range c.allocations {
		m := c.machines[n]
		machines[id] = map[string]any{"address": m.Address, "shell": m.Shell, "cpus": m.CPUs}
	}
	program := filepath.Join(dir, "gpuaas-starter")
	require.NoError(c.T, devcluster.Build(c.Ctx, harness.Source(c.T), "./deploy/starter/cmd/gpuaas-starter", program))
	log, err := os.Create(filepath.Join(dir, "log"))
	require.NoError(c.T, err)
	cmd := exec.CommandContext(context.Background(), program, append(flags, "--controller", controller)...)
	cmd.Env = append(os.Environ(), "GPUAAS_STARTER_HUB_URL="+c.Hub.Ready.APIURL,
		"GPUAAS_STARTER_HUB_CA="+c.Hub.Ready.CAFile, "GPUAAS_STARTER_SERVICE_ACCOUNT="+write("account.json", account),
		"GPUAAS_STARTER_PROJECT="+c.Tenant.Project.ID, "GPUAAS_STARTER_INSTANCE="+c.id,
		"GPUAAS_STARTER_MACHINES="+write("machines.yaml", machines))
	cmd.Stdout, cmd.Stderr = log, log
	require.NoError(c.T, cmd.Start())
	go func() { c.ended <- cmd.Wait() }()
	c.T.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = log.Close()
		if text, err := os.ReadFile(log.Name()); err == nil && c.T.Failed() {
			c.T.Logf("%s: %s", controller, text)
		}
	})
}

func (c *cluster) await(status client.AppInstanceStatus) {
	c.T.Helper()
	_, err := c.Tenant.AwaitStatus(c.Ctx, c.Operator, c.id, status, nil)
	require.NoError(c.T, err)
}

// add adds the machine as a member, and waits until it is ready.
func (c *cluster) add(machine int) (memberID string) {
	c.T.Helper()
	i := c.changed(c.Operator.AddAppInstanceMember(c.Ctx, c.Tenant.Project.ID, c.id,
		client.MemberAdd{AllocationID: c.allocations[machine]}))
	memberID = i.Members[len(i.Members)-1].ID
	c.awaitMember(memberID, client.MemberStatusReady)
	return memberID
}

func (c *cluster) report(memberID string, status client.MemberReportStatus, reason client.WorkerReason) {
	c.T.Helper()
	c.changed(c.Operator.ReportAppInstanceMember(c.Ctx, c.Tenant.Project.ID, c.id, memberID,
		client.MemberReport{Status: status, Reason: reason}))
}

func (c *cluster) recover(memberID string) {
	c.T.Helper()
	c.changed(c.Operator.RecoverAppInstanceMember(c.Ctx, c.Tenant.Project.ID, c.id, memberID))
	c.awaitMember(memberID, client.MemberStatusReady)
}

func (c *cluster) remove(memberID string) {
	c.T.Helper()
	c.changed(c.Operator.RemoveAppInstanceMember(c.Ctx, c.Tenant.Project.ID, c.id, memberID))
}

// decommission ends the instance, and its worker with it.
func (c *cluster) decommission() {
	c.T.Helper()
	end, err := c.Tenant.Decommission(c.Ctx, c.Operator, c.id)
	require.NoError(c.T, err)
	require.Equal(c.T, client.AppInstanceStatusDecommissioned, end.Status)
	require.NoError(c.T, <-c.ended, "the program ends with its instance")
}

func (c *cluster) changed(r *http.Response, err error) client.AppInstance {
	c.T.Helper()
	i, err := client.Read[client.AppInstance](r, err)
	require.NoError(c.T, err)
	return i
}

func (c *cluster) awaitMember(memberID string, want client.MemberStatus) {
	c.T.Helper()
	ctx, cancel := context.WithTimeout(c.Ctx, harness.ConvergenceBound)
	defer cancel()
	require.NoError(c.T, c.Operator.Watch(ctx, c.Tenant.Project.ID, c.id, func(i client.AppInstance) (bool, error) {
		for _, m := range i.Members {
			if m.ID == memberID && m.Status == want {
				return true, nil
			}
			if m.ID == memberID && m.Status == client.MemberStatusFailed {
				return true, fmt.Errorf("the member failed: %s %s", m.StatusReason, m.Detail)
			}
		}
		return false, nil
	}))
}

// has fails where the machine has no such file.
func (m machine) has(path string) error {
	words := append(m.Shell[1:len(m.Shell):len(m.Shell)], "test", "-e", path)
	return exec.CommandContext(context.Background(), m.Shell[0], words...).Run()
}
