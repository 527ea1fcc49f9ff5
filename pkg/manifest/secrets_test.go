package manifest_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// withSecret is the sample with a required secret parameter.
func withSecret(t testing.TB, definition string) string {
	t.Helper()
	doc := strings.Replace(document(t), "verbose: {type: boolean}", "verbose: {type: boolean}\n      token: "+definition,
		1)
	require.NotEqual(t, document(t), doc)
	doc = strings.Replace(doc, "required: [", "required: [token, ", 1)
	require.Contains(t, doc, "required: [token, ")
	return doc
}

// optionalSecret is the sample with a secret parameter that need not be given.
func optionalSecret(t testing.TB) string {
	t.Helper()
	return strings.Replace(withSecret(t, secretToken), "required: [token, ", "required: [", 1)
}

const secretToken = "{type: string, writeOnly: true, minLength: 3}"

func sealing(string, []byte) ([]byte, error) { return []byte("sealed"), nil }

func TestASecretParameterIsValidatedAndThenSealed(t *testing.T) {
	m, err := manifest.Parse([]byte(withSecret(t, secretToken)))
	require.NoError(t, err)
	require.True(t, m.HasSecrets())
	require.False(t, parsed(t).HasSecrets())
	require.Contains(t, m.Features(), manifest.FeatureSecretParameters)
	plain := `{"password_hash":"` + goodHash + `","token":"hush!"}`
	_, err = m.CheckParameters([]byte(plain))
	require.NoError(t, err)
	for raw, reason := range map[string]string{
		`{"password_hash":"` + goodHash + `"}`:              "is required",
		`{"password_hash":"` + goodHash + `","token":"hu"}`: "must have at least 3 characters",
	} {
		_, err = m.CheckParameters([]byte(raw))
		require.Equal(t, []fault.Field{{Pointer: "/parameters/token", Reason: reason}}, fault.As(err).Fields)
	}
	given := map[string]string{}
	sealed, err := m.Seal([]byte(plain), func(name string, secret []byte) ([]byte, error) {
		given[name] = string(secret)
		return sealing(name, secret)
	})
	require.NoError(t, err)
	require.Equal(t, map[string]string{"token": "hush!"}, given)
	require.NotContains(t, string(sealed), "hush!")
	params, err := m.CheckParameters(sealed)
	require.NoError(t, err, "a node checks what it has")
	again, err := m.Seal(sealed, func(string, []byte) ([]byte, error) { return nil, errors.New("it is sealed") })
	require.NoError(t, err)
	require.JSONEq(t, string(sealed), string(again))
	services, err := manifest.Lower(m, manifest.Inputs{Parameters: params}, manifest.Shape{})
	require.NoError(t, err)
	require.NotContains(t, services[0].String(), "sealed")
	require.Error(t, manifest.RefuseSealed(params), "a request cannot seal")
	_, err = parsed(t).CheckParameters([]byte(`{"password_hash":` + `{"$sealed":"eA=="}}`))
	require.Error(t, err, "only a secret one can be sealed")
}

// A hub whose online keys are stolen cannot make a node start a workload with a secret in the open.
func TestLaw11ANodeAdmitsNoSecretInTheOpen(t *testing.T) {
	w := newWorld(t, "org/acme/", "acme")
	doc := optionalSecret(t)
	env, v := w.verify(t, doc)
	m, err := manifest.Parse([]byte(doc))
	require.NoError(t, err)
	plain := `{"password_hash":"` + goodHash + `","threads":8,"token":"hush!"}`
	sealed, err := m.Seal([]byte(plain), sealing)
	require.NoError(t, err)
	workload := admittedWorkload(t, env, v)
	workload.ParametersJson = string(sealed)
	require.NoError(t, manifest.Admits(v, workload))
	workload.ParametersJson = plain
	err = manifest.Admits(v, workload)
	require.Equal(t, manifest.CodeNotAdmitted, fault.As(err).Code)
	require.Equal(t, "/parameters/token", fault.As(err).Fields[0].Pointer)
}

func TestASecretParameterIsAFileAndNothingElse(t *testing.T) {
	for pointer, doc := range map[string]string{
		"/version/parameters/properties/token/type":    withSecret(t, "{type: integer, writeOnly: true}"),
		"/version/parameters/properties/token/default": withSecret(t, "{type: string, writeOnly: true, default: abc}"),
		"/version/parameters/properties/token": withSecret(t, "{type: object, additionalProperties: false, properties: "+
			"{a: {type: string, writeOnly: true}}}"),
		"/version/runtime_profile/env/1/parameter": strings.Replace(withSecret(t, secretToken), "parameter: threads}",
			"parameter: token}", 1),
		"/version/parameters/properties/to ken": strings.ReplaceAll(withSecret(t, secretToken), "token", `"to ken"`),
	} {
		_, err := manifest.Parse([]byte(doc))
		require.Equal(t, manifest.CodeInvalid, fault.As(err).Code, "%s: %v", pointer, err)
		require.Contains(t, pointers(fault.As(err)), pointer)
	}
}

func TestWhatAChangedSecretDoesIsAFeature(t *testing.T) {
	change := func(doc, says string) string {
		return strings.Replace(doc, "  parameters:", "  secrets: "+says+"\n  parameters:", 1)
	}
	doc := optionalSecret(t)
	m, err := manifest.Parse([]byte(change(doc, "{on_change: signal, signal: SIGHUP}")))
	require.NoError(t, err)
	require.Contains(t, m.Features(), manifest.FeatureSecretDelivery)
	params := map[string]any{"password_hash": goodHash}
	services, err := manifest.Lower(m, manifest.Inputs{Parameters: params}, manifest.Shape{})
	require.NoError(t, err)
	require.Equal(t, protocol.Config_SIGNAL, services[0].GetSecrets().GetOnChange())
	require.Equal(t, "SIGHUP", services[0].GetSecrets().GetSignal())
	for pointer, doc := range map[string]string{
		"/version/secrets/signal": change(doc, "{on_change: signal}"),
		"/version/secrets":        change(document(t), "{on_change: none}"),
	} {
		_, err := manifest.Parse([]byte(doc))
		require.Contains(t, pointers(fault.As(err)), pointer)
	}
}

// Only the hub knows the secrets of a project: a reference that reaches a node is refused there.
func TestAReferenceToASecretIsForTheHub(t *testing.T) {
	m, err := manifest.Parse([]byte(withSecret(t, secretToken)))
	require.NoError(t, err)
	raw := `{"password_hash":"` + goodHash + `","token":{"$secret":"hf"}}`
	sealed, err := m.Seal([]byte(raw), func(string, []byte) ([]byte, error) { return nil, errors.New("not yet") })
	require.NoError(t, err)
	require.JSONEq(t, raw, string(sealed))
	require.Equal(t, map[string]string{"token": "hf"}, protocol.SecretReferences(raw))
	_, err = m.CheckParameters([]byte(`{"password_hash":{"$secret":"hf"},"token":{"$secret":"hf"}}`))
	require.Error(t, err, "only a secret one can refer")
	w := newWorld(t, "org/acme/", "acme")
	env, v := w.verify(t, optionalSecret(t))
	workload := admittedWorkload(t, env, v)
	workload.ParametersJson = `{"password_hash":"` + goodHash + `","threads":8,"token":{"$secret":"hf"}}`
	require.Equal(t, manifest.CodeNotAdmitted, fault.As(manifest.Admits(v, workload)).Code)
}

// Law 11: what a schema calls secret in a place that the hub does not read is refused: its value would be stored in
// plain text.
func TestLaw11NoSecretHidesInASchema(t *testing.T) {
	const hidden = "{type: string, writeOnly: true}"
	for name, c := range map[string]struct{ pointer, doc string }{
		"one of several schemas": {
			"/version/parameters/properties/token", withSecret(t, "{anyOf: ["+hidden+", {type: integer}]}"),
		},
		"a definition": {
			"/version/parameters", strings.Replace(withSecret(t, `{$ref: "#/$defs/hidden"}`), "  parameters:\n",
				"  parameters:\n    $defs: {hidden: "+hidden+"}\n", 1),
		},
	} {
		_, err := manifest.Parse([]byte(c.doc))
		require.Equal(t, manifest.CodeInvalid, fault.As(err).Code, "%s: %v", name, err)
		require.Equal(t, []fault.Field{{Pointer: c.pointer, Reason: "only a parameter itself can be writeOnly"}},
			fault.As(err).Fields, name)
	}
}
