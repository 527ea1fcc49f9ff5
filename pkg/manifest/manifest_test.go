package manifest_test

import (
	"bytes"
	"crypto/ed25519"
	"encoding/json"
	"flag"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
)

var update = flag.Bool("update", false, "rewrite the golden files")

const goodHash = "sha256:0123456789ab:" + "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"

func document(t testing.TB) string {
	t.Helper()
	doc, err := os.ReadFile(filepath.Join("testdata", "jupyter.yaml"))
	require.NoError(t, err)
	return string(doc)
}

func parsed(t testing.TB) manifest.Manifest {
	t.Helper()
	m, err := manifest.Parse([]byte(document(t)))
	require.NoError(t, err)
	return m
}

// indented rewrites JSON in one form: protojson varies its spaces on purpose.
func indented(t testing.TB, data []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	require.NoError(t, json.Indent(&b, data, "", "  "))
	return append(b.Bytes(), '\n')
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		require.NoError(t, os.WriteFile(path, got, 0o600))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), string(got))
}

func TestManifestAndItsServicesStayTheSame(t *testing.T) {
	m := parsed(t)
	asJSON, err := m.JSON()
	require.NoError(t, err)
	golden(t, "jupyter.golden.json", indented(t, asJSON))

	params, err := m.CheckParameters([]byte(`{"password_hash":"` + goodHash +
		`","threads":8,"ratio":0.25,"verbose":true,"workspace":"work"}`))
	require.NoError(t, err)
	services, err := manifest.Lower(m, manifest.Inputs{Parameters: params}, manifest.Shape{
		AcceleratorVendor: "nvidia",
		AcceleratorIDs:    []string{"GPU-1"}, CPUMillis: 2000,
	})
	require.NoError(t, err)
	require.Len(t, services, 1)
	lowered, err := protojson.Marshal(services[0])
	require.NoError(t, err)
	golden(t, "jupyter.lowered.golden.json", indented(t, lowered))
}

func TestDiskLimitOfTheManifestIsTheServices(t *testing.T) {
	doc, err := os.ReadFile("testdata/jupyter.yaml")
	require.NoError(t, err)
	limited := bytes.Replace(doc, []byte("memory_mib:"), []byte("disk_mib: 512\n      memory_mib:"), 1)
	for text, want := range map[string]uint64{string(doc): 0, string(limited): 512 << 20} {
		m, err := manifest.Parse([]byte(text))
		require.NoError(t, err)
		services, err := manifest.Lower(m, manifest.Inputs{Parameters: map[string]any{"password_hash": goodHash}},
			manifest.Shape{})
		require.NoError(t, err)
		require.Equal(t, want, services[0].GetResources().GetDiskBytes())
	}
}

func TestJSONAndYAMLSayTheSame(t *testing.T) {
	m := parsed(t)
	asJSON, err := m.JSON()
	require.NoError(t, err)
	again, err := manifest.Parse(asJSON)
	require.NoError(t, err)
	require.Equal(t, m, again)
	stored, err := manifest.FromJSON(asJSON)
	require.NoError(t, err)
	want, err := manifest.Lower(m, manifest.Inputs{Parameters: map[string]any{"password_hash": goodHash}},
		manifest.Shape{})
	require.NoError(t, err)
	got, err := manifest.Lower(stored, manifest.Inputs{Parameters: map[string]any{"password_hash": goodHash}},
		manifest.Shape{})
	require.NoError(t, err)
	require.Equal(t, want, got)
}

// badDocument is an edit that makes the sample invalid, and how the fault names it.
type badDocument struct {
	edit    func(string) string
	kind    fault.Kind
	pointer string
}

// secret stands in bad documents at fields that a fault must not echo.
const secret = "s3cr3t-value"

// badSyntax lists documents that are no YAML of the schema's form.
func badSyntax() map[string]badDocument {
	return map[string]badDocument{
		"empty":         {func(string) string { return "" }, fault.Malformed, ""},
		"not YAML":      {func(string) string { return "app: [" + secret }, fault.Malformed, ""},
		"not UTF-8":     {func(s string) string { return s + "\xff" }, fault.Malformed, ""},
		"a list":        {func(string) string { return "[" + secret + "]" }, fault.Malformed, ""},
		"two documents": {func(s string) string { return s + "---\na: 1\n" }, fault.Malformed, ""},
		"flat sample": {
			func(string) string { return `{"slug":"a","version":"1","artifact_ref":"` + secret + `"}` },
			fault.Malformed, "/slug",
		},
		"anchor":        {swap("slug: jupyter", "slug: &a jupyter"), fault.Malformed, "/app/slug"},
		"merge key":     {swap("slug: jupyter", "<<: {slug: jupyter}"), fault.Malformed, "/app"},
		"custom tag":    {swap("slug: jupyter", "slug: !x jupyter"), fault.Malformed, "/app/slug"},
		"duplicate key": {swap("slug: jupyter", "slug: jupyter\n  slug: other"), fault.Malformed, "/app/slug"},
		"unknown key":   {swap("slug: jupyter", "slug: jupyter\n  slgu: "+secret), fault.Malformed, "/app/slgu"},
		"missing key":   {swap("  slug: jupyter\n", ""), fault.Malformed, "/app/slug"},
		"U+0000 in a text": {
			swap("Notebooks in the browser.", `"\0`+secret+`"`), fault.Malformed, "/app/description",
		},
		"U+0000 in a key": {
			swap("verbose: {type: boolean}", `"\0`+secret+`": {type: boolean}`), fault.Malformed,
			"/version/parameters/properties",
		},
		"wrong type": {
			swap("pids_max: 512", "pids_max: "+secret), fault.Malformed,
			"/version/runtime_profile/resources/pids_max",
		},
		"version as float": {swap("version: 24.05.0", "version: 24.05"), fault.Malformed, "/version/version"},
		"huge exponent": {
			swap("pids_max: 512", "pids_max: 1e999999999"), fault.Malformed,
			"/version/runtime_profile/resources/pids_max",
		},
		"too large": {
			func(s string) string { return s + strings.Repeat("#", manifest.MaxDocumentBytes) },
			fault.TooLarge, "-",
		},
		"too deep": {
			func(string) string { return strings.Repeat("[", 64) + strings.Repeat("]", 64) },
			fault.Malformed, strings.Repeat("/0", manifest.MaxDepth+1),
		},
	}
}

// badProfiles lists documents with a wrong image, port, probe or directory.
func badProfiles() map[string]badDocument {
	return map[string]badDocument{
		"tag, no digest": {
			swap("runtime@sha256:"+strings.Repeat("1", 64), "runtime:latest"), fault.Malformed,
			"/version/runtime_profile/image_variants/0/image_ref",
		},
		"registry host": {
			swap("org/acme/jupyter/runtime@", "reg.example.com/org/acme/jupyter/runtime@"), fault.Malformed,
			"/version/runtime_profile/image_variants/0/image_ref",
		},
		"other app's repository": {
			swap("org/acme/jupyter/runtime@", "org/acme/other/runtime@"), fault.Unprocessable,
			"/version/runtime_profile/image_variants/0/image_ref",
		},
		"public port": {
			swap("container: 8888}", "container: 8888, expose: public}"), fault.Malformed,
			"/version/runtime_profile/ports/0/expose",
		},
		"port twice": {
			swap("container: 9229", "container: 8888"), fault.Unprocessable,
			"/version/runtime_profile/ports/1/container",
		},
		"probe of no port": {
			swap("port: http, path: /api", "port: nope, path: /api"), fault.Unprocessable,
			"/version/runtime_profile/readiness/port",
		},
		"probe of no path": {
			swap("port: http, path: /api", "port: http"), fault.Unprocessable,
			"/version/runtime_profile/readiness/path",
		},
		"range upside down": {
			swap("{min: 250, default: 1000, max: 8000}", "{min: 250, default: 100, max: 8000}"),
			fault.Unprocessable, "/version/runtime_profile/resources/cpu_millis",
		},
		"kernel directory": {
			swap("working_dir: /home/app", "working_dir: /proc/self/fd/7"), fault.Unprocessable,
			"/version/runtime_profile/working_dir",
		},
		"kernel scratch": {
			swap("path: /tmp,", "path: /proc/x,"), fault.Unprocessable,
			"/version/runtime_profile/scratch/0/path",
		},
		"scratch over the platform's files": {
			swap("path: /tmp,", "path: /etc,"), fault.Unprocessable,
			"/version/runtime_profile/scratch/0/path",
		},
		"scratch climbs": {
			swap("path: /tmp,", "path: /tmp/../etc,"), fault.Unprocessable,
			"/version/runtime_profile/scratch/0/path",
		},
		"scratch in scratch": {
			swap("path: /tmp,", "path: /home/app/x,"), fault.Unprocessable,
			"/version/runtime_profile/scratch/0/path",
		},
		"scratch over memory": {
			swap("size_mib: 64}", "size_mib: 100000}"), fault.Unprocessable,
			"/version/runtime_profile/scratch",
		},
	}
}

// badDeclarations lists documents with a wrong user, accelerator, parameter or UI.
func badDeclarations() map[string]badDocument {
	return map[string]badDocument{
		"uid unmapped": {swap(`"10001:10001"`, `"70000:1"`), fault.Unprocessable, "/version/runtime_profile/user"},
		"accelerator no image": {
			swap("[none, nvidia]", "[none, amd]"), fault.Unprocessable,
			"/version/compatibility/supported_accelerators/1",
		},
		"GPUs for none": {
			swap("supported_accelerators: [none, nvidia]", "min_gpu_count: 1"), fault.Unprocessable,
			"/version/compatibility/min_gpu_count",
		},
		"undeclared parameter": {
			swap("parameter: threads}", "parameter: nope}"), fault.Unprocessable,
			"/version/runtime_profile/env/1/parameter",
		},
		"program parameter": {
			swap("- /usr/bin/jupyter", "- {parameter: theme}"), fault.Unprocessable,
			"/version/runtime_profile/command/0",
		},
		"reserved variable": {
			swap("name: THREADS", "name: LD_PRELOAD"), fault.Unprocessable,
			"/version/runtime_profile/env/1/name",
		},
		"secret parameter": {
			swap("verbose: {type: boolean}", "verbose: {type: boolean, writeOnly: true}"),
			fault.Unprocessable, "/version/parameters/properties/verbose/type",
		},
		"remote reference": {
			swap("verbose: {type: boolean}", `verbose: {type: boolean, $ref: "https://example.com/x"}`),
			fault.Unprocessable, "/version/parameters/properties/verbose/$ref",
		},
		"file reference": {
			swap("verbose: {type: boolean}", `verbose: {type: boolean, $ref: "file:///etc/passwd"}`),
			fault.Unprocessable, "/version/parameters/properties/verbose/$ref",
		},
		"open parameters": {
			swap("additionalProperties: false\n    required", "required"), fault.Unprocessable,
			"/version/parameters/additionalProperties",
		},
		"broken schema": {
			swap("verbose: {type: boolean}", "verbose: {type: bool}"), fault.Unprocessable,
			"/version/parameters",
		},
		"bad default": {
			swap("maximum: 64, default: 4", "maximum: 64, default: 99"), fault.Unprocessable,
			"/version/parameters/properties/threads/default",
		},
		"array as variable": {swap("threads: {type: integer, minimum: 1, maximum: 64, default: 4}",
			"threads: {type: array}"), fault.Unprocessable, "/version/runtime_profile/env/1/parameter"},
		"NUL in a variable": {
			swap("value: /home/app}", `value: "a\0b"}`), fault.Malformed,
			"/version/runtime_profile/env/0/value",
		},
		"other backend": {
			swap("runtime_backend: launchable_oci", "runtime_backend: slurm"), fault.Unprocessable,
			"/version/external_worker_contract",
		},
		"mode without a scope": {
			swap("runtime_backend: launchable_oci", "supported_modes: {operating_modes: [tenant_dedicated, platform_managed]}\n"+
				"  runtime_backend: launchable_oci"), fault.Unprocessable,
			"/app/supported_modes/operating_modes/1",
		},
		"UI without port": {
			swap("port: http, path: /tree", "port: debug, path: /tree"), fault.Unprocessable,
			"/version/ui/port",
		},
	}
}

func TestBadDocumentsAreRefusedByFieldAndNeverEchoed(t *testing.T) {
	cases := badSyntax()
	maps.Copy(cases, badProfiles())
	maps.Copy(cases, badDeclarations())
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			doc := c.edit(document(t))
			require.NotEqual(t, document(t), doc, "the case changes nothing")
			_, err := manifest.Parse([]byte(doc))
			require.Error(t, err)
			f := fault.As(err)
			require.Equal(t, c.kind, f.Kind, "%v %+v", err, f.Fields)
			require.True(t, fault.IsPermanent(err))
			if c.pointer != "-" {
				require.NotEmpty(t, f.Fields)
				require.Contains(t, pointers(f), c.pointer)
			}
			shown, jsonErr := json.Marshal([]any{f.Public, f.Fields})
			require.NoError(t, jsonErr)
			require.NotContains(t, string(shown), secret)
		})
	}
}

func pointers(f *fault.Error) []string {
	var out []string
	for _, field := range f.Fields {
		out = append(out, field.Pointer)
	}
	return out
}

func swap(from, to string) func(string) string {
	return func(s string) string { return strings.Replace(s, from, to, 1) }
}

func TestParametersAreTypedAndNeverBecomeOptions(t *testing.T) {
	m := parsed(t)
	cases := map[string]struct{ raw, pointer string }{
		"missing":      {`{}`, "/parameters/password_hash"},
		"unknown":      {`{"password_hash":"` + goodHash + `","x":1}`, "/parameters/x"},
		"wrong type":   {`{"password_hash":"` + goodHash + `","threads":"4"}`, "/parameters/threads"},
		"out of range": {`{"password_hash":"` + goodHash + `","threads":65}`, "/parameters/threads"},
		"not in enum":  {`{"password_hash":"` + goodHash + `","theme":"$(id)"}`, "/parameters/theme"},
		"duplicate": {
			`{"password_hash":"` + goodHash + `","password_hash":"` + goodHash + `"}`,
			"/parameters/password_hash",
		},
		"trailing":      {`{"password_hash":"` + goodHash + `"}{}`, "/parameters"},
		"array":         {`[]`, "/parameters"},
		"huge exponent": {`{"password_hash":"` + goodHash + `","ratio":1e999999999}`, "/parameters/ratio"},
		"cut off":       {`{"password_hash":`, "/parameters"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			_, err := m.CheckParameters([]byte(c.raw))
			require.Error(t, err)
			require.Contains(t, pointers(fault.As(err)), c.pointer)
		})
	}
	_, err := manifest.Lower(m, manifest.Inputs{Parameters: map[string]any{
		"password_hash": goodHash,
		"workspace":     "--allow-root",
	}}, manifest.Shape{})
	require.Error(t, err)
	require.Equal(t, []string{"/parameters/workspace"}, pointers(fault.As(err)))
}

func TestConfigFollowsItsSchema(t *testing.T) {
	m := parsed(t)
	_, err := m.CheckConfig([]byte(`{"region":"eu"}`))
	require.NoError(t, err)
	_, err = m.CheckConfig([]byte(`{"regoin":"eu"}`))
	require.Equal(t, []string{"/config/regoin"}, pointers(fault.As(err)))
	m.Version.ConfigSchema = nil
	_, err = m.CheckConfig([]byte(`{"region":"eu"}`))
	require.Equal(t, []string{"/config/region"}, pointers(fault.As(err)))
	_, err = m.CheckConfig(nil)
	require.NoError(t, err)
}

func TestShapesOutsideTheManifestAreRefused(t *testing.T) {
	params := map[string]any{"password_hash": goodHash}
	cases := map[string]manifest.Shape{
		"too little CPU":            {CPUMillis: 249},
		"too much CPU":              {CPUMillis: 8001},
		"too little memory":         {MemoryBytes: 255 << 20},
		"too much memory":           {MemoryBytes: 65537 << 20},
		"unsupported vendor":        {AcceleratorVendor: "amd", AcceleratorIDs: []string{"a"}},
		"accelerator of no vendor":  {AcceleratorIDs: []string{"a"}},
		"vendor without any device": {AcceleratorVendor: "nvidia"},
	}
	for name, shape := range cases {
		t.Run(name, func(t *testing.T) {
			_, err := manifest.Lower(parsed(t), manifest.Inputs{Parameters: params}, shape)
			require.True(t, fault.Is(err, fault.Unprocessable), "%v", err)
		})
	}
}

func TestSchemaIsServed(t *testing.T) {
	require.True(t, json.Valid(manifest.Schema()))
}

func newKey(t testing.TB) ed25519.PrivateKey {
	t.Helper()
	_, key, err := ed25519.GenerateKey(nil)
	require.NoError(t, err)
	return key
}
