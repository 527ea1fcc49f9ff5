package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTheFlagsOfTheIdentityProviderBelongTogether(t *testing.T) {
	good := identityConfig{
		issuer: "https://id.example", clientID: "hub", redirectURL: "https://web.example/callback",
		orgsOfDomains: map[string]string{"Acme.example": "acme"},
	}
	require.NoError(t, good.check())
	require.NoError(t, (&identityConfig{}).check())
	for flag, spoil := range map[string]func(c *identityConfig){
		"oidc-issuer":       func(c *identityConfig) { c.issuer = "http://id.example" },
		"oidc-client-id":    func(c *identityConfig) { c.clientID = "" },
		"oidc-redirect-url": func(c *identityConfig) { c.redirectURL = "callback" },
		"is missing beside": func(c *identityConfig) { c.issuer = "" },
	} {
		c := good
		spoil(&c)
		require.ErrorContains(t, c.check(), flag)
	}
	good.secretFile = filepath.Join(t.TempDir(), "secret")
	_, err := good.provider()
	require.ErrorContains(t, err, "oidc-client-secret-file")
	require.NoError(t, os.WriteFile(good.secretFile, []byte("s\n"), 0o600))
	p, err := good.provider()
	require.NoError(t, err)
	require.Equal(t, map[string]string{"acme.example": "acme"}, p.OrgsOfDomains)
	none, err := (&identityConfig{}).provider()
	require.NoError(t, err)
	require.Nil(t, none)
}
