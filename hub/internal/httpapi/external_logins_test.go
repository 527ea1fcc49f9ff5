package httpapi

import (
	"fmt"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/zitadel/oidc/v3/example/server/exampleop"
	"github.com/zitadel/oidc/v3/example/server/storage"
	"github.com/zitadel/oidc/v3/pkg/op"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/oidc"
)

const callbackURL = "https://web.example/callback"

// opUsers are the people that the provider knows.
type opUsers map[string]*storage.User

func (u opUsers) GetUserByID(id string) *storage.User { return u[id] }

func (u opUsers) GetUserByUsername(name string) *storage.User { return u[name] }

func (u opUsers) ExampleClientID() string { return "service" }

// identityProvider is a real OpenID provider, zitadel's, with three people.
type identityProvider struct {
	url     string
	storage *storage.Storage
	client  *http.Client
}

func newIdentityProvider(t *testing.T, client *storage.Client) *identityProvider {
	t.Helper()
	users := opUsers{}
	for _, name := range []string{"ada", "bob", "eve"} {
		users[name] = &storage.User{
			ID: name, Username: name, Password: "pw", FirstName: name, LastName: "X", Email: name + "@acme.example",
			EmailVerified: name != "eve",
		}
	}
	p := &identityProvider{storage: storage.NewStorageWithClients(users, map[string]*storage.Client{"hub": client})}
	server := httptest.NewUnstartedServer(nil)
	p.url = "http://" + server.Listener.Addr().String()
	server.Config.Handler = exampleop.SetupServer(p.url, p.storage, nil, false, op.WithAllowInsecure())
	server.Start()
	t.Cleanup(server.Close)
	jar, err := cookiejar.New(nil)
	require.NoError(t, err)
	p.client = &http.Client{Jar: jar, CheckRedirect: func(r *http.Request, _ []*http.Request) error {
		if strings.HasPrefix(r.URL.String(), callbackURL) {
			return http.ErrUseLastResponse
		}
		return nil
	}}
	return p
}

func (p *identityProvider) config(domains map[string]string) *command.IdentityProvider {
	return &command.IdentityProvider{OrgsOfDomains: domains, Provider: oidc.New(oidc.Config{
		Issuer: p.url, ClientID: "hub", ClientSecret: "secret", RedirectURL: callbackURL,
	})}
}

// login logs a person in as a browser does, and returns what the provider sends back.
func (p *identityProvider) login(t *testing.T, at, name string) url.Values {
	t.Helper()
	form, err := p.client.Get(at)
	require.NoError(t, err)
	require.NoError(t, form.Body.Close())
	id := form.Request.URL.Query().Get("authRequestID")
	back, err := p.client.PostForm(p.url+"/login/username", url.Values{"username": {name}, "password": {"pw"}, "id": {id}})
	require.NoError(t, err)
	require.NoError(t, back.Body.Close())
	to, err := back.Location()
	require.NoError(t, err)
	return to.Query()
}

func finishBody(state, code string) string { return `{"state":"` + state + `","code":"` + code + `"}` }

func TestPeopleLogInWithTheIdentityProvider(t *testing.T) {
	p := newIdentityProvider(t, storage.WebClient("hub", "secret", callbackURL))
	h := newHouseWith(t, p.config(map[string]string{"acme.example": "ruled"}))
	orgID, _, boss := h.tenant(t, "acme")
	h.invite(t, boss, orgID, "ada@acme.example", `,"roles":["org_billing"]`)
	start, finish := "/auth/oidc/browser", "/auth/oidc/browser/finish"
	login := func(name string) (state, code string) {
		begun := h.must(t, "", "POST", start, "", "", 200)
		at, err := url.Parse(begun.text("url"))
		require.NoError(t, err)
		require.Equal(t, "S256", at.Query().Get("code_challenge_method"))
		require.NotEmpty(t, at.Query().Get("nonce"))
		back := p.login(t, begun.text("url"), name)
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
	p := newIdentityProvider(t, storage.DeviceClient("hub", "secret"))
	h := newHouseWith(t, p.config(nil))
	orgID, _, boss := h.tenant(t, "acme")
	h.invite(t, boss, orgID, "ada@acme.example", "")
	begun := h.must(t, "", "POST", "/auth/oidc/device", "", "", 200)
	require.True(t, strings.HasPrefix(begun.text("verification_uri"), p.url), begun.raw)
	body := fmt.Sprintf(`{"handle":%q}`, begun.text("handle"))
	require.Equal(t, 202, h.ask(t, "", "POST", "/auth/oidc/device/finish", "", body).status)
	require.NoError(t, p.storage.CompleteDeviceAuthorization(t.Context(), begun.text("user_code"), "ada"))
	tokens := h.must(t, "", "POST", "/auth/oidc/device/finish", "", body, 200)
	require.Equal(t, 200, h.whoami(t, tokens.text("access_token")))
	h.must(t, "", "POST", "/auth/oidc/device/finish", "", body, 401)

	denied := h.must(t, "", "POST", "/auth/oidc/device", "", "", 200)
	require.NoError(t, p.storage.DenyDeviceAuthorization(t.Context(), denied.text("user_code")))
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
