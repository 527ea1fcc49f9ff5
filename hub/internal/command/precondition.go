package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/etag"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// Precondition is which version of a resource a caller wants to change. The command that changes it compares in its own
// transaction.
type Precondition struct {
	Resource etag.Resource
	// IfMatch is the caller's header; empty for any version.
	IfMatch string
	// ETag of the resource as the command left it, or as the precondition met it; empty where there is none.
	ETag string
	// over: the request has made its change.
	over bool
}

type preconditionKey struct{}

// WithPrecondition has the next command meet a precondition.
func WithPrecondition(ctx context.Context, p *Precondition) context.Context {
	return context.WithValue(ctx, preconditionKey{}, p)
}

// preconditionOf returns what the command has to meet; nil for nothing.
func preconditionOf(ctx context.Context) *Precondition {
	p, _ := ctx.Value(preconditionKey{}).(*Precondition)
	if p == nil || p.over {
		return nil
	}
	return p
}

// meet runs fn when the resource has the version that the caller wants to change.
func meet[T any](ctx context.Context, tx db.Tx, fn func() (T, error)) (T, error) {
	p := preconditionOf(ctx)
	if p == nil {
		return fn()
	}
	var none T
	before, err := "", error(nil)
	if p.IfMatch != "" {
		if before, err = etag.Of(ctx, tx, p.Resource); err != nil {
			return none, err
		}
		if before != "" && !etag.Match(p.IfMatch, before) {
			p.ETag = before
			return none, errStale()
		}
	}
	out, err := fn() // what is not there is its to report
	if err != nil {
		return none, err
	}
	if p.IfMatch != "" && before == "" {
		return none, errStale()
	}
	p.ETag, err = etag.Of(ctx, tx, p.Resource)
	return out, err
}

// MeetPrecondition compares before a change outside of the database, which no transaction takes back. The command that
// records the change does not compare again.
func (s *Service) MeetPrecondition(ctx context.Context) error {
	p := preconditionOf(ctx)
	if p == nil || p.IfMatch == "" {
		return nil
	}
	now, err := db.Query(ctx, s.DB, func(tx db.Tx) (string, error) { return etag.Of(ctx, tx, p.Resource) })
	switch {
	case err != nil:
		return err
	case !etag.Match(p.IfMatch, now):
		p.ETag = now
		return errStale()
	}
	p.IfMatch = ""
	return nil
}

func errStale() error {
	return fault.New(fault.PreconditionFailed, codeETagStale, "The resource has another version than If-Match names; "+
		"read it again.", nil).WithField("header/If-Match", "names no current version").Permanent()
}
