// Package manifesttest holds the manifest that tests of hub and node sign. It is for tests only.
package manifesttest

import "strings"

// Document returns the manifest of version 1.0.0 of a small app with one container that runs the image.
func Document(slug, image string) string {
	return strings.NewReplacer("SLUG", slug, "IMAGE", image).Replace(`
schema: gpuaas.app/v1
app: {slug: SLUG, display_name: A small app, runtime_backend: launchable_oci}
version:
  version: 1.0.0
  runtime_profile:
    kind: launchable_oci
    image_variants: [{name: cpu, accelerator: none, image_ref: "IMAGE"}]
    command: [/SLUG]
    ports: [{name: http, container: 8080}]
    resources: {cpu_millis: {min: 100, default: 500, max: 2000}, memory_mib: {min: 16, default: 128, max: 1024}}
    readiness: {kind: http, port: http, path: /}
    readiness_timeout_seconds: 30
  parameters: {type: object, additionalProperties: false, properties: {greeting: {type: string}}}
  metering: {kind: session_seconds}
`)
}

// Services returns the manifest of version 1.0.0 of an app of a main service and the database that it waits for, both
// with the image.
func Services(slug, image string) string {
	return strings.NewReplacer("SLUG", slug, "IMAGE", image).Replace(`
schema: gpuaas.app/v1
app: {slug: SLUG, display_name: A small app, runtime_backend: docker_compose}
version:
  version: 1.0.0
  runtime_profile:
    kind: docker_compose
    main: server
    services:
      - name: db
        image_variants: [{name: any, accelerator: none, image_ref: "IMAGE"}]
        ports: [{name: sql, container: 5432, protocol: tcp}]
        resources: {cpu_millis: {min: 200, default: 200, max: 200}, memory_mib: {min: 64, default: 64, max: 64}}
        readiness: {kind: tcp, port: sql}
      - name: server
        depends_on: [{service: db, condition: service_healthy}]
        image_variants: [{name: any, accelerator: none, image_ref: "IMAGE"}]
        ports: [{name: http, container: 8080}]
        resources: {cpu_millis: {min: 100, default: 500, max: 2000}, memory_mib: {min: 16, default: 128, max: 1024}}
        readiness: {kind: http, port: http, path: /}
  parameters: {type: object, additionalProperties: false, properties: {greeting: {type: string}}}
`)
}

// External returns the manifest of version 1.0.0 of an app that an external worker operates: a controller, and up to
// three workers.
func External(slug string) string {
	return strings.ReplaceAll(`
schema: gpuaas.app/v1
app: {slug: SLUG, display_name: A small cluster, runtime_backend: slurm}
version:
  version: 1.0.0
  runtime_profile: {kind: slurm}
  external_worker_contract:
    delivery: polling
    components: [{role: controller, min: 1, max: 1}, {role: worker, min: 0, max: 3}]
    tasks:
      - {kind: deploy, phases: [install, start]}
      - {kind: upgrade, phases: []}
      - {kind: rollback, phases: []}
      - {kind: stop, phases: []}
      - {kind: member_add, phases: [join]}
      - {kind: member_remove, phases: [drain, leave]}
      - {kind: member_recover, phases: []}
      - {kind: decommission, phases: []}
  parameters: {type: object, additionalProperties: false, properties: {partition: {type: string}}}
`, "SLUG", slug)
}
