// Package command holds the commands, one method of Service each: which slices it calls, in which order, inside one
// transaction. It has no rules of its own; a rule belongs to the slice that owns the rows.
package command

import (
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// Meta is what every command is told beside its input: who asks, how the request is traced, and what makes it
// repeatable.
type Meta struct {
	Principal iam.Principal
	// CorrelationID is the request id; events, audit rows and the node's reports repeat it.
	CorrelationID string
	// TraceID is the W3C trace id in hex; empty without a trace.
	TraceID string
	// IdempotencyKey is the caller's; empty where the operation takes none.
	IdempotencyKey string
	// Route is the operation's method and path template: the same key on another route is another request.
	Route string
	// BodyHash is the SHA-256 over the concrete path, the query and the body.
	BodyHash []byte
	Now      time.Time
	// OnReplay is called when the answer is an earlier one; may be nil.
	OnReplay func()
}
