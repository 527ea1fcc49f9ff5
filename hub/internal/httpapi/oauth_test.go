package httpapi

import (
	"encoding/json"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/oauth2"
	"golang.org/x/oauth2/clientcredentials"
)

const tokenPath = "/auth/service-account/token"

// form sends a token request as a form.
func (h *house) form(t *testing.T, text string, header http.Header) answer {
	t.Helper()
	r := httptest.NewRequest(http.MethodPost, basePath+tokenPath, strings.NewReader(text))
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	maps.Copy(r.Header, header)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	out := answer{status: w.Code, header: w.Header(), raw: w.Body.String()}
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &out.body), out.raw)
	return out
}

func newAccount(t *testing.T, h *house) answer {
	t.Helper()
	_, projectID, boss := h.tenant(t, "acme")
	return h.must(t, boss, "POST", "/projects/"+projectID+"/service-accounts", "k1", `{"name":"CI","slug":"ci"}`, 201)
}

// Golang's own library of OAuth 2.0 gets a token; RFC 7523's grant does as well, whatever the case of the media type.
func TestLibrariesOfOAuthGetATokenByAForm(t *testing.T) {
	h := newHouse(t)
	sa := newAccount(t, h)
	server := httptest.NewServer(h)
	defer server.Close()
	conf := clientcredentials.Config{
		ClientID: sa.text("id"), TokenURL: server.URL + basePath + tokenPath, AuthStyle: oauth2.AuthStyleInParams,
		EndpointParams: url.Values{
			"client_assertion_type": {clientAssertionJWT}, "client_assertion": {h.assertion(t, sa, "library")},
		},
	}
	token, err := conf.Token(t.Context())
	require.NoError(t, err)
	me := h.must(t, token.AccessToken, "GET", "/auth/whoami", "", "", 200)
	require.Equal(t, sa.text("id"), me.text("id"))
	_, err = conf.Token(t.Context())
	var refused *oauth2.RetrieveError
	require.ErrorAs(t, err, &refused)
	require.Equal(t, "invalid_client", refused.ErrorCode, "an assertion counts once")

	granted := h.form(t, url.Values{
		"grant_type": {grantJWTBearer}, "assertion": {h.assertion(t, sa, "grant")}, "scope": {""}, "resource": {"x"},
	}.Encode(), http.Header{"Content-Type": {"Application/X-WWW-Form-URLEncoded; charset=UTF-8"}})
	require.Equal(t, 200, granted.status, granted.raw)
	require.Equal(t, []string{"no-store", "no-cache"},
		[]string{granted.header.Get("Cache-Control"), granted.header.Get("Pragma")})
	require.Equal(t, "Bearer", granted.text("token_type"))
	me = h.must(t, granted.text("access_token"), "GET", "/auth/whoami", "", "", 200)
	require.Equal(t, sa.text("id"), me.text("id"))
}

// Refused forms are answered as RFC 6749 §5.2 says, and audited; none gives a token.
func TestARefusedFormIsAnsweredAsOAuthSays(t *testing.T) {
	h := newHouse(t)
	sa := newAccount(t, h)
	good := func(jti string) string {
		return url.Values{"grant_type": {grantJWTBearer}, "assertion": {h.assertion(t, sa, jti)}}.Encode()
	}
	client := func(more string) string {
		return "grant_type=client_credentials&client_assertion_type=" + url.QueryEscape(clientAssertionJWT) + more
	}
	grant := "grant_type=" + url.QueryEscape(grantJWTBearer)
	basic := http.Header{"Authorization": {"Basic eDp5"}}
	for name, c := range map[string]struct {
		form      string
		header    http.Header
		status    int
		code      string
		challenge string
	}{
		"no grant type":       {"assertion=x", nil, 400, "invalid_request", ""},
		"an empty grant type": {"grant_type=&assertion=x", nil, 400, "invalid_request", ""},
		"another grant type":  {"grant_type=password&username=a", nil, 400, "unsupported_grant_type", ""},
		"a parameter twice":   {good("twice") + "&assertion=x", nil, 400, "invalid_request", ""},
		"not a form":          {"grant_type=%zz", nil, 400, "invalid_request", ""},
		"not UTF-8":           {grant + "&assertion=%ff", nil, 400, "invalid_request", ""},
		"a long assertion":    {grant + "&assertion=" + strings.Repeat("x", 8193), nil, 400, "invalid_request", ""},
		"too many bytes":      {grant + "&assertion=" + strings.Repeat("x", 40_000), nil, 413, "invalid_request", ""},
		"no assertion":        {grant, nil, 400, "invalid_request", ""},
		"a bad assertion":     {grant + "&assertion=a.b.c", nil, 400, "invalid_grant", ""},
		"two assertions":      {good("two") + "&client_assertion=a.b.c", nil, 400, "invalid_request", ""},
		"a scope":             {good("scope") + "&scope=admin", nil, 400, "invalid_scope", ""},
		"a client of no id":   {good("id") + "&client_id=me", nil, 400, "invalid_request", ""},
		"no client assertion": {client(""), nil, 401, "invalid_client", "Bearer"},
		"a bad client":        {client("&client_assertion=a.b.c"), nil, 401, "invalid_client", "Bearer"},
		"another kind of client assertion": {
			"grant_type=client_credentials&client_assertion=" + h.assertion(t, sa, "kind"),
			nil, 401, "invalid_client", "Bearer",
		},
		"another's client id": {
			client("&client_assertion=" + h.assertion(t, sa, "other") + "&client_id=" + someID), nil, 401,
			"invalid_client", "Bearer",
		},
		"a secret in the header": {good("secret"), basic, 401, "invalid_client", "Basic"},
	} {
		t.Run(name, func(t *testing.T) {
			h.wait(time.Second)
			got := h.form(t, c.form, c.header)
			require.Equal(t, c.status, got.status, got.raw)
			require.Equal(t, c.code, got.text("error"))
			require.Regexp(t, `^[\x20\x21\x23-\x5B\x5D-\x7E]+$`, got.text("error_description"))
			require.Equal(t, "application/json", got.header.Get("Content-Type"))
			require.Equal(t, "no-store", got.header.Get("Cache-Control"))
			require.Equal(t, got.header.Get("X-Request-ID"), got.text("correlation_id"))
			scheme, _, _ := strings.Cut(got.header.Get("WWW-Authenticate"), " ")
			require.Equal(t, c.challenge, scheme)
			require.NotContains(t, got.raw, "access_token")
		})
	}
	require.Equal(t, 200, h.form(t, good("twice"), nil).status, "a request that was refused unread used up no assertion")
	admin := h.must(t, h.admin, "GET", "/audit?limit=200", "", "", 200)
	require.Contains(t, admin.raw, "mintServiceAccountToken", "refused proofs are audited")
}

// A form is charged to the address as every other request without a credential.
func TestFormsAreThrottled(t *testing.T) {
	h := newHouse(t)
	for range visitorsBurst {
		h.form(t, "grant_type=x", nil)
	}
	got := h.form(t, "grant_type=x", nil)
	require.Equal(t, 429, got.status, got.raw)
	require.Equal(t, "temporarily_unavailable", got.text("error"))
	require.NotEmpty(t, got.header.Get("Retry-After"))
	require.Equal(t, 429, h.ask(t, "", "POST", tokenPath, "", `{}`).status, "JSON and forms share the budget")
}
