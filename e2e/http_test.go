package e2e_test

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"os"
	"strings"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/client"
)

// answer is what the hub says to a request as it is: no client in between that mends or repeats it.
type answer struct {
	status  int
	header  http.Header
	body    []byte
	problem client.Problem
}

// plain is an HTTP client that trusts the hub's authority and nothing else.
func (w *world) plain() *http.Client {
	w.t.Helper()
	ca, err := os.ReadFile(w.hub.Ready.CAFile)
	require.NoError(w.t, err)
	pool := x509.NewCertPool()
	require.True(w.t, pool.AppendCertsFromPEM(ca))
	transport := &http.Transport{TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: pool}}
	w.t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// adminToken is what the hub wrote into its file.
func (w *world) adminToken() string {
	w.t.Helper()
	token, err := os.ReadFile(w.hub.Ready.TokenFile)
	require.NoError(w.t, err)
	return strings.TrimSpace(string(token))
}

// ask sends one request as the admin; path begins behind /api/v1. A header with an empty value is not sent.
func (w *world) ask(c *http.Client, method, path, body string, header map[string]string) answer {
	w.t.Helper()
	req, err := http.NewRequestWithContext(w.ctx, method, w.hub.Ready.APIURL+"/api/v1"+path, bytes.NewReader([]byte(body)))
	require.NoError(w.t, err)
	all := map[string]string{"Authorization": "Bearer " + w.adminToken()}
	if body != "" {
		all["Content-Type"] = "application/json"
	}
	maps.Copy(all, header)
	for name, value := range all {
		if value != "" {
			req.Header.Set(name, value)
		}
	}
	res, err := c.Do(req)
	require.NoError(w.t, err)
	a := answer{status: res.StatusCode, header: res.Header}
	a.body, err = io.ReadAll(res.Body)
	require.NoError(w.t, err)
	require.NoError(w.t, res.Body.Close())
	if a.status >= http.StatusBadRequest {
		require.Equal(w.t, "application/problem+json", a.header.Get("Content-Type"), "%s %s: %s", method, path, a.body)
		require.NoError(w.t, json.Unmarshal(a.body, &a.problem), "%s %s: %s", method, path, a.body)
	}
	return a
}
