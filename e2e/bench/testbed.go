package main

import (
	"context"
	_ "embed" // the app's manifest
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/baseline"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// The names of what the testbed makes on the machine.
const (
	appSlug    = "bench"
	appVersion = "1.0.0"
	// probedVersion is the same app, probed every second instead of every five.
	probedVersion = "1.0.1"
	// fastVersion is the same app with a core instead of a tenth of one.
	fastVersion = "1.0.3"
	// price is an hour's, in the tenants' currency.
	price       = "3.60"
	trustDomain = "bench.gpuaas.internal"
	// credit is more than any run can cost.
	credit = "100000"
)

//go:embed app.yaml
var appManifest []byte

// Testbed is one hub with one node in their default configuration, on which an app's image is present.
type Testbed struct {
	Containerd *devcluster.Containerd
	Hub        *devcluster.Hub
	Agent      *devcluster.Agent
	Tenant     *scenario.Tenant
	Operator   *client.Hub
	Allocation client.Allocation

	publisher *scenario.Publisher
	image     v1.Image
	// version is launched.
	version string
}

// Testbed starts everything at the first call; the rows share it.
func (e *Env) Testbed(ctx context.Context) (*Testbed, error) {
	if e.testbed != nil {
		return e.testbed, nil
	}
	s := &Testbed{}
	for _, step := range []func(context.Context, *Env) error{
		s.startContainerd, s.startHub, s.startAgent, s.ship,
		s.warmUp,
	} {
		if err := step(ctx, e); err != nil {
			return nil, fmt.Errorf("set up the testbed: %w", err)
		}
	}
	e.testbed = s
	return s, nil
}

func (s *Testbed) startContainerd(ctx context.Context, e *Env) (err error) {
	dir, err := e.Dir("containerd")
	if err != nil {
		return err
	}
	if err := e.inMemory(filepath.Join(dir, "state")); err != nil {
		return err
	}
	s.Containerd, err = devcluster.StartContainerd(ctx, dir)
	if err == nil {
		e.Defer(s.Containerd.Destroy)
	}
	return err
}

func (s *Testbed) startHub(ctx context.Context, e *Env) error {
	dir, err := e.Dir("hub")
	if err != nil {
		return err
	}
	c := devcluster.HubConfig{Bin: e.Bin, Dir: dir, Listen: "127.0.0.1:0", SessionListen: "127.0.0.1:0"}
	if s.Hub, err = devcluster.NewHub(ctx, c, trustDomain); err != nil {
		return err
	}
	e.Defer(func() error { return s.Hub.Stop() })
	s.Tenant, err = scenario.NewTenant(ctx, s.Hub, filepath.Join(dir, "tenant"), "bench", credit)
	if err != nil {
		return err
	}
	s.Operator, err = s.Tenant.ServiceAccount(ctx, "operator", client.ServiceAccountRoleAppOperator)
	return err
}

func (s *Testbed) startAgent(ctx context.Context, e *Env) error {
	dir, err := e.Dir("node")
	if err != nil {
		return err
	}
	run := filepath.Join("/run", filepath.Base(e.root))
	if err := e.inMemory(run); err != nil {
		return err
	}
	c := devcluster.AgentConfig{
		Bin: e.Bin, Dir: dir, RunDir: filepath.Join(run, "agent"), APIURL: s.Hub.Ready.APIURL,
		RootFingerprint:   s.Hub.RootFingerprint,
		ContainerdAddress: s.Containerd.Address, ContainerdNamespace: "bench", Bridge: "gpbench0", PodCIDR: "10.219.0.0/24",
		PortRange: "30000-30999", CgroupParent: "/gpuaas-bench",
	}
	withToken := c
	if withToken.JoinToken, err = scenario.JoinToken(ctx, s.Tenant.Admin); err != nil {
		return err
	}
	if s.Agent, err = devcluster.StartAgent(ctx, withToken); err != nil {
		return err
	}
	s.Agent.Config = c
	e.Defer(func() error {
		return errors.Join(s.Agent.Stop(), devcluster.Uninstall(context.WithoutCancel(ctx), c))
	})
	_, err = scenario.AwaitNode(ctx, s.Tenant.Admin, s.Agent.Ready.NodeID)
	return err
}

// ship publishes the app and allocates the whole node to it.
func (s *Testbed) ship(ctx context.Context, e *Env) error {
	binary := filepath.Join(e.root, "app")
	if err := devcluster.Build(ctx, e.Source, devcluster.DemoApp, binary); err != nil {
		return err
	}
	image, err := devcluster.DemoImage(binary)
	if err != nil {
		return err
	}
	s.image = image
	if s.publisher, err = s.Tenant.NewPublisher(ctx); err != nil {
		return err
	}
	if err := s.release(ctx, appVersion, appManifest); err != nil {
		return err
	}
	if err := errors.Join(s.Tenant.Entitle(ctx, appSlug), s.Tenant.Price(ctx, appSlug, price)); err != nil {
		return err
	}
	node, err := client.Read[client.Node](s.Tenant.Admin.GetNode(ctx, s.Agent.Ready.NodeID))
	if err != nil {
		return err
	}
	cores := max(int32(node.CPUCores), 1)
	s.Allocation, err = s.Tenant.Allocate(ctx, s.Tenant.Admin, s.Agent.Ready.NodeID, cores, 1024)
	return err
}

// release ships a version; Launch uses it from then on.
func (s *Testbed) release(ctx context.Context, version string, manifest []byte) error {
	s.version = version
	_, err := s.Tenant.Ship(ctx, s.publisher, scenario.Release{
		AppSlug: appSlug, Version: version, Image: s.image,
		Template: manifest,
	})
	return err
}

// warmUp launches an instance once, so that the node has the image.
func (s *Testbed) warmUp(ctx context.Context, _ *Env) error {
	i, _, err := s.Launch(ctx, "warm-up")
	if err != nil {
		return err
	}
	_, err = s.Decommission(ctx, i.ID)
	return err
}

// Launch runs the app and returns when a watching client sees it running, with the time since the request.
func (s *Testbed) Launch(ctx context.Context, name string) (client.AppInstance, time.Duration, error) {
	return s.Tenant.Launch(ctx, s.Operator, s.request(name), nil)
}

func (s *Testbed) request(name string) client.AppInstanceCreate {
	return client.AppInstanceCreate{
		AppSlug: appSlug, Version: s.version, DisplayName: name, PlacementIntent: client.PlacementIntent{
			AllocationIds: []string{s.Allocation.ID},
		},
	}
}

// Decommission ends an instance and returns when a watching client sees it gone, with the time since the request.
func (s *Testbed) Decommission(ctx context.Context, id string) (time.Duration, error) {
	start := time.Now()
	_, err := s.Tenant.Decommission(ctx, s.Operator, id)
	return time.Since(start), err
}

// Each does something n times at once and returns the first error.
func Each(n int, do func(i int) error) error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = do(i) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// LaunchMany requests n instances at once and watches each; took is the time until the last one was running.
func (s *Testbed) LaunchMany(ctx context.Context, n int) (ids []string, took time.Duration, err error) {
	ids = make([]string, n)
	start := time.Now()
	err = Each(n, func(k int) error {
		i, _, err := s.Launch(ctx, fmt.Sprintf("many-%d", k))
		ids[k] = i.ID
		return err
	})
	took = time.Since(start)
	return slices.DeleteFunc(ids, func(id string) bool { return id == "" }), took, err
}

// DecommissionAll ends instances at once.
func (s *Testbed) DecommissionAll(ctx context.Context, ids []string) error {
	return Each(len(ids), func(i int) error {
		_, err := s.Decommission(ctx, ids[i])
		return err
	})
}

// Baseline launches an instance and prepares the measurement of containerd and CNI alone for its container. end removes
// both.
func (s *Testbed) Baseline(ctx context.Context) (bench *baseline.Bench, end func() error, err error) {
	model, _, err := s.Launch(ctx, "model")
	if err != nil {
		return nil, nil, err
	}
	gone := func() error {
		_, err := s.Decommission(ctx, model.ID)
		return err
	}
	if bench, err = s.baselineOf(ctx, model.ID); err != nil {
		return nil, nil, errors.Join(err, gone())
	}
	return bench, func() error { return errors.Join(bench.Close(ctx), gone()) }, nil
}

func (s *Testbed) baselineOf(ctx context.Context, instanceID string) (*baseline.Bench, error) {
	c := s.Agent.Config
	container, err := baseline.Find(ctx, c.ContainerdAddress, c.ContainerdNamespace, instanceID)
	if err != nil {
		return nil, err
	}
	// On the file system of the node's own state below /run.
	dir := filepath.Join(filepath.Dir(c.RunDir), "baseline-"+instanceID)
	if err := os.Mkdir(dir, 0o711); err != nil {
		return nil, err
	}
	bench, err := baseline.New(ctx, baseline.Config{
		Address: c.ContainerdAddress, Namespace: c.ContainerdNamespace, ContainerID: container, Image: s.image,
		Bridge: c.Bridge, CIDR: c.PodCIDR, PluginDir: pluginDir(), Dir: dir, ContainerPort: 8080,
	})
	if err != nil {
		return nil, fmt.Errorf("baseline: %w", err)
	}
	return bench, nil
}

// references are what a launch through the product is compared with; docker is nil on a machine without a Docker
// daemon.
type references struct {
	bench    *baseline.Bench
	attacher *baseline.Attacher
	docker   *baseline.Docker
	end      func() error
}

// referenceBridge and referenceCIDR are those of the product's networks beside the node.
const referenceBridge, referenceCIDR = "gpbench1", "10.220.0.0/24"

// references launches an instance whose container they launch, too.
func (s *Testbed) references(ctx context.Context, e *Env) (*references, error) {
	bench, end, err := s.Baseline(ctx)
	if err != nil {
		return nil, err
	}
	r := &references{bench: bench, end: end}
	program := filepath.Join(e.root, "attach")
	err = devcluster.Build(ctx, e.Source, "./agent/internal/network/attach", program)
	if err == nil {
		run := filepath.Dir(s.Agent.Config.RunDir)
		r.attacher, err = bench.StartAttacher(program, referenceBridge, referenceCIDR, filepath.Join(run, "attach"))
	}
	if err == nil {
		r.docker, err = baseline.StartDocker(ctx, s.image, 8080)
	}
	if err == nil {
		// The first launch is slower and does not count.
		_, err = bench.MeasureReference(ctx, r.attacher)
	}
	if err != nil {
		return nil, errors.Join(err, r.close(ctx))
	}
	return r, nil
}

func (r *references) close(ctx context.Context) error {
	var errs []error
	if r.docker != nil {
		errs = append(errs, r.docker.Close(ctx))
	}
	if r.attacher != nil {
		errs = append(errs, r.attacher.Close())
	}
	return errors.Join(append(errs, r.end())...)
}

// pluginDir is where this machine keeps its CNI plugins.
func pluginDir() string {
	for _, d := range []string{"/usr/lib/cni", "/opt/cni/bin"} {
		if _, err := os.Stat(filepath.Join(d, "bridge")); err == nil {
			return d
		}
	}
	return "/usr/lib/cni"
}
