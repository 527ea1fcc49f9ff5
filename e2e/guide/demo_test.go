package guide_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/e2e/leakcheck"
)

// demo runs deploy/demo in directories of the test's own.
type demo struct {
	w      *harness.Testbed
	binary string
	args   []string
}

func newDemo(w *harness.Testbed) *demo {
	w.T.Helper()
	d := &demo{w: w, binary: filepath.Join(w.Dir, "demo"), args: []string{
		"--dir", filepath.Join(w.Dir, "d"), "--run-dir",
		filepath.Join(w.RunDir, "d"),
	}}
	require.NoError(w.T, devcluster.Build(w.Ctx, harness.Source(w.T), "./deploy/demo", d.binary))
	w.T.Cleanup(func() { d.run("down") })
	return d
}

func (d *demo) run(verb string, more ...string) string {
	d.w.T.Helper()
	cmd := exec.Command(d.binary, append(append([]string{verb}, d.args...), more...)...)
	cmd.Dir = harness.Source(d.w.T)
	out, err := cmd.CombinedOutput()
	require.NoError(d.w.T, err, "demo %s: %s", verb, out)
	return string(out)
}

// up starts the demo; where no containerd serves at the address it starts its own.
func (d *demo) up(app, containerd string) devcluster.DemoSummary {
	d.w.T.Helper()
	out := d.run("up", "--bin", harness.Binaries(d.w.T), "--source", harness.Source(d.w.T), "--app", app,
		"--containerd-address", containerd,
		"--bridge", d.w.Bridge(0), "--pod-cidr", d.w.Subnet(0)+"0/24", "--port-range", d.w.Ports(0))
	lines := strings.Split(strings.TrimSpace(out), "\n")
	var line devcluster.DemoSummary
	dec := json.NewDecoder(strings.NewReader(lines[len(lines)-1]))
	dec.DisallowUnknownFields()
	require.NoError(d.w.T, dec.Decode(&line), "%s", out)
	d.w.T.Log(out)
	require.Equal(d.w.T, "running", line.Status)
	require.Positive(d.w.T, line.UsageRecords)
	require.True(d.w.T, line.LedgerZero)
	require.GreaterOrEqual(d.w.T, line.Events, 7, "and those of a pull that takes long")
	for _, happened := range []string{"upgrade_requested", "upgraded", "rollback_requested", "rolled_back"} {
		require.Contains(d.w.T, out, "apps.instance."+happened)
	}
	require.Positive(d.w.T, line.LaunchMillis)
	runPrinted(d.w, out)
	for _, file := range []string{line.CAFile, line.TokenFile} {
		require.FileExists(d.w.T, file)
	}
	info, err := os.Stat(line.TokenFile)
	require.NoError(d.w.T, err)
	require.EqualValues(d.w.T, 0o600, info.Mode().Perm())
	return line
}

// The demo replaces an earlier one, also after its programs were killed, and leaves nothing behind.
func TestDemoComesUpTwiceAndLeavesNothing(t *testing.T) {
	w := harness.NewAlone(t)
	d := newDemo(w)
	first := d.up("demo", filepath.Join(w.Dir, "absent.sock"))
	w.Eventually("the app answers", func() error { return exec.Command("curl", "-sf", first.EndpointURL+"/").Run() })
	// The next demo starts clean after a kill.
	require.NoError(t, exec.Command("kill", "-9", fmt.Sprint(first.AgentPID), fmt.Sprint(first.HubPID)).Run())
	second := d.up("demo", filepath.Join(w.Dir, "absent.sock"))
	require.NotEqual(t, first.InstanceID, second.InstanceID)
	d.run("down")
	d.run("down")
}

// Where a containerd serves already, the demo uses it and leaves it as it was.
func TestDemoIsAGuestInTheMachinesContainerd(t *testing.T) {
	w := harness.New(t)
	w.StartContainerd()
	before, err := leakcheck.Take(leakcheck.Scope{
		Kinds:             []leakcheck.Kind{leakcheck.Containerd},
		ContainerdAddress: w.Containerd.Address,
	})
	require.NoError(t, err)
	d := newDemo(w)
	d.up("demo", w.Containerd.Address)
	require.NoDirExists(t, filepath.Join(w.Dir, "d", "containerd"))
	d.run("down")
	w.Eventually("containerd holds what it held before", func() error {
		after, err := leakcheck.Take(leakcheck.Scope{
			Kinds:             []leakcheck.Kind{leakcheck.Containerd},
			ContainerdAddress: w.Containerd.Address,
		})
		if err != nil {
			return err
		}
		return harness.DifferenceError(leakcheck.Diff(before, after))
	})
}

// A person's Jupyter: a browser logs in, runs a cell and reads 42.
func TestJupyterRunsACellInTheBrowser(t *testing.T) {
	w := harness.New(t)
	d := newDemo(w)
	browser := filepath.Join(harness.Source(t), "e2e", "browser")
	line := d.up("jupyter", filepath.Join(w.Dir, "absent.sock"))
	password, err := os.ReadFile(filepath.Join(w.Dir, "d", "jupyter-password"))
	require.NoError(t, err)
	run := exec.Command("node", "notebook.mjs", line.EndpointURL, filepath.Join(w.Dir, "profile"))
	run.Dir, run.Stdin = browser, bytes.NewReader(password)
	run.Env = append(os.Environ(), "HOME="+w.Dir, "TMPDIR="+w.Dir)
	var stderr bytes.Buffer
	run.Stderr = &stderr
	out, err := run.Output()
	require.NoError(t, err, "%s", stderr.String())
	require.JSONEq(t, `{"result":"42"}`, string(out))
}
