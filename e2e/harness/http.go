package harness

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

// Answer is the hub's answer to a plain request, without a client that retries.
type Answer struct {
	Status  int
	Header  http.Header
	Body    []byte
	Problem client.Problem
}

// PlainClient is an HTTP client that trusts the hub's authority and nothing else.
func (w *Testbed) PlainClient() *http.Client {
	w.T.Helper()
	ca, err := os.ReadFile(w.Hub.Ready.CAFile)
	require.NoError(w.T, err)
	pool := x509.NewCertPool()
	require.True(w.T, pool.AppendCertsFromPEM(ca))
	transport := &http.Transport{TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: pool}}
	w.T.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// AdminToken reads the token file of the hub's first admin.
func (w *Testbed) AdminToken() string {
	w.T.Helper()
	token, err := os.ReadFile(w.Hub.Ready.TokenFile)
	require.NoError(w.T, err)
	return strings.TrimSpace(string(token))
}

// Ask sends one request as the admin; path begins behind /api/v1. A header with an empty value is not sent.
func (w *Testbed) Ask(c *http.Client, method, path, body string, header map[string]string) Answer {
	w.T.Helper()
	req, err := http.NewRequestWithContext(w.Ctx, method, w.Hub.Ready.APIURL+"/api/v1"+path, bytes.NewReader([]byte(body)))
	require.NoError(w.T, err)
	all := map[string]string{"Authorization": "Bearer " + w.AdminToken()}
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
	require.NoError(w.T, err)
	a := Answer{Status: res.StatusCode, Header: res.Header}
	a.Body, err = io.ReadAll(res.Body)
	require.NoError(w.T, err)
	require.NoError(w.T, res.Body.Close())
	if a.Status >= http.StatusBadRequest {
		require.Equal(w.T, "application/problem+json", a.Header.Get("Content-Type"), "%s %s: %s", method, path, a.Body)
		require.NoError(w.T, json.Unmarshal(a.Body, &a.Problem), "%s %s: %s", method, path, a.Body)
	}
	return a
}
