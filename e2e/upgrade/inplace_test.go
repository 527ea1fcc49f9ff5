package upgrade_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/e2e/release"
	"github.com/gpuaas/gpuaas/e2e/skip"
	api "github.com/gpuaas/gpuaas/pkg/client"
)

// lastRelease is the directory of the last release's programs, which TestMain has built.
func lastRelease(t *testing.T) string {
	t.Helper()
	v, ok, err := release.Last(t.Context(), harness.Source(t))
	require.NoError(t, err)
	if !ok {
		skip.Except(t, skip.NoRelease, "set "+release.From+" to a commit to upgrade from that")
	}
	return v.Bin()
}

// buildRelease builds the programs of the last release, and those of the commit before schemas: what they are made of
// is fetched before the tests run without a network.
func buildRelease(ctx context.Context, root string) error {
	if before, err := release.Find(ctx, root, beforeSchemas); err == nil {
		if err := before.Build(ctx, root); err != nil {
			return err
		}
	}
	v, ok, err := release.Last(ctx, root)
	if err != nil || !ok {
		return err
	}
	return v.Build(ctx, root)
}

// swapHub stops the hub and starts the one from bin on the same data and addresses.
func swapHub(w *harness.Testbed, bin string) {
	w.T.Helper()
	require.NoError(w.T, w.Hub.Stop())
	w.Hub.Config.Bin = bin
	w.RestartHub()
}

// swapAgent stops the agent and starts the one from bin on the same data.
func swapAgent(w *harness.Testbed, bin string) {
	w.T.Helper()
	require.NoError(w.T, w.Agent.Stop())
	w.Agent.Config.Bin = bin
	w.RestartAgent(w.Agent)
}

// upgradeStep replaces a program or restarts it.
type upgradeStep struct {
	name string
	take func(*harness.Testbed)
}

// A node is upgraded before its hub: a new agent works with an old hub.
func TestANodeAndThenTheHubAreUpgradedInPlace(t *testing.T) {
	today := harness.Binaries(t)
	upgradeInPlace(t, []upgradeStep{
		{"today's agent", func(w *harness.Testbed) { swapAgent(w, today) }},
		{"today's hub", func(w *harness.Testbed) { swapHub(w, today) }},
		{"a restart of the agent", func(w *harness.Testbed) { swapAgent(w, today) }},
		{"a restart of the hub", func(w *harness.Testbed) { swapHub(w, today) }},
	})
}

// A hub is upgraded before its nodes: an old agent works with a new hub.
func TestAHubAndThenTheNodeAreUpgradedInPlace(t *testing.T) {
	today := harness.Binaries(t)
	upgradeInPlace(t, []upgradeStep{
		{"today's hub", func(w *harness.Testbed) { swapHub(w, today) }},
		{"today's agent", func(w *harness.Testbed) { swapAgent(w, today) }},
	})
}

// upgradeInPlace starts hub and node of the last release and takes the steps, of which the first two are the upgrade:
// the app that runs is untouched, others come and go, and the bill is right.
func upgradeInPlace(t *testing.T, steps []upgradeStep) {
	t.Helper()
	w := newReleaseTestbed(t, lastRelease(t))
	containers := w.WatchContainerd(w.Agent.Config.ContainerdNamespace)
	kept := w.Launch("kept")
	pid := w.PidOf(kept)
	made := w.Launch("made before the upgrade, gone after it")
	w.ShipProject(map[string][]string{"1.0.0": nil})
	several := w.LaunchProject("of several services")
	services := w.Running(several)
	require.Len(t, services, 2)
	serving := w.KeepCalling(kept)
	var young api.AppInstance

	for n, s := range steps {
		t.Log(s.name)
		before, err := w.Tenant.Usage(w.Ctx, kept.ID)
		require.NoError(t, err)
		s.take(w)
		w.Eventually("usage arrives again", func() error {
			after, err := w.Tenant.Usage(w.Ctx, kept.ID)
			return harness.Pending(err, len(after) > len(before))
		})
		require.Equal(t, pid, w.PidOf(kept), "%s leaves the process alone", s.name)
		require.Equal(t, services, w.Running(several), s.name)
		passing := w.Launch("passing")
		w.RequireAnswer(passing)
		hasNoAddressTwice(w)
		w.Decommission(passing)
		if n == 1 { // both are today's now, and neither was when this one was made
			w.Decommission(made)
			young = w.Launch("made after the upgrade")
		}
	}

	require.NoError(t, serving(), "the app answered throughout")
	w.Decommission(young)
	w.Decommission(several)
	w.RequireRuns(containers, several, 2) // the service that runs once, and then the others without a gap
	w.Decommission(kept)
	w.FinalPostings(kept)
	usage, err := w.Tenant.Usage(w.Ctx, kept.ID)
	require.NoError(t, err)
	containers.RequireBilledTime(t, kept.Members[0].ID, harness.RequireContiguous(t, usage))
}

// newReleaseTestbed is a hub with a node, both of an earlier version, a tenant, its app and money for weeks of leases.
func newReleaseTestbed(t *testing.T, bin string) *harness.Testbed {
	t.Helper()
	w := harness.New(t)
	w.StartContainerd()
	hub := w.HubConfig()
	hub.Bin = bin
	w.StartHub(hub)
	w.NewTenant("acme")
	node := w.AgentConfig("node")
	node.Bin = bin
	w.Agent = w.StartAgent(node)
	w.ShipApp()
	w.GrantCredit()
	var err error
	w.Allocation, err = w.Tenant.Allocate(w.Ctx, w.Tenant.Admin, w.Agent.Ready.NodeID, 2, 1024)
	require.NoError(t, err)
	return w
}

// hasNoAddressTwice reads what the node has noted of its members' networks.
func hasNoAddressTwice(w *harness.Testbed) {
	w.T.Helper()
	records, err := filepath.Glob(filepath.Join(w.Agent.Config.RunDir, "network", "members", "*.json"))
	require.NoError(w.T, err)
	whose := map[string]string{}
	for _, path := range records {
		var record struct {
			IP string `json:"ip"`
		}
		data, err := os.ReadFile(path)
		require.NoError(w.T, err)
		require.NoError(w.T, json.Unmarshal(data, &record))
		require.NotEmpty(w.T, record.IP, path)
		require.Empty(w.T, whose[record.IP], "%s has the address %s too", path, record.IP)
		whose[record.IP] = path
	}
	require.GreaterOrEqual(w.T, len(whose), 2)
}

// The upgrade tests prove little with today's programs twice.
func TestReleasedProgramsAreNotTodays(t *testing.T) {
	old, today := lastRelease(t), harness.Binaries(t)
	if os.Getenv(release.From) != "" {
		skip.Except(t, skip.OwnRelease, "")
	}
	for _, b := range []string{"gpuaas-hub", "gpuaas-agent"} {
		was, err := os.ReadFile(filepath.Join(old, b))
		require.NoError(t, err)
		is, err := os.ReadFile(filepath.Join(today, b))
		require.NoError(t, err)
		require.NotEqual(t, sha256.Sum256(was), sha256.Sum256(is), b)
	}
}

// beforeSchemas is a commit whose agent knows no manifest schema.
const beforeSchemas = "0f2c2bd"

// A node whose agent is older than an app's manifest says which feature is missing, keeps what it runs, and gets
// nothing new until it is updated.
func TestYesterdaysAgentSaysThatAFeatureOfTodaysManifestIsMissing(t *testing.T) {
	old, err := release.Find(t.Context(), harness.Source(t), beforeSchemas)
	if err != nil {
		skip.Except(t, skip.NoHistory, err.Error())
	}
	require.NoError(t, old.Build(t.Context(), harness.Source(t)))
	w := harness.NewPlatform(t)
	shipRestarting(w, "1.0.1")
	kept, waiting := launch(w, "1.0.1"), launch(w, "1.0.1")
	pid := w.PidOf(kept)
	_, err = w.Tenant.Stop(w.Ctx, w.Operator, waiting.ID)
	require.NoError(t, err)

	require.NoError(t, w.Agent.Stop())
	_, err = api.Read[api.AppInstance](w.Operator.StartAppInstance(w.Ctx, w.Tenant.Project.ID, waiting.ID))
	require.NoError(t, err)
	w.Agent.Config.Bin = old.Bin()
	w.RestartAgent(w.Agent)
	w.Eventually("the node names the reason", func() error {
		return harness.Pending(nil, w.Instance(waiting.ID).StatusReason == api.StatusReasonFeatureMissing)
	})
	require.Equal(t, pid, w.PidOf(kept), "what runs goes on")
	w.RequireAnswer(kept)
	_, err = api.Read[api.AppInstance](w.Operator.CreateAppInstance(w.Ctx, w.Tenant.Project.ID, api.AppInstanceCreate{
		AppSlug: harness.AppSlug, Version: "1.0.1", DisplayName: "not placed",
	}))
	problem, ok := errors.AsType[*api.Problem](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, "feature_missing", problem.Code)

	swapAgent(w, harness.Binaries(t))
	_, err = w.Tenant.AwaitStatus(w.Ctx, w.Operator, waiting.ID, api.AppInstanceStatusRunning, nil)
	require.NoError(t, err)
	require.Equal(t, pid, w.PidOf(kept))
}

// shipRestarting ships a version that a new config restarts: its containers' digests hold the config, as those of the
// agent before schemas do, which stops a refused container of another digest.
func shipRestarting(w *harness.Testbed, version string) {
	w.T.Helper()
	r := w.Release(version)
	template := bytes.Replace(r.Template, []byte("{on_change: signal, signal: SIGHUP}"), []byte("{on_change: restart}"), 1)
	require.NotEqual(w.T, r.Template, template)
	r.Template = template
	_, err := w.Tenant.Ship(w.Ctx, w.Publisher, r)
	require.NoError(w.T, err)
}

func launch(w *harness.Testbed, version string) api.AppInstance {
	w.T.Helper()
	i, _, err := w.Tenant.Launch(w.Ctx, w.Operator, api.AppInstanceCreate{
		AppSlug: harness.AppSlug, Version: version, DisplayName: "of " + version,
		PlacementIntent: api.PlacementIntent{AllocationIds: []string{w.Allocation.ID}},
	}, nil)
	require.NoError(w.T, err)
	return i
}
