package httpapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/gin-gonic/gin"

	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// Values of the parameters of a token request (RFC 7523 §2).
const (
	grantJWTBearer         = "urn:ietf:params:oauth:grant-type:jwt-bearer" //nolint:gosec // a name
	grantClientCredentials = "client_credentials"
	clientAssertionJWT     = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
)

// oauthError is a fault of a token request with the code that RFC 6749 §5.2 has for it.
type oauthError struct {
	code  OAuthErrorError
	cause error
}

func (e *oauthError) Error() string { return e.cause.Error() }

// Unwrap returns the fault.
func (e *oauthError) Unwrap() error { return e.cause }

// mintByForm answers a token request of a library of OAuth 2.0.
func (s *Server) mintByForm(ctx context.Context, f OAuthTokenRequest) (MintServiceAccountTokenResponseObject, error) {
	assertion, refused, err := assertionOf(ctx, f)
	if err != nil {
		return nil, err
	}
	token, err := s.mint(ctx, iam.Proof{ServiceAccountID: f.ClientID, Assertion: assertion})
	if fault.Is(err, fault.Unauthenticated) {
		return nil, &oauthError{code: refused, cause: err}
	}
	if g, ok := ctx.(*gin.Context); ok && err == nil {
		g.Header("Pragma", "no-cache") // RFC 6749 §5.1
	}
	return token, err
}

// assertionOf returns the assertion of a token request, and the code for one that does not count.
func assertionOf(ctx context.Context, f OAuthTokenRequest) (assertion string, refused OAuthErrorError, err error) {
	bad := func(code OAuthErrorError, pointer, text string) (string, OAuthErrorError, error) {
		return "", "", &oauthError{code: code, cause: fault.New(fault.Malformed, codeInvalidRequest, text, nil).
			WithField(pointer, "is not what this endpoint takes").Permanent()}
	}
	unproven := func(pointer, text string) (string, OAuthErrorError, error) {
		return "", "", &oauthError{
			code: OAuthErrorErrorInvalidClient,
			cause: fault.New(fault.Unauthenticated, codeCredentialMissing, text, nil).
				WithField(pointer, "does not prove who asks").Permanent(),
		}
	}
	g, _ := ctx.(*gin.Context)
	switch {
	case g != nil && sentBasic(g.Request):
		return unproven("header/Authorization", "Clients have no secret: send an assertion.")
	case f.Scope != "":
		return bad(OAuthErrorErrorInvalidScope, "/scope", "There are no scopes; leave the parameter out.")
	case f.GrantType == grantJWTBearer && f.ClientAssertion != "":
		return bad(OAuthErrorErrorInvalidRequest, "/client_assertion",
			"One assertion is enough; leave client_assertion out.")
	case f.GrantType == grantJWTBearer && f.Assertion == "":
		return bad(OAuthErrorErrorInvalidRequest, "/assertion", "The parameter assertion is missing.")
	case f.GrantType == grantJWTBearer:
		return f.Assertion, OAuthErrorErrorInvalidGrant, nil
	case f.GrantType != grantClientCredentials:
		return bad(OAuthErrorErrorUnsupportedGrantType, "/grant_type",
			"The grants are "+grantJWTBearer+" and "+grantClientCredentials+".")
	case f.ClientAssertion == "" || f.ClientAssertionType != clientAssertionJWT:
		return unproven("/client_assertion",
			"Send a client_assertion with the client_assertion_type "+clientAssertionJWT+".")
	default:
		return f.ClientAssertion, OAuthErrorErrorInvalidClient, nil
	}
}

// sentBasic reports whether a client tries to authenticate by an id and a secret in a header.
func sentBasic(r *http.Request) bool {
	scheme, _, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	return strings.EqualFold(scheme, "Basic")
}

// formFields checks a form against its operation; a parameter without a value counts as left out (RFC 6749 §3.2).
func formFields(o *operation, body []byte) []fault.Field {
	values, err := url.ParseQuery(string(bytes.TrimSpace(body)))
	if err != nil {
		return []fault.Field{{Reason: "is not a form"}}
	}
	var fields []fault.Field
	form := map[string]any{}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		at := "/" + escapePointer(strings.ToValidUTF8(name, ""))
		value := values[name][0]
		switch {
		case len(values[name]) > 1:
			fields = append(fields, fault.Field{Pointer: at, Reason: "is given more than once"})
		case !utf8.ValidString(value) || strings.ContainsRune(value, 0):
			fields = append(fields, fault.Field{Pointer: at, Reason: "is not UTF-8, or has the character U+0000"})
		case value != "":
			form[name] = value
		}
	}
	return append(fields, schemaFields("", o.form.Validate(form))...)
}

// writeOAuthError is the translation of a fault for those who sent a form: what RFC 6749 §5.2 names is 400, but for a
// client that is not authenticated; what it does not name keeps its status.
func writeOAuthError(c *gin.Context, err error, correlationID string) {
	f := fault.As(err)
	code, status := OAuthErrorErrorInvalidRequest, http.StatusBadRequest
	named, ok := errors.AsType[*oauthError](err)
	switch {
	case ok:
		code = named.code
	case f.Kind == fault.TooLarge:
		status = http.StatusRequestEntityTooLarge
	case f.Kind == fault.RateLimited || f.Kind == fault.Unavailable:
		code, status = OAuthErrorErrorTemporarilyUnavailable, statusOf(f.Kind)
	case f.Kind == fault.Internal:
		code, status = OAuthErrorErrorServerError, http.StatusInternalServerError
	}
	h := c.Writer.Header()
	if code == OAuthErrorErrorInvalidClient {
		status = http.StatusUnauthorized
		h.Set("WWW-Authenticate", `Bearer realm="gpuaas"`)
		if sentBasic(c.Request) {
			h.Set("WWW-Authenticate", `Basic realm="gpuaas"`)
		}
	}
	if code == OAuthErrorErrorTemporarilyUnavailable {
		h.Set("Retry-After", retryAfter(f))
	}
	h.Del("Content-Length")
	h.Set("Content-Type", mediaJSON)
	h.Set("Pragma", "no-cache")
	closeUnread(c.Writer, c.Request)
	c.Writer.WriteHeader(status)
	// The header is out; a caller that hung up is nobody's error.
	_ = json.NewEncoder(c.Writer).Encode(OAuthError{
		Error: code, ErrorDescription: describe(f), CorrelationID: correlationID,
	})
}

// describe is the text of a fault in the characters that RFC 6749 allows.
func describe(f *fault.Error) string {
	text := f.Public
	if len(f.Fields) > 0 && f.Fields[0].Pointer != "" {
		text += " (" + strings.TrimPrefix(f.Fields[0].Pointer, "/") + " " + f.Fields[0].Reason + ")"
	}
	return strings.Map(func(r rune) rune {
		switch {
		case r == '"', r == '\\':
			return '\''
		case r < ' ' || r > '~':
			return '?'
		}
		return r
	}, text)
}
