package e2e_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/scenario"
	api "github.com/gpuaas/gpuaas/pkg/client"
)

// yesterdaysCommit is the release before this one: what hosts run until they upgrade.
const yesterdaysCommit = "3b3942e8"

// yesterday is the directory of the earlier release's programs, which TestMain has built.
func yesterday(t *testing.T) string {
	t.Helper()
	bin := yesterdaysBin(source(t))
	if _, err := os.Stat(filepath.Join(bin, "done")); err != nil {
		t.Skipf("the history does not reach back to %s (a shallow clone?), so its programs cannot be built: %v",
			yesterdaysCommit, err)
	}
	return bin
}

func yesterdaysBin(root string) string {
	return filepath.Join(root, ".cache", "yesterday", yesterdaysCommit, "bin")
}

// buildYesterday builds the programs of the earlier release from the tree's own history, once. A history that does not
// reach back to it has none, and the tests that need them say so.
func buildYesterday(root string) error {
	bin := yesterdaysBin(root)
	if _, err := os.Stat(filepath.Join(bin, "done")); err == nil {
		return nil
	}
	history := exec.Command("git", "-C", root, "cat-file", "-e", yesterdaysCommit+"^{commit}")
	if err := history.Run(); err != nil {
		return nil //nolint:nilerr // the tests that need the release say that it is missing
	}
	src := filepath.Join(filepath.Dir(bin), "src")
	if err := errors.Join(os.RemoveAll(filepath.Dir(bin)), os.MkdirAll(src, 0o700)); err != nil {
		return err
	}
	script := `git -C "$1" archive "$2" | tar -x -C "$3" && cd "$3" && CGO_ENABLED=0 go build -trimpath -buildvcs=false ` +
		`-ldflags '-s -w' -o "$4/" ./hub/cmd/gpuaas-hub ./agent/cmd/gpuaas-agent ./pkg/cmd/gpuaas && touch "$4/done"`
	out, err := exec.Command("bash", "-o", "pipefail", "-ec", script, "bash", root, yesterdaysCommit, src,
		bin).CombinedOutput()
	if err != nil {
		return fmt.Errorf("build the release of %s: %w: %s", yesterdaysCommit, err, out)
	}
	return os.RemoveAll(src)
}

// swapHub stops the hub and starts the one from bin on the same data and addresses.
func (w *world) swapHub(bin string) {
	w.t.Helper()
	require.NoError(w.t, w.hub.Stop())
	w.hub.Config.Bin = bin
	w.restartHub()
}

// swapAgent stops the agent and starts the one from bin on the same data.
func (w *world) swapAgent(bin string) {
	w.t.Helper()
	require.NoError(w.t, w.agent.Stop())
	w.agent.Config.Bin = bin
	w.restartAgent(w.agent)
}

// A node is upgraded, then the hub: the app that runs is untouched, others come and go, and the bill is right. The
// order matters: an agent of yesterday may restart a container while a newer hub words its document anew. Neither goes
// back: a node has sealed its store, and the hub keeps its books in other tables.
func TestANodeAndThenTheHubAreUpgradedInPlace(t *testing.T) {
	old, today := yesterday(t), binaries(t)
	steps := []struct {
		name string
		take func(*world)
	}{
		{"today's agent", func(w *world) { w.swapAgent(today) }},
		{"today's hub", func(w *world) { w.swapHub(today) }},
		{"a restart of the agent", func(w *world) { w.swapAgent(today) }},
		{"a restart of the hub", func(w *world) { w.swapHub(today) }},
	}
	w := newWorld(t)
	w.startContainerd()
	hub := w.hubConfig()
	hub.Bin = old
	w.startHub(hub)
	w.newTenant("acme")
	node := w.agentConfig("node")
	node.Bin = old
	w.agent = w.startAgent(node)
	w.shipApp()
	_, err := api.Read[api.Posting](w.tenant.Admin.GrantCredit(w.ctx, api.CreditGrant{
		OrgID:  w.tenant.Org.ID,
		Amount: "9000", Currency: scenario.Currency, Description: "weeks of leases",
	}))
	require.NoError(t, err)
	w.allocation, err = w.tenant.Allocate(w.ctx, w.tenant.Admin, w.agent.Ready.NodeID, 2, 1024)
	require.NoError(t, err)
	containers := w.listen(w.agent.Config.ContainerdNamespace)
	kept := w.launch("kept")
	pid := w.pidOf(kept)
	made := w.launch("made before the upgrade, gone after it")
	serving := w.keepAsking(kept)
	var young api.AppInstance

	for n, s := range steps {
		t.Log(s.name)
		before, err := w.tenant.Usage(w.ctx, kept.ID)
		require.NoError(t, err)
		s.take(w)
		w.eventually("usage arrives again", func() error {
			after, err := w.tenant.Usage(w.ctx, kept.ID)
			return orMissing(err, len(after) > len(before))
		})
		require.Equal(t, pid, w.pidOf(kept), "%s leaves the process alone", s.name)
		passing := w.launch("passing")
		w.answers(passing)
		w.hasNoAddressTwice()
		w.decommission(passing)
		if n == 1 { // both are today's now, and neither was when this one was made
			w.decommission(made)
			young = w.launch("made after the upgrade")
		}
	}

	require.NoError(t, serving(), "the app answered throughout")
	w.decommission(young)
	w.decommission(kept)
	w.eventually("the bill is final", func() error {
		postings, err := w.tenant.Postings(w.ctx, kept.ID)
		return orMissing(err, hasKind(postings, api.PostingKindHoldClosed))
	})
	usage, err := w.tenant.Usage(w.ctx, kept.ID)
	require.NoError(t, err)
	requireWithinBeat(t, containers.runningOf(t, kept.Members[0].ID), requireContiguous(t, usage, "session_seconds"))
}

// hasNoAddressTwice reads what the node has noted of its members' networks.
func (w *world) hasNoAddressTwice() {
	w.t.Helper()
	records, err := filepath.Glob(filepath.Join(w.agent.Config.RunDir, "cni", "members", "*.json"))
	require.NoError(w.t, err)
	whose := map[string]string{}
	for _, path := range records {
		var record struct {
			IP string `json:"ip"`
		}
		data, err := os.ReadFile(path)
		require.NoError(w.t, err)
		require.NoError(w.t, json.Unmarshal(data, &record))
		require.NotEmpty(w.t, record.IP, path)
		require.Empty(w.t, whose[record.IP], "%s has the address %s too", path, record.IP)
		whose[record.IP] = path
	}
	require.GreaterOrEqual(w.t, len(whose), 2)
}

// Whoever asks a program of yesterday for its version is told so: the test above would prove nothing with today's
// twice.
func TestYesterdaysProgramsAreNotTodays(t *testing.T) {
	old, today := yesterday(t), binaries(t)
	for _, b := range []string{"gpuaas-hub", "gpuaas-agent"} {
		sums, err := exec.Command("sha256sum", filepath.Join(old, b), filepath.Join(today, b)).Output()
		require.NoError(t, err)
		lines := strings.Fields(string(sums))
		require.NotEqual(t, lines[0], lines[2], b)
	}
}
