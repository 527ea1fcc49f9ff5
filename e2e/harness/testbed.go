package harness

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/leakcheck"
	"github.com/gpuaas/gpuaas/e2e/sandbox"
	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/pkg/client"
)

const (
	// TrustDomain is that of every testbed's hub.
	TrustDomain = "e2e.gpuaas.internal"
	// testLimit bounds one test; it is never reached by one that passes. ConvergenceBound bounds each of its waits.
	testLimit = 5 * time.Minute
	// PricePerHour makes a second cost a tenth of a cent.
	PricePerHour = "3.60"
	// AppSlug names the app that the testbed ships.
	AppSlug = "hello"
)

// Source is the root of the source tree.
func Source(t testing.TB) string {
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

// binEnv names a directory of programs to test instead of those in bin/, with those that have failpoints below it in
// failpoint/. It lies within the tree, which the sandbox shows: e2e/mutants builds programs there.
const binEnv = "GPUAAS_E2E_BIN"

// binaries is the directory of the programs that are tested.
func binaries(root string) string {
	return cmp.Or(os.Getenv(binEnv), filepath.Join(root, "bin"))
}

// Binaries are what `make build` made; make e2e builds them first.
func Binaries(t testing.TB) string {
	t.Helper()
	root := Source(t)
	bin := binaries(root)
	for _, b := range []string{"gpuaas-hub", "gpuaas-agent", "gpuaas"} {
		requireCurrentOnce(t, root, filepath.Join(bin, b))
	}
	nvml := filepath.Join(bin, "gpuaas-nvml")
	if _, err := os.Stat(nvml); err == nil { // make build makes none without gcc
		requireCurrentOnce(t, root, nvml)
	}
	return bin
}

// testbeds counts the testbeds of this process, so that no two share a name, a network or a port.
//
//nolint:gochecknoglobals // parallel tests of one process share its machine
var testbeds atomic.Int32

// Testbed is a hub, a containerd and a node of one test's own; all of it is gone when the test ends.
type Testbed struct {
	T           *testing.T
	Ctx         context.Context
	number      int
	alone       bool
	Dir, RunDir string
	// Env is for the hubs and agents that are configured from now on.
	Env        []string
	Containerd *devcluster.Containerd
	Hub        *devcluster.Hub
	Agent      *devcluster.Agent
	Agents     []*devcluster.Agent
	Tenant     *scenario.Tenant
	Publisher  *scenario.Publisher
	Operator   *client.Hub
	Allocation client.Allocation

	// audit is shared by the testbeds of one test's nodes.
	audit *audit
}

// New makes a testbed beside those of other tests: the test is parallel and is checked for leaks by its own names.
// RunTests checks the whole machine at the end.
func New(t *testing.T) *Testbed {
	t.Helper()
	t.Parallel()
	return newTestbed(t, false)
}

// NewAlone makes a testbed that has the machine to itself: every change on the machine is the test's.
func NewAlone(t *testing.T) *Testbed {
	t.Helper()
	return newTestbed(t, true)
}

// newTestbed makes the directories, and checks at the end of the test that nothing is left behind.
func newTestbed(t *testing.T, alone bool) *Testbed {
	t.Helper()
	skip.Root(t, "containers and network namespaces")
	Binaries(t)
	ctx, cancel := context.WithTimeout(context.Background(), testLimit)
	w := &Testbed{T: t, Ctx: ctx, number: int(testbeds.Add(1)), alone: alone, audit: newAudit()}
	// Below /tmp, where an unprivileged PostgreSQL can work, and not t.TempDir, whose parents only the owner may pass.
	w.Dir = filepath.Join("/tmp", fmt.Sprintf("gpuaas-e2e-%d-%03d", os.Getpid(), w.number))
	leakcheck.Guard(t, w.Scope())
	t.Cleanup(cancel)
	require.NoError(t, os.Mkdir(w.Dir, 0o711))
	require.NoError(t, os.Chmod(w.Dir, 0o711))
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(w.Dir)) })
	w.RunDir = filepath.Join("/run", filepath.Base(w.Dir))
	require.NoError(t, os.MkdirAll(w.RunDir, 0o711))
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(w.RunDir)) })
	t.Cleanup(func() {
		if t.Failed() {
			w.showLogs()
		}
	})
	return w
}

// maxAgents bounds the nodes of one testbed.
const maxAgents = 10

// Bridge names the bridge of the n-th node.
func (w *Testbed) Bridge(n int) string { return fmt.Sprintf("gpe%03d%d", w.number, n) }

// Subnet is the network of the n-th node's members, without its last number.
func (w *Testbed) Subnet(n int) string {
	n += w.number * maxAgents
	return fmt.Sprintf("10.%d.%d.", 220+n/250, n%250)
}

// Ports is the port range of the n-th node.
func (w *Testbed) Ports(n int) string {
	const portsOfNode = 20
	first := 22000 + (w.number*maxAgents+n)*portsOfNode
	return fmt.Sprintf("%d-%d", first, first+portsOfNode-1)
}

// Scope is what the leak check compares: the whole sandbox for a testbed that is alone, otherwise what bears its names.
func (w *Testbed) Scope() leakcheck.Scope {
	s := leakcheck.Scope{IgnoreFiles: append(sandbox.Kept(), preparedHubDir), IgnoreMounts: sandbox.Kept()}
	if w.alone {
		return s
	}
	s.Contains = []string{
		filepath.Base(w.Dir), fmt.Sprintf("e2e-%03d-", w.number), fmt.Sprintf("gpe%03d", w.number),
		fmt.Sprintf("gpx%03d", w.number),
	}
	for n := range maxAgents {
		s.Contains = append(s.Contains, w.Subnet(n))
	}
	// The firewall tables of other testbeds name the links that existed when they were made, also those of this one.
	own := fmt.Sprintf("table inet gpuaas_gpe%03d", w.number)
	s.Skip = func(id string) bool {
		return strings.HasPrefix(id, "table inet gpuaas_gpe") && !strings.HasPrefix(id, own)
	}
	return s
}

func (w *Testbed) showLogs() {
	logs, _ := filepath.Glob(filepath.Join(w.Dir, "*", "logs", "*.log"))
	logs = append(logs, filepath.Join(w.Dir, "containerd", "containerd.log"))
	for _, l := range logs {
		p := devcluster.Process{LogPath: l}
		w.T.Logf("%s:\n%s", l, p.LogTail(40))
	}
}

// StartContainerd starts the containerd that all nodes of the testbed share.
func (w *Testbed) StartContainerd() { w.StartContainerdIn("containerd") }

// StartContainerdIn starts a containerd in a directory of the testbed; the nodes that are configured next use it.
func (w *Testbed) StartContainerdIn(dir string) {
	w.T.Helper()
	started, err := devcluster.StartContainerd(w.Ctx, filepath.Join(w.Dir, dir))
	require.NoError(w.T, err)
	w.Containerd = started
	w.T.Cleanup(func() { require.NoError(w.T, started.Destroy()) })
}

// FreeAddress is a loopback address with a port, for TCP and UDP, that this process has given to nobody else and the
// kernel to no program: while nobody listens there, as between two starts of a hub, it stays free.
func FreeAddress() string {
	// Below the ports of the nodes and those that the kernel chooses (ip_local_port_range).
	const first = 10_000
	return fmt.Sprintf("127.0.0.1:%d", first+addresses.Add(1))
}

//nolint:gochecknoglobals // parallel tests of one process share its machine
var addresses atomic.Int32

// HubConfig is a hub on loopback with ports of its own.
func (w *Testbed) HubConfig() devcluster.HubConfig {
	address := FreeAddress()
	return devcluster.HubConfig{
		Bin: Binaries(w.T), Dir: filepath.Join(w.Dir, "hub"), Listen: address, SessionListen: address, Env: w.Env,
	}
}

// StartHub initialises and starts the hub; it ends with the test.
func (w *Testbed) StartHub(c devcluster.HubConfig) {
	w.T.Helper()
	require.NoError(w.T, os.MkdirAll(c.Dir, 0o711))
	fingerprint := w.initHub(c)
	var err error
	w.Hub, err = devcluster.StartHub(w.Ctx, c)
	require.NoError(w.T, err)
	w.Hub.RootFingerprint = fingerprint
	w.T.Cleanup(func() { require.NoError(w.T, w.Hub.Stop()) })
}

// RestartHub starts the hub anew on the same addresses; it must have been stopped or killed.
func (w *Testbed) RestartHub() {
	w.T.Helper()
	require.NoError(w.T, w.Hub.Restart(w.Ctx))
}

// AgentConfig is a node with names of its own.
func (w *Testbed) AgentConfig(name string) devcluster.AgentConfig {
	n := len(w.Agents)
	require.Less(w.T, n, maxAgents)
	return devcluster.AgentConfig{
		Bin: Binaries(w.T), Dir: filepath.Join(w.Dir, name), RunDir: filepath.Join(w.RunDir, name),
		APIURL: w.Hub.Ready.APIURL, RootFingerprint: w.Hub.RootFingerprint,
		ContainerdAddress: w.Containerd.Address, ContainerdNamespace: fmt.Sprintf("e2e-%03d-%s", w.number, name),
		Bridge: w.Bridge(n), PodCIDR: w.Subnet(n) + "0/24", PortRange: w.Ports(n),
		CgroupParent: fmt.Sprintf("/gpuaas-e2e-%03d-%s", w.number, name), Env: w.Env,
		ExtraArgs: []string{
			"--metering-interval", "1s", "--usage-interval", "3s", "--resync", "5s", "--report-interval",
			"5s",
		},
	}
}

// StartAgent enrolls a node and waits until the hub sees it. At the end the node is audited and the agent uninstalls
// itself.
func (w *Testbed) StartAgent(c devcluster.AgentConfig) *devcluster.Agent {
	w.T.Helper()
	w.WatchForAudit(c)
	token, err := scenario.JoinToken(w.Ctx, w.Admin())
	require.NoError(w.T, err)
	withToken := c
	withToken.JoinToken = token
	a, err := devcluster.StartAgent(w.Ctx, withToken)
	require.NoError(w.T, err)
	w.Agents = append(w.Agents, a)
	w.T.Cleanup(func() {
		require.NoError(w.T, a.Stop())
		require.NoError(w.T, devcluster.Uninstall(context.WithoutCancel(w.Ctx), c))
	})
	w.AuditAtEnd()
	w.AwaitOnline(a.Ready.NodeID)
	return a
}

// AwaitOnline waits until the hub has a session with the node.
func (w *Testbed) AwaitOnline(nodeID string) {
	w.T.Helper()
	w.Eventually("the node is online", func() error {
		n, err := client.Read[client.Node](w.Admin().GetNode(w.Ctx, nodeID))
		return Pending(err, n.Status == client.NodeStatusOnline)
	})
}

// RestartAgent starts the agent anew in place; it must have been stopped or killed.
func (w *Testbed) RestartAgent(a *devcluster.Agent) {
	w.T.Helper()
	require.NoError(w.T, a.Restart(w.Ctx))
}

// Admin calls the hub as its platform admin.
func (w *Testbed) Admin() *client.Hub {
	w.T.Helper()
	if w.Tenant != nil {
		return w.Tenant.Admin
	}
	admin, err := scenario.Admin(w.Hub.Ready)
	require.NoError(w.T, err)
	return admin
}

// NewPlatform is everything up to an entitled app and an allocation on one node.
func NewPlatform(t *testing.T) *Testbed {
	t.Helper()
	return New(t).SetUpPlatform()
}

// SetUpPlatform is NewPlatform for a testbed that exists.
func (w *Testbed) SetUpPlatform() *Testbed {
	w.T.Helper()
	w.StartContainerd()
	w.StartHub(w.HubConfig())
	w.NewTenant("acme")
	w.Agent = w.StartAgent(w.AgentConfig("node"))
	w.ShipApp()
	w.Allocate(w.Agent)
	return w
}

// NewTenant makes an org with money, a project and its operator.
func (w *Testbed) NewTenant(slug string) {
	w.T.Helper()
	var err error
	w.Tenant, err = scenario.NewTenant(w.Ctx, w.Hub, filepath.Join(w.Dir, "tenant-"+slug), slug, "1000")
	require.NoError(w.T, err)
	w.Tenant.WaitLimit = ConvergenceBound
	w.Operator, err = w.Tenant.ServiceAccount(w.Ctx, "operator", client.ServiceAccountRoleAppOperator)
	require.NoError(w.T, err)
}

// ShipApp ships version 1.0.0 of the app with changes of its manifest, entitles the project to it and prices it.
func (w *Testbed) ShipApp(changes ...string) {
	w.T.Helper()
	var err error
	w.Publisher, err = w.Tenant.NewPublisher(w.Ctx)
	require.NoError(w.T, err)
	w.ShipVersion("1.0.0", changes...)
	require.NoError(w.T, w.Tenant.Entitle(w.Ctx, AppSlug))
	require.NoError(w.T, w.Tenant.Price(w.Ctx, AppSlug, PricePerHour))
}

// Release is a version of the demo's app, ready to ship.
func (w *Testbed) Release(version string) scenario.Release {
	w.T.Helper()
	manifest, err := os.ReadFile(filepath.Join(Source(w.T), "deploy/demo/app/manifest.yaml"))
	require.NoError(w.T, err)
	image, err := devcluster.DemoImage(DemoBinary(w.T))
	require.NoError(w.T, err)
	return scenario.Release{AppSlug: AppSlug, Version: version, Image: image, Template: manifest}
}

// DemoBinary is the demo's app, built once for the process.
func DemoBinary(t testing.TB) string {
	t.Helper()
	binary, err := demoBinary()
	require.NoError(t, err)
	return binary
}

//nolint:gochecknoglobals // one for the tests of the process
var demoBinary = sync.OnceValues(func() (string, error) {
	root, err := sourceRoot()
	if err != nil {
		return "", err
	}
	binary := filepath.Join(root, "bin", "demo-app")
	return binary, devcluster.Build(context.Background(), root, devcluster.DemoApp, binary)
})

// Allocate reserves a slice of a node, enough for two instances of the app.
func (w *Testbed) Allocate(a *devcluster.Agent) {
	w.T.Helper()
	var err error
	w.Allocation, err = w.Tenant.Allocate(w.Ctx, w.Tenant.Admin, a.Ready.NodeID, 1, 512)
	require.NoError(w.T, err)
}

// Launch runs the app and waits until it is running.
func (w *Testbed) Launch(name string) client.AppInstance {
	w.T.Helper()
	i, _, err := w.Tenant.Launch(w.Ctx, w.Operator, client.AppInstanceCreate{
		AppSlug: AppSlug, Version: "1.0.0", DisplayName: name, PlacementIntent: client.PlacementIntent{
			AllocationIds: []string{w.Allocation.ID},
		},
	}, nil)
	require.NoError(w.T, err)
	require.NotEmpty(w.T, i.Endpoints)
	return i
}

// RequireAnswer fetches the app's front page.
func (w *Testbed) RequireAnswer(i client.AppInstance) {
	w.T.Helper()
	_, err := scenario.Get(w.Ctx, i.Endpoints[0].URL+"/")
	require.NoError(w.T, err)
}

// Eventually waits until the condition returns no error, for no longer than law 13 allows.
func (w *Testbed) Eventually(what string, condition func() error) {
	w.T.Helper()
	require.NoError(w.T, Await(w.Ctx, ConvergenceBound, condition), what)
}
