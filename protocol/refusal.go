package protocol

import (
	"errors"
	"fmt"
)

// RefusalError says why a document is refused. The detail is for people and holds nothing secret.
type RefusalError struct {
	Reason Nack_Reason
	Detail string
	Err    error
}

// Error implements error.
func (e *RefusalError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("%s: %s: %v", e.Reason.Text(), e.Detail, e.Err)
	}
	return e.Reason.Text() + ": " + e.Detail
}

// Unwrap returns the cause.
func (e *RefusalError) Unwrap() error { return e.Err }

// Refuse makes a RefusalError.
func Refuse(reason Nack_Reason, format string, args ...any) error {
	return &RefusalError{Reason: reason, Detail: fmt.Sprintf(format, args...)}
}

// RefusalOf returns the reason of err: Nack_MALFORMED for an error that carries none, unspecified for nil.
func RefusalOf(err error) Nack_Reason {
	if err == nil {
		return Nack_REASON_UNSPECIFIED
	}
	if r, ok := errors.AsType[*RefusalError](err); ok {
		return r.Reason
	}
	return Nack_MALFORMED
}

// RefusalDetail returns the public detail of err.
func RefusalDetail(err error) string {
	if r, ok := errors.AsType[*RefusalError](err); ok {
		return r.Detail
	}
	if err == nil {
		return ""
	}
	return "the document cannot be read"
}
