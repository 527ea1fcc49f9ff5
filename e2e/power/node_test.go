package power_test

import (
	"encoding/json"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	api "github.com/gpuaas/gpuaas/pkg/client"
)

// node is a platform whose node is switched off and on.
type node struct {
	*harness.Testbed

	outages []outage
}

// outage is a time in which nothing of the node ran.
type outage struct{ off, on time.Time }

// newNode makes the platform; what is in the node's own directory, containerd's included, is on the node's disk.
func newNode(w *harness.Testbed) *node {
	w.T.Helper()
	w.StartContainerdIn("node/containerd")
	w.StartHub(w.HubConfig())
	w.NewTenant("acme")
	c := w.AgentConfig("node")
	w.Rebootable(&c)
	w.Agent = w.StartAgent(c)
	w.ShipApp()
	w.Allocate(w.Agent)
	return &node{Testbed: w}
}

// shipImage ships a version with an image that the node must pull.
func (n *node) shipImage(version string) {
	n.T.Helper()
	const layerBytes = 4 << 20
	r := n.Release(version)
	layer, err := random.Layer(layerBytes, types.OCILayer)
	require.NoError(n.T, err)
	r.Image, err = mutate.AppendLayers(r.Image, layer)
	require.NoError(n.T, err)
	_, err = n.Tenant.Ship(n.Ctx, n.Publisher, r)
	require.NoError(n.T, err)
}

// request asks for an instance and does not wait for it.
func (n *node) request(name, version string) (id string) {
	n.T.Helper()
	i, err := api.Read[api.AppInstance](n.Operator.CreateAppInstance(n.Ctx, n.Tenant.Project.ID, api.AppInstanceCreate{
		AppSlug: harness.AppSlug, Version: version, DisplayName: name,
		PlacementIntent: api.PlacementIntent{AllocationIds: []string{n.Allocation.ID}},
	}))
	require.NoError(n.T, err)
	return i.ID
}

// awaitServing waits until the instances answer, which a process from before the last outage cannot, and the hub shows
// them running.
func (n *node) awaitServing(ids ...string) {
	n.T.Helper()
	for _, id := range ids {
		n.Eventually("the instance runs and answers", func() error {
			i := n.Instance(id)
			if i.Status != api.AppInstanceStatusRunning || i.Health != api.AppInstanceHealthHealthy || len(i.Endpoints) == 0 {
				return harness.ErrPending
			}
			_, err := scenario.Get(n.Ctx, i.Endpoints[0].URL+"/")
			return err
		})
	}
}

// awaitGone waits until the node has nothing of the instance.
func (n *node) awaitGone(id string) {
	n.T.Helper()
	n.Eventually("nothing of the instance is left", func() error {
		return harness.Pending(nil, n.ContainersOn(n.Agent, api.AppInstance{ID: id}) == 0)
	})
}

// requireBilledOnce ends the instances, and checks that no second is in two records, and none of an outage in any.
func (n *node) requireBilledOnce(running []string, ended ...string) {
	n.T.Helper()
	for _, id := range running {
		n.Decommission(n.Instance(id))
	}
	for _, id := range append(running, ended...) {
		i := n.Instance(id)
		postings := n.FinalPostings(i)
		usage, err := n.Tenant.Usage(n.Ctx, id)
		require.NoError(n.T, err)
		seconds := harness.RequireNoOverlap(n.T, usage)
		harness.RequireCost(n.T, postings, seconds, int64(len(postings)))
		require.Positive(n.T, seconds.Sign(), "%s ran and is billed", i.DisplayName)
		for _, u := range usage {
			for _, o := range n.outages {
				require.False(n.T, u.StartedAt.Before(o.on) && u.EndedAt.After(o.off),
					"%s of %s from %s to %s is billed; the power was off from %s to %s", u.Meter, i.DisplayName, u.StartedAt,
					u.EndedAt, o.off, o.on)
			}
		}
	}
}

// says is what an agent tells the owner of its machine.
type says struct {
	Incarnation string `json:"incarnation"`
	Usage       struct {
		LastSegment uint64
		Marks       struct {
			Posted uint64 `json:"posted"`
		}
	} `json:"usage"`
}

func (n *node) says(a *devcluster.Agent) (s says, err error) {
	out, err := exec.Command(filepath.Join(harness.Binaries(n.T), "gpuaas-agent"), "status", "-o", "json",
		"--local-socket", a.Ready.LocalSocket).Output()
	if err != nil {
		return s, err
	}
	return s, json.Unmarshal(out, &s)
}
