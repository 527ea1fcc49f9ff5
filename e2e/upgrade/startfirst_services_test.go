package upgrade_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/e2e/load"
	api "github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/pkg/execstream"
)

const shopSlug = "shop"

// shopTemplate is the manifest of an app that starts first: its front calls the web server, which is the one that
// versions change, and that depends on a database with a volume.
const shopTemplate = `schema: gpuaas.app/v1
app: {slug: shop, display_name: Shop, category: demo, runtime_backend: docker_compose}
version:
  version: ${version}
  upgrade: {strategy: start_first}
  compatibility:
    requires_capacity_shape: [baremetal, gpu_slice]
  runtime_profile:
    kind: docker_compose
    main: front
    readiness_timeout_seconds: 30
    services:
      - name: front
        image_variants: [{name: any, accelerator: none, image_ref: "${image}"}]
        command: [/app]
        depends_on: [{service: web, condition: service_healthy}]
        ports: [{name: front, container: 8080}]
        resources: {cpu_millis: {min: 50, default: 100, max: 8000}, memory_mib: {min: 16, default: 32, max: 4096}}
        readiness: {kind: exec, command: [/app, get, "http://web:8080/"], period_millis: 200}
        stop_grace_seconds: 2
        restart: always
      - name: web
        image_variants: [{name: any, accelerator: none, image_ref: "${image}"}]
        command: [/app]
        env: [{name: GREETING, value: Hello from GPUaaS}]
        depends_on: [{service: db, condition: service_healthy}]
        ports: [{name: web, container: 8080}]
        resources: {cpu_millis: {min: 50, default: 100, max: 8000}, memory_mib: {min: 16, default: 32, max: 4096}}
        readiness: {kind: http, port: web, path: /healthz, period_millis: 100}
        stop_grace_seconds: 2
        restart: always
      - name: db
        image_variants: [{name: any, accelerator: none, image_ref: "${image}"}]
        command: [/app]
        ports: [{name: db, container: 8080}]
        resources: {cpu_millis: {min: 50, default: 100, max: 8000}, memory_mib: {min: 16, default: 32, max: 4096}}
        readiness: {kind: http, port: db, path: /healthz, period_millis: 100}
        stop_grace_seconds: 2
        restart: always
        volumes: [{name: data, path: /data, size_mib: 16}]
  metering: {kind: session_seconds}
`

// shipShop ships versions of the shop whose web servers answer differently; the front of the last one is never ready.
func shipShop(w *harness.Testbed) {
	w.T.Helper()
	image, err := devcluster.DemoImage(harness.DemoBinary(w.T))
	require.NoError(w.T, err)
	second := []string{harness.FirstGreeting, harness.SecondGreeting}
	for version, changes := range map[string][]string{
		"1.0.0": nil, "2.0.0": second,
		"3.0.0": append(second, `get, "http://web:8080/"`, "exit, \"9\"", "readiness_timeout_seconds: 30",
			"readiness_timeout_seconds: 4"),
	} {
		_, err = w.Tenant.Ship(w.Ctx, w.Publisher, scenario.Release{
			AppSlug: shopSlug, Version: version, Image: image,
			Template: harness.Edited(w.T, []byte(shopTemplate), changes...),
		})
		require.NoError(w.T, err)
	}
	require.NoError(w.T, w.Tenant.Entitle(w.Ctx, shopSlug))
	require.NoError(w.T, w.Tenant.Price(w.Ctx, shopSlug, harness.PricePerHour))
}

// copies waits until each service of the shop has one container, and returns them.
func copies(w *harness.Testbed, i api.AppInstance) map[string]harness.ServiceContainer {
	w.T.Helper()
	w.Eventually("the other copies are gone", func() error {
		return harness.Pending(nil, w.ContainersOn(w.Agent, i) == 3)
	})
	running := w.Running(i)
	require.Len(w.T, running, 3)
	return running
}

// requireReplaced checks that the web server was replaced and then the front, both beside those before, and returns
// the containers; the front and everyone else get this answer from the web server.
func requireReplaced(w *harness.Testbed, i api.AppInstance, before map[string]harness.ServiceContainer, answer string,
) map[string]harness.ServiceContainer {
	w.T.Helper()
	require.Equal(w.T, "start_first", upgradeData(w, i.ID).Strategy)
	now := copies(w, i)
	require.Equal(w.T, before["db"], now["db"], "what is as before goes on")
	require.NotEqual(w.T, before["web"].ID, now["web"].ID)
	require.NotEqual(w.T, before["front"].ID, now["front"].ID, "it has the web server's address")
	services := map[string]api.MemberService{}
	for _, s := range w.Instance(i.ID).Members[0].Services {
		services[s.Name] = s
	}
	require.False(w.T, services["front"].StartedAt.Before(services["web"].ReadyAt), "the front waits for the web server")

	body, err := scenario.Get(w.Ctx, i.Endpoints[1].URL+"/")
	require.NoError(w.T, err)
	require.Contains(w.T, body, answer)
	s, err := w.Operator.Exec(w.Ctx, w.Tenant.Project.ID, i.ID, api.AppInstanceExec{
		Service: "front", Command: []string{"/app", "get", "http://web:8080/"},
	})
	require.NoError(w.T, err)
	defer s.Abort()
	_, payload, err := execstream.Receive(s)
	require.NoError(w.T, err)
	require.Contains(w.T, string(payload), answer)
	return now
}

// An upgrade, a rollback and an upgrade that is never ready, each of which starts first what differs and what depends
// on that, under load on all services.
func TestSeveralServicesThatStartFirstFailNoRequest(t *testing.T) {
	w := harness.NewPlatform(t)
	shipShop(w)
	containers := w.WatchContainerd(w.Agent.Config.ContainerdNamespace)
	i, _, err := w.Tenant.Launch(w.Ctx, w.Operator, api.AppInstanceCreate{
		AppSlug: shopSlug, Version: "1.0.0", DisplayName: shopSlug,
		PlacementIntent: api.PlacementIntent{AllocationIds: []string{w.Allocation.ID}},
	}, nil)
	require.NoError(t, err)
	require.Len(t, i.Endpoints, 3)
	require.Equal(t, "web", i.Endpoints[1].Name)
	var requests []*load.Load
	for _, e := range i.Endpoints {
		requests = append(requests, load.Start(w.Ctx, e.URL+"/", 50))
	}
	first := copies(w, i)

	up, err := w.Tenant.Upgrade(w.Ctx, w.Operator, i.ID, "2.0.0", nil)
	require.NoError(t, err)
	require.Equal(t, "2.0.0", up.Version)
	requireSamePlace(t, i, up)
	second := requireReplaced(w, up, first, harness.SecondGreeting)

	back, err := w.Tenant.Rollback(w.Ctx, w.Operator, i.ID, nil)
	require.NoError(t, err)
	require.Equal(t, "1.0.0", back.Version)
	requireSamePlace(t, i, back)
	third := requireReplaced(w, back, second, harness.FirstGreeting)

	left, err := w.Tenant.Upgrade(w.Ctx, w.Operator, i.ID, "3.0.0", nil)
	require.NoError(t, err)
	require.Equal(t, "1.0.0", left.Version)
	require.Equal(t, "start_first", upgradeData(w, i.ID).Strategy)
	require.Equal(t, third, copies(w, i), "those that served go on")
	require.Equal(t, 3+2+2+2, containers.Starts(), "a web server and a front beside them each time")

	for n, e := range i.Endpoints {
		result := requests[n].Stop()
		require.Zero(t, result.Failed, "%s: %d of %d failed: %v", e.Name, result.Failed, result.Requests, result.Errors)
	}
	require.Equal(t, []string{
		"requested", "deploying", "running", "upgrade_requested", "upgraded", "rollback_requested", "rolled_back",
		"upgrade_requested", "failed", "rolled_back",
	}, w.EventTypes(i.ID))
	w.Decommission(i)
	w.RequireRuns(containers, i, 1)
}
