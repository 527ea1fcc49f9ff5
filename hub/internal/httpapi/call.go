package httpapi

import (
	"context"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// call is what the middlewares know of a request in progress.
type call struct {
	op            *operation
	correlationID string
	traceparent   string
	remoteIP      string
	principal     iam.Principal
	// caller is whom the request is charged to.
	caller callerID
	// again authenticates the same credential anew: it may have been revoked meanwhile.
	again   func(ctx context.Context) (iam.Principal, error)
	bodyMAC []byte
	at      time.Time
	// refused is the login that was refused; nil for all other requests.
	refused *command.LoginRefusedError
	// form: the request is a form, and its errors are those of OAuth 2.0.
	form bool
	// failure is the code of the fault that ended it; empty when all went well.
	failure fault.Code
}

type callKey struct{}

func withCall(c *gin.Context, call *call) {
	c.Request = c.Request.WithContext(context.WithValue(c.Request.Context(), callKey{}, call))
}

func callOf(ctx context.Context) *call {
	if c, ok := ctx.Value(callKey{}).(*call); ok {
		return c
	}
	return &call{}
}

// metaFrom returns what a handler passes to a command.
func metaFrom(ctx context.Context) command.Meta {
	c := callOf(ctx)
	m := command.Meta{
		Principal: c.principal, CorrelationID: c.correlationID, Traceparent: c.traceparent,
		SourceAddress: c.remoteIP, BodyMAC: c.bodyMAC, Now: c.at,
	}
	if c.op != nil {
		m.Route = c.op.route()
	}
	if g, ok := ctx.(*gin.Context); ok {
		if c.op != nil && c.op.needsKey {
			m.IdempotencyKey = g.GetHeader(idempotencyKeyHeader)
		}
		m.OnReplay = func() { g.Header("Idempotency-Replayed", "true") }
	}
	return m
}

// principalOf returns the caller; the zero value is none.
func principalOf(ctx context.Context) iam.Principal { return callOf(ctx).principal }
