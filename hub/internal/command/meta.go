// Package command holds the commands, one method of Service each: which slices it calls, in which order, inside one
// transaction. It has no rules of its own; a rule belongs to the slice that owns the rows.
package command

import (
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/idempotency"
)

// The resource types of events and audit rows, beside those of package change.
const (
	resourceApp              = "app"
	resourceAppVersion       = "app_version"
	resourceArtifact         = "artifact"
	resourceEntitlement      = "entitlement"
	resourceEnvironment      = "environment"
	resourceInvitation       = "invitation"
	resourceJoinToken        = "join_token"
	resourceOrg              = "org"
	resourcePackageIndex     = "package_index"
	resourcePosting          = "posting"
	resourcePrice            = "price"
	resourceProject          = "project"
	resourceRole             = "role"
	resourcePublisher        = "publisher"
	resourcePublishIntent    = "publish_intent"
	resourceSecret           = "secret"
	resourceSession          = "session"
	resourceServiceAccount   = "service_account"
	resourceSKU              = "sku"
	resourceUser             = "user"
	resourceUserToken        = "user_token"
	resourceAccessCredential = "access_credential"
)

// Meta is what every command gets beside its input: who asks, how the request is traced, and what makes it repeatable.
type Meta struct {
	Principal iam.Principal
	// CorrelationID is the request id; events, audit rows and the node's reports repeat it.
	CorrelationID string
	// Traceparent is the W3C trace context of the request; empty without a trace.
	Traceparent string
	// SourceAddress is the IP address that the request came from.
	SourceAddress string
	// IdempotencyKey is the caller's; empty where the operation takes none.
	IdempotencyKey string
	// Route is the operation's method and path template: the same key on another route is another request.
	Route string
	// BodyMAC is the keyed SHA-256 over the concrete path, the query and the body.
	BodyMAC []byte
	Now     time.Time
	// OnReplay is called when the answer is an earlier one; may be nil.
	OnReplay func()
}

// by is who makes the command's change.
func (m Meta) by() change.By {
	return change.By{
		Actor:         m.Principal.Actor(),
		CorrelationID: m.CorrelationID,
		Traceparent:   m.Traceparent,
		SourceAddress: m.SourceAddress,
		Now:           m.Now,
	}
}

// request is what idempotency knows the request by.
func (m Meta) request() idempotency.Request {
	return idempotency.Request{
		Caller:   m.Principal.Actor(),
		Route:    m.Route,
		Key:      m.IdempotencyKey,
		BodyMAC:  m.BodyMAC,
		Now:      m.Now,
		OnReplay: m.OnReplay,
	}
}
