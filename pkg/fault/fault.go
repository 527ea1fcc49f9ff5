// Package fault is the one error type that may reach a person or a program outside: what kind it is, a public text that
// is safe to show and says what to do, and a cause that stays in the log. It knows nothing of HTTP, QUIC or SQL; each
// transport translates it in one place.
package fault

import (
	"errors"
	"fmt"
	"time"
)

// Kind groups faults by what the caller can do about them.
type Kind uint8

// The kinds, with the HTTP status that httpapi gives them.
const (
	// Internal is a defect or a broken dependency (500).
	Internal Kind = iota
	// Malformed breaks syntax or schema (400).
	Malformed
	// Unauthenticated has no or a bad credential (401).
	Unauthenticated
	// Forbidden is a known resource that the caller may not touch so (403).
	Forbidden
	// NotFound is absent, or another org's (404).
	NotFound
	// Conflict is refused by the current state (409).
	Conflict
	// PreconditionFailed is a stale ETag (412).
	PreconditionFailed
	// TooLarge is over a byte limit (413).
	TooLarge
	// Unprocessable is well-formed but meaningless (422).
	Unprocessable
	// RateLimited is over a rate (429).
	RateLimited
	// Unavailable will pass (503).
	Unavailable
)

// Field points at one bad input value; it never holds the value itself, which may be a secret.
type Field struct {
	// Pointer is an RFC 6901 JSON pointer into the body, or the name of a parameter or header.
	Pointer string
	Reason  string
	// Hint says what would be right; may be empty.
	Hint string
}

// Code names a fault for programs: stable, snake_case. Each package declares the codes of its own faults as constants,
// with what they mean; a code that several packages give is declared in the lowest of them.
type Code string

// Error is a fault. Public is for people.
type Error struct {
	Kind   Kind
	Code   Code
	Public string
	Fields []Field
	// Cause is logged, never shown.
	Cause error
	// RetryDelay is how long the caller should wait before it tries again; zero where waiting alone does not help.
	RetryDelay time.Duration
	// permanent is set by the producer when a retry of the same call cannot succeed; see IsPermanent.
	permanent bool
}

// New makes a fault; cause may be nil.
func New(kind Kind, code Code, public string, cause error) *Error {
	return &Error{Kind: kind, Code: code, Public: public, Cause: cause}
}

// WithField returns a copy that also names a bad input value.
func (e *Error) WithField(pointer, reason string) *Error {
	return e.with(Field{Pointer: pointer, Reason: reason})
}

// WithHint is WithField with a hint at what would be right.
func (e *Error) WithHint(pointer, reason, hint string) *Error {
	return e.with(Field{Pointer: pointer, Reason: reason, Hint: hint})
}

// Permanent returns a copy that is marked permanent: a retry of the same call cannot succeed.
func (e *Error) Permanent() *Error {
	c := *e
	c.permanent = true
	return &c
}

// RetryAfter returns a copy that asks the caller to wait before a retry.
func (e *Error) RetryAfter(d time.Duration) *Error {
	c := *e
	c.RetryDelay = d
	return &c
}

func (e *Error) with(f Field) *Error {
	c := *e
	c.Fields = append(append([]Field(nil), e.Fields...), f)
	return &c
}

// Error joins the public text and the cause; it is for logs.
func (e *Error) Error() string {
	if e.Cause != nil {
		return fmt.Sprintf("%s: %s: %v", e.Code, e.Public, e.Cause)
	}
	return string(e.Code) + ": " + e.Public
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Cause }

// As finds the fault in err's chain. An error that holds none is Internal, with a public text that tells nothing.
func As(err error) *Error {
	if e, ok := errors.AsType[*Error](err); ok {
		return e
	}
	return New(Internal, CodeInternal, "Something went wrong on our side; the correlation id finds it in the log.", err)
}

// Is reports whether err is a fault of this kind.
func Is(err error, kind Kind) bool {
	var e *Error
	return errors.As(err, &e) && e.Kind == kind
}

// IsPermanent reports whether a retry of the same call is known to be useless.
func IsPermanent(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.permanent
}
