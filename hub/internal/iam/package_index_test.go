package iam_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

func TestAPackageIndexIsAPlainURLWithCredentialsBesideIt(t *testing.T) {
	full, err := iam.SecretPackageIndex("https://packages.example/simple", "reader", "a b", "")
	require.NoError(t, err)
	require.Equal(t, "https://reader:a%20b@packages.example/simple", full)
	full, err = iam.SecretPackageIndex("http://packages.example", "", "", "")
	require.NoError(t, err)
	require.Equal(t, "http://packages.example", full)
	const address = "https://packages.example/simple"
	for name, c := range map[string]struct{ address, username, password, ca, field string }{
		"no host":              {"https:///simple", "", "", "", "/url"},
		"other scheme":         {"ftp://packages.example", "", "", "", "/url"},
		"credentials in it":    {"https://u:p@packages.example", "", "", "", "/url"},
		"query":                {address + "?a=b", "", "", "", "/url"},
		"fragment":             {address + "#a", "", "", "", "/url"},
		"space":                {address + "/a b", "", "", "", "/url"},
		"line feed":            {address + "\n-----BEGIN CERTIFICATE-----", "", "", "", "/url"},
		"delete":               {address + "/\x7f", "", "", "", "/url"},
		"not ASCII":            {address + "/ä", "", "", "", "/url"},
		"password of nobody":   {address, "", "p", "", "/username"},
		"credentials, no TLS":  {"http://packages.example", "u", "p", "", "/url"},
		"certificates, no TLS": {"http://packages.example", "", "", "x", "/url"},
		"no certificates":      {address, "", "", "x", "/ca_pem"},
		"too long":             {address + strings.Repeat("/a", 64<<10), "", "", "", "/url"},
	} {
		_, err := iam.SecretPackageIndex(c.address, c.username, c.password, c.ca)
		require.True(t, fault.Is(err, fault.Unprocessable), "%s: %v", name, err)
		require.Len(t, fault.As(err).Fields, 1, name)
		require.Equal(t, c.field, fault.As(err).Fields[0].Pointer, name)
	}
}
