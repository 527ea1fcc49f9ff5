package httpapi

import (
	"crypto/hmac"
	"crypto/sha1"
	"encoding/base32"
	"encoding/binary"
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

const (
	goodPassword = "correct horse battery"
	totpSecret   = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
)

// oneTimeCode is what an authenticator app shows at a moment.
func oneTimeCode(t *testing.T, at time.Time) string {
	t.Helper()
	secret, err := base32.StdEncoding.DecodeString(totpSecret)
	require.NoError(t, err)
	mac := hmac.New(sha1.New, secret)
	require.NoError(t, binary.Write(mac, binary.BigEndian, at.Unix()/30))
	sum := mac.Sum(nil)
	return fmt.Sprintf("%06d", binary.BigEndian.Uint32(sum[sum[19]&15:])&0x7fffffff%1_000_000)
}

func (h *house) invite(t *testing.T, boss, orgID, email, more string) string {
	t.Helper()
	key := strings.ReplaceAll(email, "@", ".") + fmt.Sprint(h.clock().UnixNano())
	return h.must(t, boss, "POST", "/orgs/"+orgID+"/invitations", key, `{"email":"`+email+`"`+more+`}`, 201).text("token")
}

func acceptance(token, more string) string {
	return `{"token":"` + token + `","display_name":"Ada","password":"` + goodPassword + `"` + more + `}`
}

func loginBody(email, password, code string) string {
	if code != "" {
		code = `,"code":"` + code + `"`
	}
	return `{"email":"` + email + `","password":"` + password + `"` + code + `}`
}

// member invites a person who accepts.
func (h *house) member(t *testing.T, boss, orgID, email string) answer {
	t.Helper()
	return h.must(t, "", "POST", "/auth/invitations/accept", "", acceptance(h.invite(t, boss, orgID, email, ""), ""), 201)
}

func TestAnInvitationMakesOneUser(t *testing.T) {
	h := newHouse(t)
	orgID, _, boss := h.tenant(t, "acme")
	path := "/orgs/" + orgID + "/invitations"
	role := h.customRole(t, boss, orgID, "reader", "audit.read")
	token := h.invite(t, boss, orgID, "Ada@acme.example", `,"roles":["org_billing"],"custom_roles":["`+role+`"]`)
	listed := h.must(t, boss, "GET", path, "", "", 200)
	require.Equal(t, "ada@acme.example", firstItem(t, listed)["email"])
	require.NotContains(t, listed.raw, token)

	accept := "/auth/invitations/accept"
	weak := strings.Replace(acceptance(token, ""), goodPassword, "short", 1)
	require.Equal(t, 400, h.ask(t, "", "POST", accept, "", weak).status)
	wrongCode := acceptance(token, `,"totp":{"secret":"`+totpSecret+`","code":"000000"}`)
	require.Contains(t, h.must(t, "", "POST", accept, "", wrongCode, 422).raw, `"pointer":"/totp/code"`)
	made := h.must(t, "", "POST", accept, "", acceptance(token, ""), 201)
	require.Equal(t, "invitation_invalid", h.must(t, "", "POST", accept, "", acceptance(token, ""), 401).text("code"))
	require.Empty(t, h.must(t, boss, "GET", path, "", "", 200).body["items"])

	who := h.must(t, made.text("access_token"), "GET", "/auth/whoami", "", "", 200)
	require.Equal(t, "Ada", who.body["display_name"])
	user := h.must(t, boss, "GET", "/users/"+made.text("user_id"), "", "", 200)
	require.Equal(t, []any{"org_billing"}, user.body["roles"])
	require.Equal(t, []any{role}, user.body["custom_roles"])
	again := `{"email":"ada@acme.example"}`
	require.Equal(t, "already_exists", h.must(t, boss, "POST", path, "again", again, 409).text("code"))
	h.must(t, made.text("access_token"), "POST", path, "mine", `{"email":"x@acme.example"}`, 403)

	bobs := h.invite(t, boss, orgID, "bob@acme.example", "")
	h.wait(time.Second)
	bobs2 := h.invite(t, boss, orgID, "bob@acme.example", `,"expires_in_seconds":60`)
	h.must(t, "", "POST", accept, "", acceptance(bobs, ""), 401)
	open := firstItem(t, h.must(t, boss, "GET", path, "", "", 200))["id"].(string)
	_, _, stranger := h.tenant(t, "other")
	h.must(t, stranger, "DELETE", path+"/"+open, "", "", 404)
	h.wait(2 * time.Minute)
	h.must(t, "", "POST", accept, "", acceptance(bobs2, ""), 401)
	h.must(t, boss, "DELETE", path+"/"+open, "", "", 404)
	h.wait(time.Second)
	bobs3 := h.invite(t, boss, orgID, "bob@acme.example", "")
	open = firstItem(t, h.must(t, boss, "GET", path, "", "", 200))["id"].(string)
	h.must(t, boss, "DELETE", path+"/"+open, "", "", 204)
	h.must(t, "", "POST", accept, "", acceptance(bobs3, ""), 401)
}

func TestAnInvitationGivesNoMoreThanItsMakerHolds(t *testing.T) {
	h := newHouse(t)
	orgID, _, boss := h.tenant(t, "acme")
	adaID, ada := h.person(t, orgID, "ada@acme.example", `"org_member"`)
	path := "/orgs/" + orgID + "/invitations"
	delegate := h.customRole(t, boss, orgID, "delegate", "iam.user.manage", "iam.user.read")
	h.must(t, boss, "PUT", "/users/"+adaID+"/roles", "", customOnly(delegate), 200)
	for i, roles := range []string{"", `,"roles":["org_admin"]`} {
		h.must(t, ada, "POST", path, fmt.Sprint("more", i), `{"email":"x@acme.example"`+roles+`}`, 403)
	}
	temporary := h.customRole(t, boss, orgID, "temporary", "audit.read")
	lost := h.invite(t, boss, orgID, "eve@acme.example", `,"custom_roles":["`+temporary+`"]`)
	h.must(t, boss, "DELETE", "/orgs/"+orgID+"/roles/"+temporary, "", "", 204)
	h.must(t, "", "POST", "/auth/invitations/accept", "", acceptance(lost, ""), 401)

	h.must(t, boss, "PUT", "/users/"+adaID+"/roles", "", `{"roles":["org_admin"]}`, 200)
	token := h.invite(t, ada, orgID, "bob@acme.example", `,"roles":["org_admin"]`)
	h.must(t, boss, "POST", "/users/"+adaID+"/disable", "disable", "", 200)
	h.must(t, "", "POST", "/auth/invitations/accept", "", acceptance(token, ""), 401)
}

func TestEveryRefusedLoginIsAnsweredAlike(t *testing.T) {
	h := newHouse(t)
	orgID, _, boss := h.tenant(t, "acme")
	h.must(t, "", "POST", "/auth/invitations/accept", "", acceptance(h.invite(t, boss, orgID, "ada@acme.example", ""),
		`,"totp":{"secret":"`+totpSecret+`","code":"`+oneTimeCode(t, h.clock())+`"}`), 201)
	bob := h.member(t, boss, orgID, "bob@acme.example")
	h.must(t, boss, "POST", "/users/"+bob.text("user_id")+"/disable", "disable", "", 200)
	used := oneTimeCode(t, h.clock())
	h.wait(time.Minute)
	code := oneTimeCode(t, h.clock())

	var first answer
	for _, body := range []string{
		loginBody("nobody@acme.example", goodPassword, code), loginBody("ada@acme.example", "wrong", code),
		loginBody("ada@acme.example", goodPassword, ""), loginBody("ada@acme.example", goodPassword, "000000"),
		loginBody("ada@acme.example", goodPassword, used), loginBody("bob@acme.example", goodPassword, ""),
	} {
		refused := h.must(t, "", "POST", "/auth/login", "", body, 401)
		if first.raw == "" {
			first = refused
		}
		require.Equal(t, first.raw, refused.raw, body)
	}
	require.Equal(t, "login_refused", first.text("code"))
	tokens := h.must(t, "", "POST", "/auth/login", "", loginBody("ADA@acme.example", goodPassword, code), 200)
	h.must(t, tokens.text("access_token"), "GET", "/auth/whoami", "", "", 200)
	h.must(t, "", "POST", "/auth/login", "", loginBody("ada@acme.example", goodPassword, code), 401)

	refusals, err := db.ReadTx(t.Context(), h.d, func(tx db.Tx) (n int, err error) {
		return n, tx.QueryRow(t.Context(), `SELECT count(*) FROM audit_rows WHERE action = 'login' AND outcome = 'denied'
			AND reason = 'login_refused'`).Scan(&n)
	})
	require.NoError(t, err)
	require.Positive(t, refusals)
	h.wait(time.Hour)
	h.must(t, "", "POST", "/auth/login", "", loginBody("ada@acme.example", "wrong", ""), 401)
	trail := h.must(t, boss, "GET", "/audit?limit=200", "", "", 200)
	require.Contains(t, trail.raw, "login_refused", "an org sees whom a login was refused for")
	stored, err := db.ReadTx(t.Context(), h.d, func(tx db.Tx) (text string, err error) {
		return text, tx.QueryRow(t.Context(), `SELECT (SELECT string_agg(p::TEXT, ' ') FROM user_passwords p) || (SELECT
			string_agg(s::TEXT, ' ') FROM sessions s) || (SELECT string_agg(i::TEXT, ' ') FROM invitations i)`).Scan(&text)
	})
	require.NoError(t, err)
	for _, secret := range []string{goodPassword, totpSecret, tokens.text("refresh_token"), tokens.text("access_token")} {
		require.NotContains(t, stored+h.log.String(), secret)
	}
}

func TestGuessingPasswordsIsThrottled(t *testing.T) {
	h := newHouse(t)
	try := func(email, address string) answer {
		r := httptest.NewRequest("POST", "/api/v1/auth/login", strings.NewReader(loginBody(email, "wrong", "")))
		r.Header.Set("Content-Type", "application/json")
		r.RemoteAddr = address + ":1"
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return answer{status: w.Code, header: w.Header(), raw: w.Body.String()}
	}
	for i := range loginsBurst {
		require.Equal(t, 401, try("ada@acme.example", fmt.Sprintf("192.0.2.%d", i)).status)
	}
	full := try("ADA@acme.example", "192.0.2.200")
	require.Equal(t, 429, full.status, "from whatever address")
	require.Contains(t, full.raw, "budget/logins")
	require.Equal(t, "60", full.header.Get("Retry-After"))
	for i := range addressLoginsBurst {
		require.Equal(t, 401, try(fmt.Sprintf("%d@acme.example", i), "192.0.2.201").status)
	}
	require.Contains(t, try("other@acme.example", "192.0.2.201").raw, "budget/address_logins")
	h.wait(time.Minute)
	require.Equal(t, 401, try("ada@acme.example", "192.0.2.202").status)
}

func TestASessionIsRefreshedAndEndsWithItsTokens(t *testing.T) {
	h := newHouse(t)
	orgID, _, boss := h.tenant(t, "acme")
	first := h.member(t, boss, orgID, "ada@acme.example")
	refresh := func(tokens answer, key string) answer {
		t.Helper()
		return h.ask(t, "", "POST", "/auth/refresh", key, `{"refresh_token":"`+tokens.text("refresh_token")+`"}`)
	}
	h.wait(14 * time.Minute)
	require.Equal(t, 200, h.whoami(t, first.text("access_token")))
	h.wait(2 * time.Minute)
	require.Equal(t, 401, h.whoami(t, first.text("access_token")))
	second := refresh(first, "one")
	require.Equal(t, 200, second.status, second.raw)
	require.Equal(t, second.raw, refresh(first, "one").raw, "a lost answer is given again")
	require.Equal(t, 200, h.whoami(t, second.text("access_token")))
	sessions := h.must(t, second.text("access_token"), "GET", "/auth/sessions", "", "", 200)
	require.Equal(t, true, firstItem(t, sessions)["current"])

	forged := answer{body: map[string]any{"refresh_token": "gpuaas_rt_" + strings.Repeat("A", 86)}}
	require.Equal(t, 401, refresh(forged, "forged").status)
	require.Equal(t, 401, refresh(answer{body: map[string]any{"refresh_token": "x"}}, "short").status)
	stolen := refresh(first, "two")
	require.Equal(t, "session_ended", stolen.text("code"))
	require.Equal(t, 401, h.whoami(t, second.text("access_token")), "its successors end, too")
	require.Equal(t, 401, refresh(second, "three").status)
	reason, err := db.ReadTx(t.Context(), h.d, func(tx db.Tx) (reason string, err error) {
		return reason, tx.QueryRow(t.Context(), `SELECT data->>'reason' FROM events
			WHERE type = 'iam.session.revoked' AND subject = $1`, first.text("session_id")).Scan(&reason)
	})
	require.NoError(t, err)
	require.Equal(t, "refresh_token_reused", reason)

	idle := h.must(t, "", "POST", "/auth/login", "", loginBody("ada@acme.example", goodPassword, ""), 200)
	h.wait(24*time.Hour + time.Second)
	require.Equal(t, 401, refresh(idle, "idle").status)
	long := h.must(t, "", "POST", "/auth/login", "", loginBody("ada@acme.example", goodPassword, ""), 200)
	for i := range 7 {
		h.wait(23 * time.Hour)
		long = refresh(long, fmt.Sprint("long", i))
		require.Equal(t, 200, long.status, long.raw)
	}
	h.wait(8 * time.Hour)
	require.Equal(t, 401, refresh(long, "end").status, "seven days after the login")
}

func TestAUserChangesPasswordAndOneTimeCodes(t *testing.T) {
	h := newHouse(t)
	orgID, _, boss := h.tenant(t, "acme")
	made := h.member(t, boss, orgID, "ada@acme.example")
	here := made.text("access_token")
	login := func(password, code string, status int) answer {
		return h.must(t, "", "POST", "/auth/login", "", loginBody("ada@acme.example", password, code), status)
	}
	change := func(current, more string, status int) answer {
		return h.must(t, here, "POST", "/auth/password", "", `{"current_password":"`+current+`"`+more+`}`, status)
	}
	there := login(goodPassword, "", 200).text("access_token")
	const other = "another horse battery"
	require.Equal(t, "password_refused", change("wrong horse battery", `,"new_password":"`+other+`"`, 403).text("code"))
	require.Contains(t, change(goodPassword, "", 422).raw, `"/new_password"`)
	change(goodPassword, `,"new_password":"short"`, 400)
	require.Equal(t, 200, h.whoami(t, there), "what is refused ends nothing")

	change(goodPassword, `,"new_password":"`+other+`"`, 204)
	require.Equal(t, 200, h.whoami(t, here))
	require.Equal(t, 401, h.whoami(t, there), "other sessions end")
	body := `{"refresh_token":"` + made.text("refresh_token") + `"}`
	require.Equal(t, 200, h.ask(t, "", "POST", "/auth/refresh", "kept", body).status)
	login(goodPassword, "", 401)
	there = login(other, "", 200).text("access_token")

	// One-time codes are set up, needed from then on, used once, and removed.
	totp := func() string {
		return `"totp":{"secret":"` + totpSecret + `","code":"` + oneTimeCode(t, h.clock()) + `"}`
	}
	require.Contains(t, change(other, `,"remove_one_time_codes":true,`+totp(), 422).raw, `"/remove_one_time_codes"`)
	change(other, ","+totp(), 204)
	require.Equal(t, 401, h.whoami(t, there), "sessions from before the one-time codes have ended")
	login(other, "", 401)
	login(other, oneTimeCode(t, h.clock()), 401) // setting them up has used this one
	h.wait(time.Minute)
	login(other, oneTimeCode(t, h.clock()), 200)
	change(other, `,"new_password":"`+goodPassword+`","code":"`+oneTimeCode(t, h.clock())+`"`, 403)
	change(other, `,"remove_one_time_codes":true`, 403)
	h.wait(time.Minute)
	change(other, `,"remove_one_time_codes":true,"code":"`+oneTimeCode(t, h.clock())+`"`, 204)
	login(other, "", 200)

	rows := h.must(t, boss, "GET", "/audit?action=iam.user.change_password", "", "", 200)
	require.NotContains(t, rows.raw, "horse")
	require.Contains(t, rows.raw, "set up")

	// Guesses are counted as those of logins are, and a credential without a password has nothing to change.
	limited := 0
	for range 20 {
		if h.ask(t, here, "POST", "/auth/password", "", `{"current_password":"a","new_password":"`+other+`"}`).status == 429 {
			limited++
		}
	}
	require.Positive(t, limited)
	require.Equal(t, 403, h.ask(t, boss, "POST", "/auth/password", "",
		`{"current_password":"a","new_password":"`+other+`"}`).status)
}

func TestAUserEndsItsOwnSessions(t *testing.T) {
	h := newHouse(t)
	orgID, _, boss := h.tenant(t, "acme")
	here := h.member(t, boss, orgID, "ada@acme.example").text("access_token")
	login := func() answer {
		return h.must(t, "", "POST", "/auth/login", "", loginBody("ada@acme.example", goodPassword, ""), 200)
	}
	there := login()
	bob := h.member(t, boss, orgID, "bob@acme.example").text("access_token")
	path := "/auth/sessions/" + there.text("session_id")
	require.Len(t, h.must(t, here, "GET", "/auth/sessions", "", "", 200).body["items"], 2)
	h.must(t, bob, "DELETE", path, "", "", 404)
	require.Equal(t, 404, h.askIf(t, bob, "DELETE", path, "", `"another"`).status)
	h.must(t, here, "DELETE", path, "", "", 204)
	h.must(t, here, "DELETE", path, "", "", 404)
	require.Equal(t, 401, h.whoami(t, there.text("access_token")))
	h.must(t, here, "POST", "/auth/logout", "", "", 204)
	require.Equal(t, 401, h.whoami(t, here))
	require.Equal(t, "no_session", h.must(t, boss, "POST", "/auth/logout", "", "", 409).text("code"))

	third := login()
	h.must(t, boss, "DELETE", "/users/"+third.text("user_id")+"/tokens", "", "", 204)
	require.Equal(t, 401, h.whoami(t, third.text("access_token")))
	body := `{"refresh_token":"` + third.text("refresh_token") + `"}`
	require.Equal(t, 401, h.ask(t, "", "POST", "/auth/refresh", "after", body).status)
	fourth := login()
	own := h.must(t, fourth.text("access_token"), "GET", "/users/"+fourth.text("user_id")+"/tokens", "", "", 200)
	require.Empty(t, own.body["items"], "access tokens are no personal tokens")
	h.must(t, boss, "DELETE", "/orgs/"+orgID+"/users/"+fourth.text("user_id"), "", "", 204)
	require.Equal(t, 401, h.whoami(t, fourth.text("access_token")))
	h.must(t, "", "POST", "/auth/login", "", loginBody("ada@acme.example", goodPassword, ""), 401)
}
