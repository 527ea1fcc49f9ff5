package httpapi

import (
	"cmp"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
)

const (
	// maxCredentialBytes bounds a bearer credential; longer ones are refused unread.
	maxCredentialBytes = 8 << 10
	// auditTimeout bounds the audit row of a failed request, which is written before the answer goes out.
	auditTimeout = 5 * time.Second
	// Ids of operations in the contract.
	renewOperation = "renewNode"
	loginOperation = "login"
	// passwordOperation proves the password once more; guesses with it are counted as those of logins.
	passwordOperation = "changePassword"
)

// Authenticator identifies the caller by a bearer credential.
type Authenticator interface {
	// Authenticate returns an Unauthenticated fault for a credential that is not valid.
	Authenticate(ctx context.Context, bearer string, now time.Time) (iam.Principal, error)
}

// Auditor records denied and failed requests.
type Auditor interface {
	AuditFailure(ctx context.Context, m command.Meta, f command.Failure) error
}

// admit passes a request on to its handler when its budgets allow it, its caller is known and it follows the contract.
func (a *api) admit(c *gin.Context) {
	state := callOf(c.Request.Context())
	state.form = state.op.form != nil && mediaOf(c.Request.Header) == mediaForm
	leave, err := a.authenticate(c, state)
	if err != nil {
		a.fail(c, err)
		return
	}
	defer leave()
	if !state.op.open || nodeOf(c.Request.TLS) != "" {
		proveConn(c.Request)
	}
	body, err := check(c, state.op)
	if err != nil {
		a.fail(c, err)
		return
	}
	if err := a.budgets.spend(a.budgets.ofGuess(state, body), state.at); err != nil {
		a.fail(c, err)
		return
	}
	// The read deadline is for the body, which is read by now; it must not end the connection.
	_ = http.NewResponseController(c.Writer).SetReadDeadline(time.Time{})
	if state.op.needsKey {
		state.bodyMAC = requestMAC(a.conf.RequestKey, c.Request, body)
	}
	c.Next()
}

// authenticate identifies the caller, charges its budgets and acquires its slots. Before it asks the database, it
// checks the budgets of the caller that a known credential had, or of the address.
func (a *api) authenticate(c *gin.Context, state *call) (leave func(), err error) {
	if state.op.open {
		return a.admitOpen(c, state)
	}
	bearer, err := credential(c.Request.Header)
	if err != nil {
		return nil, a.refusedVisitor(state, err)
	}
	digest := sha256.Sum256([]byte(bearer))
	id, known := a.known.Get(digest)
	// Before the database is asked: a flood costs it nothing.
	if known {
		err = a.budgets.check(a.budgets.ofCaller(id), 1, state.at)
	} else {
		err = a.budgets.check(a.budgets.ofVisitor(state.remoteIP), 1, state.at)
	}
	if err != nil {
		return nil, err
	}
	if state.principal, err = a.identify(c.Request.Context(), state, bearer, known); err != nil {
		if fault.Is(err, fault.Unauthenticated) {
			a.known.Remove(digest)
			return nil, a.refusedVisitor(state, err)
		}
		return nil, err
	}
	org := cmp.Or(telemetry.FieldsOf(c.Request.Context()).OrgID, state.principal.OrgID)
	telemetry.SetFields(c.Request.Context(), telemetry.Fields{OrgID: org})
	state.caller = callerOf(state.principal)
	a.known.Add(digest, state.caller)
	state.again = func(ctx context.Context) (iam.Principal, error) {
		return a.conf.Authenticator.Authenticate(ctx, bearer, a.conf.Now())
	}
	if err := a.budgets.spend(a.budgets.ofCaller(state.caller), state.at); err != nil {
		return nil, err
	}
	return a.slots.acquire(slotsOfCaller(state.caller, state.op.id, waits(c.Request))...)
}

// identify authenticates the caller. Meanwhile an unknown credential occupies a slot of a visitor.
func (a *api) identify(ctx context.Context, state *call, bearer string, known bool) (iam.Principal, error) {
	if !known {
		leave, err := a.slots.acquire(slotsOfVisitor(state.remoteIP)...)
		if err != nil {
			return iam.Principal{}, err
		}
		defer leave()
	}
	return a.conf.Authenticator.Authenticate(ctx, bearer, state.at)
}

// refusedVisitor charges a refused credential to the address that sent it, and returns the refusal.
func (a *api) refusedVisitor(state *call, refusal error) error {
	if err := a.budgets.spend(a.budgets.ofVisitor(state.remoteIP), state.at); err != nil {
		return err
	}
	return refusal
}

// admitOpen admits a request of an operation that needs no credential: as a node, where the connection shows a node's
// certificate, else as a visitor.
func (a *api) admitOpen(c *gin.Context, state *call) (leave func(), err error) {
	if node := nodeOf(c.Request.TLS); node != "" {
		return a.admitNode(node, state)
	}
	if err = a.budgets.spend(a.budgets.ofVisitor(state.remoteIP), state.at); err == nil {
		return a.slots.acquire(slotsOfVisitor(state.remoteIP)...)
	}
	if state.op.id == renewOperation && a.conf.NodeKey != nil {
		return a.admitProven(c, state, err)
	}
	return nil, err
}

// admitProven admits the renewal of an expired certificate from an address whose budget is used up: the workloads of a
// node share its address and must not keep it from renewing. The check needs no query.
func (a *api) admitProven(c *gin.Context, state *call, refusal error) (leave func(), err error) {
	address, _ := prefixes(state.remoteIP)
	done, err := a.slots.acquire(slot{"renewals_at_once", address, maxAddressRenewals})
	if err != nil {
		return nil, err
	}
	defer done()
	body, err := readBody(c, state.op)
	if err != nil {
		return nil, err
	}
	var r NodeRenew
	if json.Unmarshal(body, &r) != nil {
		return nil, refusal
	}
	signature, err := base64.StdEncoding.DecodeString(r.Signature)
	if err != nil {
		return nil, refusal
	}
	key, err := a.conf.NodeKey(c.Request.Context(), r.NodeID, state.at)
	if err != nil {
		return nil, err
	}
	if key == nil || !ed25519.Verify(key, fleet.RenewalMessage(r.NodeID, r.CsrPem, r.IssuedAt), signature) {
		return nil, refusal
	}
	return a.admitNode(r.NodeID, state)
}

func (a *api) admitNode(node string, state *call) (leave func(), err error) {
	if err := a.budgets.spend(a.budgets.ofNode(node), state.at); err != nil {
		return nil, err
	}
	return a.slots.acquire(slotsOfNode(node)...)
}

func credential(h http.Header) (string, error) {
	values := h.Values("Authorization")
	missing := fault.New(fault.Unauthenticated, codeCredentialMissing, "This operation needs a bearer token.", nil).
		WithHint("header/Authorization", "is missing", "Authorization: Bearer <token>")
	if len(values) == 0 {
		return "", missing
	}
	scheme, token, ok := strings.Cut(values[0], " ")
	token = strings.TrimSpace(token)
	if len(values) > 1 || !ok || !strings.EqualFold(scheme, "Bearer") || token == "" || len(token) > maxCredentialBytes {
		return "", fault.New(fault.Unauthenticated, fault.CodeCredentialInvalid, "The Authorization header is not one "+
			"bearer token.",
			nil).
			WithHint("header/Authorization", "is not a bearer token", "Authorization: Bearer <token>")
	}
	return token, nil
}

// fail audits a failed request, logs a defect of the hub, and answers with a problem document.
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
		a.conf.Log.LogAttrs(ctx, level, "request failed", slog.String("code", string(f.Code)), slog.Any("error", err))
	}
	a.audit(ctx, state, f)
	if c.Writer.Written() {
		return // a stream broke off half-way; its end is all that can be said
	}
	if state.form {
		writeOAuthError(c, err, state.correlationID)
		return
	}
	writeFault(c, f, state.correlationID)
}

// audit records denials, and failures of operations that mutate, within the budgets of audit rows; the next row says
// how many were left out. An error of the audit trail is logged and changes no answer.
func (a *api) audit(ctx context.Context, state *call, f *fault.Error) {
	denied := f.Kind == fault.Unauthenticated || f.Kind == fault.Forbidden
	if state.op == nil || f.Kind == fault.RateLimited || !denied && !state.op.mutates() {
		return
	}
	if a.budgets.spend(a.budgets.ofRow(state.caller, state.remoteIP), state.at) != nil {
		a.unrecorded.Add(1)
		a.leftOut.Add(ctx, 1)
		return
	}
	unrecorded := a.unrecorded.Swap(0)
	// The caller may hang up; the row is written all the same.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), auditTimeout)
	defer cancel()
	m := command.Meta{
		Principal: state.principal, CorrelationID: state.correlationID, Traceparent: state.traceparent,
		SourceAddress: state.remoteIP, Route: state.op.route(), Now: state.at,
	}
	failure := command.Failure{Operation: state.op.id, Code: f.Code, Denied: denied, Unrecorded: unrecorded}
	if state.refused != nil {
		failure.UserID, failure.OrgID = state.refused.UserID, state.refused.OrgID
	}
	if err := a.conf.Auditor.AuditFailure(ctx, m, failure); err != nil {
		a.unrecorded.Add(unrecorded)
		a.conf.Log.ErrorContext(ctx, "audit row of a failed request is lost", slog.Any("error", err))
	}
}
