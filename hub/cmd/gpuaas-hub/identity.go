package main

import (
	"net/url"
	"os"
	"strings"

	"github.com/spf13/pflag"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/oidc"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// identityConfig has the flags about the identity provider.
type identityConfig struct {
	issuer, clientID, secretFile, redirectURL string
	orgsOfDomains                             map[string]string
}

func (c *identityConfig) add(f *pflag.FlagSet) {
	f.StringVar(&c.issuer, "oidc-issuer", "", "issuer URL of an OpenID Connect provider with which people log in "+
		"(default: off)")
	f.StringVar(&c.clientID, "oidc-client-id", "", "the hub's client there")
	f.StringVar(&c.secretFile, "oidc-client-secret-file", "", "file with the client's secret (default: a public client)")
	f.StringVar(&c.redirectURL, "oidc-redirect-url", "", "where the provider sends browsers back to after a login")
	f.StringToStringVar(&c.orgsOfDomains, "oidc-domain", nil, "DOMAIN=ORG: people whose verified e-mail address is of "+
		"this domain become members of the org at their first login (repeatable)")
}

func (c *identityConfig) check() error {
	bad := func(flag, reason string) error {
		return fault.New(fault.Malformed, fault.CodeFlagInvalid, "--"+flag+" "+reason+".", nil)
	}
	if c.issuer == "" {
		if c.clientID != "" || c.secretFile != "" || c.redirectURL != "" || len(c.orgsOfDomains) > 0 {
			return bad("oidc-issuer", "is missing beside other flags of the provider")
		}
		return nil
	}
	// Plain http shows the codes to the network.
	if u, err := url.Parse(c.issuer); err != nil || u.Scheme != "https" || u.Host == "" {
		return bad("oidc-issuer", "must be an https URL")
	}
	if c.clientID == "" {
		return bad("oidc-client-id", "is missing")
	}
	if u, err := url.Parse(c.redirectURL); err != nil || u.Host == "" {
		return bad("oidc-redirect-url", "must be a URL")
	}
	return nil
}

// provider returns the identity provider, or nil where the hub has none.
func (c *identityConfig) provider() (*command.IdentityProvider, error) {
	if c.issuer == "" {
		return nil, nil //nolint:nilnil // a hub without one is complete
	}
	conf := oidc.Config{Issuer: c.issuer, ClientID: c.clientID, RedirectURL: c.redirectURL}
	if c.secretFile != "" {
		secret, err := os.ReadFile(c.secretFile)
		if err != nil {
			return nil, fault.New(fault.Malformed, fault.CodeFlagInvalid, "The file of --oidc-client-secret-file cannot be "+
				"read.", err)
		}
		conf.ClientSecret = strings.TrimSpace(string(secret))
	}
	orgs := map[string]string{}
	for domain, org := range c.orgsOfDomains {
		orgs[strings.ToLower(domain)] = org
	}
	return &command.IdentityProvider{Provider: oidc.New(conf), OrgsOfDomains: orgs}, nil
}
