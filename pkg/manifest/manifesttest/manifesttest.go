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
