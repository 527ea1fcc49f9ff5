package e2e_test

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

	"github.com/gpuaas/gpuaas/e2e/leakcheck"
)

// demoLine is the last line of the demo, all of it.
type demoLine struct {
	InstanceID   string  `json:"instance_id"`
	Status       string  `json:"status"`
	EndpointURL  string  `json:"endpoint_url"`
	AppVersion   string  `json:"app_version"`
	LaunchMillis float64 `json:"launch_ms"`
	UsageRecords int     `json:"usage_records"`
	LedgerZero   bool    `json:"ledger_zero"`
	Events       int     `json:"events"`
	HubPID       int     `json:"hub_pid"`
	AgentPID     int     `json:"agent_pid"`
	APIURL       string  `json:"api_url"`
	CAFile       string  `json:"ca_file"`
	TokenFile    string  `json:"token_file"`
}

// demo runs deploy/demo in directories of the test's own.
type demo struct {
	w      *world
	binary string
	args   []string
}

func (w *world) demo() *demo {
	w.t.Helper()
	d := &demo{w: w, binary: filepath.Join(w.dir, "demo"), args: []string{
		"--dir", filepath.Join(w.dir, "d"), "--run-dir",
		filepath.Join(w.run, "d"),
	}}
	build := exec.Command("go", "build", "-o", d.binary, "./deploy/demo")
	build.Dir = source(w.t)
	out, err := build.CombinedOutput()
	require.NoError(w.t, err, "%s", out)
	w.t.Cleanup(func() { d.run("down") })
	return d
}

func (d *demo) run(verb string, more ...string) string {
	d.w.t.Helper()
	cmd := exec.Command(d.binary, append(append([]string{verb}, d.args...), more...)...)
	cmd.Dir = source(d.w.t)
	out, err := cmd.CombinedOutput()
	require.NoError(d.w.t, err, "demo %s: %s", verb, out)
	return string(out)
}

// up brings the demo up; where no containerd serves at the address it starts its own.
func (d *demo) up(app, containerd string) demoLine {
	d.w.t.Helper()
	out := d.run("up", "--bin", binaries(d.w.t), "--source", source(d.w.t), "--app", app, "--containerd-address",
		containerd,
		"--bridge", d.w.bridge(0), "--pod-cidr", d.w.subnet(0)+"0/24", "--port-range", d.w.ports(0))
	lines := strings.Split(strings.TrimSpace(out), "\n")
	var line demoLine
	dec := json.NewDecoder(strings.NewReader(lines[len(lines)-1]))
	dec.DisallowUnknownFields()
	require.NoError(d.w.t, dec.Decode(&line), "%s", out)
	d.w.t.Log(out)
	require.Equal(d.w.t, "running", line.Status)
	require.Positive(d.w.t, line.UsageRecords)
	require.True(d.w.t, line.LedgerZero)
	require.Equal(d.w.t, 7, line.Events)
	for _, happened := range []string{"upgrade_requested", "upgraded", "rollback_requested", "rolled_back"} {
		require.Contains(d.w.t, out, "apps.instance."+happened)
	}
	require.Positive(d.w.t, line.LaunchMillis)
	d.w.runPrinted(out)
	for _, file := range []string{line.CAFile, line.TokenFile} {
		require.FileExists(d.w.t, file)
	}
	info, err := os.Stat(line.TokenFile)
	require.NoError(d.w.t, err)
	require.EqualValues(d.w.t, 0o600, info.Mode().Perm())
	return line
}

// The demo, a second one on top of it, one after a failure, and the end of it: the guard of the world finds nothing
// left.
func TestDemoComesUpTwiceAndLeavesNothing(t *testing.T) {
	w := onlyWorld(t)
	d := w.demo()
	first := d.up("demo", filepath.Join(w.dir, "nobody.sock"))
	w.eventually("the app answers", func() error { return exec.Command("curl", "-sf", first.EndpointURL+"/").Run() })
	// Killed in the middle of its life: the next one starts clean.
	require.NoError(t, exec.Command("kill", "-9", fmt.Sprint(first.AgentPID), fmt.Sprint(first.HubPID)).Run())
	second := d.up("demo", filepath.Join(w.dir, "nobody.sock"))
	require.NotEqual(t, first.InstanceID, second.InstanceID)
	d.run("down")
	d.run("down")
}

// Where a containerd serves already, the demo is a guest in it: afterwards it holds what it held before.
func TestDemoIsAGuestInTheMachinesContainerd(t *testing.T) {
	w := newWorld(t)
	w.startContainerd()
	before, err := leakcheck.Take(leakcheck.Scope{
		Kinds:             []leakcheck.Kind{leakcheck.Containerd},
		ContainerdAddress: w.containerd.Address,
	})
	require.NoError(t, err)
	d := w.demo()
	d.up("demo", w.containerd.Address)
	require.NoDirExists(t, filepath.Join(w.dir, "d", "containerd"))
	d.run("down")
	w.eventually("containerd holds what it held before", func() error {
		after, err := leakcheck.Take(leakcheck.Scope{
			Kinds:             []leakcheck.Kind{leakcheck.Containerd},
			ContainerdAddress: w.containerd.Address,
		})
		if err != nil {
			return err
		}
		return differs(leakcheck.Diff(before, after))
	})
}

// A person's Jupyter: a browser logs in, runs a cell and reads 42.
func TestJupyterRunsACellInTheBrowser(t *testing.T) {
	w := newWorld(t)
	d := w.demo()
	browser := filepath.Join(source(t), "e2e", "browser")
	line := d.up("jupyter", filepath.Join(w.dir, "nobody.sock"))
	password, err := os.ReadFile(filepath.Join(w.dir, "d", "jupyter-password"))
	require.NoError(t, err)
	run := exec.Command("node", "notebook.mjs", line.EndpointURL, filepath.Join(w.dir, "profile"))
	run.Dir, run.Stdin = browser, bytes.NewReader(password)
	run.Env = append(os.Environ(), "HOME="+w.dir, "TMPDIR="+w.dir)
	var stderr bytes.Buffer
	run.Stderr = &stderr
	out, err := run.Output()
	require.NoError(t, err, "%s", stderr.String())
	require.JSONEq(t, `{"result":"42"}`, string(out))
}
