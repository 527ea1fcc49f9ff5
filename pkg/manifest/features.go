package manifest

import (
	"errors"
	"maps"
	"slices"
	"strings"
)

// SchemaV1 is the value of a manifest's key schema, and the feature that every key belongs to for which keyFeatures
// names no other.
const SchemaV1 = "gpuaas.app/v1"

// FeatureConfig is the instance's config as a file in its containers.
const FeatureConfig = "config"

// FeatureResources is the choice of disk, shared memory and the number of accelerators.
const FeatureResources = "resources"

// FeatureVariants is the choice of an image by the model, memory and driver of the accelerators.
const FeatureVariants = "variants"

// FeatureHostPorts is the choice of ports of the node. No key of a manifest belongs to it: a choice needs it.
const FeatureHostPorts = "host_ports"

// FeatureServices is several containers that know each other by name, and what a container has beside a start command:
// arguments, liveness, files and capabilities.
const FeatureServices = "services"

// FeatureImageMounts is file systems of further images in a container.
const FeatureImageMounts = "image_mounts"

// FeatureSecretParameters are parameters that reach the node sealed, and the app as files.
const FeatureSecretParameters = "secret_parameters"

// FeatureSecretDelivery is a change of secret parameters under running containers.
const FeatureSecretDelivery = "secret_delivery"

// FeatureInstanceIdentity is a service account for each instance, which reaches the app as a file.
const FeatureInstanceIdentity = "instance_identity"

// ErrSchema is what the fault of a document wraps that does not follow the schema of this build. The hub registers no
// such document, so that a node which gets one, signed, is older than the manifest.
var ErrSchema = errors.New("the manifest does not follow the schema of this build")

// keyFeatures gives the feature that a key of the manifest belongs to, by JSON pointer; a * stands for any one step. A
// key that is not named belongs to the feature of the key that holds it. A key that is added to the schema after the
// first release gets a line here; what Parse fills in where a key is absent must belong to SchemaV1.
func keyFeatures() map[string]string {
	features := map[string]string{
		"/version/config":                            FeatureConfig,
		"/version/config_schema":                     FeatureConfig,
		"/version/secrets":                           FeatureSecretDelivery,
		"/version/external_worker_contract":          FeatureExternalWorker,
		"/version/instance_identity":                 FeatureInstanceIdentity,
		"/version/upgrade":                           FeatureStartFirst,
		"/version/parameters/properties/*/writeOnly": FeatureSecretParameters,
		"/version/runtime_profile/environment":       FeatureEnvironments,
		"/version/runtime_profile/main":              FeatureServices,
		"/version/runtime_profile/services":          FeatureServices,
	}
	for key, feature := range map[string]string{
		"/args":                          FeatureServices,
		"/capabilities":                  FeatureServices,
		"/files":                         FeatureServices,
		"/liveness":                      FeatureServices,
		"/readiness/failure_threshold":   FeatureServices,
		"/readiness/start_period_millis": FeatureServices,

		"/image_variants/*/driver":         FeatureVariants,
		"/image_variants/*/min_memory_mib": FeatureVariants,
		"/image_variants/*/models":         FeatureVariants,
		"/image_mounts":                    FeatureImageMounts,
		"/resources/accelerator_sharing":   FeatureSharing,
		"/resources/accelerators":          FeatureResources,
		"/resources/disk_mib/*":            FeatureResources,
		"/resources/shm_mib":               FeatureResources,
		"/volumes":                         FeatureVolumes,
	} {
		features["/version/runtime_profile"+key] = feature
		features["/version/runtime_profile/services/*"+key] = feature
	}
	return features
}

// Features returns what a node must know to run the version, sorted: SchemaV1, and the features of the keys that the
// manifest uses. A node that lacks one of them gets no workload of this version, and answers feature_missing if it
// does.
func (m Manifest) Features() []string { return slices.Clone(m.features) }

// featuresOf reads the features from a document's tree.
func featuresOf(tree any) []string {
	used := map[string]bool{SchemaV1: true}
	addFeatures(tree, nil, featurePatterns(), used)
	return slices.Sorted(maps.Keys(used))
}

// featurePattern is a key of keyFeatures in steps.
type featurePattern struct {
	steps   []string
	feature string
}

func featurePatterns() (patterns []featurePattern) {
	for key, feature := range keyFeatures() {
		patterns = append(patterns, featurePattern{strings.Split(key, "/")[1:], feature})
	}
	return patterns
}

// FeaturesFor returns what a node must know to run the version with a choice, sorted.
func (m Manifest) FeaturesFor(c Choice) []string {
	features := m.Features()
	if slices.ContainsFunc(c.Ports, func(p PortChoice) bool { return p.HostPort != 0 }) {
		features = append(features, FeatureHostPorts)
	}
	if slices.ContainsFunc(c.Volumes, func(v VolumeChoice) bool { return v.VolumeID != "" }) {
		features = append(features, FeatureProjectVolumes)
	}
	slices.Sort(features)
	return features
}

// FeatureSSHKeys is that a node serves the SSH keys of its state. No workload needs it.
const FeatureSSHKeys = "ssh_keys"

// KnownFeatures returns every feature that a state for this build can need, sorted.
func KnownFeatures() []string {
	known := append(slices.Collect(maps.Values(keyFeatures())), SchemaV1, FeatureHostPorts,
		FeatureProjectVolumes, FeatureSSHKeys)
	slices.Sort(known)
	return slices.Compact(known)
}

func addFeatures(value any, at []string, patterns []featurePattern, used map[string]bool) {
	for _, p := range patterns {
		if matchesPointer(p.steps, at) {
			used[p.feature] = true
		}
	}
	switch v := value.(type) {
	case map[string]any:
		for key, child := range v {
			addFeatures(child, append(slices.Clip(at), key), patterns, used)
		}
	case []any:
		for _, child := range v {
			addFeatures(child, append(slices.Clip(at), "*"), patterns, used)
		}
	}
}

func matchesPointer(pattern, at []string) bool {
	return slices.EqualFunc(pattern, at, func(want, have string) bool { return want == "*" || want == have })
}
