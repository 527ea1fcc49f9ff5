package jupyter_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/apps/jupyter"
	"github.com/gpuaas/gpuaas/pkg/appkit"
	"github.com/gpuaas/gpuaas/pkg/manifest"
)

func TestTemplateIsAManifestAndThePasswordIsAHash(t *testing.T) {
	doc, err := appkit.FillTemplate(jupyter.Template(), map[string]string{
		"version": "6.4.12", "image": "org/acme/jupyter/runtime@sha256:" + strings.Repeat("1", 64),
	})
	require.NoError(t, err)
	m, err := manifest.Parse(doc)
	require.NoError(t, err)
	require.EqualValues(t, jupyter.Port, m.Version.RuntimeProfile.Ports[0].Container)
	require.Equal(t, []string{"none", "nvidia", "amd"}, m.Version.Compatibility.SupportedAccelerators)
	require.NoError(t, m.CheckChoice(manifest.Choice{Environment: []string{"numpy>=1.26"}}))

	// From notebook.auth.security.passwd_check's own rule: sha256 over the password and then the salt.
	hash := jupyter.HashPassword("secret", "0123456789ab")
	require.Equal(t, "sha256:0123456789ab:", hash[:20])
	_, err = m.CheckParameters([]byte(`{"password_hash":"` + hash + `"}`))
	require.NoError(t, err)
	for _, bad := range []string{`{}`, `{"password_hash":""}`, `{"password_hash":"secret"}`} {
		_, err = m.CheckParameters([]byte(bad))
		require.Error(t, err)
	}
}
