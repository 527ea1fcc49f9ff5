package artifact_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"io"
	"log/slog"
	"math"
	"math/big"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/pkg/appkit"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	repository  = "org/acme/demo/runtime"
	trustDomain = "gpuaas.test"
	nodeID      = "0192f0c0-0000-7000-8000-00000000000a"
	otherNodeID = "0192f0c0-0000-7000-8000-00000000000b"
	goodToken   = "good"
)

// bench is a registry behind real TLS, with an authority for nodes.
type bench struct {
	registry *artifact.Registry
	server   *httptest.Server
	host     string
	caFile   string
	nodeCA   tls.Certificate
	dir      string
	log      *bytes.Buffer
	now      atomic.Pointer[time.Time]
	ended    atomic.Bool
	mayPull  atomic.Pointer[string]
	// quota in bytes; 0 means none.
	quota atomic.Int64
	// shutOut is the node that is banned.
	shutOut atomic.Pointer[string]
	roots   atomic.Pointer[artifact.Roots]
}

func newBench(t *testing.T, change ...func(*artifact.RegistryConfig)) *bench {
	t.Helper()
	_, key, err := ed25519.GenerateKey(nil)
	require.NoError(t, err)
	b := &bench{nodeCA: authority(t), dir: filepath.Join(t.TempDir(), "registry"), log: &bytes.Buffer{}}
	b.at(time.Now())
	b.server = httptest.NewUnstartedServer(nil)
	b.host = b.server.Listener.Addr().String()
	ctx, cancel := context.WithCancel(t.Context())
	b.roots.Store(&artifact.Roots{})
	conf := artifact.RegistryConfig{
		Dir: b.dir, Host: b.host, SigningKey: key, TrustDomain: trustDomain,
		Now: func() time.Time { return *b.now.Load() }, Log: slog.New(slog.NewTextHandler(b.log, nil)),
		IntentOpen: func(context.Context, string) error {
			if b.ended.Load() {
				return fault.New(fault.Unauthenticated, "ended", "ended", nil)
			}
			return nil
		},
		Authenticate: func(_ context.Context, token string) (string, error) {
			if token != goodToken {
				return "", fault.New(fault.Unauthenticated, "unauthenticated", "no", nil)
			}
			return "user:1", nil
		},
		MayPull: func(_ context.Context, _, repo string) error {
			if allowed := b.mayPull.Load(); allowed == nil || *allowed != repo {
				return fault.New(fault.NotFound, "not_found", "no", nil)
			}
			return nil
		},
		Quota: func(context.Context, string) (int64, error) {
			if limit := b.quota.Load(); limit > 0 {
				return limit, nil
			}
			return math.MaxInt64, nil
		},
		ShutOut: func(node string) bool {
			banned := b.shutOut.Load()
			return banned != nil && *banned == node
		},
		Roots: func(context.Context) (artifact.Roots, error) { return *b.roots.Load(), nil },
	}
	for _, c := range change {
		c(&conf)
	}
	b.registry, err = artifact.OpenRegistry(ctx, conf)
	require.NoError(t, err)
	pool := x509.NewCertPool()
	pool.AddCert(b.nodeCA.Leaf)
	b.server.Config.Handler = b.registry
	b.server.TLS = &tls.Config{ClientAuth: tls.VerifyClientCertIfGiven, ClientCAs: pool, MinVersion: tls.VersionTLS12}
	b.server.StartTLS()
	t.Cleanup(func() {
		b.server.Close()
		cancel()
	})
	b.caFile = filepath.Join(t.TempDir(), "ca.pem")
	require.NoError(t,
		os.WriteFile(b.caFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: b.server.Certificate().Raw}), 0o600))
	return b
}

func (b *bench) at(now time.Time) { b.now.Store(&now) }

func authority(t *testing.T) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "nodes"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	require.NoError(t, err)
	leaf, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}
}

// client shows the certificate of a node, or none.
func (b *bench) client(t *testing.T, node string) *http.Client {
	t.Helper()
	pool := x509.NewCertPool()
	pool.AddCert(b.server.Certificate())
	conf := &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	if node != "" {
		_, key, err := ed25519.GenerateKey(nil)
		require.NoError(t, err)
		template := &x509.Certificate{
			SerialNumber: big.NewInt(2), URIs: []*url.URL{protocol.NodeSPIFFE(trustDomain, node)},
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
			NotBefore:   time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
			KeyUsage: x509.KeyUsageDigitalSignature,
		}
		der, err := x509.CreateCertificate(rand.Reader, template, b.nodeCA.Leaf, key.Public(), b.nodeCA.PrivateKey)
		require.NoError(t, err)
		conf.Certificates = []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}
	}
	transport := &http.Transport{TLSClientConfig: conf}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

func (b *bench) intent(t *testing.T, repo string) appkit.Target {
	t.Helper()
	i := artifact.NewIntent(artifact.Intent{
		ID: "0192f0c0-0000-7000-8000-000000000001", AppVersion: "1.0.0+build",
		Channel: "dev", Repository: repo,
	}, *b.now.Load())
	username, password, err := b.registry.IntentCredential(i)
	require.NoError(t, err)
	return appkit.Target{
		RegistryHost: b.host, Repository: repo, Tag: i.Tag, Username: username, Password: password,
		CAFile: b.caFile,
	}
}

func newSigner(t *testing.T) (protocol.Signer, artifact.SignerKey) {
	t.Helper()
	pub, key, err := ed25519.GenerateKey(nil)
	require.NoError(t, err)
	return protocol.NewEd25519Signer(key), artifact.SignerKey{KeyID: protocol.KeyID(pub), Key: pub}
}

func image(t *testing.T, content string) v1.Image {
	t.Helper()
	img, err := appkit.ImageFromFiles([]appkit.File{{Path: "/app", Content: []byte(content), Mode: 0o755}},
		appkit.ImageConfig{Architecture: "amd64"})
	require.NoError(t, err)
	return img
}

// token asks for one and returns it with the status.
func token(t *testing.T, c *http.Client, host, user, password, scope string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+host+"/v2/token?service=x&scope="+
		url.QueryEscape(scope), nil)
	require.NoError(t, err)
	req.SetBasicAuth(user, password)
	res, err := c.Do(req)
	require.NoError(t, err)
	defer res.Body.Close()
	var body struct {
		Token string `json:"token"`
	}
	_ = json.NewDecoder(res.Body).Decode(&body)
	return res.StatusCode, body.Token
}

func get(t *testing.T, c *http.Client, url, bearer string) int {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	require.NoError(t, err)
	req.Header.Set("Accept", "application/vnd.oci.image.manifest.v1+json")
	if bearer != "" {
		req.Header.Set("Authorization", "Bearer "+bearer)
	}
	res, err := c.Do(req)
	require.NoError(t, err)
	defer res.Body.Close()
	_, err = io.Copy(io.Discard, res.Body)
	require.NoError(t, err)
	return res.StatusCode
}
