package sim

import (
	"crypto/ed25519"
	"crypto/sha256"
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// quality is what the world knows of an image, and neither hub nor node.
type quality string

const (
	// signed: the publisher signed a manifest with the image.
	signed quality = "signed"
	// unready: the same, and no container of it becomes ready.
	unready quality = "unready"
	// stranger: the manifest is signed by a key that is no publisher's.
	stranger quality = "stranger"
	// deviating: the manifest is signed, and the workload has an image beside it.
	deviating quality = "deviating"
	// later: the workload needs a feature of a later release.
	later quality = "later"
)

// mayRun reports whether a node may start a container of the image.
func (q quality) mayRun() bool { return q == signed || q == unready || q == "" }

// apps are the apps that orgs choose from. The platform publishes the first, a delegate each other one.
func apps() []string { return []string{"first", "second", "third"} }

// release is a version of an app with what its publisher signed.
type release struct {
	app, version         string
	manifest             manifest.Manifest
	envelope, delegation []byte
	features             []string
	quality              quality
}

// manifestText is a manifest of one service. Its main image has the digest of app and version.
const manifestText = `
schema: gpuaas.app/v1
app: {slug: SLUG, display_name: An app, runtime_backend: launchable_oci}
version:
  version: VERSION
  compatibility: {supported_accelerators: [none, nvidia]}
  runtime_profile:
    kind: launchable_oci
    image_variants:
      - {name: cpu, accelerator: none, image_ref: "IMAGE"}
      - {name: gpu, accelerator: nvidia, image_ref: "IMAGE"}
    command: [/app]
    ports: [{name: http, container: 8080}]
    resources: {cpu_millis: {min: 100, default: 500, max: 16000}, memory_mib: {min: 16, default: 512, max: 65536}}
    readiness: {kind: http, port: http, path: /}
    readiness_timeout_seconds: 30
  upgrade: {strategy: STRATEGY}
  parameters: {type: object, additionalProperties: false}
`

func imageOf(app, version string) string {
	return fmt.Sprintf("apps/%s/image@sha256:%x", app, sha256.Sum256([]byte(app+" "+version)))
}

// publish makes the next version of an app, of some quality.
func (w *World) publish(app string, q quality) *release {
	w.releases++
	version := fmt.Sprintf("1.%d.0", w.releases)
	image := imageOf(app, version)
	strategy := manifest.UpgradeRecreate
	if w.releases%2 == 0 {
		strategy = manifest.UpgradeStartFirst
	}
	doc := strings.NewReplacer("SLUG", app, "VERSION", version, "IMAGE", image, "STRATEGY", strategy).
		Replace(manifestText)
	r := &release{app: app, version: version, quality: q}
	publisher := keyOf(protocol.RoleCatalog)
	if app != apps()[0] {
		publisher = keyOf("publisher of " + app)
		r.delegation = w.delegate(app, publisher)
	}
	if q == stranger {
		publisher = keyOf("stranger")
	}
	env, err := manifest.Sign([]byte(doc), protocol.NewEd25519Signer(publisher))
	if err == nil {
		r.envelope, err = proto.Marshal(env)
	}
	if err == nil {
		r.manifest, err = manifest.Parse([]byte(doc))
	}
	if err != nil {
		w.fail(1, "version %s of %s: %v", version, app, err)
	}
	r.features = r.manifest.Features()
	if q == later {
		r.features = append(r.features, "of_a_later_release")
	}
	w.qualities[image] = q
	return r
}

// delegate lets a publisher sign for an app.
func (w *World) delegate(app string, publisher ed25519.PrivateKey) []byte {
	public, _ := publisher.Public().(ed25519.PublicKey)
	env, err := protocol.SignMessage(protocol.PayloadDelegation, &protocol.Delegation{
		Publisher:          &protocol.PublicKey{KeyId: protocol.KeyID(public), Ed25519: public},
		RepositoryPrefixes: []string{"apps/" + app + "/"},
		IssuedAt:           timestamppb.New(genesis()),
	}, protocol.NewEd25519Signer(keyOf(protocol.RoleCatalog)))
	if err != nil {
		w.fail(1, "delegation for %s: %v", app, err)
	}
	raw, _ := proto.Marshal(env)
	return raw
}

// services lowers a release for a member, as command.lower does. A hub that is not honest puts its own image in.
func (r *release) services(w *World, m *memberRow, recreate bool) []*protocol.Service {
	vendor := manifest.AcceleratorNone
	if len(m.accelerators) > 0 {
		vendor = manifest.AcceleratorNVIDIA
	}
	services, err := manifest.Lower(r.manifest, manifest.Inputs{}, manifest.Shape{
		CPUMillis: uint32(m.versions.cpuMillis), MemoryBytes: uint64(m.versions.memoryBytes),
		AcceleratorVendor: vendor, AcceleratorIDs: m.accelerators, AcceleratorSharing: sharingOf(m.accelerators),
		Recreate: recreate,
	})
	if err != nil {
		w.fail(1, "lower version %s of %s: %v", r.version, r.app, err)
		return nil
	}
	if r.quality == deviating {
		services[0].Image = imageOf(r.app, r.version+" and more")
		w.qualities[services[0].GetImage()] = deviating
		w.qualities[imageOf(r.app, r.version)] = signed
	}
	return services
}
