package idempotency

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeIdempotencyKeyReused: the idempotency key was used for another request.
	codeIdempotencyKeyReused fault.Code = "idempotency_key_reused"
)
