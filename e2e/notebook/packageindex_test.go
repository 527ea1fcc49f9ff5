package notebook_test

import (
	"archive/zip"
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/netnamespace"
)

// packageIndex is a simple repository (PEP 503) of wheels that hold one module each.
type packageIndex struct {
	url      string
	requests atomic.Int64
	// ca is the certificate that it is trusted by, where it speaks TLS; user and password are asked for then.
	ca string
}

const indexUser, indexPassword = "reader", "s3cr!t/word"

// newPackageIndex serves packages, text by name, at an address of a network namespace; a private one by TLS, with a
// certificate of its own and a password.
func newPackageIndex(t *testing.T, namespace, address string, private bool, packages map[string]string) *packageIndex {
	t.Helper()
	x := &packageIndex{url: "http://" + address + "/simple"}
	wheels := map[string][]byte{}
	mux := http.NewServeMux()
	for name, text := range packages {
		file := name + "-1.0-py3-none-any.whl"
		wheels[file] = makeWheel(t, name, text)
		mux.HandleFunc("/simple/"+name+"/", func(w http.ResponseWriter, _ *http.Request) {
			x.requests.Add(1)
			_, _ = fmt.Fprintf(w, "<!DOCTYPE html><html><body><a href=\"/files/%s\">%s</a></body></html>", file, file)
		})
	}
	mux.HandleFunc("/files/", func(w http.ResponseWriter, r *http.Request) {
		_, _ = w.Write(wheels[filepath.Base(r.URL.Path)])
	})
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if user, password, _ := r.BasicAuth(); private && (user != indexUser || password != indexPassword) {
			w.Header().Set("WWW-Authenticate", `Basic realm="index"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		mux.ServeHTTP(w, r)
	}))
	require.NoError(t, server.Listener.Close())
	require.NoError(t, netnamespace.Run(namespace, func() (err error) {
		server.Listener, err = new(net.ListenConfig).Listen(t.Context(), "tcp", address)
		return err
	}))
	if private {
		x.url = "https://" + address + "/simple"
		server.TLS = &tls.Config{Certificates: []tls.Certificate{x.makeCertificate(t, address)}, MinVersion: tls.VersionTLS12}
		server.StartTLS()
	} else {
		server.Start()
	}
	t.Cleanup(server.Close)
	return x
}

// makeCertificate makes a certificate that nobody trusts but who is given it.
func (x *packageIndex) makeCertificate(t *testing.T, address string) tls.Certificate {
	t.Helper()
	host, _, err := net.SplitHostPort(address)
	require.NoError(t, err)
	_, key, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "index"}, IPAddresses: []net.IP{net.ParseIP(host)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	require.NoError(t, err)
	x.ca = string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// makeWheel packs a module that says text (PEP 427).
func makeWheel(t *testing.T, name, text string) []byte {
	t.Helper()
	info := name + "-1.0.dist-info/"
	files := []struct{ path, content string }{
		{name + ".py", fmt.Sprintf("text = %q\n", text)},
		{info + "METADATA", "Metadata-Version: 2.1\nName: " + name + "\nVersion: 1.0\n"},
		{info + "WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"},
	}
	var record strings.Builder
	for _, f := range files {
		sum := sha256.Sum256([]byte(f.content))
		fmt.Fprintf(&record, "%s,sha256=%s,%d\n", f.path, base64.RawURLEncoding.EncodeToString(sum[:]), len(f.content))
	}
	record.WriteString(info + "RECORD,,\n")
	files = append(files, struct{ path, content string }{info + "RECORD", record.String()})
	var out bytes.Buffer
	z := zip.NewWriter(&out)
	for _, f := range files {
		w, err := z.Create(f.path)
		require.NoError(t, err)
		_, err = w.Write([]byte(f.content))
		require.NoError(t, err)
	}
	require.NoError(t, z.Close())
	return out.Bytes()
}
