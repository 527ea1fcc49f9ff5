package chaos_test

import (
	"encoding/json"
	"math/big"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/protocol"
)

const conditionDiskFull = "disk_full"

// nodeConditions are those that the node itself shows its owner.
func nodeConditions(w *harness.Testbed) ([]string, error) {
	out, err := exec.Command(filepath.Join(harness.Binaries(w.T), "gpuaas-agent"), "status", "-o", "json",
		"--local-socket",
		w.Agent.Ready.LocalSocket).Output()
	if err != nil {
		return nil, err
	}
	var status struct {
		Conditions []string `json:"conditions"`
	}
	return status.Conditions, json.Unmarshal(out, &status)
}

// The node's disk becomes full while two apps run. Owner and hub see the condition, one app goes on, the other can
// still be decommissioned, nothing new is started, and every second is billed once there is room again.
func TestNodeWhoseDiskBecomesFullLosesNothing(t *testing.T) {
	w := harness.New(t)
	w.StartContainerd()
	hub := w.HubConfig()
	// What a node refused is offered again with the next pass.
	hub.ExtraArgs = []string{"--resync", "1s"}
	w.StartHub(hub)
	w.NewTenant("acme")
	conf := w.AgentConfig("node")
	w.SmallDisk(conf.DataDir(), 400)
	w.Agent = w.StartAgent(conf)
	w.ShipApp()
	w.Allocate(w.Agent)
	containers := w.WatchContainerd(conf.ContainerdNamespace)
	i, leaves := w.Launch("app"), w.Launch("leaves")
	pid := w.PidOf(i)

	ballast := w.Fill(conf.DataDir(), 8<<20)
	w.Eventually("the node says that its disk is full", func() error {
		conditions, err := nodeConditions(w)
		return harness.Pending(err, slices.Contains(conditions, conditionDiskFull))
	})
	w.Eventually("the hub shows it", func() error {
		n, err := client.Read[client.Node](w.Tenant.Admin.GetNode(w.Ctx, w.Agent.Ready.NodeID))
		return harness.Pending(err, slices.Contains(n.Conditions, conditionDiskFull))
	})
	w.RequireAnswer(i)
	require.Equal(t, pid, w.PidOf(i))
	w.Decommission(leaves)
	later, err := client.Read[client.AppInstance](w.Operator.CreateAppInstance(w.Ctx, w.Tenant.Project.ID,
		client.AppInstanceCreate{
			AppSlug: harness.AppSlug, Version: "1.0.0", DisplayName: "later", PlacementIntent: client.PlacementIntent{
				AllocationIds: []string{w.Allocation.ID},
			},
		}))
	require.NoError(t, err)
	w.Eventually("the node refuses the lease of what it cannot start", func() error {
		n, err := client.Read[client.Node](w.Tenant.Admin.GetNode(w.Ctx, w.Agent.Ready.NodeID))
		return harness.Pending(err, n.LastRefusal.Reason == protocol.Nack_UNAVAILABLE.Text())
	})
	waiting, err := client.Read[client.AppInstance](w.Operator.GetAppInstance(w.Ctx, w.Tenant.Project.ID, later.ID))
	require.NoError(t, err)
	require.NotEqual(t, client.AppInstanceStatusRunning, waiting.Status)

	require.NoError(t, os.Remove(ballast))
	w.Eventually("the node has room again", func() error {
		conditions, err := nodeConditions(w)
		return harness.Pending(err, !slices.Contains(conditions, conditionDiskFull))
	})
	later, err = w.Tenant.AwaitStatus(w.Ctx, w.Operator, later.ID, client.AppInstanceStatusRunning, nil)
	require.NoError(t, err, "what was refused comes once there is room")
	w.Decommission(later)
	w.RequireAnswer(i)
	require.Equal(t, pid, w.PidOf(i))
	w.Decommission(i)
	w.FinalPostings(i)
	billed := new(big.Rat)
	for _, id := range []string{i.ID, leaves.ID, later.ID} {
		usage, err := w.Tenant.Usage(w.Ctx, id)
		require.NoError(t, err)
		billed.Add(billed, harness.RequireContiguous(t, usage))
	}
	containers.RequireBilledTime(t, "", billed)
}

// The hub's disk becomes full: it refuses what it cannot store, keeps all that it has answered, and works again once
// there is room.
func TestHubWhoseDiskBecomesFullLosesNothing(t *testing.T) {
	w := harness.New(t)
	w.StartContainerd()
	conf := w.HubConfig()
	w.SmallDisk(conf.DataDir(), 512)
	conf.ExtraArgs = append(conf.ExtraArgs, "--registry-min-free", "0")
	w.StartHub(conf)
	w.NewTenant("acme")
	w.Agent = w.StartAgent(w.AgentConfig("node"))
	w.ShipApp()
	w.Allocate(w.Agent)
	containers := w.WatchContainerd(w.Agent.Config.ContainerdNamespace)
	i := w.Launch("app")
	pid := w.PidOf(i)

	ballast := w.Fill(conf.DataDir(), 0)
	// Plain requests: the SDK would wait and try again.
	plain := w.PlainClient()
	create := func() harness.Answer {
		return w.Ask(plain, http.MethodPost, "/admin/join-tokens", `{}`,
			map[string]string{"X-Idempotency-Key": scenario.NewID()})
	}
	var kept []string
	var refused harness.Answer
	w.Eventually("the hub refuses for want of space", func() error {
		if refused = create(); refused.Status != http.StatusCreated {
			return nil
		}
		var token client.JoinToken
		require.NoError(t, json.Unmarshal(refused.Body, &token))
		kept = append(kept, token.ID)
		return harness.ErrPending
	})
	require.Equal(t, http.StatusServiceUnavailable, refused.Status, "%s", refused.Body)
	require.Equal(t, "database_disk_full", refused.Problem.Code)
	require.NotEmpty(t, refused.Problem.CorrelationID)
	require.NotEmpty(t, refused.Header.Get("Retry-After"))
	w.RequireAnswer(i)
	require.Equal(t, pid, w.PidOf(i))

	require.NoError(t, os.Remove(ballast))
	w.Eventually("the hub works again", func() error {
		return harness.Pending(nil, create().Status == http.StatusCreated)
	})
	tokens, err := client.Read[client.JoinTokenList](w.Tenant.Admin.ListJoinTokens(w.Ctx,
		&client.ListJoinTokensParams{Limit: client.PageSize}))
	require.NoError(t, err)
	for _, id := range kept {
		require.True(t, slices.ContainsFunc(tokens.Items, func(j client.JoinToken) bool { return j.ID == id }),
			"%s was answered and is lost", id)
	}
	w.Decommission(i)
	w.FinalPostings(i)
	usage, err := w.Tenant.Usage(w.Ctx, i.ID)
	require.NoError(t, err)
	containers.RequireBilledTime(t, "", harness.RequireContiguous(t, usage))
}
