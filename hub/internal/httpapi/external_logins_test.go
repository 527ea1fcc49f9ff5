package httpapi

import (
	"fmt"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/oidc"
	"github.com/gpuaas/gpuaas/hub/internal/oidc/oidctest"
)

// identityOf is the provider as the hub is configured with it.
func identityOf(p *oidctest.Provider, domains map[string]string) *command.IdentityProvider {
	return &command.IdentityProvider{OrgsOfDomains: domains, Provider: p.Client()}
}

func finishBody(state, code string) string { return `{"state":"` + state + `","code":"` + code + `"}` }

func TestPeopleLogInWithTheIdentityProvider(t *testing.T) {
	p := oidctest.NewForBrowsers(t)
	h := newHouseWith(t, identityOf(p, map[string]string{"acme.example": "ruled"}))
	orgID, _, boss := h.tenant(t, "acme")
	h.invite(t, boss, orgID, "ada@acme.example", `,"roles":["org_billing"]`)
	start, finish := "/auth/oidc/browser", "/auth/oidc/browser/finish"
	login := func(name string) (state, code string) {
		begun := h.must(t, "", "POST", start, "", "", 200)
		at, err := url.Parse(begun.text("url"))
		require.NoError(t, err)
		require.Equal(t, "S256", at.Query().Get("code_challenge_method"))
		require.NotEmpty(t, at.Query().Get("nonce"))
		back := p.Login(t, begun.text("url"), name)
		require.Equal(t, begun.text("state"), back.Get("state"))
		return back.Get("state"), back.Get("code")
	}
	state, code := login("ada")
	tokens := h.must(t, "", "POST", finish, "", finishBody(state, code), 200)
	user := h.must(t, tokens.text("access_token"), "GET", "/users/"+tokens.text("user_id"), "", "", 200)
	require.Equal(t, []any{"org_billing"}, user.body["roles"], "by the invitation")
	require.Equal(t, "ada X", user.body["display_name"])
	again := h.must(t, "", "POST", finish, "", finishBody(state, code), 401)
	require.Equal(t, "external_login_ended", again.text("code"))
	state, code = login("ada")
	next := h.must(t, "", "POST", finish, "", finishBody(state, code), 200)
	require.Equal(t, tokens.text("user_id"), next.text("user_id"), "by issuer and subject")

	_, code = login("ada")
	other := h.must(t, "", "POST", start, "", "", 200)
	mixed := h.must(t, "", "POST", finish, "", finishBody(other.text("state"), code), 401)
	require.Equal(t, "identity_refused", mixed.text("code"), "a code counts in its own login only")

	state, code = login("bob")
	unknown := h.must(t, "", "POST", finish, "", finishBody(state, code), 401)
	require.Equal(t, "identity_unknown", unknown.text("code"))
	ruled, _, _ := h.tenant(t, "ruled")
	state, code = login("bob")
	made := h.must(t, "", "POST", finish, "", finishBody(state, code), 200)
	require.Equal(t, ruled, h.must(t, made.text("access_token"), "GET", "/auth/whoami", "", "", 200).text("org_id"))
	state, code = login("eve")
	h.must(t, "", "POST", finish, "", finishBody(state, code), 401)

	h.must(t, boss, "POST", "/users/"+tokens.text("user_id")+"/disable", "disable", "", 200)
	state, code = login("ada")
	h.must(t, "", "POST", finish, "", finishBody(state, code), 401)
}

func TestProgramsLogInByADeviceCode(t *testing.T) {
	p := oidctest.NewForDevices(t)
	h := newHouseWith(t, identityOf(p, nil))
	orgID, _, boss := h.tenant(t, "acme")
	h.invite(t, boss, orgID, "ada@acme.example", "")
	begun := h.must(t, "", "POST", "/auth/oidc/device", "", "", 200)
	require.True(t, strings.HasPrefix(begun.text("verification_uri"), p.URL), begun.raw)
	body := fmt.Sprintf(`{"handle":%q}`, begun.text("handle"))
	require.Equal(t, 202, h.ask(t, "", "POST", "/auth/oidc/device/finish", "", body).status)
	require.NoError(t, p.Storage.CompleteDeviceAuthorization(t.Context(), begun.text("user_code"), "ada"))
	tokens := h.must(t, "", "POST", "/auth/oidc/device/finish", "", body, 200)
	require.Equal(t, 200, h.whoami(t, tokens.text("access_token")))
	h.must(t, "", "POST", "/auth/oidc/device/finish", "", body, 401)

	denied := h.must(t, "", "POST", "/auth/oidc/device", "", "", 200)
	require.NoError(t, p.Storage.DenyDeviceAuthorization(t.Context(), denied.text("user_code")))
	body = fmt.Sprintf(`{"handle":%q}`, denied.text("handle"))
	require.Equal(t, "identity_refused", h.must(t, "", "POST", "/auth/oidc/device/finish", "", body, 401).text("code"))
}

func TestAHubWithoutAnIdentityProviderSaysSo(t *testing.T) {
	h := newHouse(t)
	for _, how := range []string{"browser", "device"} {
		answer := h.must(t, "", "POST", "/auth/oidc/"+how, "", "", 409)
		require.Equal(t, "no_identity_provider", answer.text("code"))
	}
	gone := &command.IdentityProvider{Provider: oidc.New(oidc.Config{Issuer: "http://127.0.0.1:1", ClientID: "hub"})}
	h = newHouseWith(t, gone)
	answer := h.must(t, "", "POST", "/auth/oidc/device", "", "", 503)
	require.Equal(t, "identity_provider_unavailable", answer.text("code"))
}
