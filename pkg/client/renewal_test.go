package client

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A token is replaced while a fifth of its life is left, so that it never ends under way.
func TestATokenIsRenewedAheadOfItsEnd(t *testing.T) {
	const life = 900 * time.Second
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"access_token":"minted","expires_in":900}`))
	}))
	t.Cleanup(server.Close)
	_, private, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	der, err := x509.MarshalPKCS8PrivateKey(private)
	require.NoError(t, err)
	c, err := NewServiceAccountCredential(Config{
		URL: server.URL, CAPEM: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}),
	}, "account", "key", pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))
	require.NoError(t, err)
	before := time.Now()
	token, err := c.Bearer(t.Context())
	require.NoError(t, err)
	require.Equal(t, "minted", token)
	require.False(t, c.renewAt.Before(before.Add(life*4/5)))
	require.False(t, c.renewAt.After(time.Now().Add(life*4/5)))
}
