package protocol

import (
	"errors"
	"fmt"
)

// The reasons for which a document is refused. They cross the wire and are shown to admins.
const (
	RefusalSignature   = "signature_invalid"
	RefusalKeyRevoked  = "key_revoked"
	RefusalWrongNode   = "wrong_node"
	RefusalOlder       = "generation_older"
	RefusalConflict    = "generation_conflict"
	RefusalEpoch       = "epoch_unknown"
	RefusalTooLarge    = "too_large"
	RefusalBundleOld   = "bundle_too_old"
	RefusalMalformed   = "malformed"
	RefusalPartDigest  = "part_digest_mismatch"
	RefusalUnknownPart = "unknown_part"
	RefusalNotAssigned = "not_assigned"
	RefusalExpired     = "expired"
	RefusalFeature     = "feature_missing"
	RefusalManifest    = "manifest_not_admitted"
	RefusalUnavailable = "unavailable"
	// RefusalChainBroken: the usage segment is not the one that its neighbours in the chain were sealed with.
	RefusalChainBroken = "chain_broken"
	// RefusalQuarantined: the node gets nothing new until an admin has looked at it.
	RefusalQuarantined = "node_quarantined"
)

// RefusalError says why a document is refused. The detail is for people and holds nothing secret.
type RefusalError struct {
	Reason string
	Detail string
	Err    error
}

// Error implements error.
func (e *RefusalError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("%s: %s: %v", e.Reason, e.Detail, e.Err)
	}
	return e.Reason + ": " + e.Detail
}

// Unwrap returns the cause.
func (e *RefusalError) Unwrap() error { return e.Err }

// Refuse makes a RefusalError.
func Refuse(reason, format string, args ...any) error {
	return &RefusalError{Reason: reason, Detail: fmt.Sprintf(format, args...)}
}

// RefusalOf returns the reason code of err: RefusalMalformed for an error that carries none, empty for nil.
func RefusalOf(err error) string {
	if err == nil {
		return ""
	}
	if r, ok := errors.AsType[*RefusalError](err); ok {
		return r.Reason
	}
	return RefusalMalformed
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
