package httpapi

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	// maxCredentialBytes bounds a bearer credential; longer ones are not looked at.
	maxCredentialBytes = 8 << 10
	// bodyTimeout is how long a body may take to arrive.
	bodyTimeout = 30 * time.Second
	// auditTimeout bounds the audit row of a failed request, which is written before the answer goes out.
	auditTimeout = 5 * time.Second
)

// Authenticator finds out who presents a bearer credential.
type Authenticator interface {
	// Authenticate gives an Unauthenticated fault for a credential that does not count.
	Authenticate(ctx context.Context, bearer string, now time.Time) (iam.Principal, error)
}

// Auditor writes down a request that was denied or failed.
type Auditor interface {
	AuditFailure(ctx context.Context, m command.Meta, f command.Failure) error
}

// admit lets a request through to its handler: known caller, within its rate, and as the contract says.
func (a *api) admit(c *gin.Context) {
	state := callOf(c.Request.Context())
	if err := a.authenticate(c, state); err != nil {
		a.fail(c, err)
		return
	}
	// Not every connection can (HTTP/1.1 over a pipe in tests); the server's own timeouts still hold there.
	_ = http.NewResponseController(c.Writer).SetReadDeadline(a.conf.Now().Add(bodyTimeout))
	body, err := check(c, state.op)
	if err != nil {
		a.fail(c, err)
		return
	}
	_ = http.NewResponseController(c.Writer).SetReadDeadline(time.Time{})
	state.bodyHash = requestHash(c.Request, body)
	c.Next()
}

func (a *api) authenticate(c *gin.Context, state *call) error {
	visitor := "ip/" + network(state.remoteIP)
	if state.op.open {
		return a.visitors.take(visitor, state.at)
	}
	bearer, err := credential(c.Request.Header)
	if err == nil {
		state.principal, err = a.conf.Authenticator.Authenticate(c.Request.Context(), bearer, state.at)
	}
	if err != nil {
		// Guessing is limited by address: a wrong credential has no caller to count for.
		if limited := a.visitors.take(visitor, state.at); limited != nil {
			return limited
		}
		return err
	}
	return a.callers.take(state.principal.Type+"/"+state.principal.ID, state.at)
}

func credential(h http.Header) (string, error) {
	values := h.Values("Authorization")
	missing := fault.New(fault.Unauthenticated, "credential_missing", "This operation needs a bearer token.", nil).
		AtHint("header/Authorization", "is missing", "Authorization: Bearer <token>")
	if len(values) == 0 {
		return "", missing
	}
	scheme, token, ok := strings.Cut(values[0], " ")
	token = strings.TrimSpace(token)
	if len(values) > 1 || !ok || !strings.EqualFold(scheme, "Bearer") || token == "" || len(token) > maxCredentialBytes {
		return "", fault.New(fault.Unauthenticated, "credential_invalid", "The Authorization header is not one bearer token.", nil).
			AtHint("header/Authorization", "is not a bearer token", "Authorization: Bearer <token>")
	}
	return token, nil
}

// network is what counts as one visitor: an IPv4 address, or the /64 that one IPv6 customer usually has.
func network(ip string) string {
	addr := net.ParseIP(ip)
	if addr == nil || addr.To4() != nil {
		return ip
	}
	return addr.Mask(net.CIDRMask(64, 128)).String()
}

// fail ends a request with a problem document, after it is in the audit trail and, where it is our defect, in the log.
func (a *api) fail(c *gin.Context, err error) {
	f := fault.As(err)
	ctx := c.Request.Context()
	state := callOf(ctx)
	state.failure = f.Code
	c.Abort()
	if f.Kind == fault.Internal || f.Cause != nil {
		level := slog.LevelInfo
		if f.Kind == fault.Internal {
			level = slog.LevelError
		}
		a.conf.Log.LogAttrs(ctx, level, "request failed", slog.String("code", f.Code), slog.Any("error", err),
			slog.String("correlation_id", state.correlationID))
	}
	a.audit(ctx, state, f)
	if c.Writer.Written() {
		return // a stream broke off half-way; its end is all that can be said
	}
	writeProblem(c, f, state.correlationID)
}

// audit keeps denials of every kind and failures of whatever would have changed something. A failing audit trail does not
// turn a refusal into a success, so it is logged and the answer stands.
func (a *api) audit(ctx context.Context, state *call, f *fault.Error) {
	denied := f.Kind == fault.Unauthenticated || f.Kind == fault.Forbidden
	if state.op == nil || f.Kind == fault.RateLimited || !denied && !state.op.mutates() {
		return
	}
	// The caller may hang up; the row is written all the same.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), auditTimeout)
	defer cancel()
	m := command.Meta{Principal: state.principal, CorrelationID: state.correlationID, TraceID: state.traceID, Route: state.op.route(), Now: state.at}
	if err := a.conf.Auditor.AuditFailure(ctx, m, command.Failure{Operation: state.op.id, Code: f.Code, Denied: denied}); err != nil {
		a.conf.Log.ErrorContext(ctx, "audit row of a failed request is lost", slog.Any("error", err), slog.String("correlation_id", state.correlationID))
	}
}
