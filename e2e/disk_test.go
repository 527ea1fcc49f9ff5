package e2e_test

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
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/protocol"
)

const conditionDiskFull = "disk_full"

// nodeConditions are those that the node itself shows its owner.
func (w *world) nodeConditions() ([]string, error) {
	out, err := exec.Command(filepath.Join(binaries(w.t), "gpuaas-agent"), "status", "-o", "json", "--local-socket",
		w.agent.Ready.LocalSocket).Output()
	if err != nil {
		return nil, err
	}
	var status struct {
		Conditions []string `json:"conditions"`
	}
	return status.Conditions, json.Unmarshal(out, &status)
}

// The node's disk becomes full while two apps run: the owner and the hub see it, one app goes on, the other is
// decommissioned nevertheless, nothing new is started, and every second is on the bill once there is room again.
func TestNodeWhoseDiskBecomesFullLosesNothing(t *testing.T) {
	w := newWorld(t)
	w.startContainerd()
	hub := w.hubConfig()
	// What a node refused is offered again with the next pass.
	hub.ExtraArgs = []string{"--resync", "1s"}
	w.startHub(hub)
	w.newTenant("acme")
	conf := w.agentConfig("node")
	w.smallDisk(conf.DataDir(), 400)
	w.agent = w.startAgent(conf)
	w.shipApp()
	w.allocate(w.agent)
	containers := w.listen(conf.ContainerdNamespace)
	i, leaves := w.launch("app"), w.launch("leaves")
	pid := w.pidOf(i)

	ballast := w.fill(conf.DataDir(), 8<<20)
	w.eventually("the node says that its disk is full", func() error {
		conditions, err := w.nodeConditions()
		return orMissing(err, slices.Contains(conditions, conditionDiskFull))
	})
	w.eventually("the hub shows it", func() error {
		n, err := client.Read[client.Node](w.tenant.Admin.GetNode(w.ctx, w.agent.Ready.NodeID))
		return orMissing(err, slices.Contains(n.Conditions, conditionDiskFull))
	})
	w.answers(i)
	require.Equal(t, pid, w.pidOf(i))
	w.decommission(leaves)
	later, err := client.Read[client.AppInstance](w.operator.CreateAppInstance(w.ctx, w.tenant.Project.ID,
		client.AppInstanceCreate{
			AppSlug: appSlug, Version: "1.0.0", DisplayName: "later", PlacementIntent: client.PlacementIntent{
				AllocationIds: []string{w.allocation.ID},
			},
		}))
	require.NoError(t, err)
	w.eventually("the node refuses the lease of what it cannot start", func() error {
		n, err := client.Read[client.Node](w.tenant.Admin.GetNode(w.ctx, w.agent.Ready.NodeID))
		return orMissing(err, n.LastRefusal.Reason == protocol.RefusalUnavailable)
	})
	waiting, err := client.Read[client.AppInstance](w.operator.GetAppInstance(w.ctx, w.tenant.Project.ID, later.ID))
	require.NoError(t, err)
	require.NotEqual(t, client.AppInstanceStatusRunning, waiting.Status)

	require.NoError(t, os.Remove(ballast))
	w.eventually("the node has room again", func() error {
		conditions, err := w.nodeConditions()
		return orMissing(err, !slices.Contains(conditions, conditionDiskFull))
	})
	later, err = w.operator.WaitInstance(w.ctx, w.tenant.Project.ID, later.ID, client.AppInstanceStatusRunning, nil)
	require.NoError(t, err, "what was refused comes once there is room")
	w.decommission(later)
	w.answers(i)
	require.Equal(t, pid, w.pidOf(i))
	w.decommission(i)
	var postings []client.Posting
	w.eventually("the bill is final", func() (err error) {
		postings, err = w.tenant.Postings(w.ctx, i.ID)
		return orMissing(err, hasKind(postings, client.PostingKindHoldClosed))
	})
	billed := new(big.Rat)
	for _, id := range []string{i.ID, leaves.ID, later.ID} {
		usage, err := w.tenant.Usage(w.ctx, id)
		require.NoError(t, err)
		billed.Add(billed, requireContiguous(t, usage, "session_seconds"))
	}
	requireWithinBeat(t, containers.running(t), billed)
}

// The hub's disk becomes full: it says so and takes nothing it cannot keep; what it has answered is there afterwards,
// and it works on by itself once there is room.
func TestHubWhoseDiskBecomesFullLosesNothing(t *testing.T) {
	w := newWorld(t)
	w.startContainerd()
	conf := w.hubConfig()
	w.smallDisk(conf.DataDir(), 512)
	conf.ExtraArgs = append(conf.ExtraArgs, "--registry-min-free", "0")
	w.startHub(conf)
	w.newTenant("acme")
	w.agent = w.startAgent(w.agentConfig("node"))
	w.shipApp()
	w.allocate(w.agent)
	containers := w.listen(w.agent.Config.ContainerdNamespace)
	i := w.launch("app")
	pid := w.pidOf(i)

	ballast := w.fill(conf.DataDir(), 0)
	// Plain requests: the SDK would wait and try again.
	plain := w.plain()
	create := func() answer {
		return w.ask(plain, http.MethodPost, "/admin/join-tokens", `{}`,
			map[string]string{"X-Idempotency-Key": scenario.NewID()})
	}
	var kept []string
	var refused answer
	w.eventually("the hub refuses for want of space", func() error {
		if refused = create(); refused.status != http.StatusCreated {
			return nil
		}
		var token client.JoinToken
		require.NoError(t, json.Unmarshal(refused.body, &token))
		kept = append(kept, token.ID)
		return errMissing
	})
	require.Equal(t, http.StatusServiceUnavailable, refused.status, "%s", refused.body)
	require.Equal(t, "database_disk_full", refused.problem.Code)
	require.NotEmpty(t, refused.problem.CorrelationID)
	require.NotEmpty(t, refused.header.Get("Retry-After"))
	w.answers(i)
	require.Equal(t, pid, w.pidOf(i))

	require.NoError(t, os.Remove(ballast))
	w.eventually("the hub works again", func() error { return orMissing(nil, create().status == http.StatusCreated) })
	tokens, err := client.Read[client.JoinTokenList](w.tenant.Admin.ListJoinTokens(w.ctx,
		&client.ListJoinTokensParams{Limit: client.PageSize}))
	require.NoError(t, err)
	for _, id := range kept {
		require.True(t, slices.ContainsFunc(tokens.Items, func(j client.JoinToken) bool { return j.ID == id }),
			"%s was answered and is lost", id)
	}
	w.decommission(i)
	var postings []client.Posting
	w.eventually("the bill is final", func() (err error) {
		postings, err = w.tenant.Postings(w.ctx, i.ID)
		return orMissing(err, hasKind(postings, client.PostingKindHoldClosed))
	})
	usage, err := w.tenant.Usage(w.ctx, i.ID)
	require.NoError(t, err)
	requireWithinBeat(t, containers.running(t), requireContiguous(t, usage, "session_seconds"))
}
