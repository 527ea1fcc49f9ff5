package manifest

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"

	"github.com/gpuaas/gpuaas/protocol"
)

// secretName is what the name of a secret parameter must be: it names a file.
var secretName = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$`)

// MaxSecretBytes limits the value of one secret parameter.
const MaxSecretBytes = 8 << 10

//nolint:gosec // a text for people
const secretHint = "the app reads it from the file of its name in $GPUAAS_PARAMETERS_DIR"

// IsSecret reports whether the schema marks a parameter writeOnly, or the hub adds it.
func (m Manifest) IsSecret(name string) bool {
	return m.parameterSchemas()[name]["writeOnly"] == true ||
		name == protocol.PackageIndexParameter && m.Version.RuntimeProfile.Environment != nil ||
		name == protocol.InstanceIdentityParameter && m.HasIdentity()
}

// HasSecrets reports whether the version has secret parameters.
func (m Manifest) HasSecrets() bool { return slices.Contains(m.features, FeatureSecretParameters) }

// HasIdentity reports whether each instance of the version gets a service account of its own.
func (m Manifest) HasIdentity() bool { return m.Version.InstanceIdentity == InstanceServiceAccount }

// withoutSealed takes the secrets that are sealed, or will be, out of the parameters, and returns the schema that the
// others follow.
func (m Manifest) withoutSealed(params map[string]any) map[string]any {
	sealed := map[string]bool{}
	for name, value := range params {
		_, sealedNow := protocol.AsSealed(value)
		_, sealedLater := protocol.AsSecretReference(value)
		if (sealedNow || sealedLater) && m.IsSecret(name) {
			sealed[name] = true
			delete(params, name)
		}
	}
	required, _ := m.Version.Parameters["required"].([]any)
	if len(sealed) == 0 || len(required) == 0 {
		return m.Version.Parameters
	}
	schema := maps.Clone(m.Version.Parameters)
	schema["required"] = slices.DeleteFunc(slices.Clone(required), func(name any) bool {
		text, _ := name.(string)
		return sealed[text]
	})
	return schema
}

// Seal returns the parameters, which CheckParameters has accepted, with each secret one sealed.
func (m Manifest) Seal(raw []byte, seal func(name string, secret []byte) ([]byte, error)) ([]byte, error) {
	params, err := parseObject(raw, CodeParametersInvalid, "/parameters")
	if err != nil {
		return nil, err
	}
	for name, value := range params {
		_, done := protocol.AsSealed(value)
		_, refers := protocol.AsSecretReference(value)
		if done || refers || !m.IsSecret(name) {
			continue
		}
		text, ok := value.(string)
		if !ok || len(text) > MaxSecretBytes {
			return nil, parameterRefused(name, fmt.Sprintf("must be a text of at most %d bytes", MaxSecretBytes))
		}
		sealed, err := seal(name, []byte(text))
		if err != nil {
			return nil, err
		}
		params[name] = protocol.SealedValue(sealed)
	}
	out, err := json.Marshal(params)
	if err != nil {
		return nil, err
	}
	_, err = m.CheckParameters(out)
	return out, err
}

// RefuseSealed refuses a request that holds a sealed value: only the hub seals.
func RefuseSealed(params map[string]any) error {
	for name, value := range params {
		if object, is := value.(map[string]any); is && protocol.HasSealedKey(object) {
			return parameterRefused(name, "must not be sealed")
		}
	}
	return nil
}

// checkSealed refuses a workload that carries a secret in the open.
func (m Manifest) checkSealed(params map[string]any) error {
	for name, value := range params {
		if _, sealed := protocol.AsSealed(value); m.IsSecret(name) && !sealed {
			return notAdmitted("/parameters/"+escapePointer(name), "is secret and must be sealed")
		}
	}
	return nil
}

// checkSecrets makes sure that a secret parameter can be a file, and can be nothing else.
func (m Manifest) checkSecrets(f *findings) {
	rest := maps.Clone(m.Version.Parameters)
	delete(rest, "properties")
	if hasWriteOnly(rest) {
		f.add("/version/parameters", "only a parameter itself can be writeOnly")
	}
	for name, s := range m.parameterSchemas() {
		at := "/version/parameters/properties/" + escapePointer(name)
		secret, marked := s["writeOnly"]
		nested := maps.Clone(s)
		delete(nested, "writeOnly")
		if hasWriteOnly(nested) || marked && secret != true && secret != false {
			f.add(at, "only a parameter itself can be writeOnly")
		}
		if secret != true {
			continue
		}
		if !secretName.MatchString(name) {
			f.add(at, "a secret parameter is a file: its name must match "+secretName.String())
		}
		if s["type"] != "string" {
			f.add(at+"/type", "a secret parameter must be a string")
		}
		if _, has := s["default"]; has {
			f.add(at+"/default", "a secret parameter can have none")
		}
	}
	if hasWriteOnly(m.Version.ConfigSchema) {
		f.hint("/version/config_schema", "config cannot be writeOnly: it is kept in plain text",
			"let the secret be a parameter")
	}
}

// checkIdentity makes sure that the service account of an instance reaches the app, also when it is renewed.
func (m Manifest) checkIdentity(f *findings) {
	const at = "/version/instance_identity"
	if !m.HasIdentity() {
		return
	}
	if IsExternal(m.App.RuntimeBackend) {
		f.add(at, "is sealed to a node, and an external worker has none")
		return
	}
	if on := m.Version.Secrets.OnChange; on != ConfigSignal && on != ConfigNone {
		f.hint(at, "is renewed without a restart: it needs /version/secrets with on_change signal or none",
			"secrets: {on_change: none}")
	}
	if m.parameterSchemas()[protocol.InstanceIdentityParameter] != nil {
		f.add("/version/parameters/properties/"+protocol.InstanceIdentityParameter, "is the platform's own beside an "+
			"instance_identity")
	}
}

func hasWriteOnly(schema any) bool {
	switch v := schema.(type) {
	case map[string]any:
		for key, child := range v {
			if key == "writeOnly" && child == true || hasWriteOnly(child) {
				return true
			}
		}
	case []any:
		return slices.ContainsFunc(v, hasWriteOnly)
	}
	return false
}
