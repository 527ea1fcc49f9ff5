// Package oidctest runs a real OpenID provider, zitadel's, for tests of logins. It owns no test.
package oidctest

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/zitadel/oidc/v3/example/server/exampleop"
	"github.com/zitadel/oidc/v3/example/server/storage"
	"github.com/zitadel/oidc/v3/pkg/op"

	"github.com/gpuaas/gpuaas/hub/internal/oidc"
)

const (
	// CallbackURL is where the provider sends browsers back to.
	CallbackURL = "https://web.example/callback"

	clientID, clientSecret = "hub", "secret"
)

// users are the people that the provider knows.
type users map[string]*storage.User

func (u users) GetUserByID(id string) *storage.User { return u[id] }

func (u users) GetUserByUsername(name string) *storage.User { return u[name] }

func (u users) ExampleClientID() string { return "service" }

// Provider is an OpenID provider with three people, of whom eve's address is not verified.
type Provider struct {
	URL     string
	Storage *storage.Storage
	client  *http.Client
	repeats atomic.Bool
	about   atomic.Pointer[string]
}

// RepeatTokens has the provider answer a repeated request for a token as it answered the first: a code counts once
// otherwise, and a test could not repeat what comes after it.
func (p *Provider) RepeatTokens() { p.repeats.Store(true) }

// InformAbout has the provider answer requests for user information about this person, also when another has logged in.
func (p *Provider) InformAbout(name string) { p.about.Store(&name) }

// NewForBrowsers starts a provider whose client logs in with a browser.
func NewForBrowsers(t *testing.T) *Provider {
	t.Helper()
	return start(t, storage.WebClient(clientID, clientSecret, CallbackURL))
}

// NewForDevices starts a provider whose client logs in with device codes.
func NewForDevices(t *testing.T) *Provider {
	t.Helper()
	return start(t, storage.DeviceClient(clientID, clientSecret))
}

func start(t *testing.T, client *storage.Client) *Provider {
	t.Helper()
	people := users{}
	for _, name := range []string{"ada", "bob", "eve"} {
		people[name] = &storage.User{
			ID: name, Username: name, Password: "pw", FirstName: name, LastName: "X", Email: name + "@acme.example",
			EmailVerified: name != "eve",
		}
	}
	p := &Provider{Storage: storage.NewStorageWithClients(people, map[string]*storage.Client{clientID: client})}
	server := httptest.NewUnstartedServer(nil)
	p.URL = "http://" + server.Listener.Addr().String()
	server.Config.Handler = &repeater{
		Handler: p.informing(exampleop.SetupServer(p.URL, p.Storage, nil, false, op.WithAllowInsecure())),
		repeat:  p.repeats.Load,
	}
	server.Start()
	t.Cleanup(server.Close)
	jar, err := cookiejar.New(nil)
	require.NoError(t, err)
	p.client = &http.Client{Jar: jar, CheckRedirect: func(r *http.Request, _ []*http.Request) error {
		if strings.HasPrefix(r.URL.String(), CallbackURL) {
			return http.ErrUseLastResponse
		}
		return nil
	}}
	return p
}

// informing answers requests for user information where InformAbout says of whom.
func (p *Provider) informing(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name := p.about.Load()
		if name == nil || r.URL.Path != "/userinfo" {
			next.ServeHTTP(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = fmt.Fprintf(w, `{"sub":%[1]q,"email":"%[1]s@acme.example","email_verified":true}`, *name)
	})
}

// Client returns the hub's side of the provider.
func (p *Provider) Client() *oidc.Provider {
	return oidc.New(oidc.Config{
		Issuer: p.URL, ClientID: clientID, ClientSecret: clientSecret, RedirectURL: CallbackURL,
	})
}

// Login logs a person in as a browser does, and returns what the provider sends back.
func (p *Provider) Login(t *testing.T, at, name string) url.Values {
	t.Helper()
	id := p.browse(t, http.MethodGet, at, "").Get("authRequestID")
	return p.browse(t, http.MethodPost, p.URL+"/login/username",
		url.Values{"username": {name}, "password": {"pw"}, "id": {id}}.Encode())
}

// browse sends a request with a form; an empty one with none. It returns the query of where the browser ends: the
// client's own redirect to the hub is not followed.
func (p *Provider) browse(t *testing.T, method, at, form string) url.Values {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, at, strings.NewReader(form))
	require.NoError(t, err)
	if form != "" {
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	res, err := p.client.Do(req)
	require.NoError(t, err)
	require.NoError(t, res.Body.Close())
	if to, err := res.Location(); err == nil {
		return to.Query()
	}
	return res.Request.URL.Query()
}

// repeater keeps the answers to successful requests for tokens, by their bodies.
type repeater struct {
	http.Handler
	repeat func() bool

	mu   sync.Mutex
	kept map[string][]byte
}

func (r *repeater) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if !r.repeat() || req.Method != http.MethodPost || !strings.HasSuffix(req.URL.Path, "/token") {
		r.Handler.ServeHTTP(w, req)
		return
	}
	body, err := io.ReadAll(req.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	answer, known := r.kept[string(body)]
	if !known {
		req.Body = io.NopCloser(bytes.NewReader(body))
		rec := httptest.NewRecorder()
		r.Handler.ServeHTTP(rec, req)
		if rec.Code != http.StatusOK {
			w.Header().Set("Content-Type", rec.Header().Get("Content-Type"))
			w.WriteHeader(rec.Code)
			_, _ = w.Write(rec.Body.Bytes())
			return
		}
		answer = rec.Body.Bytes()
		if r.kept == nil {
			r.kept = map[string][]byte{}
		}
		r.kept[string(body)] = answer
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(answer) //nolint:gosec // G705: JSON of the provider, for a test
}
