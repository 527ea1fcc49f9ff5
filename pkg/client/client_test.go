package client_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/client"
)

const id = "0192f0c0-0000-7000-8000-000000000001"

func open(t *testing.T, handler http.HandlerFunc, change ...func(*client.Config)) *client.Hub {
	t.Helper()
	conf := serve(t, handler)
	for _, f := range change {
		f(&conf)
	}
	hub, err := client.Open(conf)
	require.NoError(t, err)
	t.Cleanup(hub.Close)
	return hub
}

func serve(t *testing.T, handler http.HandlerFunc) client.Config {
	t.Helper()
	server := httptest.NewTLSServer(handler)
	t.Cleanup(server.Close)
	authority := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	return client.Config{URL: server.URL, CAPEM: authority, Credential: client.BearerToken("t-1")}
}

func answer(w http.ResponseWriter, status int, v any) {
	media := "application/json"
	if status >= 400 {
		media = "application/problem+json"
	}
	w.Header().Set("Content-Type", media)
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v)
}

func TestCallCarriesCredentialIdsAndOnlySetParameters(t *testing.T) {
	var got *http.Request
	hub := open(t, func(w http.ResponseWriter, r *http.Request) {
		got = r
		answer(w, http.StatusOK, client.UsageRecordList{Items: []client.UsageRecord{}})
	})
	_, err := client.Read[client.UsageRecordList](hub.ListUsage(t.Context(), &client.ListUsageParams{
		ProjectID: id,
		From:      time.Unix(0, 0).UTC(),
	}))
	require.NoError(t, err)
	require.Equal(t, "/api/v1/billing/usage", got.URL.Path)
	require.Equal(t, "from=1970-01-01T00%3A00%3A00Z&project_id="+id, got.URL.RawQuery)
	require.Equal(t, "Bearer t-1", got.Header.Get("Authorization"))
	require.NotEmpty(t, got.Header.Get("X-Request-ID"))
	require.Empty(t, got.Header.Get("X-Idempotency-Key"), "reading needs no key")
}

func TestRetriesKeepTheIdempotencyKeyAndTheBody(t *testing.T) {
	var (
		keys, bodies []string
		retries      atomic.Int32
	)
	hub := open(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		keys, bodies = append(keys, r.Header.Get("X-Idempotency-Key")), append(bodies, string(body))
		switch len(keys) {
		case 1:
			w.Header().Set("Retry-After", "0")
			answer(w, http.StatusServiceUnavailable, client.Problem{Code: "database_busy"})
		case 2:
			w.Header().Set("Retry-After", "0")
			answer(w, http.StatusTooManyRequests, client.Problem{Code: "rate_limited"})
		case 3:
			panic(http.ErrAbortHandler) // the connection breaks before an answer
		default:
			answer(w, http.StatusCreated, client.Org{ID: id, Slug: "acme"})
		}
	}, func(c *client.Config) { c.OnRetry = func(int, time.Duration, error) { retries.Add(1) } })
	org, err := client.Read[client.Org](hub.CreateOrg(t.Context(), client.OrgCreate{Slug: "acme", DisplayName: "Acme"}))
	require.NoError(t, err)
	require.Equal(t, id, org.ID)
	require.GreaterOrEqual(t, retries.Load(), int32(2)) // net/http itself may hide the third, because of the key
	require.Len(t, keys, 4)
	for i := range keys {
		require.NotEmpty(t, keys[i])
		require.Equal(t, keys[0], keys[i])
		require.JSONEq(t, `{"slug":"acme","display_name":"Acme"}`, bodies[i])
	}
}

func TestProblemsAreErrorsAndNotRetried(t *testing.T) {
	calls := 0
	hub := open(t, func(w http.ResponseWriter, _ *http.Request) {
		calls++
		answer(w, http.StatusConflict, client.Problem{
			Code: "placement_required", Detail: "Say where.", CorrelationID: "c-1", Status: 409,
			Errors: []client.ProblemField{{Pointer: "/placement_intent", Reason: "is missing", Hint: "give allocation_ids"}},
		})
	})
	_, err := hub.CreateAppInstance(t.Context(), id, client.AppInstanceCreate{
		AppSlug: "a", Version: "1",
		DisplayName: "d",
	}, client.WithIdempotencyKey("k"))
	var p *client.Problem
	require.ErrorAs(t, err, &p)
	require.Equal(t, "placement_required", p.Code)
	require.Equal(t, "Say where. (placement_required, 409); /placement_intent is missing (give allocation_ids); "+
		"correlation id c-1", err.Error())
	require.Equal(t, 1, calls)
}

func TestAnswerOfSomethingElseIsSaidToBeThat(t *testing.T) {
	hub := open(t, func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "<html>nginx</html>", http.StatusForbidden)
	})
	_, err := hub.Whoami(t.Context())
	var p *client.Problem
	require.ErrorAs(t, err, &p)
	require.Equal(t, "not_a_problem_document", p.Code)
	require.EqualValues(t, 403, p.Status)
	require.NotContains(t, err.Error(), "nginx")
}

func TestUntrustedHubFailsAtOnce(t *testing.T) {
	retries := 0
	hub := open(t, func(http.ResponseWriter, *http.Request) { t.Error("the credential went to a stranger") },
		func(c *client.Config) {
			c.CAPEM = nil
			c.OnRetry = func(int, time.Duration, error) { retries++ }
		})
	_, err := hub.Whoami(t.Context())
	var u *client.UnreachableError
	require.ErrorAs(t, err, &u)
	require.Zero(t, retries)
}

func TestPlainHTTPIsForLoopbackOnly(t *testing.T) {
	for url, ok := range map[string]bool{
		"http://127.0.0.1:1": true, "http://localhost": true, "http://[::1]:1": true,
		"http://hub.example": false, "https://hub.example": true, "hub.example:1": false, "ftp://x": false,
	} {
		_, err := client.Open(client.Config{URL: url})
		require.Equal(t, ok, err == nil, url)
	}
}

// A file that was meant to name the one authority does not turn into all of the system's.
func TestAnEmptyAuthorityFileIsRefused(t *testing.T) {
	file := filepath.Join(t.TempDir(), "ca.pem")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	_, err := client.Open(client.Config{URL: "https://hub.example", CAFile: file})
	require.ErrorContains(t, err, "not a PEM certificate")
}

func TestAllWalksEveryPageAndStopsWhenAsked(t *testing.T) {
	var cursors []string
	hub := open(t, func(w http.ResponseWriter, r *http.Request) {
		cursor := r.URL.Query().Get("cursor")
		cursors = append(cursors, cursor)
		next := map[string]string{"": "1", "1": "2"}[cursor]
		answer(w, http.StatusOK, client.OrgList{
			Items:      []client.Org{{Slug: "a" + cursor}, {Slug: "b" + cursor}},
			NextCursor: next,
		})
	})
	page := func(cursor string) (*http.Response, error) {
		return hub.ListOrgs(t.Context(), &client.ListOrgsParams{Cursor: cursor, Limit: client.PageSize})
	}
	var slugs []string
	for org, err := range client.All[client.Org](page) {
		require.NoError(t, err)
		slugs = append(slugs, org.Slug)
	}
	require.Equal(t, []string{"a", "b", "a1", "b1", "a2", "b2"}, slugs)
	cursors = nil
	for _, err := range client.All[client.Org](page) {
		require.NoError(t, err)
		break
	}
	require.Equal(t, []string{""}, cursors)
}

func TestWaitInstanceSeesChangesAndDeadEnds(t *testing.T) {
	for _, c := range []struct {
		want   client.AppInstanceStatus
		states []client.AppInstanceStatus
		fails  bool
	}{
		{want: "running", states: []client.AppInstanceStatus{"requested", "deploying", "deploying", "running"}},
		{want: "running", states: []client.AppInstanceStatus{"deploying", "failed"}, fails: true},
		{want: "running", states: []client.AppInstanceStatus{"decommissioning"}, fails: true},
		{want: "decommissioned", states: []client.AppInstanceStatus{"failed", "decommissioning", "decommissioned"}},
	} {
		t.Run(fmt.Sprint(c.states), func(t *testing.T) {
			next := 0
			hub := open(t, func(w http.ResponseWriter, r *http.Request) {
				assert.Equal(t, "30s", r.URL.Query().Get("wait"))
				assert.Equal(t, next > 0, r.URL.Query().Has("after"))
				if next > 0 {
					assert.Equal(t, fmt.Sprint(next), r.URL.Query().Get("after"))
				}
				i := client.AppInstance{ID: id, Status: c.states[min(next, len(c.states)-1)]}
				next++
				i.ResourceVersion = int64(next)
				answer(w, http.StatusOK, i)
			})
			var seen []client.AppInstanceStatus
			got, err := hub.WaitInstance(t.Context(), id, id, c.want, func(i client.AppInstance) {
				seen = append(seen, i.Status)
			})
			var dead *client.InstanceError
			if c.fails {
				require.ErrorAs(t, err, &dead)
			} else {
				require.NoError(t, err)
				require.Equal(t, c.want, got.Status)
			}
			require.Equal(t, c.states[len(c.states)-1], seen[len(seen)-1])
		})
	}
}

// A hub with too many watchers answers at once; the client then asks about once a second.
func TestWatchPausesWhereTheHubDoesNotWait(t *testing.T) {
	requests := 0
	hub := open(t, func(w http.ResponseWriter, _ *http.Request) {
		requests++
		answer(w, http.StatusOK, client.AppInstance{ID: id, Status: "deploying", ResourceVersion: 7})
	})
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err := hub.WaitInstance(ctx, id, id, "running", nil)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.LessOrEqual(t, requests, 2)
}

func TestWaitingEndsWithTheContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	hub := open(t, func(w http.ResponseWriter, _ *http.Request) {
		answer(w, http.StatusOK, client.AppInstance{ID: id, Status: "deploying", ResourceVersion: 1})
	})
	_, err := hub.WaitInstance(ctx, id, id, "running", func(client.AppInstance) { cancel() })
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "still deploying")
}

func accountKey(t *testing.T) (public ed25519.PublicKey, privatePEM []byte) {
	t.Helper()
	public, private, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	der, err := x509.MarshalPKCS8PrivateKey(private)
	require.NoError(t, err)
	return public, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
}

// A token ends before its time where the machine slept: its monotonic clock stood still.
func TestATokenThatTheHubRefusesIsReplaced(t *testing.T) {
	_, key := accountKey(t)
	mints, good := 0, "minted-2"
	conf := serve(t, func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/api/v1/auth/service-account/token":
			mints++
			answer(w, http.StatusOK, client.Token{AccessToken: fmt.Sprintf("minted-%d", mints), ExpiresIn: 900})
		case r.Header.Get("Authorization") != "Bearer "+good:
			answer(w, http.StatusUnauthorized, client.Problem{Code: "token_invalid"})
		default:
			var body client.SessionRefresh
			assert.NoError(t, json.NewDecoder(r.Body).Decode(&body))
			answer(w, http.StatusOK, client.SessionTokens{RefreshToken: body.RefreshToken + "!"})
		}
	})
	credential, err := client.NewServiceAccountCredential(conf, id, id, key)
	require.NoError(t, err)
	conf.Credential = credential
	hub, err := client.Open(conf)
	require.NoError(t, err)
	t.Cleanup(hub.Close)
	call := func() (client.SessionTokens, error) {
		body := client.SessionRefresh{RefreshToken: "sent"}
		return client.Read[client.SessionTokens](hub.RefreshSession(t.Context(), body))
	}
	for range 2 {
		got, err := call()
		require.NoError(t, err)
		require.Equal(t, "sent!", got.RefreshToken)
	}
	require.Equal(t, 2, mints)

	good = "none"
	_, err = call()
	var problem *client.Problem
	require.ErrorAs(t, err, &problem)
	require.EqualValues(t, http.StatusUnauthorized, problem.Status)
	require.Equal(t, 3, mints, "one attempt with a fresh token")
}

func TestServiceAccountMintsOnceAndNeverSendsItsKey(t *testing.T) {
	public, key := accountKey(t)
	mints := 0
	used := map[string]bool{}
	conf := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/api/v1/auth/whoami" {
			assert.Equal(t, "Bearer minted-2", r.Header.Get("Authorization"))
			answer(w, http.StatusOK, client.Whoami{ID: id})
			return
		}
		var body client.ServiceAccountTokenRequest
		assert.NoError(t, json.NewDecoder(r.Body).Decode(&body))
		assert.Empty(t, body.PrivateKeyPem)
		var claims jwt.RegisteredClaims
		_, err := jwt.ParseWithClaims(body.Assertion, &claims, func(*jwt.Token) (any, error) { return public, nil },
			jwt.WithAudience("gpuaas"), jwt.WithIssuer(id), jwt.WithSubject(id), jwt.WithExpirationRequired())
		assert.NoError(t, err)
		assert.False(t, used[claims.ID])
		used[claims.ID] = true
		if mints++; mints == 1 {
			answer(w, http.StatusUnauthorized, client.Problem{Code: "credentials_invalid"}) // as after a lost answer
			return
		}
		answer(w, http.StatusOK, client.Token{AccessToken: fmt.Sprintf("minted-%d", mints), ExpiresIn: 900})
	})
	credential, err := client.NewServiceAccountCredential(conf, id, id, key)
	require.NoError(t, err)
	conf.Credential = credential
	hub, err := client.Open(conf)
	require.NoError(t, err)
	t.Cleanup(hub.Close)
	for range 3 {
		_, err := client.Read[client.Whoami](hub.Whoami(t.Context()))
		require.NoError(t, err)
	}
	require.Equal(t, 2, mints)
}
