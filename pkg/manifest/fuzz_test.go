package manifest_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// FuzzParse: no document makes the parser panic; an accepted one is valid, and its JSON form is the same manifest.
func FuzzParse(f *testing.F) {
	f.Add([]byte(document(f)))
	f.Add([]byte(chat(f)))
	f.Add([]byte(`{"app":{"slug":"a"},"version":{"version":"1"}}`))
	f.Add([]byte("a: &a [*a]"))
	f.Add([]byte("? {a: 1}\n: 2"))
	f.Add([]byte("1: 2"))
	f.Fuzz(func(t *testing.T, doc []byte) {
		m, err := manifest.Parse(doc)
		if err != nil {
			require.NotEqual(t, fault.Internal, fault.As(err).Kind, "%v", err)
			return
		}
		require.NoError(t, m.Validate())
		asJSON, err := m.JSON()
		require.NoError(t, err)
		again, err := manifest.Parse(asJSON)
		require.NoError(t, err)
		require.Equal(t, m, again)
	})
}

// FuzzParameters: whatever the tenant passes, lowering either refuses it or gives what Admits accepts, with as many
// arguments as the manifest has.
func FuzzParameters(f *testing.F) {
	w := newWorld(f, "org/acme/", "acme")
	env, v := w.verify(f, document(f))
	f.Add([]byte(`{"password_hash":"`+goodHash+`","workspace":"a b; c"}`), uint32(2000), uint64(512<<20))
	f.Add([]byte(`{"password_hash":"`+goodHash+`","ratio":1e-300,"threads":4.0}`), uint32(0), uint64(0))
	f.Fuzz(func(t *testing.T, raw []byte, cpu uint32, memory uint64) {
		params, err := v.Manifest().CheckParameters(raw)
		if err != nil {
			return
		}
		services, err := manifest.Lower(v.Manifest(), manifest.Inputs{Parameters: params}, manifest.Shape{
			CPUMillis:   cpu,
			MemoryBytes: memory,
		})
		if err != nil {
			require.NotEqual(t, fault.Internal, fault.As(err).Kind, "%v", err)
			return
		}
		require.LessOrEqual(t, len(services[0].GetCommand()), len(v.Manifest().Version.RuntimeProfile.Command))
		require.NoError(t, manifest.Admits(v, &protocol.Workload{
			OrgSlug: "acme", AppSlug: "jupyter", AppVersion: "24.05.0", Manifest: env, Services: services,
			ParametersJson: string(raw), ReadinessTimeoutSeconds: 300,
		}))
	})
}
