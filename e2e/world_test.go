package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/leakcheck"
	"github.com/gpuaas/gpuaas/e2e/sandbox"
	"github.com/gpuaas/gpuaas/pkg/appkit"
	"github.com/gpuaas/gpuaas/pkg/client"
)

const (
	trustDomain = "e2e.gpuaas.internal"
	// testLimit bounds one test; it is never reached by one that passes.
	testLimit = 5 * time.Minute
	// pricePerHour makes a second cost a tenth of a cent.
	pricePerHour = "3.60"
	appSlug      = "hello"
)

// source is the root of the source tree.
func source(t testing.TB) string {
	t.Helper()
	root, err := sourceRoot()
	require.NoError(t, err)
	return root
}

// sourceRoot is the directory of go.mod: tests run in the directory of their package.
func sourceRoot() (string, error) {
	dir, err := os.Getwd()
	for err == nil {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", errors.New("the tests run outside the source tree")
		}
		dir = filepath.Dir(dir)
	}
	return "", err
}

// binaries are what `make build` made; make e2e builds them first.
func binaries(t testing.TB) string {
	t.Helper()
	bin := filepath.Join(source(t), "bin")
	for _, b := range []string{"gpuaas-hub", "gpuaas-agent", "gpuaas"} {
		require.FileExists(t, filepath.Join(bin, b), "run make build first")
	}
	return bin
}

// worlds counts what stands beside each other in this process, so that no two share a name, a network or a port.
var worlds atomic.Int32

// world is a hub, a containerd and a node of one test's own; all of it is gone when the test ends.
type world struct {
	t          *testing.T
	ctx        context.Context
	number     int
	alone      bool
	dir, run   string
	containerd *devcluster.Containerd
	hub        *devcluster.Hub
	agent      *devcluster.Agent
	agents     []*devcluster.Agent
	tenant     *scenario.Tenant
	publisher  *scenario.Publisher
	operator   *client.Hub
	allocation client.Allocation
}

// newWorld is a world that stands beside others: its test is parallel, and looks at what bears its own names. TestMain
// looks at the whole machine.
func newWorld(t *testing.T) *world {
	t.Helper()
	t.Parallel()
	return makeWorld(t, false)
}

// onlyWorld is a world that has the machine to itself, so that everything that changes on it is the test's doing.
func onlyWorld(t *testing.T) *world {
	t.Helper()
	return makeWorld(t, true)
}

// makeWorld makes the directories and the photograph that everything must look like again at the end.
func makeWorld(t *testing.T, alone bool) *world {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("containers and network namespaces need root")
	}
	binaries(t)
	ctx, cancel := context.WithTimeout(context.Background(), testLimit)
	w := &world{t: t, ctx: ctx, number: int(worlds.Add(1)), alone: alone}
	// Below /tmp, where an unprivileged PostgreSQL can work, and not t.TempDir, whose parents only the owner may pass.
	w.dir = filepath.Join("/tmp", fmt.Sprintf("gpuaas-e2e-%d-%03d", os.Getpid(), w.number))
	leakcheck.Guard(t, w.scope())
	t.Cleanup(cancel)
	require.NoError(t, os.Mkdir(w.dir, 0o711))
	require.NoError(t, os.Chmod(w.dir, 0o711))
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(w.dir)) })
	w.run = filepath.Join("/run", filepath.Base(w.dir))
	require.NoError(t, os.MkdirAll(w.run, 0o711))
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(w.run)) })
	t.Cleanup(func() {
		if t.Failed() {
			w.showLogs()
		}
	})
	return w
}

// agentsInWorld bounds how many nodes one world has.
const agentsInWorld = 10

// bridge, subnet and ports are the network of a world's n-th node.
func (w *world) bridge(n int) string { return fmt.Sprintf("gpe%03d%d", w.number, n) }

func (w *world) subnet(n int) string {
	n += w.number * agentsInWorld
	return fmt.Sprintf("10.%d.%d.", 220+n/250, n%250)
}

func (w *world) ports(n int) string {
	const portsOfNode = 20
	first := 22000 + (w.number*agentsInWorld+n)*portsOfNode
	return fmt.Sprintf("%d-%d", first, first+portsOfNode-1)
}

// scope is the whole sandbox for a world that has it to itself; otherwise what bears this world's names.
func (w *world) scope() leakcheck.Scope {
	s := leakcheck.Scope{IgnoreFiles: append(sandbox.Kept(), templateDir)}
	if w.alone {
		return s
	}
	s.Contains = []string{
		filepath.Base(w.dir), fmt.Sprintf("e2e-%03d-", w.number), fmt.Sprintf("gpe%03d", w.number),
		fmt.Sprintf("gpx%03d", w.number),
	}
	for n := range agentsInWorld {
		s.Contains = append(s.Contains, w.subnet(n))
	}
	// The firewall tables of other worlds' nodes name the links that were there when they were made, this world's among
	// them.
	own := fmt.Sprintf("table inet gpuaas_gpe%03d", w.number)
	s.Skip = func(id string) bool {
		return strings.HasPrefix(id, "table inet gpuaas_gpe") && !strings.HasPrefix(id, own)
	}
	return s
}

func (w *world) showLogs() {
	logs, _ := filepath.Glob(filepath.Join(w.dir, "*", "logs", "*.log"))
	logs = append(logs, filepath.Join(w.dir, "containerd", "containerd.log"))
	for _, l := range logs {
		p := devcluster.Process{LogPath: l}
		w.t.Logf("%s:\n%s", l, p.LogTail(40))
	}
}

func (w *world) startContainerd() {
	w.t.Helper()
	var err error
	w.containerd, err = devcluster.StartContainerd(w.ctx, filepath.Join(w.dir, "containerd"))
	require.NoError(w.t, err)
	w.t.Cleanup(func() { require.NoError(w.t, w.containerd.Destroy()) })
}

// hubConfig is a hub on loopback with ports of its own choice.
func (w *world) hubConfig() devcluster.HubConfig {
	return devcluster.HubConfig{
		Bin: binaries(w.t), Dir: filepath.Join(w.dir, "hub"), Listen: "127.0.0.1:0",
		SessionListen: "127.0.0.1:0",
	}
}

func (w *world) startHub(c devcluster.HubConfig) {
	w.t.Helper()
	require.NoError(w.t, os.MkdirAll(c.Dir, 0o711))
	fingerprint := w.initHub(c)
	var err error
	w.hub, err = devcluster.StartHub(w.ctx, c)
	require.NoError(w.t, err)
	w.hub.RootFingerprint = fingerprint
	w.t.Cleanup(func() { require.NoError(w.t, w.hub.Stop()) })
}

// restartHub starts the hub anew on the same addresses; it must have been stopped or killed.
func (w *world) restartHub() {
	w.t.Helper()
	c, fingerprint := w.hub.Config, w.hub.RootFingerprint
	c.Listen = strings.TrimPrefix(w.hub.Ready.APIURL, "https://")
	c.SessionListen = w.hub.Ready.SessionAddr
	var err error
	w.hub, err = devcluster.StartHub(w.ctx, c)
	require.NoError(w.t, err)
	w.hub.RootFingerprint = fingerprint
}

// agentConfig is a node with names of its own.
func (w *world) agentConfig(name string) devcluster.AgentConfig {
	n := len(w.agents)
	require.Less(w.t, n, agentsInWorld)
	return devcluster.AgentConfig{
		Bin: binaries(w.t), Dir: filepath.Join(w.dir, name), RunDir: filepath.Join(w.run, name),
		APIURL: w.hub.Ready.APIURL, RootFingerprint: w.hub.RootFingerprint,
		ContainerdAddress: w.containerd.Address, ContainerdNamespace: fmt.Sprintf("e2e-%03d-%s", w.number, name),
		Bridge: w.bridge(n), PodCIDR: w.subnet(n) + "0/24", PortRange: w.ports(n),
		CgroupParent: fmt.Sprintf("/gpuaas-e2e-%03d-%s", w.number, name),
		ExtraArgs: []string{
			"--metering-interval", "1s", "--usage-interval", "3s", "--resync", "5s", "--report-interval",
			"5s",
		},
	}
}

// startAgent enrolls a node and waits until the hub sees it. At the end the agent uninstalls itself.
func (w *world) startAgent(c devcluster.AgentConfig) *devcluster.Agent {
	w.t.Helper()
	token, err := scenario.JoinToken(w.ctx, w.admin())
	require.NoError(w.t, err)
	withToken := c
	withToken.JoinToken = token
	a, err := devcluster.StartAgent(w.ctx, withToken)
	require.NoError(w.t, err)
	w.agents = append(w.agents, a)
	w.t.Cleanup(func() {
		require.NoError(w.t, a.Stop())
		require.NoError(w.t, devcluster.Uninstall(context.WithoutCancel(w.ctx), c))
	})
	_, err = scenario.AwaitNode(w.ctx, w.admin(), a.Ready.NodeID)
	require.NoError(w.t, err)
	return a
}

// restartAgent starts the agent anew in place; it must have been stopped or killed.
func (w *world) restartAgent(a *devcluster.Agent) {
	w.t.Helper()
	again, err := devcluster.StartAgent(w.ctx, a.Config)
	require.NoError(w.t, err)
	a.Process, a.Ready = again.Process, again.Ready
}

func (w *world) admin() *client.Hub {
	w.t.Helper()
	if w.tenant != nil {
		return w.tenant.Admin
	}
	admin, err := scenario.Admin(w.hub.Ready)
	require.NoError(w.t, err)
	return admin
}

// platform is everything up to an entitled app and an allocation on one node.
func platform(t *testing.T) *world {
	t.Helper()
	return newWorld(t).platform()
}

func (w *world) platform() *world {
	w.t.Helper()
	w.startContainerd()
	w.startHub(w.hubConfig())
	w.newTenant("acme")
	w.agent = w.startAgent(w.agentConfig("node"))
	w.shipApp()
	w.allocate(w.agent)
	return w
}

func (w *world) newTenant(slug string) {
	w.t.Helper()
	var err error
	w.tenant, err = scenario.NewTenant(w.ctx, w.hub, filepath.Join(w.dir, "tenant-"+slug), slug, "1000")
	require.NoError(w.t, err)
	w.operator, err = w.tenant.ServiceAccount(w.ctx, "operator", client.ServiceAccountRoleAppOperator)
	require.NoError(w.t, err)
}

func (w *world) shipApp() {
	w.t.Helper()
	var err error
	w.publisher, err = w.tenant.NewPublisher(w.ctx)
	require.NoError(w.t, err)
	_, err = w.tenant.Ship(w.ctx, w.publisher, w.release("1.0.0"))
	require.NoError(w.t, err)
	require.NoError(w.t, w.tenant.Entitle(w.ctx, appSlug))
	require.NoError(w.t, w.tenant.Price(w.ctx, appSlug, pricePerHour))
}

func (w *world) release(version string) scenario.Release {
	w.t.Helper()
	template, err := os.ReadFile(filepath.Join(source(w.t), "deploy/demo/app/manifest.yaml"))
	require.NoError(w.t, err)
	image, err := appkit.ImageFromFiles([]appkit.File{{Path: "/app", Source: demoBinary(w.t), Mode: 0o755}},
		appkit.ImageConfig{Entrypoint: []string{"/app"}, User: "1000:1000"})
	require.NoError(w.t, err)
	return scenario.Release{AppSlug: appSlug, Version: version, Image: image, Template: template}
}

// demoBinary builds the demo's app once for the process.
func demoBinary(t testing.TB) string {
	t.Helper()
	out := filepath.Join(source(t), "bin", "demo-app")
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", out, "./deploy/demo/app")
	build.Dir, build.Env = source(t), append(os.Environ(), "CGO_ENABLED=0")
	text, err := build.CombinedOutput()
	require.NoError(t, err, "%s", text)
	return out
}

func (w *world) allocate(a *devcluster.Agent) {
	w.t.Helper()
	var err error
	w.allocation, err = w.tenant.Allocate(w.ctx, w.tenant.Admin, a.Ready.NodeID, 1, 512)
	require.NoError(w.t, err)
}

// launch runs the app and waits until it is running.
func (w *world) launch(name string) client.AppInstance {
	w.t.Helper()
	i, _, err := w.tenant.Launch(w.ctx, w.operator, client.AppInstanceCreate{
		AppSlug: appSlug, Version: "1.0.0", DisplayName: name, PlacementIntent: client.PlacementIntent{
			AllocationIds: []string{w.allocation.ID},
		},
	}, nil)
	require.NoError(w.t, err)
	require.NotEmpty(w.t, i.Endpoints)
	return i
}

// answers fetches the app's front page.
func (w *world) answers(i client.AppInstance) {
	w.t.Helper()
	_, err := scenario.Get(w.ctx, i.Endpoints[0].URL+"/")
	require.NoError(w.t, err)
}

// eventually waits until look returns no error; the test's limit is the bound.
func (w *world) eventually(what string, look func() error) {
	w.t.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := look()
		if err == nil {
			return
		}
		select {
		case <-w.ctx.Done():
			w.t.Fatalf("%s: %v", what, err)
		case <-tick.C:
		}
	}
}
