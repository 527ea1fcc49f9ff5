package manifest_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/pkg/manifest/manifesttest"
	"github.com/gpuaas/gpuaas/protocol"
)

// withIdentity is the sample whose instances get service accounts.
func withIdentity(t testing.TB) string {
	t.Helper()
	doc := strings.Replace(document(t), "  parameters:", "  instance_identity: service_account\n"+
		"  secrets: {on_change: none}\n  parameters:", 1)
	require.NotEqual(t, document(t), doc)
	return doc
}

func TestAnInstanceIdentityIsASealedParameterOfThePlatforms(t *testing.T) {
	m, err := manifest.Parse([]byte(withIdentity(t)))
	require.NoError(t, err)
	require.True(t, m.HasIdentity())
	require.False(t, parsed(t).HasIdentity())
	require.Contains(t, m.Features(), manifest.FeatureInstanceIdentity)
	require.Contains(t, manifest.KnownFeatures(), manifest.FeatureInstanceIdentity)
	const hash = `"password_hash":"` + goodHash + `"`
	_, err = m.CheckParameters([]byte(`{` + hash + `,"service-account.json":{"$secret":""}}`))
	require.NoError(t, err)
	_, err = m.CheckParameters([]byte(`{` + hash + `,"service-account.json":"mine"}`))
	require.Equal(t, manifest.CodeParametersInvalid, fault.As(err).Code)
	_, err = parsed(t).CheckParameters([]byte(`{` + hash + `,"service-account.json":{"$secret":""}}`))
	require.Equal(t, manifest.CodeParametersInvalid, fault.As(err).Code, "of a version without")

	w := newWorld(t, "org/acme/", "acme")
	env, v := w.verify(t, withIdentity(t))
	workload := admittedWorkload(t, env, v)
	for text, admitted := range map[string]bool{
		`{"$sealed":"c2VhbGVk"}`: true, `{"$secret":""}`: false, `"in the open"`: false,
	} {
		workload.ParametersJson = `{` + hash + `,"threads":8,"` + protocol.InstanceIdentityParameter + `":` + text + `}`
		if admitted {
			require.NoError(t, manifest.Admits(v, workload))
		} else {
			require.Equal(t, manifest.CodeNotAdmitted, fault.As(manifest.Admits(v, workload)).Code, text)
		}
	}
}

func TestAnInstanceIdentityThatCannotBeRenewedIsRefused(t *testing.T) {
	const at = "/version/instance_identity"
	external := strings.Replace(manifesttest.External("cluster"), "  parameters:",
		"  instance_identity: service_account\n  parameters:", 1)
	for name, c := range map[string]struct{ doc, pointer string }{
		"external worker": {external, at},
		"restart":         {strings.Replace(withIdentity(t), "on_change: none", "on_change: restart", 1), at},
		"no secrets":      {strings.Replace(withIdentity(t), "  secrets: {on_change: none}\n", "", 1), at},
		"another value":   {strings.Replace(withIdentity(t), ": service_account", ": user", 1), at},
		"its file's name": {
			strings.Replace(withIdentity(t), "verbose: {", "service-account.json: {type: string}\n      verbose: {", 1),
			"/version/parameters/properties/service-account.json",
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := manifest.Parse([]byte(c.doc))
			require.Error(t, err)
			require.Contains(t, pointers(fault.As(err)), c.pointer)
		})
	}
	for _, how := range []string{"{on_change: none}", "{on_change: signal, signal: SIGHUP}"} {
		_, err := manifest.Parse([]byte(strings.Replace(withIdentity(t), "{on_change: none}", how, 1)))
		require.NoError(t, err)
	}
}
