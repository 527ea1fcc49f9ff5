// Package client is the Go SDK of the hub's REST API: types and requests are generated from hub/api/openapi.yaml, this
// thin face adds trust in the hub's own authority, credentials, request ids, idempotency keys, retries, problems as
// errors, paging and waiting. It keeps no state beyond the credential and imports nothing of the hub.
//
//	hub, err := client.Open(client.Config{
//		URL: "https://hub:8443", CAFile: "ca.pem", Credential: client.BearerToken(token),
//	})
//	instance, err := client.Read[client.AppInstance](hub.CreateAppInstance(ctx, projectID, client.AppInstanceCreate{…}))
package client

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"
)

const (
	basePath = "/api/v1"
	// Limits of one attempt; what a caller is willing to wait in all is the context's.
	dialTimeout           = 10 * time.Second
	responseHeaderTimeout = 60 * time.Second
	maxResponseHeaders    = 64 << 10
)

// Config says which hub and as whom.
type Config struct {
	// URL is scheme, host and port, as in https://hub.example:8443. Plain http is only taken for a loopback address.
	URL string
	// CAFile is a PEM file with the hub's authority; CAPEM is its content. Both empty: the system's authorities.
	CAFile string
	CAPEM  []byte
	// Credential may be nil for operations that need none.
	Credential Credential
	// UserAgent is sent along; empty means "gpuaas-client".
	UserAgent string
	// OnRetry is called before each wait; may be nil.
	OnRetry func(attempt int, wait time.Duration, cause error)
}

// Credential gives the bearer token for a request; it may mint one. It must be safe for concurrent use.
type Credential interface {
	Bearer(ctx context.Context) (string, error)
}

// BearerToken is a credential that was issued already.
type BearerToken string

// Bearer returns the token.
func (t BearerToken) Bearer(context.Context) (string, error) { return string(t), nil }

// Hub is a connection to one hub; every operation of the contract is a method of the embedded Client and gives an
// *http.Response for Read. An answer of 400 or more is an error of type *Problem. It is safe for concurrent use.
type Hub struct {
	*Client
	transport *transport
}

// Open prepares the connection; nothing is sent yet.
func Open(conf Config) (*Hub, error) {
	u, err := url.Parse(conf.URL)
	if err != nil || u.Host == "" || u.Scheme != "https" && u.Scheme != "http" {
		return nil, errors.New("client: the hub's URL must look like https://host:port")
	}
	if u.Scheme == "http" && !isLoopback(u.Hostname()) {
		return nil, errors.New("client: plain http would show the credential to the network; use https")
	}
	tlsConf := &tls.Config{MinVersion: tls.VersionTLS12}
	pem := conf.CAPEM
	if conf.CAFile != "" {
		if pem, err = os.ReadFile(conf.CAFile); err != nil {
			return nil, fmt.Errorf("client: read the hub's authority: %w", err)
		}
	}
	if len(pem) > 0 || conf.CAFile != "" { // an empty file does not mean the system's authorities
		tlsConf.RootCAs = x509.NewCertPool()
		if !tlsConf.RootCAs.AppendCertsFromPEM(pem) {
			return nil, errors.New("client: the hub's authority is not a PEM certificate")
		}
	}
	if conf.UserAgent == "" {
		conf.UserAgent = "gpuaas-client"
	}
	base := &http.Transport{
		Proxy: http.ProxyFromEnvironment, DialContext: (&net.Dialer{Timeout: dialTimeout}).DialContext,
		TLSClientConfig:     tlsConf,
		TLSHandshakeTimeout: dialTimeout, ResponseHeaderTimeout: responseHeaderTimeout,
		MaxResponseHeaderBytes: maxResponseHeaders,
		ForceAttemptHTTP2:      true, MaxIdleConnsPerHost: 8, IdleConnTimeout: time.Minute,
	}
	t := &transport{
		conf: conf,
		base: base,
		http: &http.Client{
			Transport: base,
			// The API never redirects; following one would carry the credential elsewhere.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}
	generated, err := NewClient(strings.TrimSuffix(conf.URL, "/")+basePath, WithHTTPClient(t))
	if err != nil {
		return nil, fmt.Errorf("client: %w", err)
	}
	return &Hub{Client: generated, transport: t}, nil
}

// Close gives idle connections back.
func (h *Hub) Close() { h.transport.http.CloseIdleConnections() }

func isLoopback(host string) bool {
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

// WithIdempotencyKey makes repeating this call harmless across restarts of the caller. Without it every call gets a key
// of its own, which covers the client's own retries.
func WithIdempotencyKey(key string) RequestEditorFn { return withHeader(idempotencyKeyHeader, key) }

// WithRequestID sets the correlation id of the call.
func WithRequestID(id string) RequestEditorFn { return withHeader(requestIDHeader, id) }

func withHeader(name, value string) RequestEditorFn {
	return func(_ context.Context, r *http.Request) error {
		r.Header.Set(name, value)
		return nil
	}
}
