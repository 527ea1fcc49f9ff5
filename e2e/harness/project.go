package harness

import (
	"strings"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	api "github.com/gpuaas/gpuaas/pkg/client"
)

// ProjectSlug names the app of several services that ShipProject ships.
const ProjectSlug = "project"

// ProjectServices is how many services it has.
const ProjectServices = 3

// projectTemplate is the manifest of an app whose server is the demo's app: a service that ends before the server
// starts, the server with a volume, and a sidecar that shares it.
const projectTemplate = `schema: gpuaas.app/v1
app: {slug: project, display_name: Project, category: demo, runtime_backend: docker_compose}
version:
  version: ${version}
  compatibility:
    requires_capacity_shape: [baremetal, gpu_slice]
  runtime_profile:
    kind: docker_compose
    main: web
    readiness_timeout_seconds: 30
    services:
      - name: web
        image_variants: [{name: any, accelerator: none, image_ref: "${image}"}]
        command: [/app]
        env: [{name: GREETING, value: Hello from GPUaaS}]
        depends_on: [{service: prepare, condition: service_completed_successfully}]
        ports: [{name: http, container: 8080}]
        resources: {cpu_millis: {min: 50, default: 100, max: 8000}, memory_mib: {min: 16, default: 64, max: 4096}}
        readiness: {kind: http, port: http, path: /healthz, period_millis: 100, timeout_millis: 1000}
        stop_grace_seconds: 5
        volumes: [{name: data, path: /data, size_mib: 16}]
        user: "1000:1000"
        read_only_root: true
      - name: prepare
        image_variants: [{name: any, accelerator: none, image_ref: "${image}"}]
        command: [/app]
        args: [exit, "0"]
        resources: {cpu_millis: {min: 50, default: 50, max: 50}, memory_mib: {min: 32, default: 32, max: 32}}
        restart: on_failure
      - name: sidecar
        image_variants: [{name: any, accelerator: none, image_ref: "${image}"}]
        command: [/app]
        depends_on: [{service: web, condition: service_healthy}]
        resources: {cpu_millis: {min: 50, default: 50, max: 50}, memory_mib: {min: 32, default: 32, max: 32}}
        stop_grace_seconds: 5
        volumes: [{name: data, path: /data, size_mib: 16, read_only: true}]
        restart: always
        user: "1000:1000"
  parameters: {type: object, additionalProperties: false}
  config_schema:
    type: object
    additionalProperties: false
    properties:
      motto: {type: string, maxLength: 200}
  config: {on_change: signal, signal: SIGHUP}
  metering: {kind: session_seconds}
`

// ShipProject ships versions of an app of several services, each with its own changes of the manifest, and entitles and
// prices it.
func (w *Testbed) ShipProject(versions map[string][]string) {
	w.T.Helper()
	image, err := devcluster.DemoImage(DemoBinary(w.T))
	require.NoError(w.T, err)
	for version, changes := range versions {
		_, err = w.Tenant.Ship(w.Ctx, w.Publisher, scenario.Release{
			AppSlug: ProjectSlug, Version: version, Image: image,
			Template: []byte(strings.NewReplacer(changes...).Replace(projectTemplate)),
		})
		require.NoError(w.T, err)
	}
	require.NoError(w.T, w.Tenant.Entitle(w.Ctx, ProjectSlug))
	require.NoError(w.T, w.Tenant.Price(w.Ctx, ProjectSlug, PricePerHour))
}

// LaunchProject runs version 1.0.0 of the app of several services and waits until it is running.
func (w *Testbed) LaunchProject(name string) api.AppInstance {
	w.T.Helper()
	i, _, err := w.Tenant.Launch(w.Ctx, w.Operator, api.AppInstanceCreate{
		AppSlug: ProjectSlug, Version: "1.0.0", DisplayName: name,
		PlacementIntent: api.PlacementIntent{AllocationIds: []string{w.Allocation.ID}},
	}, nil)
	require.NoError(w.T, err)
	return i
}
