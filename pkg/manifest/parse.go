package manifest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// Codes of the faults of this package.
const (
	// CodeMalformed: the manifest cannot be read.
	CodeMalformed fault.Code = "manifest_malformed"
	// CodeInvalid: the manifest contradicts itself or exceeds what version 1 can say.
	CodeInvalid fault.Code = "manifest_invalid"
	// CodeTooOld: the version of the app may not start any more.
	CodeTooOld fault.Code = "app_version_too_old"
	// CodeTooLarge: the manifest exceeds its limit of bytes.
	CodeTooLarge fault.Code = "manifest_too_large"
	// CodeParametersInvalid: the parameters do not follow the version's schema.
	CodeParametersInvalid fault.Code = "parameters_invalid"
	// CodeConfigInvalid: the configuration does not follow the version's schema.
	CodeConfigInvalid fault.Code = "config_invalid"
	// CodeResourcesInvalid: the chosen resources do not lie within the bounds of the version.
	CodeResourcesInvalid fault.Code = "resources_invalid"
	// CodeShapeRefused: the version does not run on this capacity.
	CodeShapeRefused fault.Code = "shape_refused"
	// CodeNotAdmitted: the publisher's manifest does not allow the workload.
	CodeNotAdmitted fault.Code = "manifest_not_admitted"
)

// Parse reads a manifest document (YAML or JSON) and validates it. The fault of a bad one names the fields by JSON
// pointer and never echoes a value. Anchors, aliases, merge keys, several documents and duplicate keys are refused:
// what a reviewer reads is what runs.
func Parse(doc []byte) (Manifest, error) {
	if len(doc) > MaxDocumentBytes {
		return Manifest{}, fault.New(fault.TooLarge, CodeTooLarge,
			fmt.Sprintf("The manifest has %d bytes; the limit is %d.", len(doc), MaxDocumentBytes), nil).Permanent()
	}
	tree, err := parseTree(doc)
	if err != nil {
		return Manifest{}, err
	}
	if err := refuseFlatSample(tree); err != nil {
		return Manifest{}, err
	}
	if fields := checkSchema(manifestSchema(), tree); len(fields) > 0 {
		return Manifest{}, breaksSchema(fields)
	}
	m, err := decode(tree)
	if err != nil {
		return Manifest{}, err
	}
	m.features = featuresOf(tree)
	m.fillDefaults()
	if err := m.Validate(); err != nil {
		return Manifest{}, err
	}
	return m, nil
}

func invalid(kind fault.Kind, code fault.Code, public string, fields []fault.Field) error {
	f := fault.New(kind, code, public, nil).Permanent()
	if len(fields) > MaxFields {
		fields = fields[:MaxFields]
	}
	f.Fields = fields
	return f
}

// breaksSchema is the fault of a document that wraps ErrSchema.
func breaksSchema(fields []fault.Field) error {
	for i := range fields {
		if fields[i].Pointer == "/schema" {
			fields[i].Hint = "write schema: " + SchemaV1
		}
	}
	f := fault.As(invalid(fault.Malformed, CodeMalformed, "The manifest does not follow the schema "+SchemaV1+".", fields))
	f.Cause = ErrSchema
	return f
}

func malformed(pointer, reason, hint string) error {
	return invalid(fault.Malformed, CodeMalformed, "The manifest cannot be read.",
		[]fault.Field{{Pointer: pointer, Reason: reason, Hint: hint}})
}

// refuseFlatSample tells the writer of a one-layer manifest, as an older page shows it, where the keys go.
func refuseFlatSample(tree any) error {
	top, ok := tree.(map[string]any)
	if !ok {
		return malformed("", "must be a mapping with the keys app and version", "")
	}
	if _, layered := top["app"]; layered {
		return nil
	}
	for _, key := range []string{"slug", "artifact_ref", "artifact_kind", "runtime_profile", "display_name"} {
		if _, flat := top[key]; flat {
			return malformed("/"+key, "a manifest has two layers and this key is not one of them",
				"write schema: "+SchemaV1+", put slug, display_name, description, category, runtime_backend and supported_modes "+
					"below app:, and version, "+
					"compatibility, runtime_profile, parameters, metering and ui below version:")
		}
	}
	return nil
}

func decode(tree any) (Manifest, error) {
	data, err := json.Marshal(tree)
	if err != nil {
		return Manifest{}, fmt.Errorf("encode the manifest tree: %w", err)
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	var m Manifest
	if err := dec.Decode(&m); err != nil {
		return Manifest{}, fault.New(fault.Malformed, CodeMalformed, "The manifest cannot be read.", err).Permanent()
	}
	return m, nil
}

func (m *Manifest) fillDefaults() {
	if len(m.App.SupportedModes.OperatingModes) == 0 {
		m.App.SupportedModes.OperatingModes = []string{"tenant_dedicated"}
	}
	if len(m.App.SupportedModes.ControlPlaneScopes) == 0 {
		m.App.SupportedModes.ControlPlaneScopes = []string{"project"}
	}
	v := &m.Version
	if v.RuntimeBackend == "" {
		v.RuntimeBackend = m.App.RuntimeBackend
	}
	if len(v.Compatibility.RequiresCapacityShape) == 0 {
		v.Compatibility.RequiresCapacityShape = []string{"baremetal", "gpu_slice"}
	}
	p := &v.RuntimeProfile
	if len(v.Compatibility.SupportedAccelerators) == 0 {
		for _, variant := range p.MainService().ImageVariants {
			if !slices.Contains(v.Compatibility.SupportedAccelerators, variant.Accelerator) {
				v.Compatibility.SupportedAccelerators = append(v.Compatibility.SupportedAccelerators, variant.Accelerator)
			}
		}
	}
	if v.Metering.Kind == "" && !IsExternal(v.RuntimeBackend) {
		v.Metering.Kind = "session_seconds"
	}
	if v.UI.ExtensionKind == "" {
		v.UI.ExtensionKind = "none"
	}
	orElse(&p.ReadinessTimeoutSeconds, DefaultReadinessTimeoutSeconds)
	if p.Environment != nil {
		orElse(&p.Environment.BuildTimeoutSeconds, DefaultBuildTimeoutSeconds)
	}
	if p.Kind == RuntimeLaunchableOCI {
		p.fillDefaults()
	}
	for i := range p.Services {
		p.Services[i].fillDefaults()
		for j := range p.Services[i].DependsOn {
			orElse(&p.Services[i].DependsOn[j].Condition, ServiceStarted)
		}
	}
}

func orElse[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// parseTree turns one YAML or JSON document into maps, slices, strings, bools, nil, int64 and float64.
func parseTree(doc []byte) (any, error) {
	if !utf8.Valid(doc) {
		return nil, malformed("", "must be UTF-8", "")
	}
	dec := yaml.NewDecoder(bytes.NewReader(doc))
	var root yaml.Node
	if err := dec.Decode(&root); err != nil {
		if errors.Is(err, io.EOF) {
			return nil, malformed("", "is empty", "")
		}
		return nil, fault.New(fault.Malformed, CodeMalformed, "The manifest is neither YAML nor JSON.", err).WithField("",
			lineOf(err)).Permanent()
	}
	var more yaml.Node
	if err := dec.Decode(&more); !errors.Is(err, io.EOF) {
		return nil, malformed("", "must be one document", "")
	}
	if len(root.Content) != 1 {
		return nil, malformed("", "is empty", "")
	}
	return nodeValue(root.Content[0], "", 0)
}

// lineOf keeps the line number of a YAML error and drops the rest, which may quote the document.
func lineOf(err error) string {
	_, digits, found := strings.Cut(err.Error(), "line ")
	if !found {
		return "syntax error"
	}
	end := 0
	for end < len(digits) && digits[end] >= '0' && digits[end] <= '9' {
		end++
	}
	return "syntax error at line " + digits[:end]
}

func nodeValue(n *yaml.Node, pointer string, depth int) (any, error) {
	if depth > MaxDepth {
		return nil, malformed(pointer, fmt.Sprintf("nests deeper than %d", MaxDepth), "")
	}
	if n.Anchor != "" || n.Kind == yaml.AliasNode {
		return nil, malformed(pointer, "anchors and aliases are not allowed", "write the value out")
	}
	switch n.Kind {
	case yaml.MappingNode:
		return mappingValue(n, pointer, depth)
	case yaml.SequenceNode:
		if n.ShortTag() != "!!seq" {
			return nil, malformed(pointer, "has a tag that is not allowed", "")
		}
		items := make([]any, 0, len(n.Content))
		for i, c := range n.Content {
			v, err := nodeValue(c, pointer+"/"+strconv.Itoa(i), depth+1)
			if err != nil {
				return nil, err
			}
			items = append(items, v)
		}
		return items, nil
	case yaml.ScalarNode:
		return scalarValue(n, pointer)
	case yaml.DocumentNode, yaml.AliasNode:
	}
	return nil, malformed(pointer, "is not a value", "")
}

func mappingValue(n *yaml.Node, pointer string, depth int) (any, error) {
	if n.ShortTag() != "!!map" {
		return nil, malformed(pointer, "has a tag that is not allowed", "")
	}
	out := make(map[string]any, len(n.Content)/2)
	for i := 0; i+1 < len(n.Content); i += 2 {
		key := n.Content[i]
		if key.Kind != yaml.ScalarNode || key.ShortTag() != "!!str" || key.Anchor != "" {
			return nil, malformed(pointer, "keys must be plain strings", "")
		}
		if strings.ContainsRune(key.Value, 0) {
			return nil, malformed(pointer, "has a key with the character U+0000", "")
		}
		child := pointer + "/" + escapePointer(key.Value)
		if _, twice := out[key.Value]; twice {
			return nil, malformed(child, "this key stands twice", "")
		}
		v, err := nodeValue(n.Content[i+1], child, depth+1)
		if err != nil {
			return nil, err
		}
		out[key.Value] = v
	}
	return out, nil
}

func scalarValue(n *yaml.Node, pointer string) (any, error) {
	switch n.ShortTag() {
	case "!!str", "!!timestamp":
		if strings.ContainsRune(n.Value, 0) {
			return nil, malformed(pointer, "must not contain the character U+0000", "")
		}
		return n.Value, nil
	case "!!null":
		return nil, nil
	case "!!bool":
		return n.Value == "true" || n.Value == "True" || n.Value == "TRUE", nil
	case "!!int":
		i, err := strconv.ParseInt(n.Value, 10, 64)
		if err != nil {
			return nil, malformed(pointer, "must be a decimal integer of at most 64 bits", "quote it if it is meant as text")
		}
		return i, nil
	case "!!float":
		f, err := strconv.ParseFloat(n.Value, 64)
		if err != nil || math.IsInf(f, 0) || math.IsNaN(f) {
			return nil, malformed(pointer, "must be a finite decimal number", "quote it if it is meant as text")
		}
		return f, nil
	}
	return nil, malformed(pointer, "has a tag that is not allowed", "")
}

//nolint:gochecknoglobals // a constant that is slow to make
var pointerEscapes = strings.NewReplacer("~", "~0", "/", "~1")

// escapePointer escapes one step of an RFC 6901 pointer.
func escapePointer(step string) string { return pointerEscapes.Replace(step) }

// JSON returns the manifest with every default filled in, as the API shows it.
func (m Manifest) JSON() ([]byte, error) {
	data, err := json.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode the manifest: %w", err)
	}
	return data, nil
}

// FromJSON reads what JSON wrote, from a trusted place such as the hub's own rows. Documents of others go through
// Parse.
func FromJSON(data []byte) (Manifest, error) {
	var m Manifest
	var tree any
	if err := errors.Join(json.Unmarshal(data, &m), json.Unmarshal(data, &tree)); err != nil {
		return Manifest{}, fmt.Errorf("decode a stored manifest: %w", err)
	}
	m.features = featuresOf(tree)
	return m, nil
}
