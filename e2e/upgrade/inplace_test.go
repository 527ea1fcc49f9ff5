package upgrade_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	api "github.com/gpuaas/gpuaas/pkg/client"
)

// upgradeFrom names another version than the last release for the upgrade test to begin with.
const upgradeFrom = "GPUAAS_UPGRADE_FROM"

// release is a version whose programs are built from the tree's own history.
type release struct{ name, commit string }

// lastRelease returns the newest version tag, or what upgradeFrom names; ok is false where there is none.
func lastRelease(root string) (r release, ok bool, err error) {
	r.name = os.Getenv(upgradeFrom)
	if r.name == "" {
		tags, err := exec.Command("git", "-C", root, "tag", "--list", "v*", "--sort=-v:refname").Output()
		if err != nil || len(tags) == 0 {
			return release{}, false, nil //nolint:nilerr // a tree without git has no releases; the tests say so
		}
		r.name, _, _ = strings.Cut(string(tags), "\n")
	}
	commit, err := exec.Command("git", "-C", root, "rev-parse", "--verify", r.name+"^{commit}").Output()
	if err != nil {
		return release{}, false, fmt.Errorf("find version %s: %w", r.name, err)
	}
	r.commit = strings.TrimSpace(string(commit))
	return r, true, nil
}

func (r release) bin(root string) string {
	return filepath.Join(root, ".cache", "release", r.commit, "bin")
}

// releaseBin is the directory of the last release's programs, which TestMain has built.
func releaseBin(t *testing.T) string {
	t.Helper()
	r, ok, err := lastRelease(harness.Source(t))
	require.NoError(t, err)
	if !ok {
		t.Skipf("no release is tagged yet; set %s to a commit to upgrade from that", upgradeFrom)
	}
	return r.bin(harness.Source(t))
}

// buildRelease builds the programs of the last release once.
func buildRelease(ctx context.Context, root string) error {
	r, ok, err := lastRelease(root)
	if err != nil || !ok {
		return err
	}
	bin := r.bin(root)
	if _, err := os.Stat(filepath.Join(bin, "done")); err == nil {
		return nil
	}
	src := filepath.Join(filepath.Dir(bin), "src")
	if err := errors.Join(os.RemoveAll(filepath.Dir(bin)), os.MkdirAll(src, 0o700)); err != nil {
		return err
	}
	script := `git -C "$1" archive "$2" | tar -x -C "$3" && cd "$3" && CGO_ENABLED=0 go build -trimpath -buildvcs=false ` +
		`-ldflags '-s -w' -o "$4/" ./hub/cmd/gpuaas-hub ./agent/cmd/gpuaas-agent ./pkg/cmd/gpuaas && touch "$4/done"`
	out, err := exec.CommandContext(ctx, "bash", "-o", "pipefail", "-ec", script, "bash", root, r.commit, src,
		bin).CombinedOutput()
	if err != nil {
		return fmt.Errorf("build release %s: %w: %s", r.name, err, out)
	}
	return os.RemoveAll(src)
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

// A node is upgraded, then the hub: the app that runs is untouched, others come and go, and the bill is right.
func TestANodeAndThenTheHubAreUpgradedInPlace(t *testing.T) {
	old, today := releaseBin(t), harness.Binaries(t)
	steps := []struct {
		name string
		take func(*harness.Testbed)
	}{
		{"today's agent", func(w *harness.Testbed) { swapAgent(w, today) }},
		{"today's hub", func(w *harness.Testbed) { swapHub(w, today) }},
		{"a restart of the agent", func(w *harness.Testbed) { swapAgent(w, today) }},
		{"a restart of the hub", func(w *harness.Testbed) { swapHub(w, today) }},
	}
	w := harness.New(t)
	w.StartContainerd()
	hub := w.HubConfig()
	hub.Bin = old
	w.StartHub(hub)
	w.NewTenant("acme")
	node := w.AgentConfig("node")
	node.Bin = old
	w.Agent = w.StartAgent(node)
	w.ShipApp()
	_, err := api.Read[api.Posting](w.Tenant.Admin.GrantCredit(w.Ctx, api.CreditGrant{
		OrgID:  w.Tenant.Org.ID,
		Amount: "9000", Currency: scenario.Currency, Description: "weeks of leases",
	}))
	require.NoError(t, err)
	w.Allocation, err = w.Tenant.Allocate(w.Ctx, w.Tenant.Admin, w.Agent.Ready.NodeID, 2, 1024)
	require.NoError(t, err)
	containers := w.WatchContainerd(w.Agent.Config.ContainerdNamespace)
	kept := w.Launch("kept")
	pid := w.PidOf(kept)
	made := w.Launch("made before the upgrade, gone after it")
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
	w.Decommission(kept)
	w.Eventually("the bill is final", func() error {
		postings, err := w.Tenant.Postings(w.Ctx, kept.ID)
		return harness.Pending(err, harness.HasKind(postings, api.PostingKindHoldClosed))
	})
	usage, err := w.Tenant.Usage(w.Ctx, kept.ID)
	require.NoError(t, err)
	harness.RequireBilledTime(t, containers.RunningTimeOf(t, kept.Members[0].ID), harness.RequireContiguous(t, usage,
		"session_seconds"))
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

// The upgrade test would prove nothing with today's programs twice.
func TestReleasedProgramsAreNotTodays(t *testing.T) {
	old, today := releaseBin(t), harness.Binaries(t)
	for _, b := range []string{"gpuaas-hub", "gpuaas-agent"} {
		sums, err := exec.Command("sha256sum", filepath.Join(old, b), filepath.Join(today, b)).Output()
		require.NoError(t, err)
		lines := strings.Fields(string(sums))
		require.NotEqual(t, lines[0], lines[2], b)
	}
}
