package httpapi

import (
	"bufio"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/protocol"
)

// enrolled puts a node into the database and gives its id and key.
func (y *yard) enrolled(t *testing.T) (id string, key ed25519.PrivateKey) {
	t.Helper()
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	secret, err := fleet.NewJoinSecret()
	require.NoError(t, err)
	n, err := db.RunTx(t.Context(), y.d, func(tx db.Tx) (fleet.Node, error) {
		if _, err := fleet.CreateToken(t.Context(), tx, fleet.NewToken{ID: db.NewID(), Secret: secret, CreatedBy: "admin"},
			y.clock()); err != nil {
			return fleet.Node{}, err
		}
		n, _, err := fleet.Enroll(t.Context(), tx, fleet.Enrollment{
			NodeID: db.NewID(), Secret: secret, Hostname: "n1",
			PublicKey: pub, CertificateExpiresAt: y.clock(),
		}, y.clock())
		return n, err
	})
	require.NoError(t, err)
	return n.ID, key
}

// renewal is a request for a new certificate of a node, signed by a key.
func renewal(t *testing.T, id string, key ed25519.PrivateKey) string {
	t.Helper()
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	require.NoError(t, err)
	csr, at := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})), "1970-01-01T00:00:00Z"
	body, err := json.Marshal(map[string]string{
		"node_id": id, "csr_pem": csr, "issued_at": at, "signature": base64.StdEncoding.EncodeToString(ed25519.Sign(key,
			fleet.RenewalMessage(id, csr, at))),
	})
	require.NoError(t, err)
	return string(body)
}

func TestARenewalSucceedsFromAnAddressWhoseBudgetIsUsedUp(t *testing.T) {
	y := newYard(t)
	id, key := y.enrolled(t)
	banned, bannedKey := y.enrolled(t)
	shown, shownKey := y.enrolled(t)
	_, stranger, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	keys := &fleet.PublicKeys{DB: y.d}
	lookups := 0
	y.Handler, err = NewHandler(serverOn(y.d, nil, y.keys), Config{
		Authenticator: TokenAuthenticator{DB: y.d}, Auditor: &command.Service{DB: y.d},
		Log: slog.New(slog.DiscardHandler), Now: y.clock,
		NodeKey: func(ctx context.Context, id string, now time.Time) (ed25519.PublicKey, error) {
			lookups++
			return keys.Of(ctx, id, now)
		},
	})
	require.NoError(t, err)
	y.must(t, y.admin, "POST", "/admin/nodes/"+banned+"/ban", "ban", `{"reason":"stolen"}`, 200)
	renew := func(body string) answer { return y.ask(t, "", "POST", "/nodes/renew", "", body) }

	// Without the proof, no id tells more than another.
	var refusals []string
	for _, node := range []string{id, banned, db.NewID()} {
		a := renew(renewal(t, node, stranger))
		require.Equal(t, http.StatusUnauthorized, a.status)
		delete(a.body, "correlation_id")
		raw, err := json.Marshal(a.body)
		require.NoError(t, err)
		refusals = append(refusals, string(raw))
	}
	require.Equal(t, refusals[0], refusals[1])
	require.Equal(t, refusals[0], refusals[2])
	require.EqualValues(t, fleet.CodeBanned, renew(renewal(t, banned, bannedKey)).text("code"))
	require.Zero(t, lookups, "while the address has a budget")

	for range visitorsBurst {
		y.ask(t, "", "GET", "/healthz", "", "")
	}
	require.Equal(t, http.StatusTooManyRequests, y.ask(t, "", "GET", "/healthz", "", "").status)
	require.Equal(t, http.StatusOK, renew(renewal(t, id, key)).status, "by the proof, also with an expired certificate")
	for _, body := range []string{
		renewal(t, id, stranger), renewal(t, banned, bannedKey),
		renewal(t, db.NewID(), stranger), "{", strings.Repeat(" ", 64<<10),
	} {
		require.Contains(t, []int{http.StatusTooManyRequests, http.StatusRequestEntityTooLarge}, renew(body).status)
	}

	r := httptest.NewRequest(http.MethodPost, "/api/v1/nodes/renew", strings.NewReader(renewal(t, shown, shownKey)))
	r.Header.Set("Content-Type", "application/json")
	leaf := &x509.Certificate{URIs: []*url.URL{protocol.NodeSPIFFE("gpuaas.test", shown)}}
	r.TLS = &tls.ConnectionState{PeerCertificates: []*x509.Certificate{leaf}, VerifiedChains: [][]*x509.Certificate{
		{leaf},
	}}
	before, w := lookups, httptest.NewRecorder()
	y.ServeHTTP(w, r)
	require.Equal(t, http.StatusOK, w.Code, "by the certificate that the connection shows")
	require.Equal(t, before, lookups)
}

// elsewhere is a listener whose callers have an address that is not loopback.
type elsewhere struct{ net.Listener }

type elsewhereConn struct{ net.Conn }

func (l elsewhere) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return elsewhereConn{c}, nil
}

func (elsewhereConn) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 1} }

// What runs on a node shares its address and may open as many connections as it likes, with a credential or without.
func TestARenewalGetsAConnectionFromACrowdedAddress(t *testing.T) {
	y := newYard(t)
	id, key := y.enrolled(t)
	handler, err := NewHandler(serverOn(y.d, nil, y.keys), Config{
		Authenticator: TokenAuthenticator{DB: y.d},
		Auditor:       &command.Service{DB: y.d},
		Log:           slog.New(slog.DiscardHandler),
		Now:           y.clock,
	})
	require.NoError(t, err)
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	limits := defaultServeLimits()
	limits.conns = connLimits{address: 8, prefix: 8, total: 8}
	dial := servedOn(t, elsewhere{listener}, handler, limits)
	ask := func(conn *tls.Conn, method, path, token, body string) {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), method, "https://hub/api/v1"+path, strings.NewReader(body))
		require.NoError(t, err)
		r.Header.Set("Content-Type", "application/json")
		if token != "" {
			r.Header.Set("Authorization", "Bearer "+token)
		}
		require.NoError(t, r.Write(conn))
		res, err := http.ReadResponse(bufio.NewReader(conn), r)
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, res.Body)
		require.NoError(t, err)
		require.NoError(t, res.Body.Close())
		require.Equal(t, http.StatusOK, res.StatusCode)
	}
	callers := make([]*tls.Conn, 20)
	for i := range callers {
		callers[i] = dial()
		ask(callers[i], http.MethodGet, "/orgs", y.admin, "")
	}
	silent := make([]*tls.Conn, 20)
	for i := range silent {
		silent[i] = dial()
	}
	ask(dial(), http.MethodPost, "/nodes/renew", "", renewal(t, id, key))
	ask(callers[0], http.MethodGet, "/orgs", y.admin, "")
	_, err = silent[0].Read(make([]byte, 1))
	require.Error(t, err, "it has made room")
}

func TestKeysOfNodesAreLoadedOnceForManyUnknownIDs(t *testing.T) {
	y := newYard(t)
	keys := &fleet.PublicKeys{DB: y.d}
	now := y.clock()
	key, err := keys.Of(t.Context(), db.NewID(), now)
	require.NoError(t, err)
	require.Nil(t, key)
	id, private := y.enrolled(t)
	key, err = keys.Of(t.Context(), id, now)
	require.NoError(t, err)
	require.Nil(t, key, "asked again a moment later")
	key, err = keys.Of(t.Context(), id, now.Add(time.Minute))
	require.NoError(t, err)
	require.Equal(t, private.Public(), key)
}

// A node whose proof holds is not refused for its neighbours' use of the address.
func TestANodeIsNotUnknownWhileTheKeysCannotBeLoaded(t *testing.T) {
	y := newYard(t)
	id, private := y.enrolled(t)
	keys := &fleet.PublicKeys{DB: y.d}
	now := y.clock()
	rename := func(from, to string) {
		_, err := db.RunTx(t.Context(), y.d, func(tx db.Tx) (int, error) {
			_, err := tx.Exec(t.Context(), `ALTER TABLE `+from+` RENAME TO `+to)
			return 0, err
		})
		require.NoError(t, err)
	}
	rename("nodes", "away")
	for range 2 {
		_, err := keys.Of(t.Context(), id, now)
		require.Error(t, err)
	}
	rename("away", "nodes")
	key, err := keys.Of(t.Context(), id, now.Add(time.Minute))
	require.NoError(t, err)
	require.Equal(t, private.Public(), key)
}
