package httpapi

import (
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
)

// house is the REST face over a real database, with the first admin made.
type house struct {
	http.Handler
	// unchecked is the Handler with whose connections a caller can do more than get an answer.
	unchecked http.Handler

	d     *db.DB
	tail  *event.Tail
	admin string
	log   *safeLog
	// commands are those behind the Handler.
	commands *command.Service

	begin time.Time

	mu  sync.Mutex
	now time.Time
}

type safeLog struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *safeLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *safeLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func (h *house) clock() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.now
}

func (h *house) wait(d time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.now = h.now.Add(d)
}

func newHouse(t *testing.T) *house {
	t.Helper()
	return newHouseWith(t, nil)
}

// newHouseWith has an identity provider.
func newHouseWith(t *testing.T, identity *command.IdentityProvider) *house {
	t.Helper()
	return newHouseOn(t, dbtest.New(t), time.Unix(1_800_000_000, 0).UTC(), identity)
}

// houseKey seals what a house stores.
const houseKey = "0123456789abcdef0123456789abcdef"

func newHouseOn(t *testing.T, d *db.DB, now time.Time, identity *command.IdentityProvider) *house {
	t.Helper()
	h := &house{d: d, admin: iam.NewUserToken(), now: now, log: &safeLog{}}
	kek, err := secret.NewKEK([]byte(houseKey))
	require.NoError(t, err)
	sealer := secret.NewSealer(kek)
	made, err := (&command.Service{DB: h.d, Sealer: sealer}).Bootstrap(t.Context(), h.admin, h.now)
	require.NoError(t, err)
	require.True(t, made)
	server := serverOn(h.d, sealer, nil)
	server.Commands.Identity = identity
	h.commands = server.Commands
	h.tail = server.Queries.Tail
	h.Handler, err = NewHandler(server, Config{
		Authenticator: TokenAuthenticator{DB: h.d}, Auditor: &command.Service{DB: h.d},
		Log: jsonLog(t, h.log), Now: h.clock, RequestsPerSecond: 1e6, Burst: 1e6,
	})
	require.NoError(t, err)
	h.begin = h.now
	h.unchecked, h.Handler = h.Handler, conforms(t, h.Handler)
	return h
}

// answer is what came back, decoded.
type answer struct {
	status int
	header http.Header
	raw    string
	body   map[string]any
}

func (a answer) text(key string) string {
	s, _ := a.body[key].(string)
	return s
}

func (h *house) ask(t *testing.T, token, method, path, key, body string) answer {
	t.Helper()
	var in io.Reader = http.NoBody
	if body != "" {
		in = strings.NewReader(body)
	}
	r := httptest.NewRequest(method, "/api/v1"+path, in)
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	if key != "" {
		r.Header.Set("X-Idempotency-Key", key)
	}
	r.Header.Set("X-Request-ID", "flow-"+key)
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	out := answer{status: w.Code, header: w.Header(), raw: w.Body.String()}
	if media := out.header.Get("Content-Type"); out.raw != "" && strings.HasSuffix(media, "json") {
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &out.body), out.raw)
	}
	return out
}

func (h *house) must(t *testing.T, token, method, path, key, body string, status int) answer {
	t.Helper()
	a := h.ask(t, token, method, path, key, body)
	require.Equal(t, status, a.status, a.raw)
	return a
}

// tenant makes an org with a project, and a token of an admin of that org.
func (h *house) tenant(t *testing.T, slug string) (orgID, projectID, token string) {
	t.Helper()
	orgID = h.must(t, h.admin, "POST", "/orgs", slug+"-org", `{"slug":"`+slug+`","display_name":"`+slug+`"}`,
		201).text("id")
	user := h.must(t, h.admin, "POST", "/admin/users", slug+"-user", `{"org_id":"`+orgID+`","email":"boss@`+slug+
		`.example","display_name":"Boss","roles":["org_admin"]}`, 201)
	token = h.must(t, h.admin, "POST", "/admin/users/"+user.text("id")+"/tokens", slug+"-token", `{}`, 201).text("token")
	projectID = h.must(t, token, "POST", "/projects", slug+"-project", `{"slug":"main","display_name":"Main"}`,
		201).text("id")
	return orgID, projectID, token
}

func mintBody(sa answer) string {
	key, _ := sa.body["key"].(map[string]any)
	body, _ := json.Marshal(map[string]any{
		"service_account_id": sa.body["id"], "key_id": key["key_id"],
		"private_key_pem": key["private_key_pem"],
	})
	return string(body)
}

func TestServiceAccountFromBirthToToken(t *testing.T) {
	h := newHouse(t)
	orgID, projectID, boss := h.tenant(t, "acme")
	path := "/projects/" + projectID + "/service-accounts"
	body := `{"name":"CI","slug":"ci","description":"deploys"}`

	sa := h.must(t, boss, "POST", path, "k1", body, 201)
	require.Equal(t, "app_operator", sa.text("role"))
	require.Equal(t, "active", sa.text("status"))
	again := h.must(t, boss, "POST", path, "k1", body, 201)
	require.Equal(t, "true", again.header.Get("Idempotency-Replayed"))
	require.JSONEq(t, sa.raw, again.raw, "the secret is shown again to a caller that repeats the request")
	require.Equal(t, 422, h.ask(t, boss, "POST", path, "k1", `{"name":"other","slug":"other"}`).status)
	taken := h.must(t, boss, "POST", path, "k2", body, 409)
	require.Equal(t, "already_exists", taken.text("code"))

	listed := h.must(t, boss, "GET", path, "", "", 200)
	require.Len(t, listed.body["items"], 1)
	require.NotContains(t, listed.raw, "private_key")

	token := h.must(t, "", "POST", "/auth/service-account/token", "", mintBody(sa), 200)
	require.InDelta(t, 900, token.body["expires_in"], 0)
	robot := token.text("access_token")
	me := h.must(t, robot, "GET", "/auth/whoami", "", "", 200)
	require.Equal(t, "service_account", me.text("type"))
	require.Equal(t, sa.text("id"), me.text("id"))
	require.Equal(t, orgID, me.text("org_id"))
	require.Equal(t, projectID, me.text("project_id"))
	require.Equal(t, false, me.body["platform_admin"])
	require.Contains(t, me.raw, "apps.instance.create")

	require.Equal(t, 403, h.ask(t, robot, "POST", path, "k3", body).status, "an account does not make accounts")
	require.Equal(t, 403, h.ask(t, robot, "POST", "/orgs", "k4", `{"slug":"x","display_name":"x"}`).status)
	h.wait(901 * time.Second)
	require.Equal(t, 401, h.ask(t, robot, "GET", "/auth/whoami", "", "").status, "expired")
}

// assertion is signed with the key that the account's creation answered.
func (h *house) assertion(t *testing.T, sa answer, jti string) string {
	t.Helper()
	key, _ := sa.body["key"].(map[string]any)
	text, _ := key["private_key_pem"].(string)
	block, _ := pem.Decode([]byte(text))
	private, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	require.NoError(t, err)
	assertion := jwt.NewWithClaims(jwt.SigningMethodEdDSA, jwt.RegisteredClaims{
		Issuer: sa.text("id"), Subject: sa.text("id"), Audience: jwt.ClaimStrings{"gpuaas"}, ID: jti,
		IssuedAt: jwt.NewNumericDate(h.clock()), ExpiresAt: jwt.NewNumericDate(h.clock().Add(time.Minute)),
	})
	assertion.Header["kid"] = key["key_id"]
	signed, err := assertion.SignedString(private)
	require.NoError(t, err)
	return signed
}

// The assertion of RFC 7523 is enough for a token; the request names neither account nor key beside it.
func TestAnAssertionIsExchangedForAToken(t *testing.T) {
	h := newHouse(t)
	_, projectID, boss := h.tenant(t, "acme")
	sa := h.must(t, boss, "POST", "/projects/"+projectID+"/service-accounts", "k1", `{"name":"CI","slug":"ci"}`, 201)
	signed := h.assertion(t, sa, "once")
	body := func(grant string) string { return `{"grant_type":"` + grant + `","assertion":"` + signed + `"}` }
	const path = "/auth/service-account/token"
	h.must(t, "", "POST", path, "", body("client_credentials"), 400)
	token := h.must(t, "", "POST", path, "", body("urn:ietf:params:oauth:grant-type:jwt-bearer"), 200)
	me := h.must(t, token.text("access_token"), "GET", "/auth/whoami", "", "", 200)
	require.Equal(t, sa.text("id"), me.text("id"))
	again := h.must(t, "", "POST", path, "", body("urn:ietf:params:oauth:grant-type:jwt-bearer"), 401)
	require.Equal(t, "credentials_invalid", again.text("code"))
}

// Both keys count during the overlap that was asked for, and are listed with their ends.
func TestAKeyIsRotatedWithAnOverlap(t *testing.T) {
	h := newHouse(t)
	h.commands.TokenTTL = 2 * time.Minute
	_, projectID, boss := h.tenant(t, "acme")
	path := "/projects/" + projectID + "/service-accounts"
	first := h.must(t, boss, "POST", path, "k1", `{"name":"CI","slug":"ci"}`, 201)
	rotate := path + "/" + first.text("id") + "/rotate-key"
	h.must(t, boss, "POST", rotate, "k2", `{"overlap_seconds":2592001}`, 400)
	second := h.must(t, boss, "POST", rotate, "k3", `{"overlap_seconds":600}`, 201)
	mint := func(sa answer) answer { return h.ask(t, "", "POST", "/auth/service-account/token", "", mintBody(sa)) }
	keyID := func(sa answer) any { key, _ := sa.body["key"].(map[string]any); return key["key_id"] }
	listed := func() []any {
		items, _ := h.must(t, boss, "GET", path, "", "", 200).body["items"].([]any)
		account, _ := items[0].(map[string]any)
		keys, _ := account["keys"].([]any)
		return keys
	}
	keys := listed()
	require.Len(t, keys, 2)
	replaced, newest := keys[0].(map[string]any), keys[1].(map[string]any)
	require.Equal(t, []any{keyID(first), keyID(second)}, []any{replaced["key_id"], newest["key_id"]})
	require.NotContains(t, newest, "expires_at")
	ends, err := time.Parse(time.RFC3339, fmt.Sprint(replaced["expires_at"]))
	require.NoError(t, err)
	require.WithinDuration(t, h.clock().Add(600*time.Second), ends, 5*time.Second)
	for _, sa := range []answer{first, second} {
		token := mint(sa)
		require.Equal(t, 200, token.status)
		require.InDelta(t, 120, token.body["expires_in"], 0, "as the hub is configured")
	}
	h.wait(601 * time.Second)
	require.Equal(t, 401, mint(first).status)
	require.Equal(t, 200, mint(second).status)
	require.Len(t, listed(), 1)
}

func TestServiceAccountIsRotatedDisabledAndDeleted(t *testing.T) {
	h := newHouse(t)
	_, projectID, boss := h.tenant(t, "acme")
	path := "/projects/" + projectID + "/service-accounts"
	sa := h.must(t, boss, "POST", path, "k1", `{"name":"CI","slug":"ci"}`, 201)
	path += "/" + sa.text("id")
	mint := func(sa answer) int {
		return h.ask(t, "", "POST", "/auth/service-account/token", "", mintBody(sa)).status
	}

	rotated := h.must(t, boss, "POST", path+"/rotate-key", "k2", "", 201)
	require.JSONEq(t, rotated.raw, h.must(t, boss, "POST", path+"/rotate-key", "k2", "", 201).raw)
	require.Equal(t, 401, mint(sa), "the old key")
	require.Equal(t, 200, mint(rotated))

	require.Equal(t, "disabled", h.must(t, boss, "POST", path+"/disable", "k3", "", 200).text("status"))
	h.must(t, boss, "POST", path+"/disable", "k4", "", 200)
	require.Equal(t, 401, mint(rotated))
	require.Equal(t, "service_account_disabled", h.must(t, boss, "POST", path+"/rotate-key", "k5", "", 409).text("code"))

	h.must(t, boss, "DELETE", path, "", "", 204)
	h.must(t, boss, "DELETE", path, "", "", 404)
	require.Empty(t, h.must(t, boss, "GET", "/projects/"+projectID+"/service-accounts", "", "", 200).body["items"])

	types, err := db.ReadTx(t.Context(), h.d, func(tx db.Tx) ([]string, error) {
		var types []string
		return types,
			tx.QueryRow(t.Context(),
				`SELECT array_agg(type || ' ' || resource_version ORDER BY resource_version) FROM events WHERE subject = $1`,
				sa.text("id")).Scan(&types)
	})
	require.NoError(t, err)
	require.Equal(t, []string{
		"iam.service_account.created 1", "iam.service_account.key_rotated 2", "iam.service_account.disabled 3",
		"iam.service_account.deleted 4",
	}, types)
}

func TestAnotherOrgsResourcesAnswerLikeAbsentOnes(t *testing.T) {
	h := newHouse(t)
	_, projectID, boss := h.tenant(t, "acme")
	_, _, stranger := h.tenant(t, "other")
	h.must(t, boss, "POST", "/projects/"+projectID+"/service-accounts", "k1", `{"name":"CI","slug":"ci"}`, 201)
	absent := db.NewID()
	for _, c := range []struct{ method, path, key, body string }{
		{"GET", "/projects/%s", "", ""},
		{"GET", "/projects/%s/service-accounts", "", ""},
		{"POST", "/projects/%s/service-accounts", "k2", `{"name":"CI","slug":"ci"}`},
	} {
		foreign := h.ask(t, stranger, c.method, fmt.Sprintf(c.path, projectID), c.key, c.body)
		nothing := h.ask(t, stranger, c.method, fmt.Sprintf(c.path, absent), c.key, c.body)
		require.Equal(t, 404, foreign.status, foreign.raw)
		require.JSONEq(t, nothing.raw, foreign.raw)
	}
	require.Len(t, h.must(t, stranger, "GET", "/orgs", "", "", 200).body["items"], 1)
	require.Len(t, h.must(t, stranger, "GET", "/projects", "", "", 200).body["items"], 1)
	require.Len(t, h.must(t, h.admin, "GET", "/projects", "", "", 200).body["items"], 2)
}

func TestListingGoesPageByPage(t *testing.T) {
	h := newHouse(t)
	var made []string
	for i := range 5 {
		made = append(made, h.must(t, h.admin, "POST", "/orgs", fmt.Sprint("o", i),
			fmt.Sprintf(`{"slug":"org-%d","display_name":"x"}`, i), 201).text("id"))
	}
	var seen []string
	cursor := ""
	for range 3 {
		page := h.must(t, h.admin, "GET", "/orgs?limit=2"+cursor, "", "", 200)
		items, _ := page.body["items"].([]any)
		for _, item := range items {
			org, _ := item.(map[string]any)
			seen = append(seen, fmt.Sprint(org["id"]))
		}
		cursor = "&cursor=" + page.text("next_cursor")
	}
	require.Equal(t, made, seen)
	require.Equal(t, "&cursor=", cursor, "the last page names no next one")
	require.Equal(t, 400, h.ask(t, h.admin, "GET", "/orgs?cursor=x", "", "").status)
}

// TestLaw08EveryIAMChangeHasItsEventAndItsAuditRow also breaks the audit trail and sees that nothing is left of the
// change.
func TestLaw08EveryIAMChangeHasItsEventAndItsAuditRow(t *testing.T) {
	h := newHouse(t)
	_, projectID, boss := h.tenant(t, "acme")
	sa := h.must(t, boss, "POST", "/projects/"+projectID+"/service-accounts", "k1", `{"name":"CI","slug":"ci"}`, 201)

	count := func(sql string, args ...any) (n int) {
		t.Helper()
		n, err := db.ReadTx(t.Context(), h.d, func(tx db.Tx) (int, error) {
			var n int
			return n, tx.QueryRow(t.Context(), sql, args...).Scan(&n)
		})
		require.NoError(t, err)
		return n
	}
	for table, event := range map[string]string{
		"orgs": "iam.org.created", "projects": "iam.project.created", "users": "iam.user.created",
		"service_accounts": "iam.service_account.created",
	} {
		rows := count(`SELECT count(*) FROM ` + table)
		require.Positive(t, rows, table)
		require.Equal(t, rows, count(`SELECT count(*) FROM `+table+
			` t JOIN events e ON e.subject = t.id::TEXT WHERE e.type = $1`, event), "events of %s", table)
		require.Equal(t, rows, count(`SELECT count(*) FROM `+table+
			` t JOIN audit_rows a ON a.resource_id = t.id::TEXT WHERE a.outcome = 'done'`), "audit rows of %s", table)
	}
	require.Equal(t, 1,
		count(`SELECT count(*) FROM audit_rows WHERE resource_id = $1 AND correlation_id = 'flow-k1' AND actor_type = 'user'`,
			sa.text("id")))

	h.ask(t, boss, "POST", "/orgs", "denied", `{"slug":"x","display_name":"x"}`)
	require.Equal(t, 1,
		count(
			`SELECT count(*) FROM audit_rows WHERE outcome = 'denied' AND correlation_id = 'flow-denied'
				AND reason = 'forbidden'`))

	for _, table := range []string{"audit_rows", "events"} {
		_, err := db.RunTx(t.Context(), h.d, func(tx db.Tx) (int, error) {
			_, err := tx.Exec(t.Context(), `ALTER TABLE `+table+` RENAME TO broken`)
			return 0, err
		})
		require.NoError(t, err)
		require.Equal(t, 500, h.ask(t, boss, "POST", "/projects", "broken-"+table, `{"slug":"half","display_name":"x"}`).
			status)
		_, err = db.RunTx(t.Context(), h.d, func(tx db.Tx) (int, error) {
			_, err := tx.Exec(t.Context(), `ALTER TABLE broken RENAME TO `+table)
			return 0, err
		})
		require.NoError(t, err)
		require.Zero(t, count(`SELECT count(*) FROM projects WHERE slug = 'half'`), "without %s there is no change", table)
		require.Zero(t,
			count(`SELECT count(*) FROM events e JOIN projects p ON e.subject = p.id::TEXT WHERE p.slug = 'half'`))
	}
	h.must(t, boss, "POST", "/projects", "broken-events", `{"slug":"half","display_name":"x"}`, 201)
}

// TestLaw11NoSecretOfIAMIsInTheDatabaseOrTheLog reads every column of every table after secrets went through the house.
func TestLaw11NoSecretOfIAMIsInTheDatabaseOrTheLog(t *testing.T) {
	h := newHouse(t)
	_, projectID, boss := h.tenant(t, "acme")
	sa := h.must(t, boss, "POST", "/projects/"+projectID+"/service-accounts", "k1", `{"name":"CI","slug":"ci"}`, 201)
	access := h.must(t, "", "POST", "/auth/service-account/token", "", mintBody(sa), 200).text("access_token")
	bad := strings.Replace(mintBody(sa), sa.text("id"), db.NewID(), 1)
	require.Equal(t, 401, h.ask(t, "", "POST", "/auth/service-account/token", "", bad).status)

	key, _ := sa.body["key"].(map[string]any)
	pem, _ := key["private_key_pem"].(string)
	secrets := map[string]string{
		"admin token": h.admin, "user token": boss, "access token": access,
		"private key": strings.Split(pem, "\n")[1],
	}
	for name, value := range secrets {
		require.NotEmpty(t, value, name)
		require.NotContains(t, h.log.String(), value, "%s in the log", name)
	}
	tables, err := db.ReadTx(t.Context(), h.d, func(tx db.Tx) ([]string, error) {
		var names []string
		return names,
			tx.QueryRow(t.Context(),
				`SELECT array_agg(table_name::TEXT) FROM information_schema.tables WHERE table_schema = 'public'`).Scan(&names)
	})
	require.NoError(t, err)
	require.Greater(t, len(tables), 5)
	for _, table := range tables {
		dump, err := db.ReadTx(t.Context(), h.d, func(tx db.Tx) (string, error) {
			var text string
			// BYTEA shows as hex in JSON: the test searches for both forms of each secret.
			return text, tx.QueryRow(t.Context(), `SELECT COALESCE(json_agg(t)::TEXT, '') FROM "`+table+`" t`).Scan(&text)
		})
		require.NoError(t, err)
		for name, value := range secrets {
			require.NotContains(t, dump, value, "%s in table %s", name, table)
			require.NotContains(t, dump, fmt.Sprintf("%x", value), "%s in table %s, as hex", name, table)
		}
	}
}
