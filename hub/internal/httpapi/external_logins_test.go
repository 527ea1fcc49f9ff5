package httpapi

import (
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
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
	otherID, _, other := h.tenant(t, "other")
	h.invite(t, other, otherID, "bob@acme.example", "")
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
	state, code := login("bob")
	unknown := h.must(t, "", "POST", finish, "", finishBody(state, code), 401)
	require.Equal(t, "identity_unknown", unknown.text("code"), "the domain's org does not exist yet")

	orgID, _, boss := h.tenant(t, "ruled")
	h.invite(t, boss, orgID, "ada@acme.example", `,"roles":["org_billing"]`)
	state, code = login("ada")
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
	another := h.must(t, "", "POST", start, "", "", 200)
	mixed := h.must(t, "", "POST", finish, "", finishBody(another.text("state"), code), 401)
	require.Equal(t, "identity_refused", mixed.text("code"), "a code counts in its own login only")

	state, code = login("bob")
	made := h.must(t, "", "POST", finish, "", finishBody(state, code), 200)
	require.Equal(t, orgID, h.must(t, made.text("access_token"), "GET", "/auth/whoami", "", "", 200).text("org_id"))
	state, code = login("eve")
	h.must(t, "", "POST", finish, "", finishBody(state, code), 401)

	h.must(t, boss, "POST", "/users/"+tokens.text("user_id")+"/disable", "disable", "", 200)
	state, code = login("ada")
	h.must(t, "", "POST", finish, "", finishBody(state, code), 401)
}

// loginAtProvider logs a person of the provider in by a browser, and returns the hub's answer.
func (h *house) loginAtProvider(t *testing.T, p *oidctest.Provider, name string) answer {
	t.Helper()
	begun := h.must(t, "", "POST", "/auth/oidc/browser", "", "", 200)
	back := p.Login(t, begun.text("url"), name)
	return h.ask(t, "", "POST", "/auth/oidc/browser/finish", "", finishBody(back.Get("state"), back.Get("code")))
}

// Whom an invitation lets in by a password, it lets in by the identity provider, and nobody else, and no longer.
func TestAnInvitationCountsAtTheIdentityProviderWhileItsMakerIsActive(t *testing.T) {
	p := oidctest.NewForBrowsers(t)
	h := newHouseWith(t, identityOf(p, nil))
	orgID, _, boss := h.tenant(t, "acme")
	makerID, maker := h.person(t, orgID, "maker@acme.example", `"org_admin"`)
	h.invite(t, maker, orgID, "ada@acme.example", `,"roles":["org_admin"]`)
	h.must(t, boss, "POST", "/users/"+makerID+"/disable", "disable", "", 200)
	refused := h.loginAtProvider(t, p, "ada")
	require.Equal(t, 401, refused.status)
	require.Equal(t, "identity_unknown", refused.text("code"))
	h.must(t, boss, "POST", "/users/"+makerID+"/enable", "enable", "", 200)
	require.Equal(t, 200, h.loginAtProvider(t, p, "ada").status)
	h.invite(t, boss, orgID, "bob@acme.example", "")
	h.wait(iam.DefaultInvitationLifetime)
	require.Equal(t, "identity_unknown", h.loginAtProvider(t, p, "bob").text("code"))
}

// A person whose address is in an org's domain becomes a user of that org, also when another org has invited them.
func TestAnotherOrgsInvitationTakesNobodyOfADomain(t *testing.T) {
	p := oidctest.NewForBrowsers(t)
	h := newHouseWith(t, identityOf(p, map[string]string{"acme.example": "acme"}))
	orgID, _, boss := h.tenant(t, "acme")
	otherID, _, other := h.tenant(t, "other")
	h.invite(t, boss, orgID, "bob@acme.example", `,"roles":["org_billing"]`)
	for _, name := range []string{"ada", "bob"} {
		h.invite(t, other, otherID, name+"@acme.example", "")
		in := h.loginAtProvider(t, p, name)
		require.Equal(t, 200, in.status, in.raw)
		user := h.must(t, in.text("access_token"), "GET", "/users/"+in.text("user_id"), "", "", 200)
		require.Equal(t, orgID, user.text("org_id"), name)
		require.Equal(t, map[string]any{"ada": "org_member", "bob": "org_billing"}[name], user.body["roles"].([]any)[0],
			"its own org's invitation counts")
	}
}

func TestARemovedUserComesBackByTheIdentityProviderOnlyIfInvitedAgain(t *testing.T) {
	p := oidctest.NewForBrowsers(t)
	h := newHouseWith(t, identityOf(p, nil))
	orgID, _, boss := h.tenant(t, "acme")
	h.invite(t, boss, orgID, "ada@acme.example", "")
	first := h.loginAtProvider(t, p, "ada")
	require.Equal(t, 200, first.status, first.raw)
	h.must(t, boss, "DELETE", "/orgs/"+orgID+"/users/"+first.text("user_id"), "", "", 204)
	require.Equal(t, "identity_unknown", h.loginAtProvider(t, p, "ada").text("code"))
	h.wait(time.Second)
	h.invite(t, boss, orgID, "ada@acme.example", "")
	again := h.loginAtProvider(t, p, "ada")
	require.Equal(t, 200, again.status, again.raw)
	require.NotEqual(t, first.text("user_id"), again.text("user_id"), "another account, without the roles of the first")
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

// User information about another person does not count.
func TestUserInformationAboutAnotherLetsNobodyIn(t *testing.T) {
	p := oidctest.NewForBrowsers(t)
	h := newHouseWith(t, identityOf(p, nil))
	orgID, _, boss := h.tenant(t, "acme")
	h.invite(t, boss, orgID, "bob@acme.example", "")
	p.InformAbout("bob")
	refused := h.loginAtProvider(t, p, "ada")
	require.Equal(t, 401, refused.status, refused.raw)
	require.Equal(t, "identity_refused", refused.text("code"))
	require.Equal(t, 200, h.loginAtProvider(t, p, "bob").status)
}
