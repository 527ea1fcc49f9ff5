package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/dispatch"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/periodic"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

// cli runs the program's own command line and gives what it printed.
func cli(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	err := program().Execute(t.Context(), args, &out, t.Output())
	return out.String(), err
}

type home struct{ dir, data, keys, passphrase, fingerprint string }

// newHome makes a hub's keys in a directory that the unprivileged database can pass through.
func newHome(t *testing.T) home {
	t.Helper()
	//nolint:usetesting // what is above t.TempDir() lets nobody else pass
	dir, err := os.MkdirTemp("/tmp", "gpuaas-hub-test-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	require.NoError(t, os.Chmod(dir, 0o711))
	h := home{dir: dir, data: filepath.Join(dir, "data"), keys: filepath.Join(dir, "keys"), passphrase: filepath.Join(dir,
		"passphrase")}
	printed, err := cli(t, "init", "--data-dir", h.data, "--key-dir", h.keys, "--generate-passphrase", "--trust-domain",
		"gpuaas.test", "-o", "json")
	require.NoError(t, err)
	var made map[string]string
	require.NoError(t, json.Unmarshal([]byte(printed), &made))
	require.Equal(t, "gpuaas.test", made["trust_domain"])
	h.fingerprint = made["root_fingerprint"]
	require.NoError(t, os.WriteFile(h.passphrase, []byte(made["passphrase"]+"\n"), 0o600))
	return h
}

// running is a hub that serves.
type running struct {
	ready   ready
	printed string
	stop    context.CancelFunc
	ended   chan error
	hangup  chan os.Signal
}

func start(t *testing.T, h home, change ...func(*config)) *running {
	t.Helper()
	c := config{
		dataDir: h.data, listen: "127.0.0.1:0", sessionListen: "127.0.0.1:0", metricsListen: "127.0.0.1:0",
		leaseDuration:       time.Hour,
		certificateLifetime: time.Hour, serverLifetime: 24 * time.Hour, resync: 30 * time.Second,
		retention: periodic.DefaultRetention(), postingInterval: time.Hour, tokenTTLSeconds: 60,
	}
	for _, apply := range change {
		apply(&c)
	}
	require.NoError(t, c.check())
	hangup := make(chan os.Signal, 1)
	r := startBy(t, func(ctx context.Context, out io.Writer) error {
		return serve(ctx, c, slog.New(slog.NewTextHandler(t.Output(), nil)), out, hangup)
	})
	r.hangup = hangup
	return r
}

// startByFlags starts a hub as its command line does.
func startByFlags(t *testing.T, h home, flags ...string) *running {
	t.Helper()
	args := append([]string{"serve", "--data-dir", h.data, "--listen", "127.0.0.1:0", "--session-listen", "127.0.0.1:0"},
		flags...)
	return startBy(t, func(ctx context.Context, out io.Writer) error {
		return program().Execute(ctx, args, out, t.Output())
	})
}

// startBy waits until the hub that run runs serves.
func startBy(t *testing.T, run func(ctx context.Context, out io.Writer) error) *running {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	r := &running{stop: stop, ended: make(chan error, 1)}
	out, in := io.Pipe()
	go func() {
		err := run(ctx, in)
		_ = in.CloseWithError(io.EOF)
		r.ended <- err
	}()
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if !strings.HasPrefix(lines.Text(), "{") {
			r.printed += lines.Text() + "\n"
			continue
		}
		require.NoError(t, json.Unmarshal(lines.Bytes(), &r.ready))
		break
	}
	if !r.ready.Ready {
		require.NoError(t, <-r.ended)
		require.FailNow(t, "the hub ended")
	}
	return r
}

func (r *running) end(t *testing.T) {
	t.Helper()
	r.stop()
	require.NoError(t, <-r.ended)
}

// api calls the hub as a client with its CA and, when a token is given, with it.
func (r *running) api(t *testing.T, method, path, token, body string) (int, map[string]any) {
	t.Helper()
	ca, err := os.ReadFile(r.ready.CAFile)
	require.NoError(t, err)
	pool := x509.NewCertPool()
	require.True(t, pool.AppendCertsFromPEM(ca))
	transport := &http.Transport{TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: pool}}
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(t.Context(), method, r.ready.APIURL+"/api/v1"+path, strings.NewReader(body))
	require.NoError(t, err)
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	if body != "" {
		request.Header.Set("Content-Type", "application/json")
	}
	request.Header.Set("X-Idempotency-Key", db.NewID())
	response, err := (&http.Client{Transport: transport}).Do(request)
	require.NoError(t, err)
	defer func() { _ = response.Body.Close() }()
	data, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	var out map[string]any
	require.NoError(t, json.Unmarshal(data, &out), "%s", data)
	return response.StatusCode, out
}

func readToken(t *testing.T, r *running) string {
	t.Helper()
	info, err := os.Stat(r.ready.TokenFile)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
	text, err := os.ReadFile(r.ready.TokenFile)
	require.NoError(t, err)
	return strings.TrimSpace(string(text))
}

func csr(t *testing.T, key any) string {
	t.Helper()
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	require.NoError(t, err)
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}))
}

func marshal(t *testing.T, v any) string {
	t.Helper()
	text, err := json.Marshal(v)
	require.NoError(t, err)
	return string(text)
}

// node is an enrolled node.
type node struct {
	id          string
	key         ed25519.PrivateKey
	bundle      protocol.Bundle
	certificate tls.Certificate
	sessionAddr string
	// request is the body of its enrollment.
	request string
}

// enroll does what a node does before its first session: check the bundle against the fingerprint, make a key, enroll.
func enroll(t *testing.T, h home, hub *running) node {
	t.Helper()
	status, envelope := hub.api(t, http.MethodGet, "/trust/bundle", "", "")
	require.Equal(t, http.StatusOK, status)
	env, err := protocol.EnvelopeFromJSON([]byte(marshal(t, envelope)))
	require.NoError(t, err)
	bundle, err := protocol.VerifyBundle(env, h.fingerprint)
	require.NoError(t, err)

	status, join := hub.api(t, http.MethodPost, "/admin/join-tokens", readToken(t, hub), `{"description":"first"}`)
	require.Equal(t, http.StatusCreated, status, "%v", join)
	require.Equal(t, h.fingerprint, join["root_fingerprint"])
	_, key, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	n := node{key: key, bundle: bundle}
	n.request = marshal(t, map[string]any{"join_token": join["token"], "csr_pem": csr(t, key), "hostname": "gpu-1"})
	status, credentials := hub.api(t, http.MethodPost, "/nodes/enroll", "", n.request)
	require.Equal(t, http.StatusCreated, status, "%v", credentials)
	require.Equal(t, hub.ready.SessionAddr, credentials["session_addr"])
	n.id, _ = credentials["node_id"].(string)
	n.sessionAddr = hub.ready.SessionAddr
	certificate, _ := credentials["certificate_pem"].(string)
	block, _ := pem.Decode([]byte(certificate))
	n.certificate = tls.Certificate{Certificate: [][]byte{block.Bytes}, PrivateKey: key}
	return n
}

func (n node) dial(ctx context.Context) (*link.Conn, error) {
	return link.Dial(ctx, n.sessionAddr, link.ClientTLS(
		func() (*tls.Certificate, error) { return &n.certificate, nil },
		link.Peer{Roots: n.bundle.HubCAs, TrustDomain: "gpuaas.test", Kind: protocol.KindHub, Now: time.Now},
	), nil)
}

// hello opens the control stream and says hello.
func hello(t *testing.T, conn *link.Conn) *link.Stream {
	t.Helper()
	control, err := conn.Open(t.Context(), &protocol.StreamHeader{Kind: protocol.StreamHeader_KIND_CONTROL})
	require.NoError(t, err)
	require.NoError(t, control.Send(helloMessage()))
	return control
}

func helloMessage() *protocol.NodeMessage {
	return &protocol.NodeMessage{Message: &protocol.NodeMessage_Hello{
		Hello: &protocol.Hello{ProtocolVersion: 1, Incarnation: "i1", BundleVersion: 1},
	}}
}

// The set of nodes that TLS refuses is loaded because of the ban: the periodic pass is an hour away. Until it is
// loaded, the database refuses the hello.
func TestABanRefusesTheNodesNextHandshake(t *testing.T) {
	h := newHome(t)
	hub := start(t, h, func(c *config) { c.resync = time.Hour })
	defer hub.end(t)
	banned, other := enroll(t, h, hub), enroll(t, h, hub)
	conn, err := banned.dial(t.Context())
	require.NoError(t, err)
	require.NoError(t, hello(t, conn).Receive(&protocol.HubMessage{}, protocol.MaxControlBytes))

	status, _ := hub.api(t, http.MethodPost, "/admin/nodes/"+banned.id+"/ban", readToken(t, hub), `{"reason":"stolen"}`)
	require.Equal(t, http.StatusOK, status)
	<-conn.Done()
	code, _ := link.CloseCode(conn.Err())
	require.Equal(t, link.CodeBanned, code)
	// The client is done with its part of the handshake before the hub has checked its certificate.
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for code == link.CodeBanned {
		if conn, err = banned.dial(ctx); err != nil {
			break
		}
		control, opening := conn.Open(ctx, &protocol.StreamHeader{Kind: protocol.StreamHeader_KIND_CONTROL})
		if opening == nil {
			_ = control.Send(helloMessage())
		}
		<-conn.Done()
		err = conn.Err()
		code, _ = link.CloseCode(err)
	}
	require.True(t, link.IsCertificateRefused(err), "%v", err)

	conn, err = other.dial(t.Context())
	require.NoError(t, err)
	require.NoError(t, hello(t, conn).Receive(&protocol.HubMessage{}, protocol.MaxControlBytes))
}

func TestANodeJoinsARealHub(t *testing.T) {
	h := newHome(t)
	hub := start(t, h)
	token := readToken(t, hub)
	require.Contains(t, hub.printed, token, "the admin token is printed once")
	require.Equal(t, h.fingerprint, hub.ready.RootFingerprint)
	status, health := hub.api(t, http.MethodGet, "/healthz", "", "")
	require.Equal(t, http.StatusOK, status, "%v", health)

	n := enroll(t, h, hub)
	status, again := hub.api(t, http.MethodPost, "/nodes/enroll", "", n.request)
	require.Equal(t, http.StatusCreated, status)
	require.Equal(t, n.id, again["node_id"], "a lost answer can be asked for again")
	conn, err := n.dial(t.Context())
	require.NoError(t, err)
	control := n.join(t, hub, conn)
	revokeStateKey(t, h, hub, n, control)
	requireMetrics(t, hub)

	hub.end(t)
	<-conn.Done()
	code, _ := link.CloseCode(conn.Err())
	require.Equal(t, link.CodeShutdown, code, "an orderly stop sends GoAway")

	// The second start keeps everything and prints no token.
	hub = start(t, h)
	require.Equal(t, token, readToken(t, hub))
	require.Empty(t, hub.printed)
	status, nodes := hub.api(t, http.MethodGet, "/admin/nodes", token, "")
	require.Equal(t, http.StatusOK, status)
	require.Len(t, nodes["items"], 1)
	n.requireBanned(t, hub)
	replaceAdminToken(t, h, hub, token)
}

// join says hello, and requires that the hub pushes a state and shows the node online.
func (n node) join(t *testing.T, hub *running, conn *link.Conn) *link.Stream {
	t.Helper()
	control := hello(t, conn)
	welcome, push := &protocol.HubMessage{}, &protocol.HubMessage{}
	require.NoError(t, control.Receive(welcome, protocol.MaxControlBytes))
	require.NotNil(t, welcome.GetWelcome())
	require.NoError(t, control.Receive(push, protocol.MaxControlBytes))
	me := protocol.NewNodeIdentity(n.id, n.key.Public().(ed25519.PublicKey)) //nolint:forcetypeassert // Ed25519's own
	_, err := protocol.VerifyState(push.GetPushState().GetEnvelope(), n.bundle, me)
	require.NoError(t, err)

	status, node := hub.api(t, http.MethodGet, "/admin/nodes/"+n.id, readToken(t, hub), "")
	require.Equal(t, http.StatusOK, status)
	require.Equal(t, "online", node["status"], "%v", node)
	require.InDelta(t, 1, node["generation"], 0)
	return control
}

// revokeStateKey revokes the hub's state key: a signal makes the running hub load the new bundle and push it.
func revokeStateKey(t *testing.T, h home, hub *running, n node, control *link.Stream) {
	t.Helper()
	printed, err := cli(t, "trust", "show", "--data-dir", h.data, "-o", "json")
	require.NoError(t, err)
	var shown struct {
		Keys []shownKey `json:"keys"`
	}
	require.NoError(t, json.Unmarshal([]byte(printed), &shown))
	for _, k := range shown.Keys {
		if k.Role == protocol.RoleState {
			_, err := cli(t, "trust", "revoke", "--data-dir", h.data, "--key-dir", h.keys, "--passphrase-file", h.passphrase,
				"--key-id", k.KeyID)
			require.NoError(t, err)
		}
	}
	hub.hangup <- syscall.SIGHUP
	for {
		m := &protocol.HubMessage{}
		require.NoError(t, control.Receive(m, protocol.MaxControlBytes))
		if m.GetPushBundle() != nil {
			_, err = n.bundle.Succeed(m.GetPushBundle().GetEnvelope())
			require.NoError(t, err)
			return
		}
	}
}

func requireMetrics(t *testing.T, hub *running) {
	t.Helper()
	response, err := http.Get(hub.ready.MetricsURL)
	require.NoError(t, err)
	metrics, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Contains(t, string(metrics), "go_goroutines")
	require.Contains(t, string(metrics), "gpuaas_sessions 1")
}

// requireBanned bans the node and requires that it cannot renew its certificate.
func (n node) requireBanned(t *testing.T, hub *running) {
	t.Helper()
	status, _ := hub.api(t, http.MethodPost, "/admin/nodes/"+n.id+"/ban", readToken(t, hub), `{"reason":"stolen"}`)
	require.Equal(t, http.StatusOK, status)
	issued := "2026-11-20T12:00:00Z"
	request := csr(t, n.key)
	status, problem := hub.api(t, http.MethodPost, "/nodes/renew", "", marshal(t, map[string]any{
		"node_id": n.id, "csr_pem": request, "issued_at": issued, "signature": ed25519.Sign(n.key,
			[]byte(n.id+"\n"+request+"\n"+issued)),
	}))
	require.Equal(t, http.StatusForbidden, status)
	require.Equal(t, "node_banned", problem["code"])
}

// replaceAdminToken makes new admin tokens, while the hub runs and while it does not: the one of before ends.
func replaceAdminToken(t *testing.T, h home, hub *running, token string) {
	t.Helper()
	_, err := cli(t, "admin-token", "--data-dir", h.data)
	require.NoError(t, err, "while the hub runs, too")
	status, _ := hub.api(t, http.MethodGet, "/admin/nodes", token, "")
	require.Equal(t, http.StatusUnauthorized, status)
	hub.end(t)

	_, err = cli(t, "admin-token", "--data-dir", h.data)
	require.NoError(t, err)
	setAdminPassword(t, h, "while the hub does not run")
	hub = start(t, h)
	logInAsAdmin(t, hub, "while the hub does not run", http.StatusOK)
	setAdminPassword(t, h, "while the hub runs")
	logInAsAdmin(t, hub, "while the hub does not run", http.StatusUnauthorized)
	logInAsAdmin(t, hub, "while the hub runs", http.StatusOK)
	status, _ = hub.api(t, http.MethodGet, "/admin/nodes", token, "")
	require.Equal(t, http.StatusUnauthorized, status, "the lost one no longer counts")
	status, _ = hub.api(t, http.MethodGet, "/admin/nodes", readToken(t, hub), "")
	require.Equal(t, http.StatusOK, status)
	hub.end(t)
}

func setAdminPassword(t *testing.T, h home, password string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "password")
	require.NoError(t, os.WriteFile(file, []byte("short\n"), 0o600))
	_, err := cli(t, "admin-password", "--data-dir", h.data, "--password-file", file)
	require.ErrorContains(t, err, "12 to 256 characters")
	require.NoError(t, os.WriteFile(file, []byte(password+"\n"), 0o600))
	shown, err := cli(t, "admin-password", "--data-dir", h.data, "--password-file", file)
	require.NoError(t, err)
	require.NotContains(t, shown, password)
}

func logInAsAdmin(t *testing.T, hub *running, password string, status int) {
	t.Helper()
	got, session := hub.api(t, http.MethodPost, "/auth/login", "", marshal(t, map[string]any{
		"email": "admin@localhost", "password": password,
	}))
	require.Equal(t, status, got, "%v", session)
	if status == http.StatusOK {
		got, _ = hub.api(t, http.MethodGet, "/admin/nodes", session["access_token"].(string), "")
		require.Equal(t, http.StatusOK, got)
	}
}

// The flag of the command line is what a token's life follows, as the token's answer says it.
func TestTokensOfServiceAccountsCountAsLongAsTheFlagSays(t *testing.T) {
	h := newHome(t)
	life := func(flags ...string) any {
		hub := startByFlags(t, h, flags...)
		defer hub.end(t)
		admin := readToken(t, hub)
		create := func(path, body string) map[string]any {
			status, made := hub.api(t, http.MethodPost, path, admin, body)
			require.Equal(t, http.StatusCreated, status, "%v", made)
			return made
		}
		slug := "o" + strings.ReplaceAll(db.NewID()[24:], "-", "")
		org := create("/orgs", `{"slug":"`+slug+`","display_name":"Acme"}`)
		project := create("/projects", marshal(t, map[string]any{
			"slug": "main", "display_name": "Main", "org_id": org["id"],
		}))
		account := create("/projects/"+project["id"].(string)+"/service-accounts", `{"name":"CI","slug":"ci"}`)
		key, _ := account["key"].(map[string]any)
		status, token := hub.api(t, http.MethodPost, "/auth/service-account/token", "", marshal(t, map[string]any{
			"service_account_id": account["id"], "key_id": key["key_id"], "private_key_pem": key["private_key_pem"],
		}))
		require.Equal(t, http.StatusOK, status, "%v", token)
		return token["expires_in"]
	}
	require.InDelta(t, 120, life("--auth-service-account-token-ttl-seconds", "120"), 1)
	require.InDelta(t, 900, life(), 1, "the default")
}

func TestAnExportNeedsATimeSpan(t *testing.T) {
	_, err := cli(t, "usage", "export", "--node", db.NewID(), "--from", "2026-11-22T10:00:00Z", "--to",
		"2026-11-21T10:00:00Z")
	require.ErrorContains(t, err, "--from must be before --to")
}

// A node that has lost its hub goes on for a day: the lease is what the documents, the flag and the dispatcher agree
// on.
func TestDefaultsAreWhatTheDocumentsSay(t *testing.T) {
	read := func(name string) string {
		data, err := os.ReadFile(filepath.Join("..", "..", "..", filepath.FromSlash(name)))
		require.NoError(t, err)
		return string(data)
	}
	require.Equal(t, 24*time.Hour, dispatch.DefaultLease)
	require.Equal(t, "24h0m0s", newServe().Flags().Lookup("lease-duration").DefValue)
	require.Equal(t, 24*time.Hour, fleet.DefaultTokenTTL)
	require.Contains(t, read("bootstrap/README.md"), "valid once and for 24 hours")
}
