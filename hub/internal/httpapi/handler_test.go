package httpapi

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
)

// stubServer has two operations whose behaviour a test chooses.
type stubServer struct {
	StrictServerInterface
	orgs   func(ctx context.Context) (ListOrgsResponseObject, error)
	create func(ctx context.Context, m command.Meta) error
	logs   io.ReadCloser
}

func (d stubServer) ListOrgs(ctx context.Context, _ ListOrgsRequestObject) (ListOrgsResponseObject, error) {
	if d.orgs == nil {
		return ListOrgs200JSONResponse{Items: []Org{}}, nil
	}
	return d.orgs(ctx)
}

func (d stubServer) CreateOrg(ctx context.Context, r CreateOrgRequestObject) (CreateOrgResponseObject, error) {
	if err := d.create(ctx, metaFrom(ctx)); err != nil {
		return nil, err
	}
	return CreateOrg201JSONResponse{ID: someID, Slug: r.Body.Slug, DisplayName: r.Body.DisplayName}, nil
}

func (d stubServer) GetAppInstanceLogs(context.Context,
	GetAppInstanceLogsRequestObject,
) (GetAppInstanceLogsResponseObject, error) {
	return logStream{source: d.logs}, nil
}

func (stubServer) GetHealth(context.Context, GetHealthRequestObject) (GetHealthResponseObject, error) {
	return GetHealth200JSONResponse{Status: HealthStatusOk, Version: "v"}, nil
}

func getOrgs() ask { return ask{method: http.MethodGet, path: "/api/v1/orgs"} }

func postOrg() ask {
	return ask{method: http.MethodPost, path: "/api/v1/orgs", body: `{"slug":"acme","display_name":"Acme"}`}
}

func TestRequestIDIsEchoedOrReplaced(t *testing.T) {
	d := newTestAPI(t, stubServer{})
	for given, keep := range map[string]bool{
		"a.B-9_": true, strings.Repeat("x", 128): true, "": false, strings.Repeat("x",
			129): false, "a b": false, "a\u00e9": false, `a"`: false,
	} {
		a := getOrgs()
		a.header = http.Header{"X-Request-Id": {given}}
		res := d.do(t, a)
		require.NoError(t, res.Body.Close())
		got := res.Header.Get("X-Request-ID")
		require.NotEmpty(t, got)
		require.Equal(t, keep, got == given, given)
	}
}

func TestCommandLearnsCallerKeyAndTrace(t *testing.T) {
	var got command.Meta
	d := newTestAPI(t, stubServer{create: func(_ context.Context, m command.Meta) error {
		got = m
		m.OnReplay()
		return nil
	}})
	a := postOrg()
	a.header = http.Header{"Traceparent": {"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}}
	res := d.do(t, a)
	require.NoError(t, res.Body.Close())
	require.Equal(t, http.StatusCreated, res.StatusCode)
	require.Equal(t, "true", res.Header.Get("Idempotency-Replayed"))
	require.Equal(t, "key-1", got.IdempotencyKey)
	require.Equal(t, "POST /orgs", got.Route)
	require.Equal(t, "req-1", got.CorrelationID)
	require.Equal(t, "4bf92f3577b34da6a3ce929d0e0e4736", telemetry.TraceID(got.Traceparent))
	require.Equal(t, someID, got.Principal.ID)
	first := got.BodyMAC

	a.body = "{ \"slug\":\"acme\",\n\"display_name\":\"Acme\"}"
	require.NoError(t, d.do(t, a).Body.Close())
	require.Equal(t, first, got.BodyMAC, "white space makes another request")
	a.body = `{"slug":"acme","display_name":"Acme!"}`
	require.NoError(t, d.do(t, a).Body.Close())
	require.NotEqual(t, first, got.BodyMAC)
}

// Law 11: who reads the database cannot find a secret of a request by trying values against its digest.
func TestLaw11TheDigestOfARequestIsKeyed(t *testing.T) {
	digest := func(key string) []byte {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/api/v1/x?y=1", nil)
		return requestMAC([]byte(key), r, []byte(`{"token":"1234"}`))
	}
	first := digest("a")
	require.Equal(t, first, digest("a"))
	require.NotEqual(t, digest("a"), digest("b"))
}

// A key that was used for one resource is refused for another: the answer would be about the first.
func TestARequestIsAnotherOneWithAnotherPathOrQuery(t *testing.T) {
	digest := func(target string) []byte {
		return requestMAC([]byte("a"), httptest.NewRequestWithContext(t.Context(), http.MethodPost, target, nil), nil)
	}
	require.NotEqual(t, digest("/api/v1/x/1/stop?y=1"), digest("/api/v1/x/2/stop?y=1"))
	require.NotEqual(t, digest("/api/v1/x/1/stop?y=1"), digest("/api/v1/x/1/stop?y=2"))
}

func TestFaultsBecomeProblems(t *testing.T) {
	kinds := map[fault.Kind]int{
		fault.Internal: 500, fault.Malformed: 400, fault.Unauthenticated: 401, fault.Forbidden: 403, fault.NotFound: 404,
		fault.Conflict:           409,
		fault.PreconditionFailed: 412, fault.TooLarge: 413, fault.Unprocessable: 422, fault.RateLimited: 429,
		fault.Unavailable: 503,
	}
	for kind, status := range kinds {
		d := newTestAPI(t, stubServer{orgs: func(context.Context) (ListOrgsResponseObject, error) {
			return nil, fault.New(kind, "a_code", "Do this.", errors.New("cause-"+marker)).WithHint("/x", "is bad", "like so")
		}})
		res := d.do(t, getOrgs())
		wait := res.Header.Get("Retry-After")
		p := problem(t, res, status)
		require.Equal(t, "a_code", p.Code)
		require.Equal(t, "Do this.", p.Detail)
		require.Equal(t, []ProblemField{{Pointer: "/x", Reason: "is bad", Hint: "like so"}}, p.Errors)
		require.Equal(t, status == 429 || status == 503, wait != "", status)
		require.Equal(t, status == 401, res.Header.Get("WWW-Authenticate") != "")
		require.Contains(t, d.log.String(), marker, "the cause is in the log")
	}
}

func TestUnknownErrorsAndPanicsTellNothing(t *testing.T) {
	for name, orgs := range map[string]func(context.Context) (ListOrgsResponseObject, error){
		"error": func(context.Context) (ListOrgsResponseObject, error) { return nil, errors.New(marker) },
		"panic": func(context.Context) (ListOrgsResponseObject, error) { panic(marker) },
	} {
		t.Run(name, func(t *testing.T) {
			d := newTestAPI(t, stubServer{orgs: orgs})
			p := problem(t, d.do(t, getOrgs()), 500)
			require.Equal(t, "internal", p.Code)
			require.NotContains(t, p.Detail, marker)
			require.Contains(t, d.log.String(), marker)
		})
	}
}

func TestUnknownPathsAndMethodsAreProblems(t *testing.T) {
	d := newTestAPI(t, stubServer{})
	for _, path := range []string{"/", "/api/v1/none", "/api/v1/orgs/", "/api/v2/orgs", "/v2/"} {
		require.Equal(t, "route_not_found", problem(t, d.do(t, ask{method: http.MethodGet, path: path}), 404).Code)
	}
	res := d.do(t, ask{method: http.MethodDelete, path: "/api/v1/orgs"})
	require.Contains(t, res.Header.Get("Allow"), "POST")
	require.Equal(t, "method_not_allowed", problem(t, res, 405).Code)
}

func TestEachCallerHasARate(t *testing.T) {
	d := newTestAPI(t, stubServer{}, func(c *Config) { c.RequestsPerSecond, c.Burst = 0.1, 2 })
	for range 2 {
		res := d.do(t, getOrgs())
		require.NoError(t, res.Body.Close())
		require.Equal(t, http.StatusOK, res.StatusCode)
	}
	res := d.do(t, getOrgs())
	require.Equal(t, "10", res.Header.Get("Retry-After"))
	require.Equal(t, "rate_limited", problem(t, res, 429).Code)
	d.now = d.now.Add(10 * time.Second)
	res = d.do(t, getOrgs())
	require.NoError(t, res.Body.Close())
	require.Equal(t, http.StatusOK, res.StatusCode)
}

func TestGuessingCredentialsIsLimitedByAddress(t *testing.T) {
	d := newTestAPI(t, stubServer{})
	require.Equal(t, http.StatusOK, d.status(t, getOrgs()))
	guess := getOrgs()
	guess.header = http.Header{"Authorization": {"Bearer " + marker}}
	for range visitorsBurst {
		problem(t, d.do(t, guess), 401)
	}
	p := problem(t, d.do(t, guess), 429)
	require.Equal(t, "budget/address", p.Errors[0].Pointer)
	require.Len(t, d.audits, 1)
	require.NotContains(t, d.log.String(), marker)
	require.Equal(t, 1+visitorsBurst, d.lookups, "over the rate, the database is not asked")
	// Who has shown a good credential is not locked out by a neighbour's guesses.
	require.Equal(t, http.StatusOK, d.status(t, getOrgs()))
}

func TestAnswersAreForNoBrowserAndNoCache(t *testing.T) {
	d := newTestAPI(t, stubServer{})
	for _, a := range []ask{getOrgs(), {method: http.MethodGet, path: "/none"}} {
		res := d.do(t, a)
		require.NoError(t, res.Body.Close())
		for name, value := range map[string]string{
			"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store",
			"Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
		} {
			require.Equal(t, value, res.Header.Get(name))
		}
	}
}

func TestProbesAnswerAtTheRootWithoutCredential(t *testing.T) {
	d := newTestAPI(t, stubServer{})
	for _, path := range []string{"/healthz", "/api/v1/healthz"} {
		res := d.do(t, ask{method: http.MethodGet, path: path, header: http.Header{"Authorization": nil}})
		var h Health
		require.NoError(t, json.NewDecoder(res.Body).Decode(&h))
		require.NoError(t, res.Body.Close())
		require.Equal(t, HealthStatusOk, h.Status)
	}
}

func TestRegistryIsServedBesideTheAPI(t *testing.T) {
	d := newTestAPI(t, stubServer{}, func(c *Config) {
		c.Registry = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) })
	})
	for path, status := range map[string]int{
		"/v2/": 418, "/v2": 418, "/v2/a/manifests/x": 418, "/v2x": 404,
		"/api/v1/orgs": 200,
	} {
		res := d.do(t, ask{method: http.MethodGet, path: path})
		require.NoError(t, res.Body.Close())
		require.Equal(t, status, res.StatusCode, path)
	}
}

func TestRegistryRequestsAreSeenAndItsPanicsEndOneAnswer(t *testing.T) {
	d := newTestAPI(t, stubServer{}, func(c *Config) {
		c.Registry = http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(marker) })
	})
	server := httptest.NewServer(d)
	t.Cleanup(server.Close)
	for range 2 {
		_, err := http.Get(server.URL + "/v2/")
		require.Error(t, err, "the client sees that the answer is incomplete")
	}
	require.Equal(t, 2, strings.Count(d.text(), `"panic":"`+marker))
	require.Equal(t, 2, strings.Count(d.text(), `"route":"/v2/","status":500`))
}

// served starts the handler on a port of its own and gives its address and the authority of its certificate.
func served(t *testing.T, s StrictServerInterface,
	nodeCAs *x509.CertPool,
) (addr string, roots *x509.CertPool, stop func() error) {
	t.Helper()
	cert, authority := certificate(t, "hub")
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	conf := TLSConfig(func() (*tls.Certificate, error) { return &cert, nil }, func() *x509.CertPool { return nodeCAs })
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	handler := newTestAPI(t, s)
	go func() { done <- Serve(ctx, listener, handler, conf, slog.New(slog.DiscardHandler)) }()
	stop = func() error { cancel(); return <-done }
	t.Cleanup(cancel)
	return listener.Addr().String(), authority, stop
}

func certificate(t *testing.T, name string) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour),
		IsCA:     true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	require.NoError(t, err)
	leaf, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	pool := x509.NewCertPool()
	pool.AddCert(leaf)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, pool
}

func TestClientCertificateIsOptionalButMustBeANodes(t *testing.T) {
	node, nodeCAs := certificate(t, "node")
	stranger, _ := certificate(t, "stranger")
	addr, roots, stop := served(t, stubServer{}, nodeCAs)
	ask := func(certs ...tls.Certificate) error {
		client := &http.Client{Transport: &http.Transport{
			TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: certs}, DisableKeepAlives: true,
		}}
		res, err := client.Get("https://" + addr + "/healthz")
		if err == nil {
			err = res.Body.Close()
		}
		return err
	}
	require.NoError(t, ask())
	require.NoError(t, ask(node))
	// Shown in spite of the server's list of authorities, as an attacker would.
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{
		RootCAs: roots, GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return &stranger, nil
		},
	}}}
	res, err := client.Get("https://" + addr + "/healthz")
	if err == nil {
		_ = res.Body.Close()
	}
	require.Error(t, err)
	require.NoError(t, stop())
}

func TestServeLetsRunningRequestsFinish(t *testing.T) {
	entered, release := make(chan struct{}), make(chan struct{})
	addr, roots, stop := served(t, stubServer{orgs: func(context.Context) (ListOrgsResponseObject, error) {
		close(entered)
		<-release
		return ListOrgs200JSONResponse{Items: []Org{}}, nil
	}}, nil)
	client := &http.Client{Transport: &http.Transport{
		TLSClientConfig:   &tls.Config{RootCAs: roots},
		DisableKeepAlives: true,
	}}
	answered := make(chan int, 1)
	go func() {
		r, _ := http.NewRequest(http.MethodGet, "https://"+addr+"/api/v1/orgs", nil)
		r.Header.Set("Authorization", "Bearer "+goodToken)
		res, err := client.Do(r)
		if err != nil {
			answered <- 0
			return
		}
		_ = res.Body.Close()
		answered <- res.StatusCode
	}()
	<-entered
	stopped := make(chan error, 1)
	go func() { stopped <- stop() }()
	// New connections are refused before the running request has ended.
	require.Eventually(t, func() bool {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", addr)
		if err == nil {
			_ = conn.Close()
		}
		return err != nil
	}, 10*time.Second, time.Millisecond)
	close(release)
	require.Equal(t, http.StatusOK, <-answered)
	require.NoError(t, <-stopped)
}

func TestLogsArriveAsTheyAreWritten(t *testing.T) {
	source, writer := io.Pipe()
	addr, roots, stop := served(t, stubServer{logs: source}, nil)
	client := &http.Client{Transport: &http.Transport{
		TLSClientConfig:   &tls.Config{RootCAs: roots},
		DisableKeepAlives: true,
	}}
	r, err := http.NewRequest(http.MethodGet, "https://"+addr+"/api/v1/projects/"+someID+"/app-instances/"+someID+
		"/logs?follow=true", nil)
	require.NoError(t, err)
	r.Header.Set("Authorization", "Bearer "+goodToken)
	res, err := client.Do(r)
	require.NoError(t, err)
	for _, line := range []string{"one\n", "two\n"} {
		_, err := io.WriteString(writer, line)
		require.NoError(t, err)
		got := make([]byte, len(line))
		_, err = io.ReadFull(res.Body, got)
		require.NoError(t, err)
		require.Equal(t, line, string(got))
	}
	// Who hangs up ends the stream at its source too.
	require.NoError(t, res.Body.Close())
	require.Eventually(t, func() bool { _, err := io.WriteString(writer, "three\n"); return err != nil }, 10*time.Second,
		time.Millisecond)
	require.NoError(t, stop())
}
