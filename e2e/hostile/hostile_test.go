package hostile_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
)

const program = "github.com/gpuaas/gpuaas/e2e/hostile/intruder"

// outcome is what the intruder answers.
type outcome struct {
	Done    []string          `json:"done"`
	Refused map[string]string `json:"refused"`
	Count   int               `json:"count"`
}

// scene is a node with an intruder of one org and a neighbour of another.
type scene struct {
	*harness.Testbed
	intruders, neighbours *tenant
	neighbour             client.AppInstance
	neighbourPID          uint32
}

// tenant is an org whose app is the intruder's program.
type tenant struct {
	*scenario.Tenant
	operator   *client.Hub
	allocation client.Allocation
	slug       string
}

func newScene(t *testing.T) *scene {
	s := &scene{Testbed: harness.New(t)}
	s.StartContainerd()
	s.StartHub(s.HubConfig())
	// An old runc counts as weak isolation, which this test is not about.
	policy := filepath.Join(s.Dir, "policy.yaml")
	require.NoError(t, os.WriteFile(policy, []byte("share_weak_isolation: true\n"), 0o600))
	node := s.AgentConfig("node")
	node.ExtraArgs = append(node.ExtraArgs, "--policy", policy)
	s.Agent = s.StartAgent(node)
	binary := filepath.Join(s.Dir, "intruder")
	require.NoError(t, devcluster.Build(s.Ctx, harness.Source(t), program, binary))
	s.intruders, s.neighbours = s.newTenant("mallory", "intruder", binary), s.newTenant("acme", "neighbour", binary)
	s.neighbour = s.neighbours.launch(s, "neighbour")
	s.neighbourPID = s.PidOf(s.neighbour)
	return s
}

func (s *scene) newTenant(org, slug, binary string) *tenant {
	t := s.T
	t.Helper()
	s.NewTenant(org)
	out := &tenant{Tenant: s.Tenant, operator: s.Operator, slug: slug}
	manifest, err := os.ReadFile("intruder/manifest.yaml")
	require.NoError(t, err)
	image, err := devcluster.DemoImage(binary)
	require.NoError(t, err)
	publisher, err := out.NewPublisher(s.Ctx)
	require.NoError(t, err)
	_, err = out.Ship(s.Ctx, publisher, scenario.Release{
		AppSlug: slug, Version: "1.0.0", Image: image,
		Template: []byte(strings.Replace(string(manifest), "slug: intruder", "slug: "+slug, 1)),
	})
	require.NoError(t, err)
	require.NoError(t, out.Entitle(s.Ctx, slug))
	require.NoError(t, out.Price(s.Ctx, slug, harness.PricePerHour))
	out.allocation, err = out.Allocate(s.Ctx, out.Admin, s.Agent.Ready.NodeID, 1, 256)
	require.NoError(t, err)
	return out
}

func (o *tenant) launch(s *scene, name string) client.AppInstance {
	s.T.Helper()
	i, _, err := o.Launch(s.Ctx, o.operator, client.AppInstanceCreate{
		AppSlug: o.slug, Version: "1.0.0", DisplayName: name,
		PlacementIntent: client.PlacementIntent{AllocationIds: []string{o.allocation.ID}},
	}, nil)
	require.NoError(s.T, err)
	return i
}

// end decommissions an instance.
func (o *tenant) end(s *scene, i client.AppInstance) {
	s.T.Helper()
	_, err := o.Decommission(s.Ctx, o.operator, i.ID)
	require.NoError(s.T, err)
}

// ask sends a request to an instance's program.
func ask(ctx context.Context, i client.AppInstance, path string, query url.Values) (out outcome, err error) {
	body, err := scenario.Get(ctx, i.Endpoints[0].URL+path+"?"+query.Encode())
	if err != nil {
		return out, err
	}
	return out, json.Unmarshal([]byte(body), &out)
}

// requireUntouched shows that the neighbour is the process that it was, and does what a container may.
func (s *scene) requireUntouched() {
	s.T.Helper()
	require.Equal(s.T, s.neighbourPID, s.PidOf(s.neighbour))
	for _, path := range []string{"/fork", "/watch"} {
		out, err := ask(s.Ctx, s.neighbour, path, nil)
		require.NoError(s.T, err)
		require.Greater(s.T, out.Count, 10, "%s: %v", path, out.Refused)
	}
}

func TestAHostileContainerIsAlone(t *testing.T) {
	s := newScene(t)
	intruder := s.intruders.launch(s, "intruder")
	t.Run("it is refused what only the machine may", func(t *testing.T) {
		out, err := ask(s.Ctx, intruder, "/try", nil)
		require.NoError(t, err)
		require.Empty(t, out.Done)
		require.Greater(t, len(out.Refused), 40)
	})
	t.Run("it sees nobody else", func(t *testing.T) {
		out, err := ask(s.Ctx, intruder, "/see", nil)
		require.NoError(t, err)
		require.Empty(t, out.Done)
	})
	t.Run("it reaches nobody else", func(t *testing.T) { s.reachesNobody(t, intruder) })
	t.Run("it takes no more than its own", func(t *testing.T) {
		for path, most := range map[string]int{"/fork": 64, "/watch": 1024} {
			out, err := ask(s.Ctx, intruder, path, nil)
			require.NoError(t, err)
			require.NotEmpty(t, out.Refused, "%s: it ends somewhere", path)
			require.Positive(t, out.Count)
			require.LessOrEqual(t, out.Count, most, path)
			s.requireUntouched()
		}
	})
	t.Run("its volume leads nowhere", func(t *testing.T) { s.misusesItsVolume(t, intruder) })
	s.intruders.end(s, intruder)
	for _, with := range []string{"memory", "shared memory", "disk", "files", "log", "volume", "volume's files"} {
		t.Run("it fills nobody's "+with, func(t *testing.T) { s.fills(t, with) })
	}
	s.neighbours.end(s, s.neighbour)
}

// misusesItsVolume fills a volume with links out of it, devices and the like: none works, and the machine's files are
// as they were when the node has restarted the container upon them.
func (s *scene) misusesItsVolume(t *testing.T, intruder client.AppInstance) {
	canary := filepath.Join(s.Dir, "canary")
	require.NoError(t, os.WriteFile(canary, []byte("untouched"), 0o644))
	out, err := ask(s.Ctx, intruder, "/volume", url.Values{"of": {canary}})
	require.NoError(t, err)
	require.Empty(t, out.Done)
	require.Len(t, out.Refused, 13)
	pid := s.PidOf(intruder)
	s.Explain(harness.Faults{Why: "an intruder is killed", Restarts: 1})
	require.NoError(t, unix.Kill(int(pid), unix.SIGKILL))
	s.Eventually("the container runs again upon its volume", func() error {
		_, err := ask(s.Ctx, intruder, "/see", nil)
		return err
	})
	content, err := os.ReadFile(canary)
	require.NoError(t, err)
	require.Equal(t, "untouched", string(content))
	s.requireUntouched()
}

// fills has an intruder take what it can: it is refused more, or its container is ended.
func (s *scene) fills(t *testing.T, with string) {
	i := s.intruders.launch(s, "fills "+with)
	pid := s.PidOf(i)
	s.Explain(harness.Faults{Why: "an intruder is ended at its limit", Restarts: 1})
	out, err := ask(s.Ctx, i, "/fill", url.Values{"with": {with}})
	require.Empty(t, out.Done)
	if err != nil {
		s.Eventually("the node ends the container", func() error {
			return harness.Pending(nil, !processIs(pid))
		})
	} else {
		require.NotEmpty(t, out.Refused)
	}
	s.requireUntouched()
	s.intruders.end(s, i)
}

func processIs(pid uint32) bool {
	_, err := os.Stat(fmt.Sprint("/proc/", pid))
	return err == nil
}

// reachesNobody tries the neighbour, the node's own services, a host of its LAN and the cloud's metadata; the node
// itself reaches each.
func (s *scene) reachesNobody(t *testing.T, intruder client.AppInstance) {
	const metadata = "169.254.169.254"
	lan := s.NewNetwork("lan")
	lanHost := exec.CommandContext(s.Ctx, "nsenter", "--net="+lan.Path("lan"), filepath.Join(s.Dir, "intruder"))
	require.NoError(t, lanHost.Start())
	t.Cleanup(func() {
		_ = lanHost.Process.Kill()
		_ = lanHost.Wait()
	})
	ip := func(args ...string) {
		out, err := exec.CommandContext(s.Ctx, "ip", args...).CombinedOutput()
		require.NoError(t, err, "ip %v: %s", args, out)
	}
	ip("-n", filepath.Base(lan.Path("lan")), "addr", "add", metadata+"/32", "dev", "eth0")
	ip("route", "add", metadata+"/32", "via", lan.Address("lan"))
	t.Cleanup(func() { ip("route", "del", metadata+"/32") })

	service, err := new(net.ListenConfig).Listen(s.Ctx, "tcp", "0.0.0.0:0")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, service.Close()) })
	_, port, err := net.SplitHostPort(service.Addr().String())
	require.NoError(t, err)
	api, err := url.Parse(s.Hub.Ready.APIURL)
	require.NoError(t, err)
	gateway := s.Subnet(0) + "1"
	reached := []string{
		net.JoinHostPort(gateway, port), lan.Address("lan") + ":8080", metadata + ":8080",
		net.JoinHostPort(s.memberAddress(s.neighbour), "8080"),
	}
	for _, target := range reached {
		s.Eventually("the node reaches "+target, func() error {
			c, err := net.Dial("tcp", target)
			if err == nil {
				err = c.Close()
			}
			return err
		})
	}
	// These listen on the node's loopback address alone.
	targets := append(reached, net.JoinHostPort(gateway, api.Port()),
		net.JoinHostPort(gateway, publishedPort(t, s.neighbour)))
	itself := "127.0.0.1:8080"
	out, err := ask(s.Ctx, intruder, "/dial", url.Values{"to": append(targets, itself)})
	require.NoError(t, err)
	require.Equal(t, []string{itself}, out.Done)
	require.Len(t, out.Refused, len(targets))
	s.RequireAnswer(s.neighbour)
}

func publishedPort(t *testing.T, i client.AppInstance) string {
	t.Helper()
	u, err := url.Parse(i.Endpoints[0].URL)
	require.NoError(t, err)
	return u.Port()
}

// memberAddress is the address of the instance's container behind the node's bridge.
func (s *scene) memberAddress(i client.AppInstance) string {
	s.T.Helper()
	out, err := exec.CommandContext(s.Ctx, "nsenter", "--target", fmt.Sprint(s.PidOf(i)), "--net", "ip", "-json", "addr",
		"show", "dev", "eth0").CombinedOutput()
	require.NoError(s.T, err, "%s", out)
	var links []struct {
		AddrInfo []struct {
			Family, Local string
		} `json:"addr_info"`
	}
	require.NoError(s.T, json.Unmarshal(out, &links))
	for _, a := range links[0].AddrInfo {
		if a.Family == "inet" {
			return a.Local
		}
	}
	s.T.Fatalf("the container has no address: %s", out)
	return ""
}
