package httpapi

import (
	"context"
	"crypto/ed25519"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	hugeBodyBytes = 256 << 20
	// smallBytes is what the hub may read or allocate for a body that it refuses.
	smallBytes = 8 << 20
)

// countedBody gives a prefix and then the letter a without end, up to hugeBodyBytes, and counts what was read.
type countedBody struct {
	prefix string
	read   int
}

func (b *countedBody) Read(p []byte) (int, error) {
	if b.read >= hugeBodyBytes {
		return 0, io.EOF
	}
	n := copy(p, b.prefix)
	b.prefix = b.prefix[n:]
	for i := n; i < len(p); i++ {
		p[i] = 'a'
	}
	b.read += len(p)
	return len(p), nil
}

func (*countedBody) Close() error { return nil }

// openRegistry is a registry whose every credential is good for a pull only.
func openRegistry(t *testing.T) *artifact.Registry {
	t.Helper()
	_, key, err := ed25519.GenerateKey(nil)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	refuse := func() error { return fault.New(fault.Unauthenticated, "no", "no", nil) }
	r, err := artifact.OpenRegistry(ctx, artifact.RegistryConfig{
		Dir: t.TempDir(), Host: "hub.test", SigningKey: key, TrustDomain: "gpuaas.test",
		IntentOpen:   func(context.Context, string) error { return nil },
		Authenticate: func(context.Context, string) (string, error) { return "", refuse() },
		MayPull:      func(context.Context, string, string) error { return refuse() },
		Now:          func() time.Time { return time.Unix(1_800_000_000, 0) },
	})
	require.NoError(t, err)
	return r
}

func TestARegistryRequestWithoutCredentialCostsNeitherMemoryNorDisk(t *testing.T) {
	temp := t.TempDir()
	t.Setenv("TMPDIR", temp)
	registry := openRegistry(t)
	d := newTestAPI(t, stubServer{}, func(c *Config) { c.Registry = registry })
	const multipart = "--b\r\nContent-Disposition: form-data; name=\"f\"; filename=\"f\"\r\n\r\n"
	for name, c := range map[string]struct {
		method, path, kind, prefix string
		status                     int
	}{
		"form": {"POST", "/v2/a/b/blobs/uploads/", "application/x-www-form-urlencoded", "from=", 415},
		"form, spelt": {
			"PUT", "/v2/a/b/blobs/uploads/x", "Application/X-WWW-Form-Urlencoded; charset=utf-8", "from=",
			415,
		},
		"multipart":        {"POST", "/v2/a/b/blobs/uploads/", "multipart/form-data; boundary=b", multipart, 415},
		"multipart in GET": {"GET", "/v2/a/b/manifests/x", "multipart/form-data; boundary=b", multipart, 415},
		"blob":             {"PATCH", "/v2/a/b/blobs/uploads/x", "application/octet-stream", "", 401},
		"no type":          {"POST", "/v2/a/b/blobs/uploads/", "", "", 401},
		"token":            {"POST", "/v2/token", "application/x-www-form-urlencoded", "grant_type=", 400},
	} {
		t.Run(name, func(t *testing.T) {
			body := &countedBody{prefix: c.prefix}
			r := httptest.NewRequest(c.method, c.path, body)
			r.ContentLength = hugeBodyBytes
			r.Header.Set("Content-Type", c.kind)
			w := httptest.NewRecorder()
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			d.ServeHTTP(w, r)
			runtime.ReadMemStats(&after)
			require.Equal(t, c.status, w.Code, w.Body.String())
			require.Less(t, body.read, smallBytes)
			require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(smallBytes))
			left, err := os.ReadDir(temp)
			require.NoError(t, err)
			require.Empty(t, left)
		})
	}
}

// A credential does not lift the limit: the owner of a publish intent gets the same refusal of forms.
func TestAFormIsNoUploadForThePublisherEither(t *testing.T) {
	temp := t.TempDir()
	t.Setenv("TMPDIR", temp)
	registry := openRegistry(t)
	d := newTestAPI(t, stubServer{}, func(c *Config) { c.Registry = registry })
	username, password, err := registry.IntentCredential(artifact.NewIntent(
		artifact.Intent{ID: someID, AppVersion: "1.0.0", Channel: "dev", Repository: "org/acme/demo/app"},
		time.Unix(1_800_000_000, 0)))
	require.NoError(t, err)
	ask := httptest.NewRequest(http.MethodGet, "/v2/token?scope=repository:org/acme/demo/app:pull,push", nil)
	ask.SetBasicAuth(username, password)
	w := httptest.NewRecorder()
	d.ServeHTTP(w, ask)
	require.Equal(t, http.StatusOK, w.Code, w.Body.String())
	var given struct {
		Token string `json:"token"`
	}
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &given))
	body := &countedBody{prefix: "from="}
	r := httptest.NewRequest(http.MethodPost, "/v2/org/acme/demo/app/blobs/uploads/", body)
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	r.Header.Set("Authorization", "Bearer "+given.Token)
	w = httptest.NewRecorder()
	d.ServeHTTP(w, r)
	require.Equal(t, http.StatusUnsupportedMediaType, w.Code)
	require.Zero(t, body.read)
	subject, orgSlug := registry.Caller(r)
	require.Equal(t, username, subject)
	require.Equal(t, "acme", orgSlug)
}
