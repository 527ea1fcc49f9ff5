package cli_test

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/gpuaas/gpuaas/pkg/client"
)

// sessionTokens are those of the fake hub, whose clock is ahead; the first access token has ended already.
func sessionTokens(refresh string, expires time.Duration) client.SessionTokens {
	return client.SessionTokens{
		SessionID: tokenID, UserID: userID, AccessToken: "good-token", TokenType: "Bearer", RefreshToken: refresh,
		ExpiresAt: time.Now().Add(expires + time.Hour), ExpiresIn: int64(expires / time.Second),
	}
}

// serveLogins answers for sessions and invitations.
func (h *fakeHub) serveLogins(w http.ResponseWriter, r *http.Request, route string) bool {
	invitation := client.Invitation{
		ID: tokenID, OrgID: orgID, Email: "ada@acme.example", Roles: []client.UserRole{"org_billing"},
	}
	switch route {
	case "POST /auth/login":
		var body client.Login
		_ = json.NewDecoder(r.Body).Decode(&body)
		if body.Password != "correct horse battery" || body.Code != "123456" {
			refuse(w, r, http.StatusUnauthorized, "login_refused", "Not right.")
			return true
		}
		answer(w, 200, sessionTokens("gpuaas_rt_1", time.Hour))
	case "POST /auth/oidc/device":
		answer(w, 200, client.DeviceLogin{Handle: "h", UserCode: "ABCD", VerificationURI: "https://id.example/device"})
	case "POST /auth/oidc/device/finish":
		if h.polled = !h.polled; h.polled {
			w.WriteHeader(http.StatusAccepted)
			return true
		}
		answer(w, 200, sessionTokens("gpuaas_rt_1", time.Hour))
	case "POST /auth/invitations/accept":
		answer(w, 201, sessionTokens("gpuaas_rt_1", 0))
	case "POST /auth/refresh":
		var body client.SessionRefresh
		_ = json.NewDecoder(r.Body).Decode(&body)
		if body.RefreshToken != "gpuaas_rt_1" {
			refuse(w, r, http.StatusUnauthorized, "session_ended", "Log in again.")
			return true
		}
		switch key := r.Header.Get("X-Idempotency-Key"); h.refreshed {
		case "":
			h.refreshed = key
			w.Header().Set("Content-Length", "100")
			w.WriteHeader(http.StatusOK)
		case key:
			answer(w, 200, sessionTokens("gpuaas_rt_2", time.Hour))
		default:
			refuse(w, r, http.StatusUnauthorized, "session_ended", "The refresh token was used before.")
		}
	case "GET /auth/sessions":
		answer(w, 200, client.SessionList{Items: []client.Session{{ID: tokenID, UserAgent: "gpuaas/test", Current: true}}})
	case "GET /orgs/" + orgID + "/invitations":
		answer(w, 200, client.InvitationList{Items: []client.Invitation{invitation}})
	case "POST /orgs/" + orgID + "/invitations":
		invitation.Token = "gpuaas_it_x"
		answer(w, 201, invitation)
	case "POST /auth/password":
		var body client.PasswordChange
		_ = json.NewDecoder(r.Body).Decode(&body)
		if body.CurrentPassword != "correct horse battery" || body.NewPassword == "" && !body.RemoveOneTimeCodes {
			refuse(w, r, http.StatusForbidden, "password_refused", "No.")
			return true
		}
		w.WriteHeader(http.StatusNoContent)
	case "POST /auth/logout", "DELETE /orgs/" + orgID + "/invitations/0192f0c0-0000-7000-8000-000000000099",
		"DELETE /auth/sessions/0192f0c0-0000-7000-8000-000000000098":
		w.WriteHeader(http.StatusNoContent)
	default:
		return false
	}
	return true
}
